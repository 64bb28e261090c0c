"""`refplan report`: everything measured, on one HTML page."""

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "report",
        help="one self-contained HTML page about run folders",
        description="Write results, learning curves, model diagnosis and recorded episodes of run folders to one page.",
    )
    parser.add_argument(
        "sources", nargs="+", metavar="RUN_OR_FOLDER", help="run folders, folders of them, or result files"
    )
    parser.add_argument("--out", metavar="FILE", default="report.html", help="the page (default report.html)")
    parser.add_argument("--title", help="its title (default: the names of the folders)")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Write it and say where."""
    from refplan.report.page import write_report

    print(write_report(args.sources, args.out, args.title))
    return 0
