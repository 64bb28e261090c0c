"""`refplan advise`: whether to plan on a prior at all, without touching the task."""

import argparse
from typing import Any

from refplan.cli.common import add_json, add_seed, count, logged_data, print_json, print_table


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "advise",
        help="whether to plan on a prior at all",
        description="Play the prior alone and with LOOP near it (preset careful; at home, RefPlan over worlds is LOOP) "
        "in the learned model, from logged starts, and say whether to plan like that or not at all (preset away). Near "
        "a very good prior a planner can do harm; this asks the model before the world has to answer. The model is the "
        "one the planner plans in, so what it says is an optimist's opinion: only a loss counts.",
    )
    parser.add_argument("folder", metavar="RUN", help="a run folder with prior and model (refplan run makes one)")
    parser.add_argument("--episodes", type=count, default=30, help="imagined episodes (default 30)")
    parser.add_argument("--steps", type=count, default=200, help="steps of each (default 200)")
    parser.add_argument("--data", help="name or path of the logged data (default: what the run was trained on)")
    add_seed(parser)
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Play, compare, say."""
    import sys

    import jax.random as jr

    from refplan.cli.agents import PlannerChoice, model_of_run, prior_of_run
    from refplan.experiments.advise import advise
    from refplan.planners.presets import make_planner

    prior = prior_of_run(args.folder)
    model = model_of_run(PlannerChoice("loop", None, "default", {}), args.folder)
    advice = advise(
        prior,
        lambda preset: make_planner("loop", prior, model, preset=preset),
        model,
        logged_data(args.folder, args.data),
        key=jr.key(args.seed),
        episodes=args.episodes,
        steps=args.steps,
        say=(lambda text: None) if args.json else lambda text: print(text, file=sys.stderr),
    )
    if args.json:
        print_json(advice.to_dict())
        return 0
    gains = {preset: advice.gain(preset) for preset in advice.planned}
    table = [[preset, f"{mean:+.1f} ± {error:.1f}"] for preset, (mean, error) in gains.items()]
    print_table(["preset", "imagined gain over the prior"], table)
    print(f"use it: refplan evaluate {args.folder} --planner refplan --preset {advice.choice}")
    return 0
