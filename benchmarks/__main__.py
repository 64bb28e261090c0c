"""`make bench`, or `python -m benchmarks [names] [--json FILE]`: timings on this machine. Read ratios, not seconds."""

import argparse
import importlib
import json
from pathlib import Path

from refplan.cli.common import print_table
from refplan.files import write_text
from refplan.provenance import provenance

ALL = {
    "simulation": "benchmarks.simulation",
    "priors": "benchmarks.priors",
    "dynamics": "benchmarks.dynamics",
    "planner": "refplan.bench.planner",
    "startup": "refplan.bench.startup",
}
# Only when named: they need the cross-library environment (.venv-cross, `make test-cross`).
CROSS = {"against_d3rlpy": "benchmarks.against_d3rlpy", "against_torch": "benchmarks.against_torch"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", default=[], help=f"which: {', '.join(ALL)} (default all); {', '.join(CROSS)}"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the numbers and their provenance here")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in ALL | CROSS]:
        parser.error(f"no benchmark is called {unknown[0]}; there are {', '.join(ALL | CROSS)}")
    rows = []
    for name in args.names or ALL:
        found = importlib.import_module((ALL | CROSS)[name]).run()
        print_table(list(found[0]), [[_short(v) for v in row.values()] for row in found])
        rows += found
    if args.json:
        write_text(Path(args.json), json.dumps({"rows": rows, **provenance()}, indent=2) + "\n")


def _short(value: object) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


if __name__ == "__main__":
    main()
