"""What several commands share: common options and the way tables are printed."""

import argparse
import json
from collections.abc import Sequence
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`: one JSON document on standard output instead of a table."""
    parser.add_argument("--json", action="store_true", help="print JSON for machines")


def add_seed(parser: argparse.ArgumentParser) -> None:
    """`--seed`: everything random follows from it."""
    parser.add_argument("--seed", type=int, default=0, help="everything random follows from it (default 0)")


def count(text: str) -> int:
    """A whole number of at least 1, for options that say how many."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got '{text}'") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def names_in(text: str) -> tuple[str, ...]:
    """`"prior, loop"` as names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def show(what: Any) -> None:
    """Print something of rich's; a pipe has no width of its own, and a table cut at 80 columns would lose numbers."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(what)


def print_json(value: Any) -> None:
    """One JSON document, NaN refused: it is not JSON."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_pairs(values: dict[str, Any]) -> None:
    """One line per value."""
    width = max(len(name) for name in values)
    for name, value in values.items():
        print(f"{name:{width}}  {value}")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output; first column to the left, the others to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    show(table)


def logged_data(folder: str, source: str | None) -> Any:
    """The dataset a user named, else what a run folder says it was trained on."""
    from pathlib import Path

    from refplan.data.sources import load
    from refplan.errors import RefplanError
    from refplan.store import read_tables

    source = source or read_tables(Path(folder)).get("data", {}).get("source")
    if not source:
        raise RefplanError(f"{folder}: does not say which data it was trained on; name some with --data.")
    return load(source)
