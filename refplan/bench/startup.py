"""Seconds from a process's start to its first planned action: the first one compiles, later ones read the cache."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def run(quick: bool = False) -> list[dict[str, Any]]:
    """A run folder of the usual sizes, and processes that load it and act, one after another."""
    from refplan.bench.planner import make_model, make_prior
    from refplan.store import save

    with tempfile.TemporaryDirectory() as place:
        save(Path(place) / "run", prior=make_prior(), model=make_model(5))
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(Path(place) / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        rows = []
        for number in range(2 if quick else 3):
            begun = time.perf_counter()
            words = [sys.executable, "-m", "refplan.bench.startup", str(Path(place) / "run")]
            done = subprocess.run(words, env={**os.environ, **cache}, check=True, capture_output=True, text=True)
            rows.append(
                {"process": number + 1, "seconds": time.perf_counter() - begun, "of_that_acting": float(done.stdout)}
            )
    return rows


def act_once(folder: str) -> float:
    """Load, plan one action, and say how long the action itself took, compilation or its cache included."""
    import equinox as eqx
    import jax
    import jax.random as jr

    from refplan.bench.planner import OBS
    from refplan.planners.presets import make_planner
    from refplan.store import load_run

    parts = load_run(folder)
    agent = make_planner("refplan", parts["prior"], parts["model"])
    begun = time.perf_counter()
    obs, key = jax.numpy.zeros(OBS), jr.key(0)
    jax.block_until_ready(eqx.filter_jit(agent.act)(agent.start(), obs, key)[0])
    return time.perf_counter() - begun


if __name__ == "__main__":
    print(act_once(sys.argv[1]))
