"""Replaying logged actions in the simulator: does this environment produce this data?

Two numbers: the error of single steps, each from its logged state, which a right environment keeps near rounding; and
the drift of whole segments from one logged state, which in contact-rich robots grows from rounding alone (files hold
float32 states), so it informs but does not judge.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.random as jr
import numpy as np
from jaxtyping import Float

from refplan.data.check import Finding, Report
from refplan.data.dataset import Dataset
from refplan.data.tasks import Task
from refplan.errors import RefplanError
from refplan.types import Key

TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Drift:
    """|observation - logged observation|, the largest component, per segment and step ahead."""

    env_id: str
    one_step: Float[np.ndarray, "segments steps"]  # every step from its own logged state
    open_loop: Float[np.ndarray, "segments steps"]  # only the first step from a logged state
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether 99 of 100 single steps land where the data says."""
        return float(np.quantile(self.one_step, 0.99)) <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Quantiles of both errors, the second per step ahead."""
        steps = self.open_loop.shape[1]
        shown = [k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k < steps] + [steps]
        return {
            "env_id": self.env_id,
            "segments": len(self.open_loop),
            "steps": steps,
            "tolerance": self.tolerance,
            "ok": self.ok,
            "one_step": _quantiles(self.one_step),
            "open_loop": {str(k): _quantiles(self.open_loop[:, k - 1]) for k in shown},
            "segments_within_tolerance": float((self.open_loop.max(axis=1) <= self.tolerance).mean()),
        }


def _quantiles(values: np.ndarray) -> dict[str, float]:
    return {
        "median": float(np.median(values)),
        "p99": float(np.quantile(values, 0.99)),
        "max": float(values.max()),
    }


def replay_drift(data: Dataset, task: Task | None = None, *, key: Key, steps: int = 50, segments: int = 100) -> Drift:
    """Replay `segments` random stretches of `steps` logged actions in the task's simulator."""
    task = task or data.task
    qpos, qvel = _states(data)
    env = task.make()
    try:
        world: Any = env.unwrapped
        if not hasattr(world, "set_state"):
            raise RefplanError(
                f"environment '{task.env_id}' has no set_state, so logged states cannot be replayed in it."
            )
        _check_sizes(data, (qpos, qvel), world, task)
        env.reset(seed=0)
        begins, steps = _segments(data, key, steps, segments)
        one_step, open_loop = np.zeros((2, len(begins), steps))
        for number, begin in enumerate(begins):
            rows = np.arange(begin, begin + steps)
            open_loop[number] = _replay(data, world, rows, [(qpos[begin], qvel[begin])])
            one_step[number] = _replay(data, world, rows, list(zip(qpos[rows], qvel[rows], strict=True)))
    finally:
        env.close()
    return Drift(str(task.env_id), one_step, open_loop)


def _states(data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    if data.qpos is None or data.qvel is None:
        raise RefplanError(
            f"dataset '{data.meta.name}' has no simulator states (infos/qpos, infos/qvel), so it cannot be replayed."
        )
    return data.qpos.astype(np.float64), data.qvel.astype(np.float64)


def _check_sizes(data: Dataset, states: tuple[np.ndarray, np.ndarray], world: Any, task: Task) -> None:
    logged = states[0].shape[1], states[1].shape[1]
    if (world.model.nq, world.model.nv) != logged:
        raise RefplanError(
            f"dataset '{data.meta.name}' logged states of {logged} values (qpos, qvel), but '{task.env_id}' has "
            f"{(world.model.nq, world.model.nv)}: it is not the environment of this data."
        )


def _segments(data: Dataset, key: Key, steps: int, segments: int) -> tuple[np.ndarray, int]:
    """First rows of distinct random segments that fit into their episodes, and their length."""
    steps = min(steps, int(data.lengths.max()))
    left = np.repeat(data.ends, data.lengths) - np.arange(len(data))
    fits = np.flatnonzero(left >= steps)
    picked = jr.choice(key, len(fits), (min(segments, len(fits)),), replace=False)
    return fits[np.asarray(picked)], steps


def _replay(data: Dataset, world: Any, rows: np.ndarray, states: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The error after each row's action; `states` are set before the first rows, as many as there are."""
    import mujoco

    errors = np.zeros(len(rows))
    for k, row in enumerate(rows):
        if k < len(states):  # a fresh start, without the solver's memory of another state
            mujoco.mj_resetData(world.model, world.data)
            world.set_state(*states[k])
        obs = world.step(data.actions[row])[0]
        errors[k] = np.abs(obs - data.next_observations[row]).max()
    return errors


def with_replay(report: Report, drift: Drift) -> Report:
    """The report with the replay in it: an error if the environment is not the data's own."""
    said = drift.to_dict()
    errors, notes = list(report.errors), list(report.notes)
    if not drift.ok:
        message = (
            f"replayed in {drift.env_id}, 1 of 100 single steps misses the logged observation by "
            f"{said['one_step']['p99']:.2g} or more (allowed {drift.tolerance:g}): the data comes from another version "
            "of the environment or its physics"
        )
        errors.append(Finding("replay", message))
    elif said["segments_within_tolerance"] < 1.0:
        share = said["segments_within_tolerance"]
        message = (
            f"single steps land where the data says, but only {share:.0%} of the segments stay within "
            f"{drift.tolerance:g} for all {said['steps']} steps: contacts amplify the rounding of the stored states"
        )
        notes.append(Finding("replay", message))
    return dataclasses.replace(report, errors=tuple(errors), notes=tuple(notes), replay=said)
