"""`refplan tune`: find a planner's numbers, in the task or without touching it."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refplan.cli.common import add_json, add_seed, count, logged_data, print_json, print_table

Objective = Callable[[dict[str, Any]], tuple[float, dict[str, float]]]


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "tune",
        help="find a planner's numbers: online, or offline in another model",
        description="Try settings of a planner and keep the best. Online counts episodes in the task; offline never "
        "touches it: the planner acts in a model it does not plan with, from logged states, and fitted Q evaluation "
        "judges where it ends. The same command again continues.",
    )
    parser.add_argument("folder", metavar="RUN", help="a run folder with prior and model (refplan run makes one)")
    parser.add_argument("--planner", default="refplan", help="mppi, loop or refplan (default refplan)")
    parser.add_argument("--method", default="bayes", help="bayes (TPE) or grid (the paper's 240 points; default bayes)")
    parser.add_argument("--trials", type=count, default=20, help="settings to try in all (default 20)")
    parser.add_argument("--objective", choices=("online", "offline"), default="offline")
    parser.add_argument("--episodes", type=count, default=3, help="per trial, online (default 3)")
    parser.add_argument("--starts", type=count, default=32, help="logged states to begin at, offline (default 32)")
    parser.add_argument("--length", type=count, default=50, help="imagined steps per start, offline (default 50)")
    parser.add_argument("--judge", metavar="RUN", help="run folder of the model to be tried in (default: the other)")
    parser.add_argument("--data", help="name or path of the logged data (default: what the run was trained on)")
    parser.add_argument("--critic-steps", type=count, default=10_000, help="updates of FQE, offline (default 10000)")
    parser.add_argument(
        "--agree", type=int, default=0, metavar="N", help="run the first N settings online too and compare the ranking"
    )
    parser.add_argument(
        "--fix", action="append", default=[], metavar="NAME=VALUE", help="keep a setting, e.g. --fix latents=4"
    )
    add_seed(parser)
    add_json(parser)
    parser.set_defaults(run=run, parser=parser, kept_in="folder")


def run(args: argparse.Namespace) -> int:
    """Try, keep, show."""
    import sys

    from refplan.cli.fit import parse_settings
    from refplan.experiments.tune import Space, check_search, free_settings, tune
    from refplan.planners.presets import planner_settings_of

    check_search(args.method)
    fixed = parse_settings(args.fix)
    make = _planner_maker(args, fixed)
    names = free_settings(planner_settings_of(make({})), fixed)
    online = _online(args, make) if args.objective == "online" or args.agree else None
    objective = online if online and args.objective == "online" else _offline(args, make)
    say = lambda text: print(text, file=sys.stderr if args.json else sys.stdout, flush=True)  # noqa: E731
    storage = Path(args.folder) / "tune" / f"{args.planner}-{args.objective}.journal"
    options: dict[str, Any] = {"method": args.method, "trials": args.trials, "seed": args.seed, "say": say}
    trials = tune(objective, Space(names), storage=storage, about=_question(args, make({})), **options)
    document = _document(args, trials, names)
    if args.agree and online:
        document["agreement"] = _agreement(args, trials, online, say)
    _write(storage.with_suffix(".json"), document)
    if args.json:
        print_json(document)
    else:
        _show(args, document)
    return 0


def _planner_maker(args: argparse.Namespace, fixed: dict[str, str]) -> Callable[[dict[str, Any]], Any]:
    from refplan.cli.agents import PlannerChoice, model_of_run, prior_of_run
    from refplan.errors import unknown_name
    from refplan.experiments.plan import MODEL_OF
    from refplan.planners.presets import make_planner

    if args.planner not in MODEL_OF:
        raise unknown_name("planner with settings to find", args.planner, MODEL_OF)
    prior = prior_of_run(args.folder)
    model = model_of_run(PlannerChoice(args.planner, None, "default", {}), args.folder)
    return lambda settings: make_planner(args.planner, prior, model, changes={**fixed, **settings})


def _question(args: argparse.Namespace, planner: Any) -> str:
    """What is asked about the settings, so that answers to another question do not count."""
    from refplan.experiments.workshop import digest_inputs
    from refplan.planners.presets import planner_settings_of
    from refplan.store import read_tables

    names = ("episodes",) if args.objective == "online" else ("starts", "length", "judge", "data", "critic_steps")
    asked: dict[str, Any] = {name: getattr(args, name) for name in (*names, "seed")}
    made = {name: table.get("sha256") for name, table in read_tables(Path(args.folder)).items()}
    return digest_inputs({**asked, **made, "model": type(planner.model).__name__, **planner_settings_of(planner)})


def _online(args: argparse.Namespace, make: Callable[[dict[str, Any]], Any]) -> Objective:
    from refplan.cli.agents import default_task
    from refplan.experiments.tune import online_objective

    return online_objective(make, default_task(args.folder), args.episodes, args.seed)


def _offline(args: argparse.Namespace, make: Callable[[dict[str, Any]], Any]) -> Objective:
    import jax
    import jax.numpy as jnp
    import jax.random as jr

    from refplan.experiments.imagined import Judge, held_out_starts, imagined_returns, logged_range

    planner = make({})
    model, data = _judge_model(args), logged_data(args.folder, args.data)
    judge = Judge(model, _critic(args, planner.prior, data), planner.discount, logged_range(data))
    key_starts, key = jr.split(jr.key(args.seed))
    starts = jnp.asarray(held_out_starts(data, args.starts, key=key_starts))

    def objective(settings: dict[str, Any]) -> tuple[float, dict[str, float]]:
        begun = time.perf_counter()
        returns = jax.block_until_ready(imagined_returns(make(settings), judge, starts, args.length, key))
        return float(returns.mean()), {"episodes": 0.0, "steps": 0.0, "seconds": time.perf_counter() - begun}

    return objective


def _critic(args: argparse.Namespace, prior: Any, data: Any) -> Any:
    """Critics of the prior's policy by FQE, kept in the run folder; a prior with a memory keeps its own."""
    import sys

    import jax
    import jax.random as jr

    from refplan.experiments.line import critic_inputs
    from refplan.experiments.workshop import Workshop
    from refplan.priors.fqe import FQE
    from refplan.train import fit

    if jax.tree.leaves(prior.start()):
        print("the prior remembers earlier steps, which FQE cannot judge: its own value is used", file=sys.stderr)
        return prior
    learner = FQE(getattr(prior, "policy", prior))
    inputs = {"data": data.fingerprint, "steps": args.critic_steps, **critic_inputs(learner)}

    def make(folder: Path) -> tuple[Any, dict[str, Any]]:
        return fit(learner, data, steps=args.critic_steps, key=jr.key(1), folder=folder, show=True), {}

    return Workshop(Path(args.folder), lambda text: None).module("critic", inputs, make).made


