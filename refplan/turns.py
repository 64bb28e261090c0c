"""Many of the same side by side, but not all at once: a batch whose layers fit the cache is computed faster."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

# Rows of a network per turn. With 200 units, 5000 rows are 4 MB a layer; ten times that waits for the memory.
ROWS = 6000


def at_once(count: int, rows: int) -> int:
    """How many of `count` items of `rows` rows each go into one turn, at least one.

    A divisor of `count` if one makes turns half as large as they may be; otherwise a remainder is left for the end.
    """
    most = min(max(ROWS // rows, 1), count)
    divisor = max(n for n in range(1, most + 1) if count % n == 0)
    return divisor if 2 * divisor > most else most


def in_turns(function: Callable[..., Any], rows: int, *args: Any) -> Any:
    """`jax.vmap(function)(*args)`, a few at a time where each item alone computes many rows."""
    count = jax.tree.leaves(args)[0].shape[0]
    many = at_once(count, rows)
    if many == count:
        return jax.vmap(function)(*args)
    return jax.lax.map(lambda each: function(*each), args, batch_size=many if many > 1 else None)


def sum_in_turns(function: Callable[..., Array], heads: PyTree, rows: int, *args: Any) -> Float[Array, " head"]:
    """The sum of `function(heads, *items)` over turns of the items in `args`, each with its gradient at once.

    `function` gives one number per head, already summed over the items it is given; the number of a head depends on
    that head alone (its slice of every array in `heads`), so one backward pass of the sum gives all gradients. `args`
    are constants. A plain gradient would keep every layer of all items until it comes back to them.
    """
    count = jax.tree.leaves(args)[0].shape[0]
    many = at_once(count, rows)
    if many == count:
        return function(heads, *args)
    even = count - count % many
    turns = jax.lax.stop_gradient(jax.tree.map(lambda x: x[:even].reshape(-1, many, *x.shape[1:]), args))

    def forward(heads: PyTree) -> tuple[Array, PyTree]:
        def turn(sums: PyTree, items: Any) -> tuple[PyTree, None]:
            value, pull = jax.vjp(lambda h: function(h, *items), heads)
            return jax.tree.map(jnp.add, sums, (value, *pull(jnp.ones_like(value)))), None

        shape = jax.eval_shape(function, heads, *jax.tree.map(lambda x: x[0], turns))
        empty = jnp.zeros(shape.shape, shape.dtype), jax.tree.map(jnp.zeros_like, heads)
        return jax.lax.scan(turn, empty, turns)[0]

    def backward(grads: PyTree, wanted: Float[Array, " head"]) -> tuple[PyTree]:
        return (jax.tree.map(lambda g: g * wanted.reshape(-1, *(1,) * (g.ndim - 1)), grads),)

    total = jax.custom_vjp(lambda heads: forward(heads)[0])
    total.defvjp(forward, backward)
    if even == count:
        return total(heads)
    return total(heads) + function(heads, *jax.lax.stop_gradient(jax.tree.map(lambda x: x[even:], args)))
