"""`refplan bench`: how fast this machine plans."""

import argparse
from typing import Any

from refplan.cli.common import add_json, print_json, print_table


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "bench",
        help="how fast this machine plans, beside its bare matrix products",
        description="planner: milliseconds per decision over horizon, latents, members and episodes; ratio 1 is the "
        "limit set by the matrix products alone. startup: seconds from the start of a process to its first action.",
    )
    parser.add_argument("what", choices=["planner", "startup"], help="what to measure")
    parser.add_argument("--quick", action="store_true", help="a few settings, or two processes, only")
    parser.add_argument("--out", metavar="FILE", help="also write the numbers with their provenance here, as JSON")
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    import json
    from pathlib import Path

    from refplan.bench import planner, startup
    from refplan.files import write_text
    from refplan.provenance import provenance

    rows = (planner if args.what == "planner" else startup).run(args.quick)
    table = {"rows": rows, **provenance()}
    if args.out:
        write_text(Path(args.out), json.dumps(table, indent=2) + "\n")
    if args.json:
        print_json(table)
        return 0
    print_table(list(rows[0]), [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows])
    return 0
