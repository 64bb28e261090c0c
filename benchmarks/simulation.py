"""Environment steps per second: mujoco.batch beside a plain loop over Gymnasium environments."""

import time

import numpy as np

from refplan.data.simulate import make_simulator
from refplan.data.tasks import task


def run() -> list[dict]:
    return [measure(name, episodes) for name in ("halfcheetah", "hopper") for episodes in (10, 64)]


def measure(name: str, episodes: int, steps: int = 60) -> dict:
    world = task(name)
    rates = {}
    for batched in (True, False):
        simulator = make_simulator(world, episodes, batched=batched)
        best = 0.0
        for repeat in range(3):
            simulator.reset(range(repeat * episodes, (repeat + 1) * episodes))
            actions = np.zeros((episodes, world.action_dim), np.float32)
            begun, stepped = time.perf_counter(), 0
            for _ in range(steps):
                _, _, terminated, _ = simulator.step(actions)
                stepped += int((~terminated).sum())
            best = max(best, stepped / (time.perf_counter() - begun))
        rates[batched] = best
        simulator.close()
    return {
        "what": f"step {name} x {episodes}",
        "per_second": rates[True],
        "loop_per_second": rates[False],
        "ratio": rates[True] / rates[False],
    }
