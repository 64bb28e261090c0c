"""The paper's figures from result rows, the paper's own numbers as open marks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refplan.experiments.recipes import Recipe, Table, published
from refplan.files import atomic_path
from refplan.report.curves import import_pyplot
from refplan.report.html import UNKNOWN
from refplan.report.paper import Rows, aggregates, measured, paper_aggregates, paper_number, shared_tasks

COLOURS = {"orig": "0.6", "prior": "0.35", "loop": "tab:orange", "refplan": "tab:blue"}
MORE = ("tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink")


def draw_figure(recipe: Recipe, rows: Rows, note: str, *paths: Path) -> None:
    """Draw an experiment's figure into every path (.png, .svg)."""
    draw = {"dots": _dots, "lines": _lines, "aggregates": _aggregates, "search": _search}[recipe.figure.kind]
    plt = import_pyplot()
    with plt.rc_context({"svg.hashsalt": "refplan", "font.size": 9}):
        figure = draw(plt, recipe, rows)
        figure.suptitle(recipe.title, fontsize=10)
        figure.text(0.01, 0.005, note, fontsize=6, color="0.4", wrap=True)
        for path in paths:
            with atomic_path(path) as temporary:
                # Without a date and the like the same rows give the same file, on every machine.
                metadata = dict.fromkeys(("Date", "Creator", "Format", "Type")) if path.suffix == ".svg" else {}
                figure.savefig(temporary, format=path.suffix[1:], dpi=130, metadata=metadata)
        plt.close(figure)


def _panels(plt: Any, count: int, lines: int = 1, height: float = 3.2) -> tuple[Any, np.ndarray]:
    size = (max(4.6, 3.6 * count), height * lines + 0.7)
    figure, axes = plt.subplots(lines, count, figsize=size, squeeze=False, layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.09, 1, 0.91))
    return figure, axes


def _values(rows: Rows, name: str) -> list[str]:
    return list(dict.fromkeys(str(row[name]) for row in rows if str(row.get(name, ""))))


def _colour(agent: str, agents: Sequence[str]) -> str:
    others = [name for name in agents if name not in COLOURS]
    return COLOURS[agent] if agent in COLOURS else MORE[others.index(agent) % len(MORE)]


def _dots(plt: Any, recipe: Recipe, rows: Rows) -> Any:
    """One panel per robot; per line of the table one dot with its interval for every agent."""
    table, spec = recipe.tables[0], recipe.figure
    panels, agents = _values(rows, spec.panels), _values(rows, "agent")
    figure, axes = _panels(plt, max(len(panels), 1))
    for axis, panel in zip(axes[0], panels, strict=False):
        here = [row for row in rows if str(row[spec.panels]) == panel]
        marks = list(dict.fromkeys(_mark(row, table, spec) for row in here))
        for place, mark in enumerate(marks):
            mine = [row for row in here if _mark(row, table, spec) == mark]
            _dots_at(axis, place, mine, agents, recipe, table)
        axis.set_xticks(range(len(marks)), marks, rotation=30 if len(marks) > 2 else 0)
        axis.set_title(panel, fontsize=9)
        axis.set_ylabel(table.value)
        axis.grid(axis="y", alpha=0.3)
    for agent in agents:
        axes[0, 0].plot([], [], "o", color=_colour(agent, agents), label=agent)
    axes[0, 0].plot([], [], "D", markerfacecolor="none", color="0.3", label="paper")
    # Over no mark and no title.
    figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=7, loc="outside right center")
    return figure


def _mark(row: dict[str, Any], table: Table, spec: Any) -> str:
    """What tells the marks of a panel apart: the declared label, and the prior where there are several."""
    names = [spec.marks, *(["prior"] if "prior" in table.rows and spec.panels != "prior" else [])]
    return " ".join(str(row[name]).removeprefix("halfcheetah-") for name in dict.fromkeys(names))


def _dots_at(axis: Any, place: int, rows: Rows, agents: list[str], recipe: Recipe, table: Table) -> None:
    width = 0.7 / max(len(agents), 1)
    for number, agent in enumerate(agents):
        x, colour = place - 0.35 + width * (number + 0.5), _colour(agent, agents)
        found = measured([row for row in rows if row["agent"] == agent], table.value)
        if found is not None:
            axis.plot([x, x], [found.low, found.high], color=colour, linewidth=1.5)
            axis.plot(x, found.value, "o", color=colour, markersize=5)
        labels = {name: str(rows[0][name]) for name in table.rows}
        for name in table.beside or (agent,):
            text = paper_number(recipe.name, table, labels, name)
            if text != UNKNOWN:
                axis.plot(x, float(text.split()[0]), "D", markerfacecolor="none", color=colour, markersize=5)


