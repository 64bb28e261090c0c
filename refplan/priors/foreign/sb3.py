"""Policies of Stable-Baselines3 zips: `policy.pth` holds the weights, `data` settings as JSON.

Some settings are base64 cloudpickle, which is never decoded; the readable text that stands beside them is enough.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from refplan.errors import RefplanError
from refplan.nn import Normaliser
from refplan.priors.foreign.torch_file import load_torch, open_zip, read_bytes, read_member
from refplan.priors.foreign.weights import ActorWeights, Layer, activation_named, build_policy, named, to_unit_gaussian
from refplan.priors.policy import Bound, GaussianPolicy, Head, check_bounds, gaussian_layers


def from_sb3(
    path: str | Path,
    low: Bound | None = None,
    high: Bound | None = None,
    *,
    normaliser: Normaliser | None = None,
    activation: str | None = None,
    noise: float = 0.0,
) -> GaussianPolicy:
    """A policy from a Stable-Baselines3 zip: SAC and TQC, TD3 and DDPG, PPO and A2C with plain MLP actors.

    The pickled fields of the zip are never decoded. Action bounds and activation come from the readable text beside
    them, or from the arguments; statistics of a `VecNormalize` are in another file and come as `normaliser`.
    """
    where = str(path)
    archive = open_zip(read_bytes(path), where)
    settings = _settings(read_member(archive, "data", where), where)
    state = load_torch(read_member(archive, "policy.pth", where), f"{where}/policy.pth")
    actor = {name: value for name, value in named(state, where).items() if not name.startswith(_CRITICS)}
    layers, head, default = _network(ActorWeights(actor, where))
    bounds = _bounds(settings, low, high, where)
    if head == "gaussian":
        layers, limits = to_unit_gaussian(layers, *bounds), (-20.0, 20.0)  # PPO does not clip its log-std
    else:
        limits = (-20.0, 2.0)
    function = activation_named(activation or _activation(settings) or default, where)
    return build_policy(
        where, layers, *bounds, head=head, activation=function, normaliser=normaliser, log_std_range=limits, noise=noise
    )


# what in policy.pth does not act; all the rest must be understood
_CRITICS = ("critic", "actor_target.", "value_net.", "mlp_extractor.value_net.", "vf_features_extractor.")
_SDE = "{}: trained with use_sde=True, whose exploration is not a plain Gaussian; such files are not read."


def _settings(data: bytes, where: str) -> Mapping[str, Any]:
    try:
        settings = named(json.loads(data), where)
    except (ValueError, RecursionError):
        raise RefplanError(f"{where}: its 'data' part is not JSON; not a Stable-Baselines3 file.") from None
    for name in ("observation_space", "action_space"):
        space = settings.get(name)
        kind = str(space.get(":type:", "Box")) if isinstance(space, dict) else "Box"
        if "Box" not in kind:
            raise RefplanError(f"{where}: its {name} is {kind}; only plain vectors (Box) are read.")
    return settings


def _network(weights: ActorWeights) -> tuple[list[Layer], Head, str]:
    """Layers, head and the library's default activation for that algorithm."""
    if any(name.startswith("actor.latent_pi.") for name in weights.left):
        if "actor.log_std" in weights.left:
            raise RefplanError(_SDE.format(weights.where))
        hidden = weights.sequence("actor.latent_pi")
        layers = gaussian_layers(hidden, weights.linear("actor.mu"), weights.linear("actor.log_std"))
        kind: tuple[Head, str] = ("tanh_gaussian", "relu")
    elif any(name.startswith("actor.mu.") for name in weights.left):
        layers, kind = weights.sequence("actor.mu"), ("deterministic", "relu")
    else:
        hidden = weights.sequence("mlp_extractor.policy_net")
        mean, log_std = weights.linear("action_net"), weights.array("log_std")
        if log_std.ndim != 1:
            raise RefplanError(_SDE.format(weights.where))
        layers = gaussian_layers(hidden, mean, log_std)
        kind = ("gaussian", "tanh")
    weights.finish()
    return layers, *kind


def _activation(settings: Mapping[str, Any]) -> str | None:
    """The activation from the readable text of `policy_kwargs`, such as "<class '...activation.ReLU'>"."""
    arguments = settings.get("policy_kwargs")
    text = arguments.get("activation_fn") if isinstance(arguments, dict) else None
    if text is None:
        return None
    name = str(text).strip("<>'").rpartition(".")[2].lower()
    return "swish" if name == "silu" else name


def states_bounds(path: str | Path) -> bool:
    """Whether a Stable-Baselines3 zip says its action bounds itself, in readable text."""
    where = str(path)
    return _stated_bounds(_settings(read_member(open_zip(read_bytes(path), where), "data", where), where)) is not None


def _stated_bounds(settings: Mapping[str, Any]) -> tuple[Bound, Bound] | None:
    space = settings.get("action_space")
    texts = [str(space.get(side)) if isinstance(space, dict) else "" for side in ("low", "high")]
    try:
        lows, highs = (np.array([float(x) for x in text.strip("[] ").split()], np.float32) for text in texts)
        return check_bounds(lows, highs)
    except (ValueError, RefplanError):
        return None


def _bounds(settings: Mapping[str, Any], low: Bound | None, high: Bound | None, where: str) -> tuple[Bound, Bound]:
    if low is not None and high is not None:
        return low, high
    stated = _stated_bounds(settings)
    if stated is None:
        raise RefplanError(
            f"{where}: the action bounds cannot be read without unpickling. Give them: from_sb3(path, low, high)."
        )
    return stated
