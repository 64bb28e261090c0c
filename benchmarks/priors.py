"""Updates per second of the prior learners, beside the bare matrix products of the same update."""

import jax
import jax.numpy as jnp
import jax.random as jr

from benchmarks.matmuls import bare_seconds, flops, median_seconds, products
from refplan.data.sources import load
from refplan.priors.presets import load_preset
from refplan.priors.sac import SAC
from refplan.train import _updates, own_buffers

CHUNK = 30


def run() -> list[dict]:
    data = load("halfcheetah-medium-replay-mini")
    learners = {
        name: load_preset(name, "cpu", "halfcheetah-medium-replay").learner for name in ("bc", "iql", "cql", "edac")
    }
    return [measure(name, learner, data) for name, learner in {"sac": SAC(), **learners}.items()]


def measure(name: str, learner, data) -> dict:
    source = learner.prepare(data)
    state = own_buffers(learner.init(data, jr.key(0)))
    one = lambda s, k: learner.update(s, learner.batch(source, s, k), k)  # noqa: E731
    found = products(one, state, jr.key(1))
    bare = bare_seconds(found)

    def chunk():
        nonlocal state
        state, metrics = _updates((learner, source, jr.key(1)), state, jnp.asarray(0), jnp.asarray(CHUNK))
        jax.block_until_ready(metrics)

    seconds = median_seconds(chunk, 7) / CHUNK
    return {
        "what": f"update {name}",
        "per_second": 1 / seconds,
        "ms": 1e3 * seconds,
        "bare_ms": 1e3 * bare,
        "ratio": seconds / bare,
        "gflop": flops(found) / 1e9,
        "gflops": flops(found) / seconds / 1e9,
    }
