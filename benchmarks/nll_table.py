"""Held-out NLL of models at equal training, from the learning curves of their run folders.

`python -m benchmarks.nll_table OUT.csv ENSEMBLE_RUN BELIEF_RUN [BELIEF_RUN ...]`, all trained on the same data: every
model is read at the number of decoder updates the shortest of them had. The unit is MOPO's loss per output, twice the
NLL without its constant, on held-out transitions and standardised targets.
"""

import csv
import sys
from pathlib import Path

from refplan.logs import read_csv
from refplan.store import read_tables


def curve(run: Path) -> list[tuple[int, float]]:
    """(updates, held-out loss) of the networks that predict."""
    second = run / "model" / "beliefdecoder" / "metrics.csv"
    rows = read_csv(second if second.exists() else run / "model" / "metrics.csv")
    return [(int(float(row["step"])), float(row["held_nll"])) for row in rows if row.get("held_nll")]


def at(points: list[tuple[int, float]], updates: int) -> float:
    """The loss at a number of updates, between the epochs around it."""
    before = max((p for p in points if p[0] <= updates), default=points[0])
    after = min((p for p in points if p[0] >= updates), default=points[-1])
    share = 0.0 if after[0] == before[0] else (updates - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])


def main(out: str, *folders: str) -> None:
    runs = [Path(folder) for folder in folders]
    curves = {run: curve(run) for run in runs}
    equal = min(points[-1][0] for points in curves.values())
    rows = []
    for run, points in curves.items():
        tables = read_tables(run)
        learner = tables["model_learner"]
        rows.append(
            {
                "dataset": tables["data"]["name"], "run": run.name, "model": learner["method"],
                "kl_target": learner.get("kl_target", ""), "updates": equal, "held_nll": round(at(points, equal), 3),
                "updates_in_all": points[-1][0], "held_nll_at_the_end": round(points[-1][1], 3),
                "wall_s": round(float(learner["wall_s"]), 1), "command": tables["provenance"]["command"],
                "commit": tables["provenance"]["commit"],
            }
        )  # fmt: skip
    path = Path(out)
    old = list(csv.DictReader(path.open())) if path.exists() else []
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*(row for row in old if row["dataset"] != rows[0]["dataset"]), *rows])


if __name__ == "__main__":
    main(*sys.argv[1:])