def _lines(plt: Any, recipe: Recipe, rows: Rows) -> Any:
    """A value over a number, one line per agent with its interval as a band, the paper's where it has any."""
    spec = recipe.figure
    rows = [row for row in rows if str(row.get(spec.x, ""))]
    panels, agents = _values(rows, spec.panels), _values(rows, "agent")
    figure, axes = _panels(plt, max(len(panels), 1), len(spec.values), 2.6)
    for (line, value), (column, panel) in ((a, b) for a in enumerate(spec.values) for b in enumerate(panels)):
        axis = axes[line, column]
        for agent in agents:
            mine = [r for r in rows if r["agent"] == agent and str(r[spec.panels]) == panel]
            xs = sorted({float(row[spec.x]) for row in mine})
            found = [measured([row for row in mine if float(row[spec.x]) == x], value) for x in xs]
            pairs = [(x, each) for x, each in zip(xs, found, strict=True) if each is not None]
            _band(axis, pairs, _colour(agent, agents), agent)
        theirs = [r for r in published(recipe.name) if r.get(spec.x) and r.get(spec.panels) == panel]
        axis.plot([float(r[spec.x]) for r in theirs], [float(r["value"]) for r in theirs], "D--", color="0.4",
                  markerfacecolor="none", markersize=4, linewidth=0.8, label="paper" if theirs else None)  # fmt: skip
        axis.set_title(f"{spec.panels} {panel}" if panel.isdigit() else panel, fontsize=9)
        axis.set_xlabel(spec.x)
        axis.xaxis.get_major_locator().set_params(integer=True)  # latents, horizons, rows
        axis.set_ylabel(value.replace("_", " "))
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7)
    return figure


def _band(axis: Any, pairs: list[tuple[float, Any]], colour: str, label: str) -> None:
    xs = [x for x, _ in pairs]
    axis.plot(xs, [each.value for _, each in pairs], "o-", color=colour, markersize=4, linewidth=1.2, label=label)
    axis.fill_between(xs, [each.low for _, each in pairs], [each.high for _, each in pairs], color=colour, alpha=0.15)


def _aggregates(plt: Any, recipe: Recipe, rows: Rows) -> Any:
    """RLiable's four aggregates, one panel each; the paper's points are computed from its table, for the same tasks."""
    ours, theirs = aggregates(rows), paper_aggregates(recipe.name, shared_tasks(rows))
    agents = list(ours)
    figure, axes = _panels(plt, 4, 1, 1.8)
    for axis, name in zip(axes[0], ("median", "iqm", "mean", "optimality_gap"), strict=True):
        for place, agent in enumerate(agents):
            found, colour = ours[agent][name], _colour(agent, agents)
            axis.plot([found.low, found.high], [place, place], color=colour, linewidth=6, alpha=0.4)
            axis.plot(found.value, place, "o", color=colour)
            if agent in theirs:
                axis.plot(theirs[agent][name], place, "D", markerfacecolor="none", color=colour, markersize=5)
        axis.set_yticks(range(len(agents)), agents)
        axis.set_title(name.replace("_", " ") + (" (lower is better)" if name == "optimality_gap" else ""), fontsize=9)
        axis.grid(axis="x", alpha=0.3)
    return figure


def _search(plt: Any, recipe: Recipe, rows: Rows) -> Any:
    """Best score against trials, the grid's best as a line across."""
    panels = _values(rows, recipe.figure.panels)
    figure, axes = _panels(plt, max(len(panels), 1))
    for axis, panel in zip(axes[0], panels, strict=False):
        here = [row for row in rows if str(row[recipe.figure.panels]) == panel]
        for agent in _values(here, "agent"):
            mine = [row for row in here if row["agent"] == agent]
            xs = sorted({int(row["trial"]) for row in mine})
            found = [measured([row for row in mine if int(row["trial"]) == x], "best") for x in xs]
            pairs = [(float(x), each) for x, each in zip(xs, found, strict=True) if each is not None]
            if agent.startswith("grid"):
                axis.axhline(
                    pairs[-1][1].value, color="0.4", linestyle="--", label=f"best of {len(xs)} points ({agent})"
                )
            else:
                _band(axis, pairs, "tab:blue", agent)
        axis.set_title(panel, fontsize=9)
        axis.set_xlabel("trials")
        axis.set_ylabel("best score so far")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    return figure
