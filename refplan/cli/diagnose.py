"""`refplan diagnose`: can the model of a run folder be planned with, at home and in other worlds?"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refplan.cli.common import add_json, add_seed, count, logged_data, print_json

if TYPE_CHECKING:
    from refplan.agent import AbstractAgent
    from refplan.data.dataset import Dataset
    from refplan.data.tasks import Task
    from refplan.types import Key

JUDGED_STEPS, JUDGED_EVERY = 250, 25  # of each episode: ten states at the most


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "diagnose",
        help="judge a learned model: errors, calibration, imagined against realised returns",
        description="Judge the model of a run folder on logged data, and on fresh episodes of other worlds.",
    )
    parser.add_argument("folder", metavar="RUN", help="a run folder with a model")
    parser.add_argument("--data", help="name or path of the data to judge on (default: what the run was trained on)")
    parser.add_argument(
        "--world",
        action="append",
        default=[],
        help="also judge on episodes of this world, e.g. joint or halfcheetah-hill; repeat or separate by commas",
    )
    parser.add_argument("--episodes", type=count, default=4, help="episodes per world (default 4)")
    parser.add_argument(
        "--planner",
        metavar="NAME",
        help="also carry out this planner's plans in the task's own simulator: do its scores rank them rightly?",
    )
    parser.add_argument("--preset", help="of that planner: default, careful, fixed or paper (default default)")
    parser.add_argument("--horizon", type=count, default=10, help="steps to look ahead (default 10)")
    parser.add_argument("--segments", type=count, default=1024, help="rows to look ahead from (default 1024)")
    parser.add_argument("--out", metavar="FOLDER", help="write diagnosis.json and figures into this folder")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png", help="of the figures (default png)")
    add_seed(parser)
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Diagnose, print, write."""
    import time

    import jax.random as jr

    from refplan.agent import AbstractPrior
    from refplan.dynamics.diagnose import diagnose
    from refplan.dynamics.diagnose_record import plain
    from refplan.files import check_writable
    from refplan.provenance import provenance

    begun = time.perf_counter()
    if args.out:
        check_writable(Path(args.out) / "diagnosis.json")
    parts = load_parts(args.folder)
    prior = parts.get("prior")
    planner = _planner(args, parts)  # what is wrong with it should not be found after minutes
    key_worlds, key = jr.split(jr.key(args.seed))
    found, datasets = {}, _datasets(args, parts, key_worlds)
    for name, data in datasets.items():
        known = prior if isinstance(prior, AbstractPrior) else None
        found[name] = diagnose(parts["model"], data, key=key, horizon=args.horizon, prior=known, segments=args.segments)
    seen = _was_trained_on(parts, args)
    document: dict[str, Any] = {"run": Path(args.folder).name, "home_is_training_data": seen}
    document["diagnoses"] = {name: diagnosis.to_dict() for name, diagnosis in found.items()}
    judged = None if planner is None else _judge(datasets["home"], planner, args.episodes, key_worlds)
    if judged is not None:
        numbers = {name: plain(value) for name, value in judged.summary().items()}
        document["plans"] = {"planner": args.planner, "preset": args.preset or "default", **numbers}
    document["provenance"] = provenance([args.seed], time.perf_counter() - begun)
    if args.out:
        _write(Path(args.out), document, found, f".{args.format}")
    if args.json:
        print_json(document)
        return 0
    for name, diagnosis in found.items():
        print(f"== {name} ==\n{diagnosis.text()}\n")
    if judged is not None:
        print(f"== plans of {args.planner}, carried out in the task ==\n{judged.text()}\n")
    if seen:
        print("The home data is what the model was trained on; on new data expect larger errors.")
    return 0


def load_parts(folder: str) -> dict[str, Any]:
    """The parts of a run folder that has a model."""
    from refplan.dynamics.base import AbstractDynamics
    from refplan.errors import RefplanError
    from refplan.store import load_run

    parts = load_run(folder)
    # A folder of `refplan run` holds several: the belief says more.
    models = [parts[name] for name in ("model", "belief", "ensemble") if isinstance(parts.get(name), AbstractDynamics)]
    if not models:
        raise RefplanError(
            f"{folder}: holds {', '.join(parts) or 'nothing'}, but no model. Train one: refplan fit dynamics DATA "
            "--out FOLDER."
        )
    return {**parts, "model": models[0]}


