"""Whole episodes of an agent as a dataset."""

import jax.random as jr
import numpy as np

from refplan.agent import AbstractAgent
from refplan.data.assemble import concatenate
from refplan.data.dataset import Dataset, Meta
from refplan.data.tasks import Task
from refplan.errors import RefplanError
from refplan.evaluation import evaluate
from refplan.progress import progress
from refplan.provenance import versions
from refplan.types import Key


def roll_out(
    agent: AbstractAgent,
    task: Task,
    transitions: int,
    *,
    key: Key,
    name: str,
    recipe: str,
    episodes: int = 32,
    show: bool | None = None,
) -> Dataset:
    """Whole episodes, `episodes` at a time, until there are at least `transitions` rows; what is over is dropped whole.

    The first episodes in order that reach the count are kept, so the result does not depend on how the last wave ended.
    """
    if transitions < 1:
        raise RefplanError(f"at least one transition is needed, got {transitions}.")
    meta = task_meta(task, name, recipe)
    waves: list[Dataset] = []
    rows = 0
    with progress(f"collect {name}", transitions, "transitions", show) as advance:
        while rows < transitions:
            result = evaluate(agent, task, episodes, key=jr.fold_in(key, len(waves)), trace=True, show=False)
            assert result.trace is not None
            waves.append(result.trace.dataset(meta))
            rows += len(waves[-1])
            advance(min(rows, transitions), f"return {result.returns.mean():.0f}")
    whole = concatenate(waves, meta)
    enough = int((whole.ends < transitions).sum()) + 1
    return whole.take_episodes(np.arange(enough))


def task_meta(task: Task, name: str, recipe: str) -> Meta:
    """Metadata of data made here and now in a task."""
    references = task.references
    flavour = "d4rl" if task.name.endswith("-d4rl") else "v5"
    return Meta(
        name=name,
        env_id=task.env_id,
        flavour=flavour,
        recipe=recipe,
        ref_min=None if references is None else references.low,
        ref_max=None if references is None else references.high,
        ref_source="" if references is None else references.source,
        source="refplan data collect",
        action_low=tuple(float(x) for x in task.low),
        action_high=tuple(float(x) for x in task.high),
        versions={k: v for k, v in versions().items() if k in ("gymnasium", "mujoco", "refplan", "jax")},
    )
