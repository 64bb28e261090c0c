"""The paper's tables from result rows, with the paper's own numbers beside them. Nothing here is kept but the CSV."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from refplan.experiments.recipes import Recipe, Table, published
from refplan.report.charts import number
from refplan.report.gain import score_slope
from refplan.report.html import UNKNOWN
from refplan.stats import STATISTICS, Interval, improvement_interval, interval, mean_interval, nested_interval

Rows = Sequence[dict[str, Any]]


class Shown(NamedTuple):
    """A table as text, ready for a terminal, Markdown or HTML."""

    title: str
    headings: list[str]
    lines: list[list[str]]


def measured(rows: Rows, value: str) -> Interval | None:
    """A number from all rows of one cell of a table: over seeds and their episodes, or the mean of plain numbers."""
    if not rows:
        return None
    if value in ("return", "score") and all(row.get("returns") for row in rows):
        return nested_interval([_episodes(row, value) for row in rows])
    known = [float(row[value]) for row in rows if str(row.get(value, "")) not in ("", "None")]
    return mean_interval(np.array(known)) if known else None


def _episodes(row: dict[str, Any], value: str) -> np.ndarray:
    returns = np.array(json.loads(row["returns"]))
    if value == "return":
        return returns
    # The score is linear in the return; the row knows the mean of both, and the robot the slope.
    return float(row["score"]) + score_slope(row["world"]) * (returns - returns.mean())


def make_tables(recipe: Recipe, rows: Rows) -> list[Shown]:
    """Every table of an experiment that has rows, the aggregates last."""
    made = [_table(recipe, table, rows) for table in recipe.tables]
    made += [aggregate_table(rows, recipe.name)] if recipe.figure.kind == "aggregates" else []
    return [table for table in made if table.lines]


def _table(recipe: Recipe, table: Table, rows: Rows) -> Shown:
    have = [row for row in rows if all(str(row.get(name, "")) for name in table.rows) and _has(row, table.value)]
    lines = list(dict.fromkeys(tuple(str(row[name]) for name in table.rows) for row in have))
    columns = list(table.columns)
    if recipe.cells == "tune":
        body = [[*line, *_best_after(_of(have, table.rows, line), columns)] for line in lines]
        return Shown(_title(table), [*table.rows, *(f"best after {n}" for n in columns)], body)
    columns += [name for name in dict.fromkeys(str(row["agent"]) for row in have) if name not in columns]
    columns = [name for name in columns if any(row["agent"] == name for row in have)]
    theirs = [name for name in (table.beside or columns) if any(row["agent"] == name for row in published(recipe.name))]
    body = []
    for line in lines:
        mine = _of(have, table.rows, line)
        ours = [show(measured([r for r in mine if r["agent"] == name], table.value), table.value) for name in columns]
        labels = dict(zip(table.rows, line, strict=True))
        body.append([*line, *ours, *(paper_number(recipe.name, table, labels, str(name)) for name in theirs)])
    if body and all(cell == UNKNOWN for line in body for cell in line[len(table.rows) + len(columns) :]):
        theirs, body = [], [line[: len(table.rows) + len(columns)] for line in body]
    return Shown(_title(table), [*table.rows, *map(str, columns), *(f"paper: {name}" for name in theirs)], body)


def _has(row: dict[str, Any], value: str) -> bool:
    return str(row.get(value, "")) not in ("", "None")


def _of(rows: Rows, names: Sequence[str], line: Sequence[str]) -> list[dict[str, Any]]:
    return [row for row in rows if all(str(row[name]) == part for name, part in zip(names, line, strict=True))]


def _title(table: Table) -> str:
    words = {"action_variance": "variance of the planned action", "best": "best score so far"}
    return table.title or words.get(table.value, table.value)


def _best_after(rows: Rows, counts: Sequence[Any]) -> list[str]:
    """The best score among the first n trials, the mean over seeds; beyond the last trial nothing is claimed."""
    shown = []
    for count in counts:
        found = [float(row["best"]) for row in rows if int(row["trial"]) == int(count)]
        shown.append(f"{np.mean(found):.1f}" if found else UNKNOWN)
    return shown


def paper_number(experiment: str, table: Table, labels: dict[str, str], agent: str) -> str:
    """What the paper says in the same place, with its spread where it has one."""
    names = table.match or table.rows
    for row in published(experiment):
        if row["agent"] == agent and all(row.get(name, "") == labels[name] for name in names):
            return f"{row['value']} ± {row['spread']}" if row["spread"] else row["value"]
    return UNKNOWN


def show(found: Interval | None, value: str) -> str:
    """A number with its 95 % interval."""
    if found is None:
        return UNKNOWN
    if value in ("return", "score"):
        digits = 0 if value == "return" else 1
        return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"
    return (
        number(found.value)
        if found.low == found.high
        else f"{number(found.value)} [{number(found.low)}, {number(found.high)}]"
    )


def score_matrix(rows: Rows, agent: str) -> tuple[np.ndarray, list[str]]:
    """Mean scores (seeds, tasks) of an agent over the tasks all its seeds have; a task is a dataset and a prior."""
    mine = [row for row in rows if row["agent"] == agent and _has(row, "score")]
    seeds = sorted({int(row["seed"]) for row in mine})
    cells = {(int(row["seed"]), f"{row['prior']} {row['dataset']}"): float(row["score"]) for row in mine}
    names = [task for task in dict.fromkeys(task for _, task in cells) if all((seed, task) in cells for seed in seeds)]
    return np.array([[cells[seed, task] for task in names] for seed in seeds]), names


def aggregates(rows: Rows) -> dict[str, dict[str, Interval]]:
    """Agent -> statistic -> interval, over the tasks that every agent has."""
    found = {agent: score_matrix(rows, agent) for agent in dict.fromkeys(str(row["agent"]) for row in rows)}
    shared = shared_tasks(rows)
    made = {}
    for agent, (scores, names) in found.items() if shared else ():
        picked = scores[:, [n for n, name in enumerate(names) if name in shared]]
        made[agent] = {name: interval(picked, statistic) for name, statistic in STATISTICS.items()}
    return made


def shared_tasks(rows: Rows) -> set[str]:
    """The tasks that every agent has in all seeds."""
    agents = dict.fromkeys(str(row["agent"]) for row in rows)
    return set.intersection(*(set(score_matrix(rows, agent)[1]) for agent in agents)) if agents else set()


def paper_aggregates(experiment: str, tasks: set[str]) -> dict[str, dict[str, float]]:
    """The same statistics of the paper's means on the same tasks (its seeds are not published: no intervals)."""
    rows = [row for row in published(experiment) if f"{row['prior']} {row['robot']}-{row['kind']}" in tasks]
    agents = list(dict.fromkeys(row["agent"] for row in rows))
    scores = {agent: np.array([[float(row["value"]) for row in rows if row["agent"] == agent]]) for agent in agents}
    return {agent: {name: float(f(scores[agent])) for name, f in STATISTICS.items()} for agent in agents}


