"""From what a user typed to an agent."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from refplan.agent import AbstractAgent, AbstractPolicy, RandomAgent, Sampled
from refplan.errors import RefplanError

if TYPE_CHECKING:
    from refplan.data.tasks import Task


def find_agent(name: str, task: "Task", sampled: bool = False) -> AbstractAgent:
    """`random`, a bundled policy's name, a policy file, or a run folder holding one agent."""
    agent = _find(name, task)
    _check_sizes(agent, name, task)
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


def _check_sizes(agent: AbstractAgent, name: str, task: "Task") -> None:
    """One abstract call finds a policy of the wrong size before any episode starts."""
    import jax

    obs = jax.ShapeDtypeStruct((task.obs_dim,), jnp.float32)
    try:
        action, _ = jax.eval_shape(lambda o: agent.act(agent.start(), o, jax.random.key(0)), obs)
    except (TypeError, ValueError) as error:
        detail = str(error).splitlines()[0]
        raise RefplanError(
            f"agent '{name}' does not accept the {task.obs_dim}-dimensional observations of {task.name} ({detail})."
        ) from None
    if action.shape != (task.action_dim,):
        raise RefplanError(
            f"agent '{name}' gives actions of shape {action.shape}; {task.name} needs ({task.action_dim},)."
        )


def result_labels(name: str) -> dict[str, Any]:
    """What a result row says about an agent: for a run folder its data, method and preset."""
    if not Path(name).is_dir():
        return {"prior": name}
    from refplan.store import read_tables

    tables = read_tables(Path(name))
    learner = tables.get("prior_learner", {})
    settings = {key: learner[key] for key in ("preset", "updates") if key in learner}
    dataset = tables.get("data", {}).get("name", "")
    return {"prior": learner.get("method", name), "dataset": dataset, "settings": {"run": Path(name).name, **settings}}


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
