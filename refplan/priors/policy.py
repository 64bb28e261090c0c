"""`GaussianPolicy`: the policy every learner trains and every foreign file is turned into.

The network speaks in units of half the action range, where the action box is [-1, 1]; `low` and `high` turn that into
the world's actions. Densities are those of the world's actions: log p(a) = log p(u) - sum log((high - low) / 2).
"""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.scipy.stats import norm
from jaxtyping import ArrayLike

from refplan.agent import AbstractPolicy
from refplan.errors import RefplanError, unknown_name
from refplan.files import load_arrays
from refplan.nn import (
    MLP,
    Activation,
    Linear,
    Normaliser,
    identity_normaliser,
    split_gaussian,
    tanh_gaussian_log_prob,
    tanh_gaussian_sample,
)
from refplan.types import Action, Key, Obs, Scalar, State, Transition

Head = Literal["tanh_gaussian", "gaussian", "gaussian_tanh_mean", "deterministic"]
Bound = ArrayLike | Sequence[float]  # action bounds as a user writes them: per action, or one for all
BUNDLED = Path(__file__).parent.parent / "data" / "bundled" / "policies"


class GaussianPolicy(AbstractPolicy):
    """A policy on raw observations with one of four heads, u being the action in units of half its range:

    - `tanh_gaussian`: u = tanh(m + s e), the head of SAC, CQL and their kin;
    - `gaussian`: u = clip(m + s e), PPO's;
    - `gaussian_tanh_mean`: u = clip(tanh(m) + s e), IQL's;
    - `deterministic`: u = clip(tanh(m) + noise e), the head of TD3 and DDPG.

    A clipped head's log-probability is that of the normal before clipping, taken at the executed action. A
    deterministic policy with `noise` 0 has one action only; its log-probability is 0 (probability one, not a density).
    """

    net: MLP  # observations to (m, log s), or to m alone for a deterministic head
    normaliser: Normaliser  # the observation scaler the network was trained behind
    low: Action
    high: Action
    noise: Scalar = eqx.field(converter=jnp.asarray, default=0.0)  # exploration of a deterministic head, a std of u
    head: str = eqx.field(static=True, default="tanh_gaussian")  # one of Head
    log_std_low: float = eqx.field(static=True, default=-5.0)
    log_std_high: float = eqx.field(static=True, default=2.0)

    def __check_init__(self):
        if self.head not in get_args(Head):
            raise unknown_name("policy head", self.head, get_args(Head))
        outputs = self.net.layers[-1].bias.shape[-1]
        expected = self.low.shape[-1] * (1 if self.head == "deterministic" else 2)
        if outputs != expected or self.low.shape != self.high.shape:
            raise RefplanError(
                f"the network has {outputs} outputs, but a {self.head} head with action bounds of shapes "
                f"{self.low.shape} and {self.high.shape} needs {expected}. Give bounds with one entry per action."
            )
        inputs = self.net.layers[0].weight.shape[-2]
        if self.normaliser.mean.shape[-1] != inputs:
            raise RefplanError(
                f"the network reads {inputs} numbers, the observation scaler has {self.normaliser.mean.shape[-1]}."
            )

    def start(self) -> State:
        """Nothing to remember."""
        return ()

    def observe(self, state: State, transition: Transition) -> State:
        """Nothing to learn."""
        return state

    def act(self, state: State, obs: Obs, key: Key) -> tuple[Action, State]:
        """The mean action, inside the bounds; the middle of the range where the network's answer is not a number."""
        mean, _ = self.distribution(obs)
        return self.to_world(mean if self.head == "gaussian" else jnp.tanh(mean)), state

    def distribution(self, obs: Obs) -> tuple[Action, Action]:
        """(m, log s) of the head at one observation, in units of half the action range and before any tanh."""
        output = self.net(jax.lax.stop_gradient(self.normaliser)(obs))
        if self.head == "deterministic":
            return output, jnp.broadcast_to(jnp.log(jax.lax.stop_gradient(self.noise)), output.shape)
        return split_gaussian(output, self.log_std_low, self.log_std_high)

    def sample(self, state: State, obs: Obs, key: Key) -> tuple[Action, Scalar]:
        """A random action and its log-probability; differentiable with respect to the network (reparametrised)."""
        mean, log_std = self.distribution(obs)
        if self.head == "tanh_gaussian":
            unit, log_prob = tanh_gaussian_sample(mean, log_std, key)
            return self.to_world(unit), log_prob - self._log_scale()
        centre = mean if self.head == "gaussian" else jnp.tanh(mean)
        unit = jnp.clip(centre + jnp.exp(log_std) * jr.normal(key, mean.shape), -1.0, 1.0)
        return self.to_world(unit), self._clipped_log_prob(unit, centre, log_std)

    def log_prob(self, obs: Obs, action: Action) -> Scalar:
        """The log-probability of a given action of the world."""
        mean, log_std = self.distribution(obs)
        unit = self.to_unit(action)
        if self.head == "tanh_gaussian":
            return tanh_gaussian_log_prob(mean, log_std, unit) - self._log_scale()
        return self._clipped_log_prob(unit, mean if self.head == "gaussian" else jnp.tanh(mean), log_std)

    def to_world(self, unit: Action) -> Action:
        """From [-1, 1] to the world's actions; what is not a number becomes the middle of the range."""
        return to_world(unit, *jax.lax.stop_gradient((self.low, self.high)))

    def to_unit(self, action: Action) -> Action:
        """From the world's actions to [-1, 1]."""
        return to_unit(action, *jax.lax.stop_gradient((self.low, self.high)))

    def _log_scale(self) -> Scalar:
        return jnp.sum(jnp.log(0.5 * jax.lax.stop_gradient(self.high - self.low)))

    def _clipped_log_prob(self, unit: Action, centre: Action, log_std: Action) -> Scalar:
        if self.head == "deterministic":
            return noise_log_prob(unit - centre, jax.lax.stop_gradient(self.noise), self._log_scale())
        return jnp.sum(norm.logpdf(unit, centre, jnp.exp(log_std))) - self._log_scale()


