"""`refplan demo`: the whole line on bundled data, a few minutes on two cores."""

import argparse
from typing import Any

from refplan.cli.common import count, names_in


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        help="the whole line on bundled HalfCheetah data, a few minutes on two cores",
        description="Learn a policy and a model from bundled data, then run the policy alone and with planning on top, "
        "on the same episodes. Kept in the run folder: the same command again shows it at once.",
    )
    parser.add_argument("--out", default="runs/demo", metavar="FOLDER", help="the run folder (default %(default)s)")
    parser.add_argument("--planners", default="prior,loop,refplan", help="separated by commas (default %(default)s)")
    parser.add_argument(
        "--also-in",
        default="halfcheetah-steep",
        metavar="TASKS",
        help="worlds the data did not show, by commas (default %(default)s; empty: none)",
    )
    parser.add_argument("--episodes", type=count, default=5)
    parser.add_argument("--seeds", type=count, default=1, help="how often everything is done anew (default 1)")
    parser.add_argument("--quick", action="store_true", help="a minute, with too little training to gain anything")
    parser.set_defaults(run=run, parser=parser, kept_in="out")


def run(args: argparse.Namespace) -> int:
    """`refplan run` with settings for a few minutes."""
    from refplan.cli.run import carry_out
    from refplan.experiments.plan import Plan

    planners = names_in(args.planners)
    plan = Plan(
        method="iql",
        planners=planners,
        episodes=args.episodes,
        prior_steps=50 if args.quick else 20_000,
        model_settings=_model_settings(args.quick),
        planner_settings=_planner_settings(args.quick) if set(planners) - {"prior"} else (),
        elsewhere=names_in(args.also_in),
    )
    print("HalfCheetah, 1000 steps per episode: a policy learned from bundled data, alone and with planning on top,")
    print("in the world of the data and in one that it did not show.")
    carry_out(plan, "halfcheetah-medium-replay-mini", args.out, args.seeds)
    return 0


def _model_settings(quick: bool) -> tuple[tuple[str, str], ...]:
    small = (("elites", "2"), ("members", "2"), ("hidden", "32,32"))
    return (("epochs", "1"), *small) if quick else (("epochs", "25"),)


def _planner_settings(quick: bool) -> tuple[tuple[str, str], ...]:
    few = (("plans", "10"),) if quick else ()
    # A fifth of the plans takes part: a critic of so little training is no judge of the single best one.
    return (("effective", "0.2"), *few)
