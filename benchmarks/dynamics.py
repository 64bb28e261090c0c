"""Updates per second of the dynamics models, and what encoding costs, beside the bare matrix products of that work.

`epoch_100k_s` is the time for 100 000 transitions. Encoding one episode is faster than its bare products: those read a
matrix of their own each time, the loop keeps one in the cache.
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from refplan.bench.products import bare_seconds, flops, median_seconds, products
from refplan.data.assemble import make_dataset
from refplan.data.dataset import Dataset, Meta
from refplan.data.sources import load
from refplan.dynamics.belief import BeliefDynamics, BeliefModel
from refplan.dynamics.encoding import encode_rows, place_episodes
from refplan.dynamics.ensemble import Ensemble
from refplan.learner import AbstractLearner
from refplan.train import _updates, own_buffers

CHUNK, ROUNDS = 5, 5
STEPS = 1000  # of an episode to encode


def run() -> list[dict]:
    data = load("halfcheetah-medium-replay-mini")
    first = BeliefModel()
    fresh = first.result(eqx.filter_jit(first.init)(data, jr.key(0)))
    second = first.following(fresh)
    # What is timed, and how many rows of the data one update uses up (every member has rows of its own).
    learners = {f"ensemble, batch {size}": (Ensemble(batch_size=size), size) for size in (256, 1024)}
    learners["belief, stage 1"] = first, first.lanes * first.length
    learners["belief, stage 2"] = second, first.decoder_batch
    rows = [measure_update(f"update {name}", learner, data, used) for name, (learner, used) in learners.items()]
    return rows + [measure_encoding(fresh, data, episodes) for episodes in (1, 100)]


def measure_update(what: str, learner: AbstractLearner, data: Dataset, rows: int) -> dict:
    source = learner.prepare(data)
    state = own_buffers(eqx.filter_jit(learner.init)(data, jr.key(0)))
    found = products(lambda s, k: learner.update(s, learner.batch(source, s, k), k), state, jr.key(1))

    def chunk():
        nonlocal state
        state, metrics = _updates((learner, source, jr.key(1)), state, jnp.asarray(0), jnp.asarray(CHUNK))
        jax.block_until_ready(metrics)

    return compare(what, chunk, CHUNK, found, rows)


def measure_encoding(model: BeliefDynamics, data: Dataset, episodes: int) -> dict:
    """Beliefs of whole episodes, as diagnosis and the second stage make them."""
    placed = place_episodes(episodes_of(data, episodes))
    encode = eqx.filter_jit(encode_rows)
    call = lambda: jax.block_until_ready(encode(model.encoder, model.scale, placed))  # noqa: E731
    found = products(encode_rows, model.encoder, model.scale, placed)
    return compare(f"encode {episodes} x {STEPS} steps", call, 1, found, episodes * STEPS)


def episodes_of(data: Dataset, episodes: int) -> Dataset:
    """So many episodes of the same length, of rows as they come: what they hold does not matter to the clock."""
    row = np.arange(episodes * STEPS) % len(data)
    return make_dataset(
        data.observations[row],
        data.actions[row],
        data.rewards[row],
        np.zeros(len(row), bool),
        np.arange(len(row)) % STEPS == STEPS - 1,
        next_observations=data.next_observations[row],
        meta=Meta(name="bench"),
    )


def compare(what: str, call: Callable[[], object], calls: int, found: list, rows: int) -> dict:
    """One line of the table; `call` does the work of `found` `calls` times, and `rows` transitions' worth of it."""
    often = math.gcd(*(times for *_, times in found))  # a long scan is timed by a part of it: its arrays fill memory
    part = [(left, right, numbers, times // often) for left, right, numbers, times in found]
    # In turns, so that a load that comes and goes weighs on both alike.
    pairs = np.array([(median_seconds(call, 3) / calls, often * bare_seconds(part, 10)) for _ in range(ROUNDS)])
    seconds, bare = np.median(pairs, axis=0)
    return {
        "what": what,
        "per_second": float(1 / seconds),
        "ms": float(1e3 * seconds),
        "bare_ms": float(1e3 * bare),
        "ratio": float(np.median(pairs[:, 0] / pairs[:, 1])),
        "gflop": flops(found) / 1e9,
        "gflops": float(flops(found) / seconds / 1e9),
        "epoch_100k_s": float(seconds * 100_000 / rows),
    }
