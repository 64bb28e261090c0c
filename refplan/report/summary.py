"""Result rows as the few lines a person reads at the end of a run."""

import json
from typing import Any

import numpy as np

from refplan.stats import nested_interval


def summarise(rows: list[dict[str, Any]]) -> list[list[str]]:
    """One line per world and planner, in order of appearance, over seeds and their episodes."""
    kinds = dict.fromkeys((row["world"], row["planner"]) for row in rows)
    worlds = {world for world, _ in kinds}
    lines = []
    for world, planner in kinds:
        line = _line(planner, [row for row in rows if (row["world"], row["planner"]) == (world, planner)])
        lines.append([line[0] if len(worlds) == 1 else f"{world}: {line[0]}", *line[1:]])
    return lines


def _line(planner: str, rows: list[dict[str, Any]]) -> list[str]:
    returns = [np.array(json.loads(row["returns"])) for row in rows]
    mean, low, high = nested_interval(returns)
    scores = [row["score"] for row in rows if row["score"] != ""]
    return [
        rows[0]["prior"] if planner == "none" else f"{rows[0]['prior']} + {planner}",
        f"{mean:.0f} [{low:.0f}, {high:.0f}]",
        "-" if not scores else _score(rows, returns),
        f"{np.mean([float(row['ms_per_action']) for row in rows]):.2f}",
        str(sum(map(len, returns))),
        str(len({row["seed"] for row in rows})),
    ]


def _score(rows: list[dict[str, Any]], returns: list[np.ndarray]) -> str:
    from refplan.data.tasks import task

    world = task(rows[0]["world"])
    mean, low, high = nested_interval([world.score(each) for each in returns])
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"
