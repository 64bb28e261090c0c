"""Small networks: MLP, the tanh-Gaussian head, and the `Normaliser` that travels with its model."""

import itertools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from refplan.types import Key

Activation = Callable[[Array], Array]


def _align(vector: Float[Array, " dim"], x: Float[Array, "*batch any"]) -> Float[Array, "... dim"]:
    """A vector with as many leading ones as `x` has batch axes: broadcasting said out loud."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


class Linear(eqx.Module):
    """x -> x W + b, with W stored (inputs, outputs) so that a batch is one plain product."""

    weight: Float[Array, "*member inputs outputs"]
    bias: Float[Array, "*member outputs"]

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Apply to one example or to a batch of them."""
        y = x @ self.weight
        return y + _align(self.bias, y)


class MLP(eqx.Module):
    """Linear layers with an activation between them and none after the last."""

    layers: tuple[Linear, ...]
    activation: Activation = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Apply to one example or to a batch of them."""
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def make_mlp(sizes: Sequence[int], key: Key, activation: Activation = jax.nn.relu, last_scale: float = 1.0) -> MLP:
    """An MLP with weights uniform in ±1/sqrt(inputs) (PyTorch's default) and its last layer scaled.

    All weights come from one random draw: separate draws per layer each compile on their own and cost seconds.
    """
    shapes = list(itertools.pairwise(sizes))
    flat = jr.uniform(key, (sum(i * o + o for i, o in shapes),), minval=-1.0, maxval=1.0)
    layers, at = [], 0
    for number, (i, o) in enumerate(shapes):
        bound = i**-0.5 * (last_scale if number == len(shapes) - 1 else 1.0)
        weight = flat[at : at + i * o].reshape(i, o) * bound
        bias = flat[at + i * o : at + i * o + o] * bound
        layers.append(Linear(weight, bias))
        at += i * o + o
    return MLP(tuple(layers), activation)


def make_ensemble(
    members: int, sizes: Sequence[int], key: Key, activation: Activation = jax.nn.relu, last_scale: float = 1.0
) -> MLP:
    """`members` MLPs in one pytree, every array with a leading member axis; call it with `ensemble_apply`."""
    return eqx.filter_vmap(lambda k: make_mlp(sizes, k, activation, last_scale))(jr.split(key, members))


def ensemble_apply(ensemble: MLP, x: Float[Array, "*batch inputs"]) -> Float[Array, "member *batch outputs"]:
    """Every member on the same input."""
    return eqx.filter_vmap(lambda net, y: net(y), in_axes=(eqx.if_array(0), None))(ensemble, x)


def split_gaussian(
    output: Float[Array, "*batch twice"], low: float = -5.0, high: float = 2.0
) -> tuple[Float[Array, "*batch act"], Float[Array, "*batch act"]]:
    """A head's output as (mean, log-std), the latter clipped to [low, high]."""
    mean, log_std = jnp.split(output, 2, axis=-1)
    return mean, jnp.clip(log_std, low, high)


def _squash_correction(raw: Float[Array, "*batch act"]) -> Float[Array, "*batch"]:
    """log |d tanh(u)/du| summed over dimensions, in the form that does not overflow."""
    return jnp.sum(2.0 * (jnp.log(2.0) - raw - jax.nn.softplus(-2.0 * raw)), axis=-1)


def _normal_log_prob(
    raw: Float[Array, "*batch act"], mean: Float[Array, "*batch act"], log_std: Float[Array, "*batch act"]
) -> Float[Array, "*batch"]:
    scaled = (raw - mean) * jnp.exp(-log_std)
    return jnp.sum(-0.5 * scaled**2 - log_std - 0.5 * np.log(2.0 * np.pi), axis=-1)


def tanh_gaussian_sample(
    mean: Float[Array, "*batch act"], log_std: Float[Array, "*batch act"], key: Key
) -> tuple[Float[Array, "*batch act"], Float[Array, "*batch"]]:
    """a = tanh(mean + std * noise) and its log-density in [-1, 1]^A."""
    raw = mean + jnp.exp(log_std) * jr.normal(key, mean.shape)
    return jnp.tanh(raw), _normal_log_prob(raw, mean, log_std) - _squash_correction(raw)


def tanh_gaussian_log_prob(
    mean: Float[Array, "*batch act"],
    log_std: Float[Array, "*batch act"],
    action: Float[Array, "*batch act"],
    edge: float = 1e-6,
) -> Float[Array, "*batch"]:
    """The log-density of a given action; actions on the border are moved in by `edge` before atanh."""
    raw = jnp.arctanh(jnp.clip(action, -1.0 + edge, 1.0 - edge))
    return _normal_log_prob(raw, mean, log_std) - _squash_correction(raw)


class Normaliser(eqx.Module):
    """(x - mean) / std with the statistics of the data a model was trained on; part of that model."""

    mean: Float[Array, " dim"]
    std: Float[Array, " dim"]

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """To zero mean and unit variance."""
        return (x - _align(self.mean, x)) / _align(self.std, x)

    def inverse(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """Back to the original units."""
        return x * _align(self.std, x) + _align(self.mean, x)


def fit_normaliser(x: np.ndarray | Array, floor: float = 1e-6) -> Normaliser:
    """Statistics over the first axis, summed in float64; a constant column is centred but not scaled."""
    values = np.asarray(x)
    mean = values.mean(axis=0, dtype=np.float64)
    std = values.std(axis=0, dtype=np.float64)
    std = np.where(std > floor, std, 1.0)
    return Normaliser(jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32))


def identity_normaliser(dim: int) -> Normaliser:
    """A normaliser that changes nothing."""
    return Normaliser(jnp.zeros(dim), jnp.ones(dim))
