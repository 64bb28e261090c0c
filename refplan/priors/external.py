"""Policies trained elsewhere: Stable-Baselines3 zips, d3rlpy .d3 files, CORL checkpoints, ONNX, any Python function.

Weights are read by `refplan.priors.foreign.torch_file`, which executes nothing; every array of a file's actor must find
its place in the network, or the file is refused by the name of that array.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import ArrayLike

from refplan.agent import AbstractAgent
from refplan.errors import RefplanError
from refplan.files import load_arrays
from refplan.modules import load_module
from refplan.priors.foreign.callback import CallablePolicy, from_callable, from_onnx
from refplan.priors.foreign.corl import corl_normaliser, from_corl
from refplan.priors.foreign.d3rlpy import from_d3rlpy
from refplan.priors.foreign.sb3 import from_sb3, states_bounds
from refplan.priors.foreign.torch_file import open_zip
from refplan.priors.policy import load_npz_policy, policy_from_arrays

__all__ = [
    "CallablePolicy",
    "corl_normaliser",
    "from_callable",
    "from_corl",
    "from_d3rlpy",
    "from_onnx",
    "from_sb3",
    "load_policy",
]


def load_policy(path: str | Path, **options: Any) -> AbstractAgent:
    """A policy from any file refplan can read, told apart by its content (and by its name for ONNX).

    `options` go to the reader: `low`, `high`, `normaliser`, `noise` and so on.
    """
    path = Path(path)
    if not path.is_file():
        raise RefplanError(f"{path}: no such file.")
    reader = _reader(path)
    known = inspect.signature(reader).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        offered = ", ".join(name for name in known if name != "path") or "none"
        raise RefplanError(
            f"{path}: the reader for this file has no option {', '.join(unknown)} (its options: {offered})."
        )
    return reader(path, **_with_bounds(path, known, options))


def load_policy_for(path: str | Path, low: ArrayLike, high: ArrayLike) -> AbstractAgent:
    """A policy from any file, for a world with these bounds: given to the reader only where the file lacks them."""
    path = Path(path)
    reader = _reader(path) if path.is_file() else None
    if reader is None or (reader is from_sb3 and states_bounds(path)):
        return load_policy(path)
    known = inspect.signature(reader).parameters
    bounds = {"low": low, "high": high}
    return load_policy(path, **{name: bound for name, bound in bounds.items() if name in known})


def _with_bounds(path: Path, known: Any, options: dict[str, Any]) -> dict[str, Any]:
    missing = [n for n in ("low", "high") if n in known and known[n].default is inspect.Parameter.empty]
    if any(name not in options for name in missing):
        raise RefplanError(f"{path}: this kind of file does not hold the action bounds. Give low=... and high=...")
    return options


def _reader(path: Path) -> Callable[..., AbstractAgent]:
    if path.suffix == ".onnx":
        return from_onnx
    if path.suffix == ".safetensors":
        return load_safetensors_policy
    with open(path, "rb") as file:
        start = file.read(2)
    if start == b"PK":
        names = open_zip(path.read_bytes(), str(path)).namelist()
        if "policy.pth" in names:
            return from_sb3
        if any(name.endswith("data.pkl") for name in names):
            return from_corl
        if names and all(name.endswith(".npy") for name in names):
            return load_npz_policy
    elif start[:1] == b"\x80":
        return from_d3rlpy
    raise RefplanError(
        f"{path}: not a policy file that refplan reads: Stable-Baselines3 .zip, d3rlpy .d3, CORL .pt, .onnx, .npz and "
        ".safetensors of refplan. It may be damaged or cut short. Any Python policy can be used with from_callable."
    )


def load_safetensors_policy(path: str | Path) -> AbstractAgent:
    """A policy from a .safetensors file of refplan: a saved agent, or named arrays as in the .npz layout."""
    arrays, header = load_arrays(path)
    if "structure" not in header:
        return policy_from_arrays(arrays, path)
    agent = load_module(path)
    if not isinstance(agent, AbstractAgent):
        raise RefplanError(f"{path}: holds a {type(agent).__name__}, which is not an agent.")
    return agent
