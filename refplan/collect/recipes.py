"""The five kinds of D4RL data (and expert), made from one online SAC run.

random         rollouts of the randomly initialised policy, actions sampled
medium         rollouts of the first snapshot that reaches a third of the way from random to expert, sampled
medium-replay  everything the run saw until that snapshot
medium-expert  half medium, half expert rollouts
full-replay    everything the run saw
expert         rollouts of the best snapshot, sampled
"""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import jax.random as jr

from refplan.agent import AbstractPolicy, Sampled
from refplan.collect.online import OnlineRun, OnlineSettings
from refplan.collect.rollout import roll_out, task_meta
from refplan.data.assemble import concatenate
from refplan.data.dataset import Dataset
from refplan.data.tasks import Task
from refplan.errors import RefplanError, unknown_name
from refplan.evaluation import evaluate
from refplan.files import write_text
from refplan.logs import read_csv
from refplan.modules import load_module
from refplan.nn import identity_normaliser
from refplan.priors.actor_critic import in_world_units
from refplan.priors.policy import GaussianPolicy
from refplan.priors.sac import SAC
from refplan.progress import progress
from refplan.types import Key


@dataclass(frozen=True)
class Recipe:
    """What a dataset is made of besides the online run."""

    rows: int  # transitions of rollout kinds
    medium: float = 1 / 3  # how far from random to expert a medium policy is
    judge_episodes: int = 10  # per snapshot, to find medium and best


def random_policy(task: Task, key: Key) -> GaussianPolicy:
    """A randomly initialised policy: D4RL's `random`."""
    sac = SAC()
    state = sac.create(identity_normaliser(task.obs_dim), jnp.asarray(task.low), jnp.asarray(task.high), key)
    return in_world_units(state.policy, state.low, state.high)


def collect_random(task: Task, rows: int, *, key: Key, name: str, show: bool | None = None) -> Dataset:
    """Rollouts of a randomly initialised policy, actions sampled."""
    key_policy, key_roll = jr.split(key)
    recipe = "rollouts of a randomly initialised tanh-Gaussian policy (2x256), actions sampled"
    policy = Sampled(random_policy(task, key_policy))
    return roll_out(policy, task, rows, key=key_roll, name=name, recipe=recipe, show=show)


def collect_online(
    kind: str,
    task: Task,
    folder: str | Path,
    settings: OnlineSettings,
    recipe: Recipe,
    *,
    key: Key,
    name: str,
    show: bool | None = None,
) -> Dataset:
    """Train (or resume, or reuse) the online run in `folder` and make one kind of dataset from it."""
    if kind not in KINDS:
        raise unknown_name("kind of dataset", kind, KINDS)
    key_run, key_roll = jr.split(key)
    run = OnlineRun(task, folder, settings, key=key_run).train(show=show)
    return KINDS[kind](_Kitchen(run, recipe, key_roll, name, show))


@dataclass(frozen=True)
class _Kitchen:
    """Everything a kind is made from."""

    run: OnlineRun
    recipe: Recipe
    key: Key
    name: str
    show: bool | None

    def returns(self) -> dict[int, float]:
        """Mean return of every snapshot (sampled actions), measured once and kept in `snapshots.csv`."""
        path = self.run.folder / "snapshots.csv"
        known = {int(r["step"]): float(r["return"]) for r in read_csv(path)} if path.exists() else {}
        missing = {step: file for step, file in self.run.snapshots().items() if step not in known}
        with progress("judge snapshots", len(missing), "snapshots", self.show) as advance:
            for number, (step, file) in enumerate(missing.items()):
                known[step] = self._judge(file)
                _write_returns(path, known)
                advance(number + 1, f"step {step}: {known[step]:.0f}")
        return dict(sorted(known.items()))

    def _judge(self, file: Path) -> float:
        agent = Sampled(load_module(file))
        result = evaluate(agent, self.run.task, self.recipe.judge_episodes, key=jr.fold_in(self.key, 0), show=False)
        return float(result.returns.mean())

    def medium_step(self) -> int:
        """The first snapshot that reaches the medium return."""
        returns = self.returns()
        first = returns[min(returns)]
        references = self.run.task.references
        expert = references.high if references is not None else max(returns.values())
        expert = min(expert, max(returns.values()))
        goal = first + self.recipe.medium * (expert - first)
        step = next(step for step, value in returns.items() if value >= goal)
        if step == 0:
            raise RefplanError(
                f"no snapshot in {self.run.folder} is better than the untrained policy ({first:.0f}), so there is no "
                "medium one. Train longer: give more --steps (the run continues where it is)."
            )
        return step

    def best_step(self) -> int:
        """The snapshot with the highest return."""
        returns = self.returns()
        return max(returns, key=lambda step: returns[step])

    def describe(self, what: str) -> str:
        settings = self.run.settings
        return (
            f"{what}; online SAC (2x256 relu, batch {settings.sac.batch_size}, {settings.lanes} environments, one "
            f"update per step, first {settings.warmup} steps uniform) in {self.run.task.env_id}, {settings.steps} steps"
        )

    def rollouts(self, step: int, rows: int, label: str, number: int) -> Dataset:
        policy: AbstractPolicy = load_module(self.run.snapshots()[step])
        recipe = self.describe(f"rollouts of the {label} snapshot at step {step}, actions sampled")
        key = jr.fold_in(self.key, number)
        return roll_out(Sampled(policy), self.run.task, rows, key=key, name=self.name, recipe=recipe, show=self.show)

    def replay(self, step: int | None, label: str) -> Dataset:
        recipe = self.describe(f"replay buffer {label}, episodes ordered by their last step, cut ones truncated")
        meta = task_meta(self.run.task, self.name, recipe)
        return self.run.dataset(meta, None if step is None else step // self.run.settings.lanes)


def _write_returns(path: Path, returns: dict[int, float]) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", "return"])
    writer.writerows([step, repr(value)] for step, value in sorted(returns.items()))
    write_text(path, out.getvalue())


def _medium_expert(kitchen: _Kitchen) -> Dataset:
    half = kitchen.recipe.rows // 2
    medium = kitchen.rollouts(kitchen.medium_step(), half, "medium", 1)
    expert = kitchen.rollouts(kitchen.best_step(), half, "best", 2)
    recipe = f"first half: {medium.meta.recipe}; second half: {expert.meta.recipe}"
    return concatenate([medium, expert], task_meta(kitchen.run.task, kitchen.name, recipe))


KINDS: dict[str, Callable[[_Kitchen], Dataset]] = {
    "random": lambda k: k.rollouts(0, k.recipe.rows, "initial", 0),
    "medium": lambda k: k.rollouts(k.medium_step(), k.recipe.rows, "medium", 1),
    "medium-replay": lambda k: k.replay(k.medium_step(), "until the medium snapshot"),
    "medium-expert": _medium_expert,
    "full-replay": lambda k: k.replay(None, "of the whole run"),
    "expert": lambda k: k.rollouts(k.best_step(), k.recipe.rows, "best", 2),
}
