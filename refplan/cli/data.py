"""`refplan data list | info X | check X | collect ENV`: what data there is, what is in it, what is wrong with it."""

import argparse
from typing import Any

from refplan.cli import collect
from refplan.cli.common import add_json, count, print_json, show


def add(commands_above: Any) -> None:
    """Declare the commands."""
    parser = commands_above.add_parser("data", help="list, describe, check and make datasets")
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="what can be loaded by name, and what of it is on this machine")
    info = commands.add_parser("info", help="what a dataset holds and where it came from")
    check = commands.add_parser("check", help="everything wrong and notable; exit code 1 if anything is wrong")
    check.add_argument("--replay", action="store_true", help="also replay logged actions in the simulator")
    check.add_argument("--steps", type=count, default=50, help="steps per replayed segment (default %(default)s)")
    check.add_argument("--segments", type=count, default=100, help="replayed segments (default %(default)s)")
    check.add_argument("--seed", type=int, default=0, help="which segments (default %(default)s)")
    for command in (info, check):
        command.add_argument("dataset", help="bundled or D4RL name, Minari id, .hdf5 or .npz path, Minari folder")
        command.add_argument("--task", help="task or Gymnasium id of data that does not state its own")
    for command, run in ((listing, run_list), (info, run_info), (check, run_check)):
        add_json(command)
        command.set_defaults(run=run, parser=command)
    collect.add(commands)


def run_list(args: argparse.Namespace) -> int:
    """`refplan data list`."""
    import dataclasses

    from refplan.data.sources import list_datasets

    listed = list_datasets()
    if args.json:
        print_json([dataclasses.asdict(one) for one in listed])
        return 0
    table = _table("name", "kind", "on this machine", "about")
    for one in listed:
        table.add_row(one.name, one.kind, "yes" if one.here else "download", one.about)
    show(table)
    return 0


def run_info(args: argparse.Namespace) -> int:
    """`refplan data info X`."""
    import dataclasses

    from refplan.data.check import check_dataset, plain
    from refplan.data.sources import read

    raw = read(args.dataset, task=args.task)
    report = check_dataset(raw)
    said = {**plain(dataclasses.asdict(raw.meta)), "errors": len(report.errors), **report.to_dict()["summary"]}
    if args.json:
        print_json(said)
        return 0
    table = _table("what", "value")
    for key, value in said.items():
        if value not in (None, "", {}):
            table.add_row(key, _cell(value))
    show(table)
    if report.errors:
        print(f"{len(report.errors)} errors; see: refplan data check {args.dataset}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """`refplan data check X [--replay]`: exit code 0 if nothing is wrong, else 1."""
    from refplan.data.check import check_dataset
    from refplan.data.sources import read

    raw = read(args.dataset, task=args.task)
    report = check_dataset(raw)
    if args.replay and report.ok:
        import jax.random as jr

        from refplan.data.replay import replay_drift, with_replay

        drift = replay_drift(raw.build(), key=jr.key(args.seed), steps=args.steps, segments=args.segments)
        report = with_replay(report, drift)
    if args.json:
        print_json(report.to_dict())
    else:
        _show_report(report)
        if args.replay and report.replay is None:
            print("Not replayed: correct the errors first.")
    return 0 if report.ok else 1


def _show_report(report: Any) -> None:
    from rich.text import Text

    show(Text(f"{report.name}: " + ("nothing wrong" if report.ok else f"{len(report.errors)} errors")))
    table = _table("", "code", "finding")
    for kind, findings in (("error", report.errors), ("note", report.notes)):
        for one in findings:
            table.add_row(kind, one.code, Text(one.message))
    if table.row_count:
        show(table)
    said = report.to_dict()
    for title, part in (("what", said["summary"]), ("replay", said["replay"])):
        if part:
            table = _table(title, "value")
            for key, value in part.items():
                table.add_row(key, _cell(value))
            show(table)


def _cell(value: Any) -> Any:
    """A value as text with few digits; nested values one per line."""
    from rich.text import Text

    def short(x: Any) -> str:
        if isinstance(x, float):
            return f"{x:.4g}"
        if isinstance(x, dict):
            return ", ".join(f"{k} {short(v)}" for k, v in x.items())
        return ", ".join(short(v) for v in x) if isinstance(x, list) else str(x)

    nested = isinstance(value, dict) and any(isinstance(v, dict) for v in value.values())
    return Text("\n".join(f"{k}: {short(v)}" for k, v in value.items()) if nested else short(value))


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table
