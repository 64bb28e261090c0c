"""`refplan evaluate`: an agent in one or several worlds."""

import argparse
from typing import Any

from refplan.cli.common import add_json, add_seed, count, print_json, print_table


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "evaluate",
        help="run a policy in one or several worlds",
        description="Run an agent for some episodes in each of the given tasks and report return, score and speed.",
    )
    parser.add_argument(
        "agent", help="'random', a bundled policy (e.g. halfcheetah-medium), a policy file or a run folder"
    )
    parser.add_argument(
        "--task", action="append", default=[], help="task or Gymnasium id; repeat or separate by commas"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="option of the world, e.g. --env fail_at=500"
    )
    parser.add_argument("--episodes", type=count, default=10)
    parser.add_argument("--sampled", action="store_true", help="execute sampled actions instead of the mean")
    add_planner_options(parser)
    parser.add_argument("--video", metavar="FILE", help="write the first episode of the first task as .mp4")
    parser.add_argument(
        "--record",
        metavar="PLACE",
        help="record the first episode of the first task for refplan report: an .npz file, or a (run) folder",
    )
    parser.add_argument("--out", metavar="CSV", help="append one result row per task to this file")
    add_seed(parser)
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def add_planner_options(parser: argparse.ArgumentParser) -> None:
    """Which planner to put on top of the agent, and its numbers."""
    group = parser.add_argument_group("planning")
    group.add_argument("--planner", metavar="NAME", help="critic, mppi, loop or refplan on top of the agent")
    group.add_argument("--model", metavar="FOLDER", help="run folder with the model (default: the agent's own)")
    belief = group.add_mutually_exclusive_group()
    for name, about in AROUND.items():
        belief.add_argument(f"--{name}", dest="around", action="store_const", const=name, default="", help=about)
    group.add_argument(
        "--preset",
        default="default",
        help="default, careful (near the prior), away (plans in changed worlds only), fixed (one for all), paper (its "
        "picks)",
    )
    for name, about in SHORTCUTS.items():
        group.add_argument(f"--{name}", metavar="N", help=about)
    group.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting, e.g. --set members=5"
    )


AROUND = {
    "worlds": "believe in worlds around the ensemble (other actuators, ground, pull) and tell the prior which it is in",
    "refined": "let the last layers of the ensemble go on learning in the episode",
    "refined-worlds": "both: worlds around the ensemble, and last layers that learn what no such world explains",
}
SHORTCUTS = {
    "horizon": "steps looked ahead",
    "plans": "proposals per decision",
    "latents": "worlds drawn from the belief (refplan)",
    "kappa": "inverse temperature of the weights",
    "sigma": "noise on proposed actions",
    "penalty": "price of disagreement between members",
}


def planner_choice(args: argparse.Namespace) -> Any:
    """The planner the options describe; None without --planner."""
    from refplan.cli.agents import PlannerChoice
    from refplan.cli.fit import parse_settings
    from refplan.errors import RefplanError

    changes = {name: getattr(args, name) for name in SHORTCUTS if getattr(args, name) is not None}
    changes |= parse_settings(args.set)
    if args.planner is None:
        if changes or args.model or args.around:
            raise RefplanError("these are settings of a planner; name one with --planner, e.g. --planner refplan.")
        return None
    if args.sampled:
        raise RefplanError("--sampled is about a policy alone; a planner weighs sampled actions anyway.")
    return PlannerChoice(args.planner, args.model, args.preset, changes, args.around)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print."""
    import jax.random as jr

    from refplan.cli.agents import find_agent, result_labels
    from refplan.evaluation import evaluate
    from refplan.files import check_writable
    from refplan.store import append_results, result_row

    results, rows = [], []
    choice = planner_choice(args)
    for place in filter(None, (args.out, args.video)):
        check_writable(place)
    name = args.agent if choice is None else f"{args.agent} + {choice.name}"
    for number, task in enumerate(_tasks(args)):
        agent = find_agent(args.agent, task, sampled=args.sampled, planner=choice)
        video = args.video if number == 0 else None
        recorder = _recorder(task) if args.record and number == 0 else None
        result = evaluate(agent, task, args.episodes, key=jr.key(args.seed), video=video, watcher=recorder, name=name)
        results.append(result)
        labels = result_labels(args.agent, agent, choice)
        labels["settings"] |= {f"env.{name}": value for name, value in task.env_kwargs.items()}
        rows.append(result_row(result, seed=args.seed, **labels))
        if recorder is not None:
            _save_recording(recorder, args, rows[-1], labels)
    if args.out:
        append_results(args.out, rows)
    if args.json:
        print_json([result.to_dict() for result in results])
        return 0
    print_results(results)
    return 0


def _recorder(task: Any) -> Any:
    from refplan.report.record import Recorder

    return Recorder(task.horizon)


def _save_recording(recorder: Any, args: argparse.Namespace, row: dict[str, Any], labels: dict[str, Any]) -> None:
    """Beside the numbers of its row, so that a report can say what was recorded."""
    import sys

    from refplan.report.record import recording_path

    planner, world = labels["planner"], str(row["world"])
    path = recording_path(args.record, "prior" if planner == "none" else planner, world, f"seed{args.seed}")
    about = {name: row[name] for name in ("dataset", "prior", "planner", "world", "seed", "command", "commit")}
    recorder.save(path, **about, settings=labels["settings"])
    print(f"recorded the first episode: {path}", file=sys.stderr)


def _tasks(args: argparse.Namespace) -> list[Any]:
    from refplan.cli.agents import default_task
    from refplan.data.tasks import task
    from refplan.errors import RefplanError

    names = [name for group in args.task for name in group.split(",") if name]
    options = env_options(args.env)
    if options and not names:
        raise RefplanError("--env is about a world; name it with --task, e.g. --task halfcheetah-joint.")
    return [task(name, **options) for name in names] or [default_task(args.agent)]


def env_options(pairs: list[str]) -> dict[str, Any]:
    """`["gains=1,1,0", "fail_at=500", "heights=original"]` as numbers, tuples of numbers, or words."""
    from refplan.cli.fit import parse_settings

    return {name: _value(text) for name, text in parse_settings(pairs, "--env").items()}


def _value(text: str) -> Any:
    parts = [part.strip() for part in text.split(",")]
    try:
        numbers = tuple(float(part) for part in parts)
    except ValueError:
        return text
    return numbers if len(parts) > 1 else int(text) if text.lstrip("+-").isdigit() else numbers[0]


def print_results(results: list[Any]) -> None:
    """The table a person reads."""
    rows = []
    for result in results:
        mean, low, high = result.return_interval
        score = result.score_interval
        rows.append(
            [
                result.task,
                result.agent,
                f"{mean:.0f} [{low:.0f}, {high:.0f}]",
                "-" if score is None else f"{score.value:.1f} [{score.low:.1f}, {score.high:.1f}]",
                f"{result.lengths.mean():.0f}",
                str(len(result.returns)),
                f"{result.ms_per_action:.3f}",
            ]
        )
    headings = ["task", "agent", "return [95 %]", "score [95 %]", "length", "episodes", "ms/action"]
    print_table(headings, rows)
