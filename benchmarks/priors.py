"""Updates per second of the prior learners, and imagined steps per second, beside the bare matrix products of each.

A line "imagine" is one round of rollouts (MAPLE: also its memory along all logged episodes); its `per_second` counts
imagined steps, all else is per round.
"""

import dataclasses
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from refplan.bench.products import bare_seconds, flops, median_seconds, products
from refplan.data.sources import load
from refplan.dynamics.ensemble import Ensemble
from refplan.priors.imagining import AbstractImaginingLearner
from refplan.priors.presets import load_preset
from refplan.priors.sac import SAC
from refplan.train import _updates, own_buffers

CHUNK = 30
MODEL_FREE = ("bc", "iql", "cql", "edac")
IMAGINING = ("mopo", "combo", "maple")


def run() -> list[dict]:
    data = load("halfcheetah-medium-replay-mini")
    find = lambda name: load_preset(name, "cpu", "halfcheetah-medium-replay").learner  # noqa: E731
    rows = [measure(f"update {name}", learner, data) for name, learner in {"sac": SAC()}.items()]
    rows += [measure(f"update {name}", find(name), data) for name in MODEL_FREE]
    # What its networks have learned does not matter to the clock.
    model = Ensemble().result(eqx.filter_jit(Ensemble().init)(data, jr.key(0)))
    for name in IMAGINING:
        learner = dataclasses.replace(find(name), model=model)
        rows += [measure(f"update {name}", learner, data), measure_round(name, learner, data)]
    return rows


def measure(what: str, learner, data) -> dict:
    """Updates, without the rounds of imagination between them."""
    source = learner.prepare(data)
    state = own_buffers(eqx.filter_jit(learner.init)(data, jr.key(0)))
    imagines = isinstance(learner, AbstractImaginingLearner)
    step = learner.improve if imagines else lambda s, rows, k: learner.update(s, learner.batch(rows, s, k), k)
    found = products(lambda s, k: step(s, source, k), state, jr.key(1))

    def chunk():
        nonlocal state
        state, metrics = _updates((learner, source, jr.key(1)), state, jnp.asarray(0), jnp.asarray(CHUNK))
        jax.block_until_ready(metrics)

    return compare(what, chunk, found, CHUNK)


def measure_round(name: str, learner: AbstractImaginingLearner, data) -> dict:
    """One round of rollouts."""
    logged = learner.prepare(data)
    state = eqx.filter_jit(learner.init)(data, jr.key(0))
    renew = eqx.filter_jit(lambda s, k: learner.renew(s, logged, k))
    found = products(lambda s, k: learner.renew(s, logged, k), state, jr.key(1))
    starts, length = learner.imagined.starts, learner.imagined.length
    row = compare(f"imagine {name}, {starts} x {length}", lambda: jax.block_until_ready(renew(state, jr.key(2))), found)
    return {**row, "per_second": starts * length * row["per_second"]}


def compare(what: str, call: Callable[[], object], found: list, calls: int = 1) -> dict:
    """One line of the table; `call` does the work of `found` `calls` times."""
    often = math.gcd(*(times for *_, times in found))  # a long scan is timed by a part of it: its arrays fill memory
    bare = often * bare_seconds([(left, right, numbers, times // often) for left, right, numbers, times in found])
    seconds = median_seconds(call, 7) / calls
    return {
        "what": what,
        "per_second": 1 / seconds,
        "ms": 1e3 * seconds,
        "bare_ms": 1e3 * bare,
        "ratio": seconds / bare,
        "gflop": flops(found) / 1e9,
        "gflops": flops(found) / seconds / 1e9,
    }
