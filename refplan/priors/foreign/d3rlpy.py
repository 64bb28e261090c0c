"""Policies of d3rlpy 2 .d3 files: a pickle of plain values, the settings as JSON and the weights as a torch file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from refplan.errors import RefplanError, unknown_name
from refplan.nn import Activation, Normaliser
from refplan.priors.foreign.torch_file import load_plain_pickle, load_torch, read_bytes
from refplan.priors.foreign.weights import ActorWeights, Layer, activation_named, build_policy, named
from refplan.priors.policy import Bound, GaussianPolicy, Head, gaussian_layers


class _Kind(NamedTuple):
    """How a d3rlpy algorithm's actor answers."""

    head: Head
    log_std_range: tuple[float, float] = (-20.0, 2.0)


_KINDS = {
    "sac": _Kind("tanh_gaussian"),
    "cql": _Kind("tanh_gaussian"),
    "cal_ql": _Kind("tanh_gaussian"),
    "iql": _Kind("gaussian_tanh_mean", (-5.0, 2.0)),
    "awac": _Kind("gaussian_tanh_mean", (-6.0, 0.0)),
    "ddpg": _Kind("deterministic"),
    "td3": _Kind("deterministic"),
    "td3_plus_bc": _Kind("deterministic"),
    "rebrac": _Kind("deterministic"),
    "prdc": _Kind("deterministic"),
    "bc": _Kind("deterministic"),
}


def from_d3rlpy(path: str | Path, *, noise: float = 0.0) -> GaussianPolicy:
    """A policy from a d3rlpy 2 .d3 file, with its observation scaler and action scaler.

    Without an action scaler d3rlpy's actions are in [-1, 1], and so are these.
    """
    where = str(path)
    outer = named(load_plain_pickle(read_bytes(path), where), where)
    try:
        config = json.loads(outer["config"])
        algorithm, settings = config["config"]["type"], config["config"]["params"]
        blob = bytes(outer["torch"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise RefplanError(f"{where}: not a d3rlpy 2 file (no readable 'config' and 'torch' inside).") from None
    if algorithm not in _KINDS:
        raise RefplanError(f"{where}: {unknown_name('d3rlpy actor', str(algorithm), _KINDS)}")
    kind = _KINDS[algorithm]
    if algorithm == "bc" and settings.get("policy_type") == "stochastic":
        kind = _Kind("gaussian_tanh_mean", (-4.0, 15.0))
    state = named(load_torch(blob, f"{where}/torch"), where)
    actor = state.get("imitator" if algorithm == "bc" else "policy")
    layers = _network(ActorWeights(actor, where), kind)
    encoder = settings.get("encoder_factory" if algorithm == "bc" else "actor_encoder_factory")
    low, high = _actions(settings.get("action_scaler"), where)
    return build_policy(
        where,
        layers,
        low,
        high,
        head=kind.head,
        activation=_activation(encoder, where),
        normaliser=_observations(settings.get("observation_scaler"), where),
        log_std_range=kind.log_std_range,
        noise=noise,
    )


def _network(weights: ActorWeights, kind: _Kind) -> list[Layer]:
    hidden = weights.sequence("_encoder._layers")
    if kind.head == "deterministic":
        layers = [*hidden, weights.linear("_fc")]
    elif "_logstd" in weights.left:  # one number per action, squashed into its range by a sigmoid
        low, high = kind.log_std_range
        raw = weights.array("_logstd").ravel().astype(np.float64)
        log_std = (low + (high - low) / (1.0 + np.exp(-raw))).astype(np.float32)
        layers = gaussian_layers(hidden, weights.linear("_mu"), log_std)
    else:
        layers = gaussian_layers(hidden, weights.linear("_mu"), weights.linear("_logstd"))
    weights.finish()
    return layers


def _activation(encoder: Any, where: str) -> Activation:
    kind, settings = _typed(encoder, "encoder", where)
    if kind not in ("default", "vector"):
        raise RefplanError(f"{where}: its encoder is of type '{kind}'; only plain MLPs ('default', 'vector') are read.")
    activation = settings.get("activation", "relu")
    if settings.get("exclude_last_activation") or settings.get("last_activation") not in (None, activation):
        raise RefplanError(f"{where}: an encoder with another activation in its last layer is not read.")
    return activation_named(activation, where)


def _typed(entry: Any, what: str, where: str) -> tuple[str, Mapping[str, Any]]:
    """d3rlpy's {"type": ..., "params": {...}}."""
    try:
        return str(entry["type"]), named(entry["params"], where)
    except (TypeError, KeyError):
        raise RefplanError(f"{where}: its configuration has no readable {what}.") from None


def _floats(settings: Mapping[str, Any], names: tuple[str, str], what: str, where: str) -> list[np.ndarray]:
    try:
        return [np.array([float(value) for value in settings[name]]) for name in names]
    except (KeyError, TypeError, ValueError):
        raise RefplanError(f"{where}: its {what} has no readable {' and '.join(names)}; was it fitted?") from None


def _observations(entry: Any, where: str) -> Normaliser | None:
    kind, settings = _typed(entry, "observation scaler", where) if entry else ("none", {})
    if kind == "none":
        return None
    if kind == "standard":
        mean, std = _floats(settings, ("mean", "std"), "observation scaler", where)
        std = std + settings.get("eps", 1e-3)
    elif kind == "min_max":
        low, high = _floats(settings, ("minimum", "maximum"), "observation scaler", where)
        mean, std = 0.5 * (low + high), 0.5 * (high - low)
    else:
        raise RefplanError(f"{where}: {unknown_name('observation scaler', kind, ('standard', 'min_max'))}")
    if mean.shape != std.shape or not (np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()):
        raise RefplanError(f"{where}: its observation scaler divides by zero or holds NaN; the policy cannot be used.")
    return Normaliser(jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32))


def _actions(entry: Any, where: str) -> tuple[Bound, Bound]:
    kind, settings = _typed(entry, "action scaler", where) if entry else ("none", {})
    if kind == "none":
        return -1.0, 1.0
    if kind != "min_max":
        raise RefplanError(f"{where}: {unknown_name('action scaler', kind, ('min_max',))}")
    low, high = _floats(settings, ("minimum", "maximum"), "action scaler", where)
    return low.astype(np.float32), high.astype(np.float32)
