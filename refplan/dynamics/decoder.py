"""The network both models share: an ensemble of probabilistic networks over (delta s, r).

Each member predicts a Gaussian; the log-variance lives between soft bounds that are learned too. Members are kept in
the order of their error on held-out data, so that the first ones are the elites.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from refplan.dynamics.base import Outcome
from refplan.nn import Activation, Linear, Normaliser
from refplan.types import Key, Scalar, Transition


class GaussianNet(eqx.Module):
    """x (and a latent m) to the mean and log-variance of the outputs; with an ensemble, every array leads with members.

    `residual` adds each hidden layer's input to its output where sizes agree ("skip connection" of the paper).
    `inject`, if not empty, holds one matrix per hidden layer after the first that feeds m in again.
    """

    layers: tuple[Linear, ...]
    inject: tuple[Float[Array, "*member latent hidden"], ...]
    max_log_var: Float[Array, " outputs"]
    min_log_var: Float[Array, " outputs"]
    residual: bool = eqx.field(static=True)
    activation: Activation = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "*batch inputs"], latent: Float[Array, "*batch latent"] | None = None
    ) -> tuple[Float[Array, "*batch outputs"], Float[Array, "*batch outputs"]]:
        """(mean, log-variance) of one member; the latent, if any, is part of the input."""
        mean, raw = jnp.split(self.layers[-1](self.hidden(x, latent)), 2, axis=-1)
        return mean, soft_bounds(raw, self.min_log_var, self.max_log_var)

    def hidden(
        self, x: Float[Array, "*batch inputs"], latent: Float[Array, "*batch latent"] | None = None
    ) -> Float[Array, "*batch hidden"]:
        """What the last layer of one member reads."""
        h = x if latent is None else jnp.concatenate([x, latent], axis=-1)
        for number, layer in enumerate(self.layers[:-1]):
            y = layer(h)
            if number > 0 and self.inject and latent is not None:
                y = y + latent @ self.inject[number - 1]
            y = self.activation(y)
            h = y + h if self.residual and y.shape == h.shape else y
        return h


def soft_bounds(
    raw: Float[Array, "*batch outputs"], low: Float[Array, " outputs"], high: Float[Array, " outputs"]
) -> Float[Array, "*batch outputs"]:
    """v <- high - softplus(high - v); v <- low + softplus(v - low): close to v inside, never outside."""
    shape = (1,) * (raw.ndim - 1) + low.shape
    low, high = low.reshape(shape), high.reshape(shape)
    capped = high - jax.nn.softplus(high - raw)
    return low + jax.nn.softplus(capped - low)


def make_gaussian_nets(
    members: int,
    inputs: int,
    latent: int,
    outputs: int,
    hidden: Sequence[int],
    key: Key,
    *,
    residual: bool = False,
    inject: bool = False,
    activation: Activation = jax.nn.swish,
) -> GaussianNet:
    """`members` networks in one pytree; weights truncated normal with std 1 / (2 sqrt(inputs)), biases zero (MOPO).

    The bounds are shared by all members: maximum 0.5, minimum -10 at the start.
    """
    sizes = [inputs + latent, *hidden, 2 * outputs]
    shapes = list(itertools.pairwise(sizes))
    shapes += [(latent, size) for size in hidden[1:]] if inject and latent else []
    # One draw for all weights: separate ones compile separately and cost seconds.
    flat = jr.truncated_normal(key, -2.0, 2.0, (members, sum(i * o for i, o in shapes)))
    weights, at = [], 0
    for i, o in shapes:
        weights.append(flat[:, at : at + i * o].reshape(members, i, o) / (2.0 * i**0.5))
        at += i * o
    count = len(sizes) - 1
    layers = tuple(Linear(w, jnp.zeros((members, w.shape[2]))) for w in weights[:count])
    bounds = jnp.full(outputs, 0.5), jnp.full(outputs, -10.0)
    return GaussianNet(layers, tuple(weights[count:]), *bounds, residual, activation)


def apply_members(
    nets: GaussianNet, x: Float[Array, "member *batch inputs"], latent: Float[Array, "*batch latent"] | None = None
) -> tuple[Float[Array, "member *batch outputs"], Float[Array, "member *batch outputs"]]:
    """Every member on inputs of its own, all under one latent; the bounds are shared."""
    return _over_members(nets, x, latent, None)


def members_apart(
    nets: GaussianNet,
    x: Float[Array, "member *batch inputs"],
    latent: Float[Array, "member *batch latent"] | None = None,
) -> tuple[Float[Array, "member *batch outputs"], Float[Array, "member *batch outputs"]]:
    """Every member on inputs and latents of its own."""
    return _over_members(nets, x, latent, 0)


def _over_members(nets: GaussianNet, x: Array, latent: Array | None, latent_axis: int | None) -> tuple[Array, Array]:
    def one(layers: tuple, inject: tuple, x: Array, latent: Array | None) -> tuple[Array, Array]:
        return eqx.tree_at(lambda n: (n.layers, n.inject), nets, (layers, inject))(x, latent)

    return jax.vmap(one, in_axes=(0, 0, 0, latent_axis))(nets.layers, nets.inject, x, latent)


def decoder_rows(
    inputs: Normaliser, targets: Normaliser, rows: Transition
) -> tuple[Float[Array, "*batch inputs"], Float[Array, "*batch outputs"]]:
    """What a member reads, [s, a], and what it should say, [s' - s, r], in its units."""
    x = jnp.concatenate([rows.obs, rows.action], axis=-1)
    y = jnp.concatenate([rows.next_obs - rows.obs, rows.reward[..., None]], axis=-1)
    return inputs(x), targets(y)


def negative_log_likelihood(
    mean: Float[Array, "*batch outputs"],
    log_var: Float[Array, "*batch outputs"],
    target: Float[Array, "*batch outputs"],
) -> Float[Array, "*batch"]:
    """mean over outputs of (mu - y)^2 exp(-v) + v: twice the Gaussian's, without its constant (MOPO's loss)."""
    return jnp.mean((mean - target) ** 2 * jnp.exp(-log_var) + log_var, axis=-1)


def bounds_penalty(nets: GaussianNet, weight: float | Scalar = 0.01) -> Scalar:
    """0.01 (sum max - sum min): keeps the learned bounds tight."""
    return weight * (jnp.sum(nets.max_log_var) - jnp.sum(nets.min_log_var))


class Decoder(eqx.Module):
    """The elites of an ensemble with the statistics they were trained behind: (s, a[, m]) to Gaussians over (s', r)."""

    nets: GaussianNet  # all members, best first
    inputs: Normaliser  # of [s, a]
    targets: Normaliser  # of [s' - s, r]
    elites: int = eqx.field(static=True)

    def predict(
        self,
        latent: Float[Array, " latent"] | None,
        obs: Float[Array, "member obs"],
        action: Float[Array, "*member act"],
    ) -> Outcome:
        """Each elite from a state of its own, under one action for all or one each."""
        x = jnp.concatenate([obs, jnp.broadcast_to(action, (self.elites, action.shape[-1]))], axis=1)
        mean, log_var = apply_members(self.elite_nets(), self.inputs(x), latent)
        mean, std = self.targets.inverse(mean), jnp.exp(0.5 * log_var) * self.targets.std[None]
        return Outcome(obs + mean[:, :-1], mean[:, -1], std[:, :-1], std[:, -1])

    def best(self, count: int) -> "Decoder":
        """The same with fewer elites."""
        return dataclasses.replace(self, elites=min(count, self.elites))

    def elite_nets(self) -> GaussianNet:
        """The first `elites` members."""
        return take_members(self.nets, slice(0, self.elites))


def take_members(nets: GaussianNet, which: slice | Array) -> GaussianNet:
    """Some members, with the shared bounds."""
    picked = jax.tree.map(lambda x: x[which], (nets.layers, nets.inject))
    return eqx.tree_at(lambda n: (n.layers, n.inject), nets, picked)
