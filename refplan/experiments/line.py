"""The line the data walks: check, prior, models, diagnosis, evaluation; every stage cached (see `workshop`)."""

import dataclasses
import hashlib
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.random as jr

from refplan.agent import AbstractPolicy, AbstractPrior
from refplan.data.check import check_dataset
from refplan.data.dataset import Dataset
from refplan.data.envs import world_version
from refplan.data.starts import Starts
from refplan.data.tasks import Task
from refplan.data.tasks import task as find_task
from refplan.dynamics.around import AROUND, VERSIONS, believe, expectations
from refplan.dynamics.diagnose import diagnose
from refplan.dynamics.presets import load_model_preset
from refplan.errors import RefplanError
from refplan.evaluation import check_agent, evaluate
from refplan.experiments.advise import advice_stage
from refplan.experiments.plan import Plan, needs_model
from refplan.experiments.spread import ActionSpread
from refplan.experiments.workshop import Stage, Workshop, digest_inputs, inputs_of
from refplan.planners.presets import (
    ADVISED,
    asks_first,
    make_planner,
    planner_defaults,
    planner_settings_of,
    preset_for,
)
from refplan.presets import with_settings
from refplan.priors.fqe import FQE
from refplan.priors.presets import load_preset
from refplan.store import result_row
from refplan.train import fit, training_seconds

HORIZON = 10  # steps a model is judged over, where episodes are that long


def check_stage(shop: Workshop, data: Dataset) -> Stage:
    """What is wrong or notable in the data."""

    def make(_: Path) -> dict[str, Any]:
        report = check_dataset(data)
        return {"report": str(report), "notes": [note.message for note in report.notes]}

    return shop.document("check", {"data": data.fingerprint}, make)


def model_learner(data: Dataset, kind: str, plan: Plan) -> Any:
    """The learner of a model; of the plan's settings it takes those it has."""
    learner = load_model_preset(kind, plan.preset, data.meta.name).learner
    return with_settings(learner, {n: value for n, value in plan.model_settings if n in inputs_of(learner)})


def model_stage(shop: Workshop, data: Dataset, kind: str, plan: Plan, seed: int) -> Stage:
    """A trained model of the world."""
    learner = model_learner(data, kind, plan)
    inputs = {"data": data.fingerprint, "seed": seed, **inputs_of(learner)}

    def make(folder: Path) -> tuple[Any, dict[str, Any]]:
        made = fit(learner, data, key=jr.fold_in(jr.key(seed), 1), folder=folder, show=True)
        return made, {"method": kind, "preset": plan.preset, "wall_s": training_seconds(folder)}

    return shop.module(kind, inputs, make)


def prior_learner(data: Dataset, plan: Plan) -> tuple[Any, int]:
    """The learner of the prior and its number of updates."""
    preset = load_preset(plan.method, plan.preset, data.meta.name)
    return with_settings(preset.learner, dict(plan.prior_settings)), plan.prior_steps or preset.steps or 0


def prior_stage(shop: Workshop, data: Dataset, plan: Plan, seed: int, model: Stage | None) -> Stage:
    """A trained prior, or a foreign policy with critics fitted by FQE."""
    if plan.policy is not None:
        return foreign_stage(shop, data, plan, seed)
    learner, steps = prior_learner(data, plan)
    if model is not None and needs_model(plan.method):
        learner = dataclasses.replace(learner, model=model.made)
    inputs = {"data": data.fingerprint, "seed": seed, "steps": steps, **inputs_of(learner)}
    inputs["model"] = model.digest if model is not None and needs_model(plan.method) else ""

    def make(folder: Path) -> tuple[Any, dict[str, Any]]:
        made = fit(learner, data, key=jr.fold_in(jr.key(seed), 0), steps=steps, folder=folder, show=True)
        about = {"method": plan.method, "preset": plan.preset, "updates": steps}
        return _with_value(made, data, folder, plan, seed), {**about, "wall_s": training_seconds(folder)}

    return shop.module("prior", inputs, make)


