"""A gated recurrent layer, with a gradient written out for speed."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from refplan.nn import Linear


class GRU(eqx.Module):
    """One gated recurrent layer; gates in the order reset, update, candidate (as PyTorch's)."""

    inputs: Linear
    recurrent: Linear

    def __call__(
        self, gates: Float[Array, "*batch gates"], memory: Float[Array, "*batch memory"]
    ) -> Float[Array, "*batch memory"]:
        """z_t from `inputs(x_t)` and z_{t-1}."""
        return _gate(jnp.split(gates, 3, axis=-1), self.recurrent(memory), memory)[0]

    def run(
        self,
        x: Float[Array, "time lanes inputs"],
        memory: Float[Array, "lanes memory"],
        first: Bool[Array, "time lanes"],
    ) -> Float[Array, "time lanes memory"]:
        """z_t along consecutive steps, from `memory`, anew where `first` is set."""
        # Three arrays: slices of one, taken inside the loop, keep XLA's CPU code from using vector instructions.
        weights, biases = (jnp.split(value, 3, axis=-1) for value in (self.inputs.weight, self.inputs.bias))
        gates = tuple(x @ weight + bias[None, None] for weight, bias in zip(weights, biases, strict=True))
        return _run(self.recurrent.weight, self.recurrent.bias, gates, memory, first)


def _gate(
    x: Sequence[Array], h: Float[Array, "*batch gates"], memory: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """(z_t, reset, update, candidate, the memory's part of it) from the inputs' and the memory's part of the gates."""
    h_reset, h_update, h_new = jnp.split(h, 3, axis=-1)
    reset, update = jax.nn.sigmoid(x[0] + h_reset), jax.nn.sigmoid(x[1] + h_update)
    new = jnp.tanh(x[2] + reset * h_new)
    return new + update * (memory - new), reset, update, new, h_new


def _scan(weight: Array, bias: Array, gates: tuple[Array, ...], memory: Array, first: Array, outputs: int) -> Any:
    """The first `outputs` results of `_gate` at every step."""

    def step(memory: Array, at: tuple[tuple[Array, ...], Array]) -> tuple[Array, tuple[Array, ...]]:
        memory = jnp.where(at[1][:, None], 0.0, memory)
        made = _gate(at[0], memory @ weight + bias[None], memory)
        return made[0], made[:outputs]

    return jax.lax.scan(step, memory, (gates, first))[1]


@jax.custom_vjp
def _run(weight: Array, bias: Array, gates: tuple[Array, ...], memory: Array, first: Array) -> Array:
    """z_t at every step.

    Its gradient is written out below: the backward loop then holds one product and a few multiplications per step,
    and the gradient of the recurrent matrix is one large product after it instead of a sum inside it.
    """
    return _scan(weight, bias, gates, memory, first, 1)[0]


def _run_forward(weight: Array, bias: Array, gates: tuple[Array, ...], memory: Array, first: Array) -> tuple:
    after, *parts = _scan(weight, bias, gates, memory, first, 5)
    return after, (weight, memory, first, after, *parts)


def _run_backward(kept: tuple, after_grad: Float[Array, "time lanes memory"]) -> tuple:
    weight, memory, first, after, reset, update, new, h_new = kept
    before = jnp.where(first[..., None], 0.0, jnp.concatenate([memory[None], after[:-1]]))
    # d z_t / d (gate's argument), for each gate; the candidate's memory part is seen through the reset gate.
    by_new = (1.0 - update) * (1.0 - new**2)
    by_update = (before - new) * update * (1.0 - update)
    by_h_new = by_new * reset
    by_reset = by_h_new * h_new * (1.0 - reset)
    back = weight.T

    def step(later: Array, at: tuple[Array, ...]) -> tuple[Array, Array]:
        given, by_reset, by_update, by_h_new, update, first = at
        grad = later + given
        gates = jnp.concatenate([by_reset * grad, by_update * grad, by_h_new * grad], axis=1)
        return jnp.where(first[:, None], 0.0, update * grad + gates @ back), grad

    along = (after_grad, by_reset, by_update, by_h_new, update, first)
    memory_grad, grad = jax.lax.scan(step, jnp.zeros_like(memory), along, reverse=True)
    gates = by_reset * grad, by_update * grad, by_new * grad
    of_memory = jnp.concatenate([*gates[:2], by_h_new * grad], axis=2).reshape(-1, weight.shape[1])
    weight_grad = before.reshape(-1, weight.shape[0]).T @ of_memory
    return weight_grad, jnp.sum(of_memory, axis=0), gates, memory_grad, None


_run.defvjp(_run_forward, _run_backward)
