"""`refplan data collect`: make a dataset in an environment of your own."""

import argparse
from pathlib import Path
from typing import Any

from refplan.cli.common import add_json, add_seed, count, print_json, print_pairs

KINDS = ("random", "medium", "medium-replay", "medium-expert", "full-replay", "expert")


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "collect",
        help="make a dataset: rollouts of a policy, or the five D4RL kinds from an online SAC run",
        description=(
            "Make a dataset by D4RL's recipe. With --policy sac an online run is trained first, in a folder beside the "
            "output; it resumes after a kill and serves every further --kind without training again."
        ),
    )
    parser.add_argument("env", help="task or Gymnasium id, e.g. halfcheetah or Pendulum-v1")
    parser.add_argument(
        "--policy", default="sac", help="random, sac, a bundled policy, a policy file or a run folder (default sac)"
    )
    parser.add_argument(
        "--kind", choices=KINDS, help="with --policy sac: what to make of the run (default full-replay)"
    )
    parser.add_argument("--steps", type=count, default=100_000, help="environment steps of the run, or of the rollouts")
    parser.add_argument("--rows", type=count, help="with --policy sac: transitions of rollout kinds (default --steps)")
    parser.add_argument("--lanes", type=count, default=8, help="environments side by side (default 8)")
    parser.add_argument("--warmup", type=int, default=5000, help="first steps with uniformly random actions")
    parser.add_argument("--snapshot-every", type=count, default=10_000, metavar="STEPS")
    parser.add_argument("--run-folder", help="where the online run is kept (default: OUT with the ending .sac)")
    parser.add_argument("--deterministic", action="store_true", help="execute mean instead of sampled actions (FILE)")
    parser.add_argument("--out", required=True, metavar="X.hdf5")
    add_seed(parser)
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Make it, save it, say what it is."""
    import jax.random as jr

    from refplan.data.hdf5 import save_hdf5
    from refplan.data.tasks import task
    from refplan.errors import RefplanError
    from refplan.files import check_writable

    out = Path(args.out)
    if out.suffix not in (".hdf5", ".h5"):
        raise RefplanError(f"--out {out}: datasets are written as HDF5; use a name ending in .hdf5.")
    if args.kind and args.policy != "sac":
        raise RefplanError(f"--kind {args.kind} is made from an online run; it needs --policy sac.")
    world = task(args.env)
    check_writable(out)
    data = _collect(args, world, out, jr.key(args.seed))
    save_hdf5(data, out)
    scores = world.score(data.returns)
    summary = {
        "path": str(out),
        "transitions": len(data),
        "episodes": data.episodes,
        "return_mean": float(data.returns.mean()),
        "return_max": float(data.returns.max()),
        "score_mean": None if scores is None else float(scores.mean()),
        "recipe": data.meta.recipe,
    }
    if args.json:
        print_json(summary)
    else:
        print_pairs(summary)
    return 0


def _collect(args: argparse.Namespace, world: Any, out: Path, key: Any) -> Any:
    from refplan.collect.online import OnlineSettings
    from refplan.collect.recipes import Recipe, collect_online, collect_random

    if args.policy == "random":
        return collect_random(world, args.steps, key=key, name=out.stem, show=True)
    if args.policy == "sac":
        settings = OnlineSettings(args.steps, args.lanes, args.warmup, args.snapshot_every)
        folder = args.run_folder or out.with_suffix(".sac")
        recipe = Recipe(args.rows or args.steps)
        kind = args.kind or "full-replay"
        return collect_online(kind, world, folder, settings, recipe, key=key, name=out.stem, show=True)
    from refplan.cli.agents import find_agent
    from refplan.collect.rollout import roll_out

    agent = find_agent(args.policy, world, sampled=not args.deterministic)
    how = "mean actions" if args.deterministic else "actions sampled"
    recipe_text = f"rollouts of the policy {Path(args.policy).name}, {how}"
    return roll_out(agent, world, args.steps, key=key, name=out.stem, recipe=recipe_text, show=True)
