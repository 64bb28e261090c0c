"""Choosing a planner's numbers: Bayesian optimisation (TPE) or the paper's grid, online or without the real world."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.random as jr
import numpy as np

from refplan.data.tasks import Task
from refplan.errors import MissingExtraError, RefplanError, unknown_name
from refplan.evaluation import evaluate

Objective = Callable[[dict[str, Any]], tuple[float, dict[str, float]]]

# The grid of the paper's appendix.
GRID: dict[str, list[Any]] = {
    "horizon": [2, 4],
    "sigma": [0.01, 0.05],
    "kappa": [0.1, 0.5, 1.0, 5.0, 10.0],
    "latents": [1, 4, 8, 16],
    "penalty": [0.1, 0.5, 1.0],
}
METHODS = ("bayes", "grid")


@dataclass(frozen=True)
class Trial:
    """One setting that was tried."""

    number: int
    settings: dict[str, Any]
    value: float
    spent: dict[str, float]  # what it cost: episodes and steps in the real world, seconds


@dataclass(frozen=True)
class Space:
    """What may vary: those of the paper's five numbers that a planner has."""

    names: tuple[str, ...]

    def points(self, seed: int) -> list[dict[str, Any]]:
        """Every point of the paper's grid, in a random order."""
        values = [
            dict(zip(self.names, point, strict=True)) for point in itertools.product(*(GRID[n] for n in self.names))
        ]
        return [values[i] for i in np.random.default_rng(seed).permutation(len(values))]

    def suggest(self, trial: Any, method: str) -> dict[str, Any]:
        """One setting; `bayes` also looks between the paper's values and a little beyond."""
        chosen: dict[str, Any] = {}
        for name in self.names:
            if method == "grid" or name in ("horizon", "latents"):
                chosen[name] = trial.suggest_categorical(name, GRID[name])
            elif name == "penalty":
                chosen[name] = trial.suggest_float(name, 0.0, 1.0)
            else:
                low, high = (0.1, 20.0) if name == "kappa" else (0.01, 0.2)
                chosen[name] = trial.suggest_float(name, low, high, log=True)
        return chosen


def free_settings(known: Iterable[str], fixed: Iterable[str]) -> tuple[str, ...]:
    """What is left to find: those of the paper's five a planner has and nobody fixed; a fixed share finds its kappa."""
    settled = {*fixed, *(("kappa",) if "effective" in fixed else ())}
    return tuple(name for name in GRID if name in known and name not in settled)


def tune(
    objective: Objective,
    space: Space,
    *,
    method: str,
    trials: int,
    storage: Path,
    seed: int = 0,
    about: str = "",
    say: Callable[[str], None] = print,
) -> list[Trial]:
    """Try settings until `trials` of them are known; what an earlier sitting tried counts (`storage`).

    `objective` gives a number to make large and what it cost to find it; `about` tells it from others of the same
    storage, whose trials do not count.
    """
    check_search(method)
    if trials < 1:
        raise RefplanError(f"trials must be at least 1, got {trials}.")
    study = open_study(storage, space, method, seed, about)
    points = space.points(seed) if method == "grid" else []
    most = min(trials, len(points)) if points else trials
    while len(found := finished_trials(study)) < most:
        if points:  # in a random order, so that a part of the grid is a fair sample of it
            known = [trial.settings for trial in found]
            study.enqueue_trial(next(point for point in points if point not in known))
        trial = study.ask()
        settings = space.suggest(trial, method)
        value, spent = objective(settings)
        if not np.isfinite(value):
            study.tell(trial, state=_states().FAIL)
            raise RefplanError(f"the objective is {value} at {settings}; is the model any good? refplan diagnose says.")
        for name, amount in spent.items():
            trial.set_user_attr(name, amount)
        study.tell(trial, value)
        words = ", ".join(f"{name} {number(setting)}" for name, setting in settings.items())
        say(f"[{len(found) + 1}/{most}] {value:.2f}  {words}")
    return finished_trials(study)


def check_search(method: str) -> None:
    """Whether this way of searching is known and installed."""
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    _optuna()


def online_objective(make: Callable[[dict[str, Any]], Any], task: Task, episodes: int, seed: int) -> Objective:
    """The mean return of a setting in the task itself, always on the same episodes, and what they cost."""

    def objective(settings: dict[str, Any]) -> tuple[float, dict[str, float]]:
        result = evaluate(make(settings), task, episodes, key=jr.key(seed), show=False)
        spent = {"episodes": float(episodes), "steps": float(result.lengths.sum()), "seconds": result.wall_s}
        return float(result.returns.mean()), spent

    return objective


def open_study(storage: Path, space: Space, method: str, seed: int, about: str = "") -> Any:
    """The study kept in a journal file; a new one if there is none."""
    optuna = _optuna()
    storage.parent.mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(storage))
    return optuna.create_study(
        study_name="-".join([method, *space.names, *([about] if about else [])]),
        storage=optuna.storages.JournalStorage(backend),
        sampler=optuna.samplers.TPESampler(seed=seed),
        direction="maximize",
        load_if_exists=True,
    )


def finished_trials(study: Any) -> list[Trial]:
    """What is known so far, in the order it was tried; a trial that was killed does not count."""
    done = [trial for trial in study.get_trials(deepcopy=False) if trial.state == _states().COMPLETE]
    return [Trial(n, dict(t.params), float(t.value), dict(t.user_attrs)) for n, t in enumerate(done)]


def number(value: Any) -> str:
    """A setting, short."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _states() -> Any:
    return _optuna().trial.TrialState


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("optuna", "hpo", "tuning") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