def aggregate_table(rows: Rows, experiment: str) -> Shown:
    """RLiable's four aggregates, and how likely RefPlan is to beat LOOP; one seed alone has no interval."""
    ours, theirs = aggregates(rows), paper_aggregates(experiment, shared_tasks(rows))
    agents = list(ours)
    headings = ["aggregate of scores", *agents, *(f"paper: {agent}" for agent in agents if agent in theirs)]
    lines, seeds = [], {agent: len(score_matrix(rows, agent)[0]) for agent in agents}
    many = min(seeds.values(), default=0) > 1
    for name in STATISTICS if ours else ():
        found = {agent: ours[agent][name] for agent in agents}
        mine = [show(found[a], "score") if seeds[a] > 1 else f"{found[a].value:.1f}" for a in agents]
        lines.append([name.replace("_", " "), *mine, *(f"{theirs[a][name]:.1f}" for a in agents if a in theirs)])
    if many and {"loop", "refplan"} <= set(agents):
        lines.append(["P(refplan beats loop)", *_chance(rows, agents), *[UNKNOWN] * (len(headings) - 1 - len(agents))])
    drawn = "stratified bootstrap over seeds" if many else "no interval where there is one seed"
    return Shown(f"aggregates ({drawn})", headings, lines)


def _chance(rows: Rows, agents: list[str]) -> list[str]:
    (x, names), (y, others) = score_matrix(rows, "refplan"), score_matrix(rows, "loop")
    shared = [name for name in names if name in others]
    left, right = (m[:, [own.index(name) for name in shared]] for m, own in ((x, names), (y, others)))
    found = improvement_interval(left, right)
    text = f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"
    return [text if agent == "refplan" else UNKNOWN for agent in agents]