def _judge_model(args: argparse.Namespace) -> Any:
    """A model the planner does not plan with."""
    from refplan.cli.agents import PlannerChoice, model_of_run
    from refplan.dynamics.around import AROUND
    from refplan.errors import RefplanError
    from refplan.store import load_run

    if args.judge:
        return model_of_run(PlannerChoice("refplan", None, "default", {}), args.judge)
    parts = load_run(args.folder)
    # What is made around the ensemble is judged fairly only by the other kind of model.
    other = "ensemble" if args.planner == "refplan" and not AROUND.keys() & parts.keys() else "belief"
    if other not in parts or not ({"ensemble", "belief"} <= set(parts)):
        raise RefplanError(
            f"{args.folder}: holds one model only, and a planner judged in its own model looks better than it is. "
            f"Train the other kind (refplan fit dynamics DATA --model belief --out FOLDER) and name it with --judge."
        )
    return parts[other]


def _document(args: argparse.Namespace, trials: list[Any], names: tuple[str, ...]) -> dict[str, Any]:
    import dataclasses

    from refplan.provenance import provenance

    best = max(trials, key=lambda trial: trial.value)
    spent = {name: sum(t.spent.get(name, 0.0) for t in trials) for name in ("episodes", "steps", "seconds")}
    return {
        "planner": args.planner,
        "objective": args.objective,
        "method": args.method,
        "settings": list(names),
        "best": dataclasses.asdict(best),
        "spent": spent,
        "trials": [dataclasses.asdict(trial) for trial in trials],
        "provenance": provenance([args.seed], spent["seconds"]),
    }


def _agreement(args: argparse.Namespace, trials: list[Any], online: Objective, say: Any) -> dict[str, Any]:
    """How well the order of the tried settings agrees with their order in the task (Spearman's rank correlation)."""
    import numpy as np

    from refplan.dynamics.diagnose_measure import spearman

    pairs = []
    for trial in trials[: args.agree]:
        value, _ = online(trial.settings)
        pairs.append({"settings": trial.settings, args.objective: trial.value, "online": value})
        say(f"online: {value:.0f} where {args.objective} said {trial.value:.2f}")
    found = spearman(*(np.array([p[n] for p in pairs]) for n in (args.objective, "online")))
    return {
        "settings": len(pairs),
        "episodes": args.episodes * len(pairs),
        "rank_correlation": found if np.isfinite(found) else None,  # all alike: there is no order to agree on
        "pairs": pairs,
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    import json

    from refplan.files import write_text

    write_text(path, json.dumps(document, indent=1) + "\n")


def _show(args: argparse.Namespace, document: dict[str, Any]) -> None:
    from refplan.experiments.tune import number

    best = sorted(document["trials"], key=lambda trial: -trial["value"])[:5]
    rows = [[f"{t['value']:.2f}", *(number(t["settings"][n]) for n in document["settings"])] for t in best]
    print_table([args.objective, *document["settings"]], rows)
    spent = document["spent"]
    print(f"{len(document['trials'])} settings, {spent['episodes']:.0f} episodes in the task, {spent['seconds']:.0f} s")
    if "agreement" in document:
        found = document["agreement"]
        agrees = found["rank_correlation"]
        said = "undefined, all earned the same" if agrees is None else f"{agrees:.2f}"
        print(f"rank correlation with the task over {found['settings']} settings: {said}")
    flags = " ".join(f"--{name} {number(value)}" for name, value in document["best"]["settings"].items())
    print(f"use it: refplan evaluate {args.folder} --planner {args.planner} {flags}")
