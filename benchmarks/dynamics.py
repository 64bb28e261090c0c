"""Updates per second of the dynamics models, beside the bare matrix products of the same update."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from benchmarks.matmuls import bare_seconds, flops, median_seconds, products
from refplan.data.sources import load
from refplan.dynamics.ensemble import Ensemble
from refplan.train import _updates, own_buffers

CHUNK, ROUNDS = 10, 5


def run() -> list[dict]:
    data = load("halfcheetah-medium-replay-mini")
    learners = {f"ensemble, batch {size}": Ensemble(batch_size=size) for size in (256, 1024)}
    return [measure(name, learner, data) for name, learner in learners.items()]


def measure(name: str, learner, data) -> dict:
    source = learner.prepare(data)
    state = own_buffers(learner.init(data, jr.key(0)))
    found = products(lambda s, k: learner.update(s, learner.batch(source, s, k), k), state, jr.key(1))

    def chunk():
        nonlocal state
        state, metrics = _updates((learner, source, jr.key(1)), state, jnp.asarray(0), jnp.asarray(CHUNK))
        jax.block_until_ready(metrics)

    # In turns, so that a load that comes and goes weighs on both alike.
    pairs = np.array([(median_seconds(chunk, 3) / CHUNK, bare_seconds(found, 10)) for _ in range(ROUNDS)])
    seconds, bare = np.median(pairs, axis=0)
    return {
        "what": f"update {name}",
        "per_second": float(1 / seconds),
        "ms": float(1e3 * seconds),
        "bare_ms": float(1e3 * bare),
        "ratio": float(np.median(pairs[:, 0] / pairs[:, 1])),
        "gflop": flops(found) / 1e9,
        "gflops": float(flops(found) / seconds / 1e9),
        "epoch_100k_s": float(seconds * 100_000 / learner.batch_size),
    }
