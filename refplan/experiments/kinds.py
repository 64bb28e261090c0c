"""What each kind of cell does: (the stage it made, the rows it gives)."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.random as jr
import numpy as np

from refplan.data.starts import draw_starts
from refplan.data.tasks import task
from refplan.dynamics.presets import load_model_preset
from refplan.evaluation import evaluate
from refplan.experiments.advise import advice_stage
from refplan.experiments.line import evaluation_stage, model_stage, prior_stage
from refplan.experiments.tune import Space, free_settings, online_objective, tune
from refplan.experiments.work import Bench
from refplan.planners.presets import planner_defaults, planner_settings_of
from refplan.presets import with_settings
from refplan.provenance import command, commit
from refplan.settings import settings_of
from refplan.store import COLUMNS
from refplan.train import fit

Made = tuple[Any, list[dict[str, Any]]]


def _model(bench: Bench) -> Made:
    settings = bench.request.settings
    plan = bench.plan(preset=settings["preset"], model_settings=settings["settings"])
    return model_stage(bench.shop, bench.load(), settings["model"], plan, bench.seed), []


def _prior(bench: Bench) -> Made:
    settings = bench.request.settings
    given = {"method": settings["method"], "preset": settings["preset"], "prior_steps": settings["steps"]}
    plan = bench.plan(**given, critic_steps=settings["critic_steps"], prior_settings=settings["settings"])
    return prior_stage(bench.shop, bench.load(), plan, bench.seed, bench.stage("model")), []


def _evaluate(bench: Bench) -> Made:
    settings = bench.request.settings
    where = task(settings["task"]) if settings["task"] else bench.load().task
    starts = None
    if "starts" in bench.request.data:
        starts = draw_starts(bench.load("starts"), where, settings["episodes"], key=jr.key(bench.seed))
    plan = bench.plan(
        planner_preset=settings.get("planner_preset", "default"),
        episodes=settings["episodes"],
        planner_settings=settings.get("changes", {}),
    )
    planned = (settings["planner"], bench.stage("prior"), bench.stage("model"), plan, bench.seed, settings["dataset"])
    options = {"starts": starts, "replans": settings.get("replans", 0), "advice": bench.stage("advice")}
    stage = evaluation_stage(bench.shop, where, *planned, **options)
    return stage, [stage.made]


def _advise(bench: Bench) -> Made:
    return advice_stage(bench.shop, bench.load(), bench.stage("prior"), bench.stage("model"), bench.seed), []


def _tune(bench: Bench) -> Made:
    settings, data = bench.request.settings, bench.load()
    fixed = settings["changes"]
    names = free_settings(planner_defaults("refplan"), fixed)
    prior, model = bench.stage("prior"), bench.stage("model")
    inputs = {**settings, "prior": prior.digest, "model": model.digest, **planner_settings_of(bench.planner({}))}

    def make(folder: Path) -> dict[str, Any]:
        objective = online_objective(bench.planner, data.task, settings["episodes"], bench.seed)
        options: Any = {"method": settings["search"], "trials": settings["trials"], "seed": bench.seed}
        trials = tune(objective, Space(names), storage=folder / "study.journal", **options)
        return {"trials": [dataclasses.asdict(trial) for trial in trials]}

    stage = bench.shop.document(f"tune-{settings['search']}", inputs, make)
    rows, best = [], float("-inf")
    for trial in stage.made["trials"]:
        best = max(best, trial["value"])
        numbers = {"return": trial["value"], "score": data.task.score(trial["value"]), "best": data.task.score(best)}
        labels = {"planner": "refplan", "world": data.task.name, "trial": trial["number"] + 1}
        rows.append(_row(bench, **numbers, **labels, settings=trial["settings"], wall_s=trial["spent"]["seconds"]))
    return stage, rows


def _epochs(bench: Bench) -> Made:
    """Seconds per epoch of each stage of a model's training."""
    settings, data = bench.request.settings, bench.load()
    learner = load_model_preset(settings["model"], settings["preset"], data.meta.name).learner
    learner = with_settings(learner, settings["settings"])

    def make(_: Path) -> dict[str, Any]:
        ended: dict[tuple[str, ...], list[float]] = {}  # when epochs ended; each stage has metrics of its own

        def clock(step: int, row: dict[str, float]) -> None:
            ended.setdefault(tuple(row), []).append(time.perf_counter())

        fit(learner, data, key=jr.key(bench.seed), logs=[clock], show=True)
        # Differences begin after the first epoch, which also compiled.
        return {"seconds": [float(np.median(np.diff(times))) for times in ended.values()]}

    inputs = {**settings, **settings_of(learner), "data": data.fingerprint}
    stage = bench.shop.document("epochs", inputs, make)
    named = zip(("encoder", "decoder"), stage.made["seconds"], strict=False)
    labels = {"rows": len(data), "settings": settings["settings"]}
    return stage, [_row(bench, agent=name, seconds=seconds, **labels) for name, seconds in named]


def _steps(bench: Bench) -> Made:
    """Seconds per environment step of a planner, one episode at a time."""
    settings, data = bench.request.settings, bench.load()
    planner = bench.planner({})
    inputs = {**settings, "prior": bench.stage("prior").digest, "model": bench.stage("model").digest}
    inputs |= planner_settings_of(planner)

    def make(_: Path) -> dict[str, Any]:
        for length in (2, settings["steps"]):  # the first only compiles
            result = evaluate(planner, dataclasses.replace(data.task, horizon=length), 1, key=jr.key(bench.seed))
        return {"seconds": result.ms_per_call / 1e3, "wall_s": result.wall_s}

    stage = bench.shop.document("steps", inputs, make)
    labels = {"planner": "refplan", "world": data.task.name, "wall_s": stage.made["wall_s"]}
    return stage, [_row(bench, seconds=stage.made["seconds"], **labels, settings=planner_settings_of(planner))]


WORK: dict[str, Callable[[Bench], Made]] = {
    "model": _model,
    "prior": _prior,
    "advise": _advise,
    "evaluate": _evaluate,
    "tune": _tune,
    "epochs": _epochs,
    "steps": _steps,
}


def _row(bench: Bench, **values: Any) -> dict[str, Any]:
    """A result row of something that is not an evaluation."""

    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row |= {"dataset": bench.request.data["train"][0], "seed": bench.seed, "command": command(), "commit": commit()}
    return {**row, **values, "settings": json.dumps(values.get("settings", {}), sort_keys=True)}
