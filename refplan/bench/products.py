"""The yardstick: the matrix products a function makes, and nothing else.

The products are read off the function's jaxpr (loops counted by their length), so the yardstick cannot drift from the
code it measures. Everything a function does besides them is overhead; the ratio is what we watch.
"""

import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


def products(function: Callable, *args: Any) -> list[tuple[tuple, tuple, Any, int]]:
    """(left shape, right shape, dimension numbers, how often) of every product in one call."""
    dynamic, static = eqx.partition(args, eqx.is_array)
    jaxpr = jax.make_jaxpr(lambda d: eqx.filter(function(*eqx.combine(d, static)), eqx.is_array))(dynamic)
    found: list = []
    _walk(jaxpr.jaxpr, 1, found)
    return found


def _walk(jaxpr: Any, times: int, found: list) -> None:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            left, right = (v.aval.shape for v in equation.invars)
            found.append((left, right, equation.params["dimension_numbers"], times))
        inner = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(part, "eqns"):
                    _walk(part, inner, found)
                elif hasattr(part, "jaxpr"):
                    _walk(part.jaxpr, inner, found)


def flops(found: list) -> float:
    """Multiply-adds of the products, times two."""
    total = 0.0
    for left, right, ((contract, _), (batch, _)), times in found:
        shared = np.prod([left[i] for i in contract], dtype=float)
        batches = np.prod([left[i] for i in batch], dtype=float)
        total += 2 * times * np.prod(left, dtype=float) * np.prod(right, dtype=float) / shared / batches
    return total


def bare_seconds(found: list, repeats: int = 30) -> float:
    """Median time of the products alone, one compiled call that makes them all."""
    random = np.random.default_rng(0)
    arrays = [
        (jnp.asarray(random.normal(size=left), jnp.float32), jnp.asarray(random.normal(size=right), jnp.float32))
        for left, right, _, times in found
        for _ in range(times)
    ]
    numbers = [numbers for _, _, numbers, times in found for _ in range(times)]
    run = jax.jit(lambda pairs: [jax.lax.dot_general(a, b, n) for (a, b), n in zip(pairs, numbers, strict=True)])
    return median_seconds(lambda: jax.block_until_ready(run(arrays)), repeats)


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median time of a call, after two to warm up."""
    call(), call()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return float(np.median(times))
