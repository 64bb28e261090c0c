"""The simulator as a function: what really follows an observation and an action, for many rows at once."""

from typing import Any

import numpy as np
from jaxtyping import Float

from refplan.data.envs import known_env
from refplan.data.physics import ROBOTS
from refplan.data.tasks import Task
from refplan.errors import RefplanError


class TrueWorld:
    """One step of a known robot from states rebuilt out of observations (x, which earns nothing by itself, is 0).

    Hopper and Walker2d observe velocities clipped to 10, so faster states are only nearly the true ones. Worlds whose
    ground depends on x, and those that draw a new body per episode, cannot be rebuilt from an observation.
    """

    def __init__(self, task: Task):
        from refplan.data.simulate import BatchSimulator, can_batch

        known = known_env(task.env_id or "")
        if known is None or not can_batch(task):
            raise RefplanError(
                f"the true world of '{task.name}' cannot be had: that needs one of {', '.join(ROBOTS)} and MuJoCo."
            )
        self.task, self._robot = task, ROBOTS[known[1].robot]
        probe = BatchSimulator(task, 1)
        probe.reset([0])
        first, again = probe._gains.copy(), BatchSimulator(task, 1)
        again.reset([1])
        if known[1].world not in ("flat", "joint") or not np.array_equal(first, again._gains):
            raise RefplanError(
                f"'{task.name}' is another world in every episode or at every place; its observation does not say "
                "which. Use a flat task, or a joint task with given gains."
            )
        self._make = lambda rows: BatchSimulator(task, rows)
        self._simulators: dict[int, Any] = {}

    def step(
        self, obs: Float[np.ndarray, "rows obs"], actions: Float[np.ndarray, "rows act"]
    ) -> tuple[Float[np.ndarray, "rows obs"], Float[np.ndarray, " rows"]]:
        """(next observations, rewards); what is not finite stays NaN."""
        rows, split = len(obs), self._robot.positions - 1
        if rows not in self._simulators:
            self._simulators[rows] = self._make(rows)
            self._simulators[rows].reset([0] * rows)
        simulator = self._simulators[rows]
        good = np.all(np.isfinite(np.concatenate([obs, actions], axis=1)), axis=1)[:, None]
        state = np.where(good, obs, 0.0).astype(np.float64)
        qpos = np.concatenate([np.zeros((rows, 1)), state[:, :split]], axis=1)
        simulator.revive()
        simulator.set_states(qpos, state[:, split:])
        after, rewards, _, _ = simulator.step(np.where(good, actions, 0.0))
        after, rewards = np.where(good, after, np.nan), np.where(good.ravel(), rewards, np.nan)
        return after.astype(np.float32), rewards.astype(np.float32)
