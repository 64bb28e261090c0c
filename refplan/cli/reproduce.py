"""`refplan reproduce`: the paper's experiments, on this machine or on many."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refplan.cli.common import add_json, names_in, print_json, print_table
from refplan.experiments.recipes import NAMES


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "reproduce",
        help="an experiment of the paper, from data to table and figure",
        description="Do the cells (trainings, evaluations, searches, timings) of one or several of the paper's "
        "experiments, and draw their tables and figures beside the paper's own numbers. A finished cell is never made "
        "again, whichever experiment asks for it: the same command continues.",
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join(NAMES)}; or all")
    parser.add_argument("--scale", default="cpu", help="cpu (hours on two cores), paper (its sizes), tiny (to try)")
    parser.add_argument("--out", default="reproduce", metavar="DIR", help="where everything goes (default reproduce/)")
    parser.add_argument("--data", metavar="DIR", help="folder of datasets (default data/ if there is one, else D4RL's)")
    parser.add_argument(
        "--model",
        "--belief",
        dest="belief",
        default="belief",
        metavar="MODELS",
        help="what RefPlan believes with, by commas: belief (the default), worlds, refined, refined-worlds",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change the scale, e.g. priors=cql or seeds=3"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done and how long it may take")
    parser.add_argument("--redraw", action="store_true", help="only draw tables and figures from the results.csv")
    group = parser.add_argument_group("where cells are done")
    group.add_argument("--executor", choices=("local", "ray"), default="local")
    group.add_argument("--workers", type=int, metavar="N", help="local: processes at once (default: one per CPU)")
    group.add_argument("--ray-address", metavar="HOST:PORT", help="ray: the running cluster (default: the local one)")
    group.add_argument("--gpus", type=float, default=0.0, metavar="SHARE", help="ray: of a GPU per cell (default 0)")
    add_json(parser)
    parser.set_defaults(run=run, parser=parser, kept_in="out")


def run(args: argparse.Namespace) -> int:
    """Do what is missing, draw, say what failed."""
    import sys

    from refplan.experiments.sweep import Store

    say = lambda text: print(text, file=sys.stderr if args.json else sys.stdout, flush=True)  # noqa: E731
    recipes = find_recipes(args.names)
    folder = Path(args.out)
    if args.redraw:
        show_all(recipes, folder, args.json)
        return 0
    graph = make_graph(args, recipes)
    store = Store(folder)
    if args.dry_run:
        return dry_run(args, graph, store)
    with store.alone(say) as hold:
        report = _sweep(args, graph, store, recipes, hold, say)
    show_all(recipes, folder, args.json)
    return _end(report, store, graph, say)


def find_recipes(names: list[str]) -> list[Any]:
    """The declarations of the experiments a user named."""
    from refplan.experiments.recipes import load_recipe

    return [load_recipe(name) for name in (NAMES if names == ["all"] else dict.fromkeys(names))]


def make_graph(args: argparse.Namespace, recipes: list[Any]) -> Any:
    """All cells of all experiments."""
    from refplan.cli.fit import parse_settings
    from refplan.dynamics import find_model
    from refplan.experiments.build import Builder
    from refplan.experiments.cells import Graph
    from refplan.experiments.shelf import find_shelf

    beliefs = names_in(args.belief)
    for name in beliefs:
        find_model(name)
    graph = Graph(find_shelf(args.data), fetch=not args.dry_run)
    for recipe in recipes:
        scale = recipe.scale(args.scale, parse_settings(args.set))
        Builder(graph, recipe, args.scale, scale, beliefs).build()
    return graph


def _sweep(
    args: argparse.Namespace, graph: Any, store: Any, recipes: list[Any], hold: int | None, say: Callable[[str], None]
) -> Any:
    from refplan.experiments.sweep import sweep

    def progress() -> None:
        for recipe in recipes:
            write_rows(graph, store, recipe)

    progress()
    return sweep(graph, store, make_executor(args, hold), say=say, progress=progress)


def write_rows(graph: Any, store: Any, recipe: Any) -> None:
    """An experiment's results.csv: exactly the rows of its finished cells."""
    from refplan.store import write_results

    write_results(store.folder / recipe.name / "results.csv", store.rows(graph, recipe.name))


def make_executor(args: argparse.Namespace, hold: int | None) -> Any:
    """Where cells are done."""
    if args.executor == "ray":
        from refplan.experiments.cluster import RayExecutor

        return RayExecutor(args.ray_address, args.gpus)
    from refplan.experiments.local import LocalExecutor

    return LocalExecutor(args.workers, hold)


def show_all(recipes: list[Any], folder: Path, as_json: bool) -> None:
    """Draw every experiment from its results and print its tables."""
    from refplan.report.paper_page import draw

    shown = {recipe.name: draw(recipe, folder / recipe.name) for recipe in recipes}
    if as_json:
        print_json({name: [table._asdict() for table in tables] for name, tables in shown.items()})
        return
    for recipe in recipes:
        print(f"\n{recipe.title}\n{recipe.about}")
        for table in shown[recipe.name]:
            print(f"\n{table.title}")
            print_table(table.headings, table.lines)
        print(f"\n{folder / recipe.name}: results.csv, table.md, figure.png, figure.svg, page.html")


def _end(report: Any, store: Any, graph: Any, say: Callable[[str], None]) -> int:
    if not report.failed:
        return 0
    say(f"\n{len(report.failed)} cells failed, {len(report.skipped)} that need them were skipped:")
    for name, error in report.failed.items():
        say(f"  {graph.cells[name].words}: {error}\n    log: {store.log(name)}")
    say("The same command tries them again.")
    return 1


def dry_run(args: argparse.Namespace, graph: Any, store: Any) -> int:
    """The cells, which of them are finished, and how long the rest may take."""
    from refplan.bench.estimate import Speed, cell_seconds
    from refplan.experiments.local import available_cpus

    speed = Speed.measured()
    rows, left = [], 0.0
    for cell in graph.cells.values():
        known = store.outcome(cell.name)
        seconds = known.wall_s if known else cell_seconds(cell, graph, speed)
        left += 0.0 if known else seconds
        rows.append({"cell": cell.name, "what": cell.words, "seconds": seconds, "finished": known is not None})
    workers = min(args.workers or len(available_cpus()), len(available_cpus()))
    if args.json:
        print_json({"cells": rows, "seconds": left, "workers": workers, "gflops": speed.gflops})
        return 0
    print_table(
        ["cell", "what", "seconds"],
        [[r["cell"], r["what"], "finished" if r["finished"] else f"{r['seconds']:.0f}"] for r in rows],
    )
    missing = sum(not row["finished"] for row in rows)
    print(f"{len(rows)} cells, {missing} to do, at the {speed.gflops:.0f} GFLOPS one CPU has just shown:")
    hours, shared = left / 3600, left / workers / 3600
    print(f"about {hours:.1f} hours of one CPU, {shared:.1f} on {workers}; a factor of two either way is usual.")
    return 0