def foreign_policy(data: Dataset, plan: Plan) -> AbstractPolicy:
    """The policy of a file, if it can act in the data's task and be sampled."""
    from refplan.priors.external import load_policy_for

    policy = load_policy_for(plan.policy or "", data.task.low, data.task.high)
    check_agent(policy, plan.policy or "", data.task)
    if not isinstance(policy, AbstractPolicy):
        raise RefplanError(
            f"{plan.policy}: holds {type(policy).__name__}, which cannot be sampled; a planner needs proposals."
        )
    return policy


def foreign_stage(shop: Workshop, data: Dataset, plan: Plan, seed: int) -> Stage:
    """A policy from a file, judged by critics that FQE fits on the data."""
    from refplan.files import sha256

    path, policy = Path(plan.policy or ""), foreign_policy(data, plan)
    inputs = {"data": data.fingerprint, "seed": seed, "policy": sha256(path), "steps": plan.critic_steps}
    inputs |= critic_inputs(FQE(policy))

    def make(folder: Path) -> tuple[Any, dict[str, Any]]:
        made = _with_value(policy, data, folder, plan, seed)
        about = {"method": path.name, "preset": "foreign policy, critics by FQE", "updates": plan.critic_steps}
        return made, {**about, "wall_s": training_seconds(folder)}

    return shop.module("prior", inputs, make)


def critic_inputs(learner: FQE) -> dict[str, Any]:
    """The settings of FQE; what its policy is, `digest` says."""
    return {name: value for name, value in inputs_of(learner).items() if not name.startswith("policy.")}


def _with_value(policy: Any, data: Dataset, folder: Path, plan: Plan, seed: int) -> Any:
    """A policy without a value gets critics: planners need one."""
    if isinstance(policy, AbstractPrior):
        return policy
    key = jr.fold_in(jr.key(seed), 2)
    return fit(FQE(policy), data, steps=plan.critic_steps, key=key, folder=folder / "critic", show=True)


