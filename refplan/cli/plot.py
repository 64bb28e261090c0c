"""`refplan plot`: the learning curves of one or several runs."""

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "plot", help="learning curves of run folders", description="Draw the metrics.csv of one or several run folders."
    )
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--out", metavar="FILE", help=".png, .svg or .pdf (default: metrics.png in the first folder)")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Draw and say where."""
    from refplan.report.curves import draw_curves

    out = Path(args.out) if args.out else Path(args.runs[0]) / "metrics.png"
    draw_curves([Path(run) for run in args.runs], out)
    print(out)
    return 0
