"""`refplan run`: the whole line from data to report as one command; the same command again continues."""

import argparse
from pathlib import Path
from typing import Any

from refplan.cli.common import add_json, count, names_in, print_json, print_table


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "run",
        help="from data to a report: prior, models, diagnosis, evaluation",
        description="Check the data, train a prior and the models its planners need, judge the models, run prior and "
        "planners in the task, and write a report. Every stage is kept: killed or changed, the same command goes on "
        "from what is there.",
    )
    parser.add_argument("data", help="bundled or D4RL name, Minari id, .hdf5 or .npz path")
    parser.add_argument("--prior", metavar="METHOD", help="bc, iql, cql, edac, mopo, combo or maple (default iql)")
    parser.add_argument("--policy", metavar="FILE", help="plan on this policy instead (SB3, d3rlpy, CORL, ONNX, npz)")
    parser.add_argument("--planners", default="prior,loop,refplan", help="separated by commas (default %(default)s)")
    parser.add_argument(
        "--model",
        "--belief",
        dest="belief",
        default="refined-worlds",
        metavar="MODEL",
        help="the model refplan believes with: refined-worlds, worlds, refined (all around the ensemble) or belief "
        "(the paper's); default %(default)s",
    )
    parser.add_argument(
        "--also-in", default="", metavar="TASKS", help="other worlds to evaluate in, e.g. halfcheetah-steep"
    )
    parser.add_argument("--preset", default="cpu", help="of prior and models: cpu or paper (default cpu)")
    parser.add_argument(
        "--planner-preset",
        default="default",
        help="of planners: default, careful, away, fixed, paper, or advised (careful, or away if the learned model "
        "says that it loses)",
    )
    parser.add_argument("--episodes", type=count, default=10, help="per planner and seed (default 10)")
    parser.add_argument("--seeds", type=count, default=1, help="how often everything is done anew (default 1)")
    parser.add_argument("--steps", type=count, help="updates of the prior (default: the preset's)")
    parser.add_argument("--critic-steps", type=count, default=20_000, help="updates of FQE, where a critic is missing")
    for part in ("prior", "model", "planner"):
        parser.add_argument(
            f"--set-{part}", action="append", default=[], metavar="NAME=VALUE", help=f"change a setting of the {part}"
        )
    parser.add_argument("--task", help="task or Gymnasium id of data that does not state its own")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the run folder")
    add_json(parser)
    parser.set_defaults(run=run, parser=parser, kept_in="out")


def run(args: argparse.Namespace) -> int:
    """Do what is missing, then show all of it."""
    rows = carry_out(make_plan(args), args.data, args.out, args.seeds, args.task, quiet=args.json)
    if args.json:
        print_json(rows)
    return 0


def make_plan(args: argparse.Namespace) -> Any:
    """The plan the options describe."""
    from refplan.cli.fit import parse_settings
    from refplan.errors import RefplanError
    from refplan.experiments.plan import Plan

    if args.prior and args.policy:
        raise RefplanError("--prior trains a policy, --policy brings one; give one of them.")
    changed = {
        f"{part}_settings": tuple(parse_settings(getattr(args, f"set_{part}")).items())
        for part in ("prior", "model", "planner")
    }
    return Plan(
        method=args.prior or "iql",
        planners=names_in(args.planners),
        preset=args.preset,
        planner_preset=args.planner_preset,
        episodes=args.episodes,
        prior_steps=args.steps,
        critic_steps=args.critic_steps,
        policy=args.policy,
        belief=args.belief,
        elsewhere=names_in(args.also_in),
        **changed,
    )


def carry_out(
    plan: Any, source: str, out: str, seeds: int, task: str | None = None, quiet: bool = False
) -> list[dict[str, Any]]:
    """Walk the line for every seed; table, run folder and report follow from the stages."""
    import sys

    from refplan.cli.fit import describe_data
    from refplan.data.sources import load
    from refplan.experiments.line import check_stage, walk
    from refplan.experiments.rehearse import rehearse
    from refplan.experiments.workshop import Workshop

    data = load(source, task=task)
    rehearse(plan, data)
    folder, simulated = Path(out), data.task.env_id is not None
    say = lambda text: print(text, file=sys.stderr if quiet else sys.stdout, flush=True)  # noqa: E731
    shop = Workshop(folder, say, plan.stages(seeds, simulated))
    for note in check_stage(shop, data).made.get("notes", ()):
        say(f"      note: {note}")
    if not simulated:
        say(
            "      note: the data names no environment (--task would), so nothing is run in one: training and diagnosis"
        )
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        walked = walk(shop, data, plan, seed)
        rows += walked.rows
        _keep(folder, walked, rows, describe_data(data, source), seed)
    page = _report(folder, say)
    if not quiet:
        if rows:
            print_rows(rows)
        print(f"\nreport: {page}\nagain, or with other options: what is unchanged is not made again")
    return rows


def _keep(folder: Path, walked: Any, rows: list[dict[str, Any]], about: dict[str, Any], seed: int) -> None:
    """The run folder other commands read: parts of the first seed, rows of all."""
    import json
    import shutil

    from refplan.experiments.plan import BELIEFS
    from refplan.files import write_text
    from refplan.store import save, write_results

    if rows:
        write_results(folder / "results.csv", rows)
    if seed:
        return
    parts: dict[str, Any] = {"data": about}
    for name, stage in walked.parts.items():
        parts |= {name: stage.made, f"{name}_learner": stage.about}
        for curves in stage.folder.rglob("metrics.csv"):
            place = folder / name / curves.relative_to(stage.folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(curves, place)
    for name, stage in walked.diagnoses.items():
        write_text(folder / name / "diagnosis.json", json.dumps(stage.made, indent=1) + "\n")
    # What an earlier command believed with must not be taken for what this one does.
    if walked.advice is not None:
        parts["advice"] = {"choice": walked.advice.made["choice"]}
    gone = {part for name in BELIEFS for part in (name, f"{name}_learner")} | {"advice"}
    save(folder, seeds=[seed], without=gone, **parts)


def _report(folder: Path, say: Any) -> Path:
    from refplan.report.page import write_report

    say("report")
    return write_report([folder], folder / "report.html")


def print_rows(rows: list[dict[str, Any]]) -> None:
    """One line per planner: all seeds and episodes together, with their interval."""
    from refplan.report.summary import summarise

    headings = ["planner", "return [95 %]", "score [95 %]", "ms/action", "episodes", "seeds"]
    print_table(headings, summarise(rows))
