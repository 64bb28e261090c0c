"""What can be found wrong before anything is trained: names, settings, sizes, files, missing simulators."""

from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import jax.random as jr
import numpy as np

from refplan.data.dataset import Dataset
from refplan.data.tasks import task as find_task
from refplan.errors import RefplanError, unknown_name
from refplan.experiments.line import foreign_policy, model_learner, prior_learner
from refplan.experiments.plan import Plan, needs_model
from refplan.experiments.workshop import inputs_of
from refplan.learner import AbstractLearner, AbstractReviewingLearner, check_sizes
from refplan.planners.presets import check_planner_settings, planner_defaults, planner_settings, preset_for
from refplan.priors.fqe import FQE


def rehearse(plan: Plan, data: Dataset) -> None:
    """Raise now what a stage of the plan would raise later, perhaps after hours."""
    task = data.task
    for each in (task, *map(find_task, plan.elsewhere)):
        if (each.obs_dim, each.action_dim) != (task.obs_dim, task.action_dim):
            raise RefplanError(
                f"{each.name} has observations of size {each.obs_dim} and actions of size {each.action_dim}, the data "
                f"{task.obs_dim} and {task.action_dim}: what is learned here cannot act there."
            )
        if each.env_id is not None:
            each.make().close()
    if plan.policy is not None:
        _rehearse_policy(plan, data)
    else:
        learner, _ = prior_learner(data, plan)
        if not needs_model(plan.method):  # others cannot begin without their model
            _rehearse_fit(learner, data)
    learners = {kind: model_learner(data, kind, plan) for kind in plan.models}
    _check_known("models", plan.model_settings, {kind: inputs_of(one) for kind, one in learners.items()})
    for learner in learners.values():
        _rehearse_fit(learner, data)
    _rehearse_planners(plan, data)


def _rehearse_fit(learner: AbstractLearner, data: Dataset) -> None:
    """Everything `fit` refuses before its first update; nothing is computed."""
    check_sizes(learner)
    if isinstance(learner, AbstractReviewingLearner):
        data, _ = learner.hold_out(data, jr.key(0))
    eqx.filter_eval_shape(learner.init, data, jr.key(0))


def _rehearse_policy(plan: Plan, data: Dataset) -> None:
    policy: Any = foreign_policy(data, plan)
    task = data.task
    low, high = (np.asarray(getattr(policy, side, getattr(task, side))) for side in ("low", "high"))
    if (low < task.low - 1e-6).any() or (high > task.high + 1e-6).any():
        raise RefplanError(
            f"{plan.policy}: acts between {low.tolist()} and {high.tolist()}, but actions of {task.name} lie between "
            f"{task.low.tolist()} and {task.high.tolist()}. Was it trained in another environment, or in other units?"
        )
    _rehearse_fit(FQE(policy), data)


def _rehearse_planners(plan: Plan, data: Dataset) -> None:
    names = [name for name in plan.planners if name != "prior"]
    known = {name: planner_defaults(name) for name in names}
    _check_known("planners", plan.planner_settings, known)
    for name in names:
        planner_settings(preset_for(name, plan.planner_preset, "default"), data.meta.name, plan.method)
        check_planner_settings(name, {n: value for n, value in plan.planner_settings if n in known[name]})


def _check_known(kind: str, changes: Iterable[tuple[str, str]], known: Mapping[str, Mapping[str, Any]]) -> None:
    """A setting that only some of several things have is theirs alone; one that none has is a mistake."""
    every = {setting for settings in known.values() for setting in settings} - {"class"}
    for setting, _ in changes:
        if not every:
            raise RefplanError(f"setting '{setting}' is for {kind}, and this plan has none of them.")
        if setting not in every:
            raise unknown_name(f"setting of {kind}", setting, every)