def _datasets(args: argparse.Namespace, parts: dict[str, Any], key: "Key") -> dict[str, "Dataset"]:
    """The home data and fresh episodes of every world asked for."""
    import jax.random as jr

    found = {"home": logged_data(args.folder, args.data)}
    worlds = [name for group in args.world for name in group.split(",") if name]
    for number, name in enumerate(worlds):
        task = find_world(name, parts.get("data", {}).get("task") or found["home"].task.name)
        agent = world_agent(parts, task)
        found[name] = data_from_world(agent, task, args.episodes, jr.fold_in(key, number))
    return found


def _planner(args: argparse.Namespace, parts: dict[str, Any]) -> Any:
    """The planner whose plans are to be carried out, if one is asked for."""
    from refplan.cli.agents import PlannerChoice, plan_with
    from refplan.errors import RefplanError

    if args.planner is None:
        if args.preset:
            raise RefplanError(f"--preset {args.preset} is of a planner; name one with --planner, e.g. --planner loop.")
        return None
    if "prior" not in parts:
        raise RefplanError(f"{args.folder}: --planner needs a prior to plan with, and there is none in it.")
    return plan_with(parts["prior"], args.folder, PlannerChoice(args.planner, None, args.preset or "default", {}))


def _judge(data: "Dataset", planner: Any, episodes: int, key: "Key") -> Any:
    """What the plans of a planner are worth in the simulator of the data's task, at states its prior visits there."""
    import jax.numpy as jnp

    from refplan.dynamics.true import make_true_dynamics
    from refplan.experiments.judge import judge_plans, visited

    truth = make_true_dynamics(data.task)
    starts = jnp.asarray(data.observations[data.starts[:episodes]])
    states = visited(planner.prior, truth, starts, steps=JUDGED_STEPS, every=JUDGED_EVERY)
    return judge_plans(planner, truth, states, key=key)


def find_world(name: str, home: str) -> "Task":
    """The task of a world: its own name, or a short one (`joint`) for the robot of the home task."""
    from refplan.data.tasks import TASKS, task

    full = f"{home.split('-')[0].lower()}-{name}"
    return task(full if name not in TASKS and full in TASKS else name)


def world_agent(parts: dict[str, Any], task: "Task") -> "AbstractAgent":
    """The run's prior with sampled actions (means alone say little about other actions), or random actions."""
    import jax.numpy as jnp

    from refplan.agent import AbstractAgent, AbstractPolicy, RandomAgent, Sampled

    prior = parts.get("prior")
    if isinstance(prior, AbstractPolicy):
        return Sampled(prior)
    if isinstance(prior, AbstractAgent):
        return prior
    return RandomAgent(jnp.asarray(task.low, jnp.float32), jnp.asarray(task.high, jnp.float32))


def data_from_world(agent: "AbstractAgent", task: "Task", episodes: int, key: "Key") -> "Dataset":
    """Fresh episodes of an agent in a world, as logged data."""
    from refplan.data.dataset import Meta
    from refplan.evaluation import evaluate

    trace = evaluate(agent, task, episodes, key=key, trace=True).trace
    assert trace is not None  # asked for one line above
    return trace.dataset(Meta(name=f"{type(agent).__name__} in {task.name}", env_id=task.env_id))


def _was_trained_on(parts: dict[str, Any], args: argparse.Namespace) -> bool:
    return args.data is None or args.data == parts.get("data", {}).get("source")


def _write(folder: Path, document: dict[str, Any], found: dict[str, Any], suffix: str) -> None:
    import json
    import re

    from refplan.files import write_text
    from refplan.report.diagnosis import draw_diagnoses

    text = json.dumps(document, indent=1, allow_nan=False)
    # One line per list of numbers, instead of one per number.
    text = re.sub(r"\[[^\[\]{}\"]*\]", lambda found: " ".join(found.group().split()), text)
    write_text(folder / "diagnosis.json", text + "\n")
    draw_diagnoses(found, folder, suffix)
