"""`refplan fit prior | dynamics`: train from data; the same command again resumes or returns at once."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from refplan.cli.common import add_json, add_seed, count, print_json, print_pairs


def add(commands: Any) -> None:
    """Declare the commands."""
    parser = commands.add_parser("fit", help="train a prior policy or a dynamics model from data")
    parts = parser.add_subparsers(title="what to train", metavar="PART", required=True)
    kinds = (
        ("prior", "method", "iql", "a policy: bc, iql, cql, edac, mopo, combo or maple", run_prior),
        (
            "dynamics",
            "model",
            "ensemble",
            "a model of the world: ensemble, belief, worlds, refined or refined-worlds",
            run_dynamics,
        ),
    )
    for part, option, default, about, run in kinds:
        text = f"Train {about} -- from data into a run folder. After a kill the same command resumes."
        command = parts.add_parser(part, help=about, description=text)
        command.add_argument("data", help="bundled or D4RL name, Minari id, .hdf5 or .npz path")
        command.add_argument(f"--{option}", default=default, help=f"{about.split(': ')[1]} (default {default})")
        command.add_argument("--preset", default="cpu", help="cpu (minutes on two cores) or paper (default cpu)")
        if part == "prior":
            command.add_argument(
                "--model",
                metavar="RUN",
                help="for mopo, combo and maple: the run folder whose model to imagine with (default: the model in "
                "--out, which is trained first if there is none)",
            )
            command.add_argument(
                "--worlds",
                action="store_true",
                help="learn what to do when actuators weaken or fail, in worlds made from the model; refplan with a "
                "belief over worlds then tells the policy how strong they are",
            )
        add_training_options(command)
        command.set_defaults(run=run, parser=command, kept_in="out")


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """What every training command takes."""
    parser.add_argument("--steps", type=count, help="updates (default: the preset's)")
    parser.add_argument("--every", type=count, help="updates per row of metrics.csv (default 1000, or one epoch)")
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
    """Train a prior, save, report; one that learns in imagination gets its world first."""
    from refplan.data.sources import load
    from refplan.errors import RefplanError
    from refplan.priors.imagining import AbstractImaginingLearner
    from refplan.priors.presets import load_preset

    data = load(args.data, task=args.task)
    preset = load_preset(args.method, args.preset, data.meta.name)
    preset = preset._replace(learner=_with_options(preset.learner, args))
    imagines = isinstance(preset.learner, AbstractImaginingLearner)
    if args.worlds:
        return _report(args, _train_in_worlds(args, data, preset, imagines))
    if not imagines:
        if args.model:
            raise RefplanError(f"--model {args.model}: {args.method} learns without a model. Leave it out.")
        return _report(args, _train(args, "prior", args.method, data, preset))
    model = _find_model(args, data)
    preset = preset._replace(learner=dataclasses.replace(preset.learner, model=model))
    return _report(args, _train(args, "prior", args.method, data, preset, {"model": args.model or args.out}))


def _train_in_worlds(args: argparse.Namespace, data: Any, preset: Any, imagines: bool) -> dict[str, Any]:
    """A prior that knows what to do about weak actuators, from worlds made out of the model."""
    from refplan.dynamics.labelled import in_worlds
    from refplan.errors import RefplanError

    if args.method in ("bc", "mbop", "maple"):
        why = "carries its own idea of the world" if args.method == "maple" else "has no value to learn with"
        raise RefplanError(f"--worlds: {args.method} {why}; take cql, iql, edac, mopo or combo.")
    labelled = in_worlds(data, _find_model(args, data), seed=args.seed)
    if imagines:
        preset = preset._replace(learner=dataclasses.replace(preset.learner, model=labelled.model))
    return _train(args, "prior", args.method, data, preset, {"model": args.model or args.out, "worlds": True}, labelled)


def run_dynamics(args: argparse.Namespace) -> int:
    """Train a model, save, report."""
    from refplan.data.sources import load
    from refplan.dynamics.presets import load_model_preset

    data = load(args.data, task=args.task)
    preset = load_model_preset(args.model, args.preset, data.meta.name)
    preset = preset._replace(learner=_with_options(preset.learner, args))
    return _report(args, _train(args, "model", args.model, data, preset))


def _with_options(learner: Any, args: argparse.Namespace) -> Any:
    from refplan.presets import with_settings

    return with_settings(learner, parse_settings(args.set))


def _find_model(args: argparse.Namespace, data: Any) -> Any:
    """The model of --model, or of the run folder itself; an ensemble is trained into the latter if it has none."""
    from refplan.dynamics.base import AbstractDynamics
    from refplan.dynamics.presets import load_model_preset
    from refplan.errors import RefplanError
    from refplan.store import load_run, read_tables

    folder = Path(args.model or args.out)
    if args.model or ((folder / "run.toml").exists() and "model" in read_tables(folder)):
        model = load_run(folder).get("model")
        if not isinstance(model, AbstractDynamics):
            raise RefplanError(
                f"{folder}: holds no model to imagine with. Train one: refplan fit dynamics {args.data} --out {folder}"
            )
        return model
    print(f"{args.method} imagines: training an ensemble first, into {folder} (--model names another)", file=sys.stderr)
    alone = argparse.Namespace(**{**vars(args), "steps": None, "every": None})
    _train(alone, "model", "ensemble", data, load_model_preset("ensemble", args.preset, data.meta.name))
    return load_run(folder)["model"]


def _train(
    args: argparse.Namespace,
    part: str,
    name: str,
    data: Any,
    preset: Any,
    more: dict[str, Any] | None = None,
    labelled: Any = None,
) -> dict[str, Any]:
    """Train one part of a run folder; its checkpoint and curves live in a folder of their own inside."""
    import jax.random as jr

    from refplan.files import check_writable
    from refplan.settings import settings_of
    from refplan.store import save
    from refplan.train import fit, training_seconds

    folder, learner = Path(args.out), preset.learner
    check_writable(folder / "run.toml")
    # What the model is, its own run folder says.
    settings = {key: value for key, value in settings_of(learner).items() if not key.startswith("model.")}
    logs = extra_logs(args, folder / part, settings)
    steps, key = args.steps or preset.steps, jr.key(args.seed)
    rows = data if labelled is None else labelled.data
    made = fit(learner, rows, key=key, steps=steps, every=args.every, folder=folder / part, logs=logs, show=True)
    made = made if labelled is None else labelled.wrap(made)
    wall = training_seconds(folder / part)
    about = {"method": name, "preset": args.preset, "updates": steps, "source": " ".join(preset.notes), **(more or {})}
    about = {key: value for key, value in about.items() if value is not None}
    parts = {part: made, f"{part}_learner": {**about, "wall_s": wall, **settings}}
    save(folder, seeds=[args.seed], wall_s=wall, **parts, data=describe_data(data, args.data))
    return {"folder": str(folder), **about, "seconds": round(wall, 1)}


def _report(args: argparse.Namespace, summary: dict[str, Any]) -> int:
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


def parse_settings(pairs: list[str], option: str = "--set") -> dict[str, str]:
    """`["a=1", "b=2"]` as a dict, each pair checked."""
    from refplan.errors import RefplanError

    found = {}
    example = "weight=5" if option == "--set" else "fail_at=500"
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise RefplanError(f"{option} {pair}: write it as NAME=VALUE, e.g. {option} {example}.")
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