def to_world(unit: Action, low: Action, high: Action) -> Action:
    """From [-1, 1] to [low, high], clipped; what is not a number becomes the middle of the range."""
    unit = jnp.where(jnp.isnan(unit), 0.0, unit)
    return jnp.clip(0.5 * (low + high) + 0.5 * (high - low) * unit, low, high)


def to_unit(action: Action, low: Action, high: Action) -> Action:
    """From [low, high] to [-1, 1]."""
    return (2.0 * action - low - high) / (high - low)


def noise_log_prob(deviation: Action, noise: Scalar, log_scale: Scalar) -> Scalar:
    """The log-probability of a deviation from a deterministic action; 0 when there is no noise, so only one action."""
    certain = noise == 0.0
    std = jnp.where(certain, 1.0, noise)  # keeps the branch that is not taken finite, and so its gradient
    return jnp.where(certain, 0.0, jnp.sum(norm.logpdf(deviation, 0.0, std)) - log_scale)


def check_bounds(low: Bound, high: Bound, actions: int | None = None) -> tuple[Action, Action]:
    """Action bounds as arrays: finite, low < high, one per action; a single number holds for all of them."""
    bounds = [np.asarray(low, np.float32), np.asarray(high, np.float32)]
    shape = np.broadcast_shapes(*(bound.shape for bound in bounds)) if actions is None else (actions,)
    if len(shape) != 1 or any(bound.shape not in ((), shape) for bound in bounds):
        raise RefplanError(
            f"action bounds of shapes {bounds[0].shape} and {bounds[1].shape} do not fit"
            + (" each other: give one number per action." if actions is None else f" a policy with {actions} actions.")
        )
    if not (np.isfinite(bounds[0]).all() and np.isfinite(bounds[1]).all() and (bounds[0] < bounds[1]).all()):
        raise RefplanError(f"action bounds must be finite with low < high, got {bounds[0]} and {bounds[1]}.")
    return jnp.asarray(np.broadcast_to(bounds[0], shape)), jnp.asarray(np.broadcast_to(bounds[1], shape))


