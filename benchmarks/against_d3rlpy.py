"""Updates per second of our CQL and IQL beside d3rlpy's at equal sizes, in one process, in turns.

Needs the cross-library environment: .venv-cross/bin/python -m benchmarks against_d3rlpy
"""

import time

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Meta
from refplan.priors.cql import CQL
from refplan.priors.iql import IQL
from refplan.priors.sac import SAC
from refplan.train import _updates, own_buffers

ROWS, OBS, ACT, HIDDEN, SAMPLES, TURNS, CHUNK = 20_000, 17, 6, [256, 256], 10, 4, 30


def run() -> list[dict]:
    import d3rlpy

    random = np.random.default_rng(0)
    obs = random.normal(size=(ROWS, OBS)).astype(np.float32)
    actions = random.uniform(-0.9, 0.9, (ROWS, ACT)).astype(np.float32)
    rewards, ends = obs[:, 0], np.arange(ROWS) % 1000 == 999
    data = make_dataset(obs, actions, rewards, np.zeros(ROWS, bool), ends, next_observations=obs, meta=Meta("random"))
    theirs = d3rlpy.dataset.MDPDataset(obs, actions, rewards, np.zeros(ROWS), ends.astype(np.float32))
    nets = d3rlpy.models.VectorEncoderFactory(HIDDEN)
    both = {"actor_encoder_factory": nets, "critic_encoder_factory": nets, "batch_size": 256}
    sac = SAC(hidden=tuple(HIDDEN), actor_rate=1e-4, entropy_in_backup=False)
    cql = d3rlpy.algos.CQLConfig(n_action_samples=SAMPLES, **both)
    pairs = {
        "cql": (CQL(samples=SAMPLES, sac=sac), cql),
        "cql, drawn 4": (CQL(samples=SAMPLES, drawn=4, sac=sac), cql),
        "iql": (IQL(hidden=tuple(HIDDEN)), d3rlpy.algos.IQLConfig(value_encoder_factory=nets, **both)),
    }
    return [compare(name, ours, config, data, theirs) for name, (ours, config) in pairs.items()]


def compare(name: str, learner, config, data, theirs) -> dict:
    algorithm = config.create()
    algorithm.build_with_dataset(theirs)
    source, state = learner.prepare(data), own_buffers(learner.init(data, jr.key(0)))
    ours_best, theirs_best = 0.0, 0.0
    for turn in range(TURNS + 1):
        begun = time.perf_counter()
        state, metrics = _updates((learner, source, jr.key(1)), state, jnp.asarray(0), jnp.asarray(CHUNK))
        jax.block_until_ready(metrics)
        ours = CHUNK / (time.perf_counter() - begun)
        begun = time.perf_counter()
        for _ in range(CHUNK):
            algorithm.update(theirs.sample_transition_batch(256))
        if turn:  # the first turn compiles and warms up
            ours_best = max(ours_best, ours)
            theirs_best = max(theirs_best, CHUNK / (time.perf_counter() - begun))
    return {
        "what": f"update {name}",
        "per_second": ours_best,
        "d3rlpy_per_second": theirs_best,
        "ratio": ours_best / theirs_best,
    }
