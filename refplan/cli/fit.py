"""`refplan fit prior | dynamics`: train from data; the same command again resumes or returns at once."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refplan.cli.common import add_json, add_seed, print_json, print_pairs


def add(commands: Any) -> None:
    """Declare the commands."""
    parser = commands.add_parser("fit", help="train a prior policy or a dynamics model from data")
    parts = parser.add_subparsers(title="what to train", metavar="PART", required=True)
    kinds = (
        ("prior", "method", "iql", "a policy: bc, iql, cql or edac", run_prior),
        ("dynamics", "model", "ensemble", "a model of the world: ensemble or belief", run_dynamics),
    )
    for part, option, default, about, run in kinds:
        text = f"Train {about} -- from data into a run folder. After a kill the same command resumes."
        command = parts.add_parser(part, help=about, description=text)
        command.add_argument("data", help="bundled or D4RL name, Minari id, .hdf5 or .npz path")
        command.add_argument(f"--{option}", default=default, help=f"{about.split(': ')[1]} (default {default})")
        command.add_argument("--preset", default="cpu", help="cpu (minutes on two cores) or paper (default cpu)")
        add_training_options(command)
        command.set_defaults(run=run, parser=command)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """What every training command takes."""
    parser.add_argument("--steps", type=int, help="updates (default: the preset's)")
    parser.add_argument("--every", type=int, help="updates per row of metrics.csv (default 1000, or one epoch)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change one setting, e.g. --set weight=5"
    )
    parser.add_argument("--task", help="task or Gymnasium id of data that does not state its own")
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard events into the run folder")
    parser.add_argument("--wandb", metavar="PROJECT", help="also log to this Weights & Biases project")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="the run folder")
    add_seed(parser)
    add_json(parser)


def run_prior(args: argparse.Namespace) -> int:
    """Train a prior, save, report."""
    from refplan.priors.presets import load_preset

    return _run(args, "prior", args.method, load_preset)


def run_dynamics(args: argparse.Namespace) -> int:
    """Train a model, save, report."""
    from refplan.dynamics.presets import load_model_preset

    return _run(args, "model", args.model, load_model_preset)


def _run(args: argparse.Namespace, part: str, name: str, find: Callable[..., Any]) -> int:
    """Train one part of a run folder; its checkpoint and curves live in a folder of their own inside."""
    import jax.random as jr

    from refplan.data.sources import load
    from refplan.presets import with_settings
    from refplan.settings import settings_of
    from refplan.store import save
    from refplan.train import fit, training_seconds

    data = load(args.data, task=args.task)
    preset = find(name, args.preset, data.meta.name)
    learner = with_settings(preset.learner, parse_settings(args.set))
    folder = Path(args.out)
    logs = extra_logs(args, folder / part, settings_of(learner))
    steps, key = args.steps or preset.steps, jr.key(args.seed)
    made = fit(learner, data, key=key, steps=steps, every=args.every, folder=folder / part, logs=logs, show=True)
    wall = training_seconds(folder / part)
    about = {"method": name, "preset": args.preset, "updates": steps, "source": " ".join(preset.notes)}
    about = {key: value for key, value in about.items() if value is not None}
    parts = {part: made, f"{part}_learner": {**about, "wall_s": wall, **settings_of(learner)}}
    save(folder, seeds=[args.seed], wall_s=wall, **parts, data=describe_data(data, args.data))
    summary = {"folder": str(folder), **about, "seconds": round(wall, 1)}
    if args.json:
        print_json(summary)
    else:
        print_pairs(summary)
    return 0


def describe_data(data: Any, source: str) -> dict[str, Any]:
    """What a run folder says about its data."""
    return {
        "name": data.meta.name,
        "source": source,
        "task": data.task.name,
        "transitions": len(data),
        "fingerprint": data.fingerprint,
    }


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """`["a=1", "b=2"]` as a dict, each pair checked."""
    from refplan.errors import RefplanError

    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise RefplanError(f"--set {pair}: write it as NAME=VALUE, e.g. --set weight=5.")
        found[name.strip()] = value.strip()
    return found


def extra_logs(args: argparse.Namespace, folder: Path, settings: dict[str, Any]) -> list[Any]:
    """TensorBoard and Weights & Biases, when asked for."""
    from refplan.logs import TensorBoardLog, WandbLog

    logs: list[Any] = []
    if args.tensorboard:
        logs.append(TensorBoardLog(folder / "tensorboard"))
    if args.wandb:
        logs.append(WandbLog(folder, args.wandb, settings))
    return logs
