"""What an evaluation found: returns, intervals, times, and every step if asked for."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Dataset, Meta
from refplan.stats import Interval, mean_interval


@dataclass(frozen=True, eq=False)
class Trace:
    """Every step of every episode; `live` is false after an episode's end."""

    observations: Float[np.ndarray, "time episodes obs"]
    actions: Float[np.ndarray, "time episodes act"]
    rewards: Float[np.ndarray, "time episodes"]
    next_observations: Float[np.ndarray, "time episodes obs"]
    terminated: Bool[np.ndarray, "time episodes"]
    truncated: Bool[np.ndarray, "time episodes"]
    live: Bool[np.ndarray, "time episodes"]
    qpos: Float[np.ndarray, "time episodes q"] | None = None
    qvel: Float[np.ndarray, "time episodes v"] | None = None

    def dataset(self, meta: Meta) -> Dataset:
        """The episodes one after another, as logged data."""
        names = ("observations", "actions", "rewards", "next_observations", "terminated", "truncated", "qpos", "qvel")
        columns = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return make_dataset(**{n: np.swapaxes(x, 0, 1)[self.live.T] for n, x in columns.items()}, meta=meta)


@dataclass(frozen=True, eq=False)
class Result:
    """What an agent earned, with intervals over episodes, and what it cost."""

    agent: str
    task: str
    returns: Float[np.ndarray, " episodes"]
    lengths: Int[np.ndarray, " episodes"]
    scores: Float[np.ndarray, " episodes"] | None
    seeds: tuple[int, ...]
    ms_per_action: float  # time of one batched call, divided by the episodes in it
    ms_per_call: float  # what one call costs, however many episodes share it
    steps_per_second: float  # live environment steps, acting and simulation included
    wall_s: float
    trace: Trace | None = None

    @property
    def return_interval(self) -> Interval:
        """Mean return with its 95 % bootstrap interval over episodes."""
        return mean_interval(self.returns)

    @property
    def score_interval(self) -> Interval | None:
        """Mean normalised score with its interval, where the task has references."""
        return None if self.scores is None else mean_interval(self.scores)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        score = self.score_interval
        return {
            "agent": self.agent,
            "task": self.task,
            "episodes": len(self.returns),
            "return": self.return_interval._asdict(),
            "score": None if score is None else score._asdict(),
            "returns": [float(x) for x in self.returns],
            "lengths": [int(x) for x in self.lengths],
            "seeds": list(self.seeds),
            "ms_per_action": self.ms_per_action,
            "ms_per_call": self.ms_per_call,
            "steps_per_second": self.steps_per_second,
            "wall_s": self.wall_s,
        }

    def __str__(self) -> str:
        mean, low, high = self.return_interval
        score = self.score_interval
        words = "" if score is None else f", score {score.value:.1f} [{score.low:.1f}, {score.high:.1f}]"
        return (
            f"{self.agent} in {self.task}: return {mean:.1f} [{low:.1f}, {high:.1f}]{words}, "
            f"{len(self.returns)} episodes, {self.ms_per_action:.3f} ms per action"
        )