def make_policy(
    layers: Sequence[tuple[np.ndarray, np.ndarray]],
    low: Bound,
    high: Bound,
    *,
    head: str = "tanh_gaussian",
    activation: Activation = jax.nn.relu,
    normaliser: Normaliser | None = None,
    log_std_range: tuple[float, float] = (-20.0, 2.0),
    noise: float = 0.0,
) -> GaussianPolicy:
    """A policy from plain arrays, checked: one (weight (inputs, outputs), bias) pair per layer, and action bounds.

    A single number as a bound holds for every action.
    """
    _check_layers(layers)
    actions = layers[-1][1].shape[0] // (1 if head == "deterministic" else 2)
    low, high = check_bounds(low, high, actions)
    net = MLP(tuple(Linear(jnp.asarray(w, jnp.float32), jnp.asarray(b, jnp.float32)) for w, b in layers), activation)
    normaliser = normaliser or identity_normaliser(layers[0][0].shape[0])
    return GaussianPolicy(net, normaliser, low, high, jnp.asarray(noise), head, *log_std_range)


def _check_layers(layers: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    if not layers:
        raise RefplanError("a policy network needs at least one layer, none was found.")
    inputs = None
    for number, (weight, bias) in enumerate(layers):
        fits = weight.ndim == 2 and bias.shape == weight.shape[1:] and inputs in (None, weight.shape[0])
        if not fits:
            raise RefplanError(
                f"layer {number} of the policy network does not fit: weight {weight.shape}, bias {bias.shape}"
                + (f", after a layer with {inputs} outputs." if inputs else ".")
            )
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise RefplanError(f"layer {number} of the policy network holds NaN or infinite weights.")
        inputs = weight.shape[1]


def gaussian_layers(
    hidden: Sequence[tuple[np.ndarray, np.ndarray]],
    mean: tuple[np.ndarray, np.ndarray],
    log_std: tuple[np.ndarray, np.ndarray] | np.ndarray,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Hidden layers, then one last layer for (m, log s); a log s that does not depend on the state is an array."""
    weight, bias = mean
    spread = (np.zeros_like(weight), log_std) if isinstance(log_std, np.ndarray) else log_std
    if spread[0].shape != weight.shape or spread[1].shape != bias.shape:
        raise RefplanError(f"mean and log-std do not fit: biases of shapes {bias.shape} and {spread[1].shape}.")
    return [*hidden, (np.concatenate([weight, spread[0]], axis=1), np.concatenate([bias, spread[1]]))]


def policy_from_arrays(arrays: Mapping[str, np.ndarray], where: str | Path) -> GaussianPolicy:
    """A tanh-Gaussian relu policy, actions in [-1, 1], from arrays `l0_w, l0_b, l1_w, ..., mu_w, mu_b, ls_w, ls_b`."""
    depth = sum(name.startswith("l") and name.endswith("_w") and name[1:-2].isdigit() for name in arrays)
    expected = [f"{layer}_{part}" for layer in (*(f"l{i}" for i in range(depth)), "mu", "ls") for part in "wb"]
    if set(expected) != set(arrays):
        odd = ", ".join(sorted(set(expected) ^ set(arrays)))
        raise RefplanError(
            f"{where}: not a policy in refplan's layout (l0_w, l0_b, ..., mu_w, mu_b, ls_w, ls_b); "
            f"missing or extra: {odd}."
        )
    pairs = [(arrays[w], arrays[b]) for w, b in zip(expected[::2], expected[1::2], strict=True)]
    try:
        return make_policy(gaussian_layers(pairs[:-2], pairs[-2], pairs[-1]), -1.0, 1.0)
    except RefplanError as error:
        raise RefplanError(f"{where}: {error}") from None


def load_npz_policy(path: str | Path) -> GaussianPolicy:
    """A policy from an .npz file in refplan's layout (see `policy_from_arrays`); nothing in it is unpickled."""
    path = Path(path)
    try:
        # opened here, because numpy leaves its own file open when the archive is damaged
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise RefplanError(f"{path}: no such file.") from None
    except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise RefplanError(f"{path}: not a readable .npz file of plain arrays ({error}).") from None
    return policy_from_arrays(arrays, path)


def from_bundled(name: str) -> GaussianPolicy:
    """A policy that comes with refplan, by name ("hopper-medium") or by robot ("hopper")."""
    known = sorted(path.stem for path in BUNDLED.glob("*.safetensors"))
    match = [each for each in known if name in (each, each.removesuffix("-medium"))]
    if not match:
        raise unknown_name("bundled policy", name, known)
    arrays, _ = load_arrays(BUNDLED / f"{match[0]}.safetensors")
    return policy_from_arrays(arrays, match[0])
