"""From what a user typed to an agent."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from refplan.agent import AbstractAgent, AbstractPolicy, AbstractPrior, RandomAgent, Sampled
from refplan.dynamics.base import AbstractDynamics
from refplan.errors import RefplanError
from refplan.evaluation import check_agent
from refplan.planners.base import AbstractPlanner

if TYPE_CHECKING:
    from refplan.data.tasks import Task


class PlannerChoice(NamedTuple):
    """Which planner to put on top of a prior, as the command line says it."""

    name: str
    model: str | None  # a run folder; None: the prior's own
    preset: str
    changes: dict[str, str]
    around: str = ""  # a belief around the ensemble: worlds, refined, refined-worlds


def plan_with(prior: AbstractAgent, source: str, choice: PlannerChoice) -> AbstractPlanner:
    """The planner a user chose for the prior of a run folder (or of a policy file with a critic)."""
    from refplan.planners.presets import make_planner, preset_for

    if not isinstance(prior, AbstractPrior):
        raise RefplanError(
            f"agent '{source}' ({type(prior).__name__}) has no value function to plan with. Fit one with refplan.FQE, "
            "or train a prior that has critics (iql, cql, edac, mopo, combo, maple)."
        )
    labels = result_labels(source)
    preset = preset_for(choice.name, choice.preset, _advice_of(source, choice))
    options: dict[str, Any] = {"preset": preset, "dataset": labels.get("dataset", ""), "method": labels["prior"]}
    model = None if choice.name == "critic" else model_of_run(choice, source)
    return make_planner(choice.name, prior, model, changes=choice.changes, **options)


def _advice_of(source: str, choice: PlannerChoice) -> str:
    """What the model of a run folder once advised; where it was not asked, the preset's own name, which is refused."""
    from refplan.store import read_tables

    kept = read_tables(Path(source)) if Path(source).is_dir() else {}
    return kept.get("advice", {}).get("choice", choice.preset)


def prior_of_run(folder: str) -> AbstractPrior:
    """The prior of a run folder, if it can be planned on."""
    from refplan.store import load_run

    prior = load_run(folder).get("prior")
    if not isinstance(prior, AbstractPrior):
        raise RefplanError(f"{folder}: no prior with a value in it. refplan run makes a folder that has all.")
    return prior


def model_of_run(choice: PlannerChoice, source: str) -> AbstractDynamics:
    """The model a planner plans with: of --model, or of the prior's own run folder."""
    from refplan.dynamics.around import AROUND, believe
    from refplan.store import load_run

    folder = Path(choice.model or source)
    parts = load_run(folder) if folder.is_dir() else {}
    plain = choice.around or choice.name != "refplan"
    wanted = ("ensemble", "model", "belief") if plain else (*AROUND, "belief", "model", "ensemble")
    for part in wanted:
        if isinstance(parts.get(part), AbstractDynamics):
            return believe(choice.around, parts[part]) if choice.around else parts[part]
    raise RefplanError(
        f"{folder}: no model of the world in it. Train one with 'refplan fit dynamics DATA --out {folder}', "
        "or name another run folder with --model."
    )


def find_agent(name: str, task: "Task", sampled: bool = False, planner: PlannerChoice | None = None) -> AbstractAgent:
    """`random`, a bundled policy's name, a policy file, or a run folder holding one agent."""
    agent = _find(name, task)
    check_agent(agent, name, task)
    if planner is not None:
        agent = plan_with(agent, name, planner)
        check_agent(agent, name, task)
    if not sampled:
        return agent
    if not isinstance(agent, AbstractPolicy):
        raise RefplanError(f"agent '{name}' has one action per state; it cannot be sampled.")
    return Sampled(agent)


def _find(name: str, task: "Task") -> AbstractAgent:
    if name == "random":
        return RandomAgent(jnp.asarray(task.low, jnp.float32), jnp.asarray(task.high, jnp.float32))
    path = Path(name)
    if path.is_dir():
        return _from_run(path)
    if path.exists():
        from refplan.priors.external import load_policy_for

        return load_policy_for(path, task.low, task.high)
    from refplan.priors.policy import from_bundled

    return from_bundled(name)


def _from_run(path: Path) -> AbstractAgent:
    from refplan.store import load_run

    parts = load_run(path)
    agents = {name: part for name, part in parts.items() if isinstance(part, AbstractAgent)}
    for name in ("agent", "prior"):
        if name in agents:
            return agents[name]
    if len(agents) == 1:
        return next(iter(agents.values()))
    raise RefplanError(f"{path}: holds {', '.join(parts) or 'nothing'}; no single agent to evaluate among them.")


def result_labels(name: str, agent: AbstractAgent | None = None, choice: PlannerChoice | None = None) -> dict[str, Any]:
    """What a result row says about an agent: data, method and preset of a run folder, the numbers of a planner."""
    labels: dict[str, Any] = {"prior": name, "planner": "none", "settings": {}}
    if Path(name).is_dir():
        from refplan.store import read_tables

        tables = read_tables(Path(name))
        learner = tables.get("prior_learner", {})
        known = {key: learner[key] for key in ("preset", "updates") if key in learner}
        labels |= {"prior": learner.get("method", name), "dataset": tables.get("data", {}).get("name", "")}
        labels["settings"] = {"run": Path(name).name, **known}
    if choice is not None and isinstance(agent, AbstractPlanner):
        from refplan.planners.presets import planner_settings_of

        model: dict[str, Any] = {"model": Path(choice.model).name} if choice.model else {}
        model |= {choice.around: True} if choice.around else {}
        planned = {"planner_preset": choice.preset, **model, **planner_settings_of(agent)}
        labels |= {"planner": choice.name, "settings": {**labels["settings"], **planned}}
    return labels


def default_task(name: str) -> "Task":
    """The task a run folder or a bundled policy belongs to."""
    from refplan.data.tasks import TASKS, task

    path = Path(name)
    if path.is_dir():
        from refplan.store import read_tables

        known = read_tables(path).get("data", {}).get("task")
        if known:
            return task(known)
    robot = path.name.split("-")[0]
    if robot in TASKS:
        return task(robot)
    raise RefplanError(f"which task should '{name}' run in? Name it with --task, e.g. --task halfcheetah.")
