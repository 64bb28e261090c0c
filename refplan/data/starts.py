"""Start states out of another dataset (RQ1): can an agent recover from where its own data never was?"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Bool, Float, Int

from refplan.data.envs import known_env
from refplan.data.physics import ROBOTS, Robot
from refplan.data.tasks import Task
from refplan.errors import RefplanError
from refplan.types import Key

if TYPE_CHECKING:
    from refplan.data.dataset import Dataset


@dataclass(frozen=True, eq=False)
class Starts:
    """Simulator states to begin episodes in, and the rows of the dataset they are."""

    qpos: Float[np.ndarray, "episodes q"]
    qvel: Float[np.ndarray, "episodes v"]
    rows: Int[np.ndarray, " episodes"]


def draw_starts(dataset: "Dataset", task: Task, episodes: int, *, key: Key) -> Starts:
    """Random rows of `dataset` as start states of `task`; the same rows for the same key, whatever the agent.

    Logged qpos and qvel are used where there are any; otherwise the state is rebuilt from the observation with x = 0
    (Hopper and Walker2d observe velocities clipped to 10, so faster ones are lost). Rows that are already unhealthy are
    never drawn. Rows differ from each other unless there are fewer than episodes.
    """
    if episodes < 1:
        raise RefplanError(f"at least one start state must be drawn, got {episodes}.")
    robot = _robot_of(task)
    _check_same_robot(dataset, task, robot)
    qpos, qvel = _all_states(dataset, task, robot)
    good = np.flatnonzero(_healthy(dataset, task, robot, qpos, qvel))
    if len(good) == 0:
        raise RefplanError(f"dataset '{dataset.meta.name}': every row is already unhealthy in '{task.name}'.")
    rows = good[np.asarray(jr.choice(key, len(good), (episodes,), replace=episodes > len(good)))]
    return Starts(qpos[rows].astype(np.float64), qvel[rows].astype(np.float64), rows)


def _robot_of(task: Task) -> Robot | None:
    known = known_env(task.env_id) if task.env_id else None
    if known is None:
        return None
    if known[1].world not in ("flat", "joint"):
        raise RefplanError(
            f"task '{task.name}': states logged on flat ground would begin inside its terrain. Use the flat task."
        )
    return ROBOTS[known[1].robot]


def _check_same_robot(dataset: "Dataset", task: Task, robot: Robot | None) -> None:
    logged = dataset.meta.env_id
    ours = known_env(logged) if logged else None
    name = ours[1].robot if ours else re.sub(r"-v\d+$", "", logged or "").lower()
    sizes = (dataset.obs_dim, dataset.action_dim)
    differs = name != robot.name if robot and logged else False
    if differs or sizes != (task.obs_dim, task.action_dim):
        raise RefplanError(
            f"dataset '{dataset.meta.name}' (environment {logged or 'unknown'}, observations and actions of size "
            f"{sizes}) is not of the robot of task '{task.name}' ({(task.obs_dim, task.action_dim)}); draw "
            "start states from data of the same robot."
        )


def _all_states(dataset: "Dataset", task: Task, robot: Robot | None) -> tuple[np.ndarray, np.ndarray]:
    if dataset.qpos is not None and dataset.qvel is not None:
        return dataset.qpos, dataset.qvel
    if robot is None:
        raise RefplanError(
            f"dataset '{dataset.meta.name}' has no simulator states (qpos, qvel), and for '{task.name}' they cannot be "
            f"rebuilt from observations; that is possible for {', '.join(ROBOTS)} only."
        )
    split = robot.positions - 1
    x = np.zeros((len(dataset), 1), np.float32)
    return np.concatenate([x, dataset.observations[:, :split]], axis=1), dataset.observations[:, split:]


def _healthy(
    dataset: "Dataset", task: Task, robot: Robot | None, qpos: np.ndarray, qvel: np.ndarray
) -> Bool[np.ndarray, " rows"]:
    finite = np.asarray(np.isfinite(np.concatenate([qpos, qvel], axis=1)).all(axis=1))
    if robot is not None:
        return finite & robot.healthy(qpos.astype(np.float64), qvel.astype(np.float64))
    if task.termination is None:
        return finite
    rule = jax.jit(jax.vmap(task.termination))
    obs = jnp.asarray(dataset.observations)
    ended = np.asarray(rule(obs, jnp.asarray(dataset.actions), obs))
    return np.logical_and(finite, ~ended)
