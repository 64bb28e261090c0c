"""`refplan demo`: what there is so far, on bundled data, in under a minute."""

import argparse
from typing import Any

from refplan.cli.common import add_seed


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        help="bundled data and a bundled policy, in under a minute",
        description="Check the bundled HalfCheetah data, then run a random and a bundled policy beside it.",
    )
    parser.add_argument("--episodes", type=int, default=5)
    add_seed(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Load, check, evaluate, compare."""
    import jax.random as jr

    from refplan.cli.agents import find_agent
    from refplan.cli.evaluate import print_results
    from refplan.data.sources import load
    from refplan.evaluation import evaluate

    data = load("halfcheetah-medium-replay-mini")
    returns, scores = data.returns, data.task.score(data.returns)
    print(f"{data}\n  returns {returns.min():.0f} to {returns.max():.0f}, mean {returns.mean():.0f}")
    print(f"  scores {scores.min():.1f} to {scores.max():.1f}, mean {scores.mean():.1f}\n")
    key = jr.key(args.seed)
    results = [
        evaluate(find_agent(name, data.task), data.task, args.episodes, key=key, name=name)
        for name in ("random", "halfcheetah-medium")
    ]
    print_results(results)
    print("Same start states for both. Next: refplan evaluate halfcheetah-medium --task halfcheetah-joint")
    return 0