def diagnosis_stage(shop: Workshop, data: Dataset, model: Stage, prior: Stage, seed: int) -> Stage:
    """Can the model be planned with?"""
    known = prior.made if isinstance(prior.made, AbstractPrior) else None
    inputs = {"data": data.fingerprint, "seed": seed, "model": model.digest, "prior": prior.digest}

    def make(_: Path) -> dict[str, Any]:
        horizon = min(HORIZON, int(data.complete().lengths.max()))
        found = diagnose(model.made, data, key=jr.key(seed), prior=known, horizon=horizon)
        document = {"run": model.name, "home_is_training_data": True, "diagnoses": {"home": found.to_dict()}}
        return {**document, "text": found.text()}

    stage = shop.document(f"diagnosis-{model.name}", inputs, make)
    verdict = stage.made["diagnoses"]["home"]["verdict"]
    shop.say(textwrap.fill(verdict, 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return stage


def evaluation_stage(
    shop: Workshop,
    task: Task,
    planner: str,
    prior: Stage,
    model: Stage | None,
    plan: Plan,
    seed: int,
    dataset: str,
    *,
    starts: Starts | None = None,
    replans: int = 0,
    advice: Stage | None = None,
) -> Stage:
    """What the prior alone, or a planner on top of it, earns; all of one seed meet the same episodes.

    `starts` puts the episodes into given states; `replans` makes every plan of the first episode that many times anew
    and says how much its action varies. `advice` is what the model answered where the plan's preset asks it.
    """
    agent, settings = prior.made, {}
    advised = {} if advice is None else {"advised": advice.made["choice"]}
    if planner != "prior":
        made = None if model is None else model.made
        preset = preset_for(planner, plan.planner_preset, advised.get("advised", ADVISED))
        options: Any = {"preset": preset, "dataset": dataset, "method": prior.about["method"]}
        known = planner_defaults(planner)
        changes = {name: value for name, value in plan.planner_settings if name in known}
        agent = make_planner(planner, prior.made, made, changes=changes, **options)
        settings = planner_settings_of(agent)
    inputs = {"task": task.name, "planner": planner, "prior": prior.digest, "episodes": plan.episodes, "seed": seed}
    inputs |= {"model": "" if model is None else model.digest, **settings, **world_version(task.name)}
    inputs |= {} if starts is None else {"starts": hashlib.sha256(starts.qpos.tobytes()).hexdigest()}
    inputs |= {"replans": replans} if replans else {}

    def make(_: Path) -> dict[str, Any]:
        name = prior.about["method"] if planner == "prior" else f"{prior.about['method']} + {planner}"
        watcher = ActionSpread(replans) if replans else None
        result = evaluate(agent, task, plan.episodes, key=jr.key(seed), starts=starts, watcher=watcher, name=name)
        labels = {"dataset": dataset, "prior": prior.about["method"], "seed": seed}
        labels |= {"planner": "none" if planner == "prior" else planner}
        about = {name: prior.about[name] for name in ("preset", "updates")}
        labels |= {} if watcher is None else {"action_variance": watcher.variance}
        return result_row(result, settings={**about, **settings}, **labels)

    stage = shop.document(f"evaluation-{planner}", inputs, make)
    if advice is None:
        return stage
    # Not among the inputs: what was advised is the same evaluation as what was asked for by name.
    told = json.dumps(json.loads(stage.made["settings"]) | advised, sort_keys=True)
    return dataclasses.replace(stage, made={**stage.made, "settings": told})


@dataclass(frozen=True)
class Walked:
    """Everything one seed made."""

    parts: dict[str, Stage]  # prior, ensemble, belief, what is made around the ensemble
    diagnoses: dict[str, Stage]  # by model
    rows: list[dict[str, Any]]  # one result row per planner
    advice: Stage | None = None  # what the ensemble said of planning, if it was asked


def walk(shop: Workshop, data: Dataset, plan: Plan, seed: int) -> Walked:
    """The whole line for one seed; data without an environment ends with the diagnosis."""
    imagines = plan.policy is None and needs_model(plan.method)
    world = model_stage(shop, data, "ensemble", plan, seed) if imagines else None
    prior = prior_stage(shop, data, plan, seed, world)
    models = {
        kind: model_stage(shop, data, kind, plan, seed) for kind in plan.models if kind != "ensemble" or not world
    }
    models |= {} if world is None else {"ensemble": world}
    diagnoses = {kind: diagnosis_stage(shop, data, model, prior, seed) for kind, model in models.items()}
    for name in set(map(plan.model_of, plan.planners)) & set(AROUND):
        models[name] = belief_around(name, models["ensemble"])
    simulated = data.task.env_id is not None
    advice = advice_stage(shop, data, prior, models["ensemble"], seed) if plan.asks and simulated else None
    rows = []
    for task in (data.task, *map(find_task, plan.elsewhere)) if simulated else ():
        for planner in plan.planners:
            model, asked = models.get(plan.model_of(planner)), asks_first(plan.planner_preset, planner)
            done = (task, planner, prior, model, plan, seed, data.meta.name)
            rows.append(evaluation_stage(shop, *done, advice=advice if asked else None).made)
    return Walked({"prior": prior, **models}, diagnoses, rows, advice)


def belief_around(name: str, ensemble: Stage) -> Stage:
    """A belief around a trained ensemble: made at once, so not a stage of its own that could be resumed."""
    about = {"method": name, "preset": ensemble.about["preset"], "around": ensemble.digest}
    made = believe(name, ensemble.made)
    expected = {setting: float(value) for setting, value in expectations(made, name).items()}
    digest = digest_inputs({"stage": name, "ensemble": ensemble.digest, "version": VERSIONS.get(name, 0), **expected})
    return Stage(name, digest, ensemble.folder, about, made)
