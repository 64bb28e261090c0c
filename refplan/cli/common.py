"""What several commands share: common options and the way tables are printed."""

import argparse
from collections.abc import Sequence


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`: one JSON document on standard output instead of a table."""
    parser.add_argument("--json", action="store_true", help="print JSON for machines")


def add_seed(parser: argparse.ArgumentParser) -> None:
    """`--seed`: everything random follows from it."""
    parser.add_argument("--seed", type=int, default=0, help="everything random follows from it (default 0)")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """A table on standard output; first column to the left, the others to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    # A pipe has no width; a table cut at 80 columns would lose numbers.
    console.print(table, width=None if console.is_terminal else 200)
