"""Policies of CORL checkpoints: a dictionary of state dicts, its 'actor' being one of five networks.

CORL's CQL also pickles whole modules (`__main__.Scalar`); they are read as inert stubs and left alone. A checkpoint
holds neither the action bounds nor the statistics its observations were normalised with, so the caller gives them.
"""

import re
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from refplan.errors import RefplanError
from refplan.nn import Normaliser
from refplan.priors.foreign.torch_file import load_torch, read_bytes
from refplan.priors.foreign.weights import ActorWeights, Layer, build_policy, named, to_unit_gaussian
from refplan.priors.policy import Bound, GaussianPolicy, Head, gaussian_layers


class _Actor(NamedTuple):
    layers: list[Layer]
    head: Head
    log_std_range: tuple[float, float] = (-20.0, 2.0)
    normalises: bool = True  # whether the algorithm may train on normalised observations


def from_corl(
    path: str | Path,
    low: Bound | None = None,
    high: Bound | None = None,
    *,
    normaliser: Normaliser | None = None,
    noise: float = 0.0,
) -> GaussianPolicy:
    """A policy from a CORL checkpoint of CQL, IQL, AWAC, EDAC, SAC-N, TD3+BC or BC.

    `normaliser` is `corl_normaliser(observations)` of the training data, or `identity_normaliser(dim)` where the run
    had `normalize: false`; a config.yaml beside the file that says so is enough.
    """
    where = str(path)
    if low is None or high is None:
        raise RefplanError(f"{where}: CORL does not save the action bounds. Give them: from_corl(path, low, high).")
    state = named(load_torch(read_bytes(path), where, stubs=True), where)
    actor = _read_actor(ActorWeights(state.get("actor", state), where))
    if normaliser is None and actor.normalises and not _says_raw(Path(path).parent / "config.yaml"):
        raise RefplanError(
            f"{where}: CORL normalises observations in most runs and does not save their mean and std. Give "
            "normaliser=corl_normaliser(observations of the training data), or identity_normaliser(dim) if the run had "
            "'normalize: false'."
        )
    layers = to_unit_gaussian(actor.layers, low, high) if actor.head == "gaussian" else actor.layers
    return build_policy(
        where, layers, low, high, head=actor.head, normaliser=normaliser, log_std_range=actor.log_std_range, noise=noise
    )


def corl_normaliser(observations: np.ndarray) -> Normaliser:
    """The statistics CORL computes for a dataset: mean, and std + 0.001."""
    values = np.asarray(observations, np.float64)
    mean, std = values.mean(axis=0), values.std(axis=0) + 1e-3
    return Normaliser(jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32))


def _says_raw(config: Path) -> bool:
    """Whether the run's configuration says that observations were not normalised."""
    if not config.is_file():
        return False
    text = config.read_text(encoding="utf-8", errors="replace")
    return re.search(r"^normalize:\s*false\s*(#.*)?$", text, re.MULTILINE | re.IGNORECASE) is not None


def _read_actor(weights: ActorWeights) -> _Actor:
    """Which of CORL's actors this is, told by the names of its arrays."""
    names = weights.left
    if "base_network.0.weight" in names:  # CQL
        actor = _Actor(_scaled_log_std(weights), "tanh_gaussian")
    elif "trunk.0.weight" in names:  # EDAC and SAC-N, which never normalise
        hidden = weights.sequence("trunk")
        layers = gaussian_layers(hidden, weights.linear("mu"), weights.linear("log_sigma"))
        actor = _Actor(layers, "tanh_gaussian", (-5.0, 2.0), normalises=False)
    elif "_mlp.0.weight" in names:  # AWAC, its mean in the world's units
        *hidden, mean = weights.sequence("_mlp")
        log_std = np.clip(weights.array("_log_std"), -20.0, 2.0)
        actor = _Actor(gaussian_layers(hidden, mean, log_std), "gaussian", (-30.0, 30.0))
    elif "net.net.0.weight" in names and "log_std" in names:  # IQL
        *hidden, mean = weights.sequence("net.net")
        actor = _Actor(gaussian_layers(hidden, mean, weights.array("log_std")), "gaussian_tanh_mean")
    elif "net.net.0.weight" in names:  # IQL with a deterministic actor
        actor = _Actor(weights.sequence("net.net"), "deterministic")
    elif "net.0.weight" in names:  # TD3+BC and BC
        actor = _Actor(weights.sequence("net"), "deterministic")
    else:
        found = ", ".join(sorted(names)[:8])
        raise RefplanError(f"{weights.where}: not an actor of CORL that this reader knows (it has: {found}).")
    weights.finish()
    return actor


def _scaled_log_std(weights: ActorWeights) -> list[Layer]:
    """CQL's last layer with its log-std's learned factor and offset multiplied out."""
    *hidden, (weight, bias) = weights.sequence("base_network")
    factor, offset = (weights.array(f"log_std_{part}.constant").squeeze() for part in ("multiplier", "offset"))
    actions = bias.size // 2
    if 2 * actions != bias.size or factor.shape != () or offset.shape != ():
        raise RefplanError(f"{weights.where}: not CQL's actor, its last layer has {bias.size} outputs.")
    scale = np.concatenate([np.ones(actions), np.full(actions, factor)]).astype(np.float32)
    shift = np.concatenate([np.zeros(actions), np.full(actions, offset)]).astype(np.float32)
    return [*hidden, (weight * scale, bias * scale + shift)]
