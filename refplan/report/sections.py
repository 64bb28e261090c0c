"""The sections of the report, each as HTML from what was found; a section without content is left out or says so."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from refplan.report.charts import SMALL, Line, Mark, dot_chart, level, line_chart, number
from refplan.report.gain import Entry, Gain, title_of
from refplan.report.gather import Evaluation, Found, Run, Training
from refplan.report.html import UNKNOWN, Cell, code, figures, folded, grid, pairs, section, table, words

PLANNER_COLOUR = {"none": 7, "critic": 4, "mppi": 3, "loop": 1, "refplan": 0}
SHORT = {
    "horizon": "H",
    "kappa": "κ",
    "sigma": "\N{GREEK SMALL LETTER SIGMA}",
    "penalty": "p",
    "latents": "latents",
    "plans": "plans",
}
MOST_MARKS = 30


def summary(found: Found, entries: Sequence[Entry]) -> str:
    """What data, prior, models and planners there are."""
    cards = [
        (
            "Data",
            sorted({_data_words(run) for run in found.runs} - {""}) or sorted({e.dataset for e in entries} - {""}),
        ),
        ("Prior", _learned(found.runs, "prior") or sorted({e.prior for e in entries})),
        ("Models", _learned(found.runs, "model", "ensemble", "belief")),
        ("Agents evaluated", list(dict.fromkeys(title_of(e.planner) for e in entries))),
    ]
    return '<div class="cards">' + "".join(_card(name, lines) for name, lines in cards) + "</div>"


def _card(name: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines) or '<li class="none">none here</li>'
    return f"<div class='card'><h3>{escape(name)}</h3><ul>{items}</ul></div>"


def _data_words(run: Run) -> str:
    data = run.tables.get("data", {})
    rows = data.get("transitions")
    if "name" not in data:
        return ""
    return f"{data['name']}{f', {rows:,} transitions' if isinstance(rows, int) else ''}"


def _learned(runs: Sequence[Run], *parts: str) -> list[str]:
    found = []
    for run in runs:
        for part in parts:
            learner = run.tables.get(f"{part}_learner")
            if learner or part in run.tables:
                found.append(_learner_words(learner or {}, run.tables.get(part, {}), run.name))
    return list(dict.fromkeys(found))


def _learner_words(learner: dict[str, Any], part: dict[str, Any], name: str) -> str:
    said = [str(learner.get("method") or part.get("class", "?"))]
    if "preset" in learner:
        said.append(f"preset {learner['preset']}")
    if isinstance(learner.get("updates"), int):
        said.append(f"{learner['updates']:,} updates")
    if isinstance(learner.get("wall_s"), int | float):
        said.append(f"{learner['wall_s'] / 60:.1f} minutes")
    return f"{', '.join(said)} ({name})"


def gains_table(gains: Sequence[Gain]) -> str:
    """Every planner beside its prior."""
    if not gains:
        return ""
    headings = ["planner", "prior", "change", "95 % interval", "prior alone", "planned", "data", "world", "how sure"]
    rows = [
        [
            words(title_of(g.entry.planner)),
            words(g.entry.prior),
            Cell(f'<span class="{g.verdict}">{level(g.change.value, plus=True)}</span>', g.change.value, number=True),
            figures(_between(g.change.low, g.change.high, plus=True), g.change.low),
            figures(level(g.before), g.before),
            figures(level(g.after), g.after),
            words(g.entry.dataset),
            words(g.entry.world),
            words(g.basis),
        ]
        for g in gains
    ]
    return section("gains", "What planning gained", table("gains", headings, rows))


def _between(low: float | None, high: float | None, plus: bool = False) -> str:
    if low is None or high is None or low == high:
        return "unknown"
    return f"{level(low, plus)} to {level(high, plus)}"


def results(evaluations: Sequence[Evaluation], entries: Sequence[Entry]) -> str:
    """Intervals, latency, and every row."""
    if not evaluations:
        lead = "None yet: refplan evaluate RUN --out RUN/results.csv adds a row."
        return section("results", "Results", "", lead)
    panels: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        panels.setdefault((entry.dataset, entry.world), []).append(entry)
    charts = [_intervals(*place, inside) for place, inside in panels.items()]
    charts += [_latency(entries)]
    headings = ["planner", "prior", "score", "95 % interval", "return", "ms per action", "seed", "episodes"]
    headings += ["settings", "data", "world", "command", "commit"]
    body = grid(charts) + table("results", headings, [_row(each) for each in evaluations])
    return section("results", "Results", body, "Intervals are 95 % bootstrap intervals. Press a heading to sort.")


def _row(each: Evaluation) -> list[Cell]:
    settings = pairs((name, escape(_plain(value))) for name, value in each.settings.items())
    return [
        words(title_of(each.planner)),
        words(each.prior),
        figures(level(each.score), each.score),
        figures(_between(each.score_low, each.score_high), each.score_low),
        figures(level(each.earned), each.earned),
        figures(number(each.ms_per_action), each.ms_per_action),
        figures(each.seed, float(each.seed) if each.seed.lstrip("-").isdigit() else None),
        figures(str(each.episodes), each.episodes),
        folded(_short(each.settings), settings) if each.settings else words(""),
        words(each.dataset),
        words(each.world),
        folded("show", code(each.command)) if each.command else words(""),
        Cell(code(each.commit) if each.commit else UNKNOWN, each.commit),
    ]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _short(settings: dict[str, Any]) -> str:
    known = [f"{short} {_plain(settings[name])}" for name, short in SHORT.items() if name in settings]
    return ", ".join(known) or str(settings.get("preset", settings.get("run", "show")))


def _labels(entries: Sequence[Entry]) -> list[str]:
    """Planner and prior, and whatever setting tells two of the same apart."""
    labels = []
    for entry in entries:
        alike = [e for e in entries if (e.planner, e.prior) == (entry.planner, entry.prior)]
        names = {name for e in alike for name in e.settings}
        told = [n for n in sorted(names) if len({json.dumps(e.settings.get(n)) for e in alike}) > 1]
        extra = [f"{SHORT.get(n, n)} {_plain(entry.settings.get(n, UNKNOWN))}" for n in told]
        labels.append(" · ".join([title_of(entry.planner), entry.prior, *extra[:3]]))
    return labels


def _intervals(dataset: str, world: str, entries: Sequence[Entry]) -> str:
    scored = all(entry.scored for entry in entries)
    marks = []
    for entry, label in zip(entries[:MOST_MARKS], _labels(entries), strict=False):
        value, low, high = entry.interval
        text = level(value) if low == high else f"{level(value)} [{level(low)}, {level(high)}]"
        single = [(r.score if scored else r.earned) for r in entry.rows] if len(entry.rows) > 1 else []
        colour = PLANNER_COLOUR.get(entry.planner, 5)
        marks.append(Mark(label, value, low, high, text, colour, tuple(v for v in single if v is not None)))
    title = f"{'Score' if scored else 'Return'} in {world}{f', data {dataset}' if dataset else ''}"
    note = f"The first {MOST_MARKS} of {len(entries)}." if len(entries) > MOST_MARKS else ""
    return dot_chart(title, marks, "normalised score" if scored else "return", note=note)


def _latency(entries: Sequence[Entry]) -> str:
    known = [(e, label) for e, label in zip(entries, _labels(entries), strict=True) if e.ms_per_action is not None]
    marks = [
        Mark(label, e.ms_per_action or 0.0, 0.0, 0.0, f"{number(e.ms_per_action)} ms", PLANNER_COLOUR.get(e.planner, 5))
        for e, label in known[:MOST_MARKS]
    ]
    marks = [mark._replace(low=mark.value, high=mark.value) for mark in marks]
    note = "Time of one call divided by the episodes that share it; compilation is not in it."
    return dot_chart("Time per action", marks, "milliseconds, logarithmic", log=True, note=note) if marks else ""


def curves(trainings: Sequence[Training]) -> str:
    """One fold per training, one small chart per metric."""
    if not trainings:
        return ""
    folds = []
    for index, each in enumerate(trainings):
        charts = [
            line_chart(name, [Line(name, each.steps, y)], "updates", size=SMALL) for name, y in each.metrics.items()
        ]
        last = f"{int(each.steps[-1]):,} updates, {len(each.metrics)} metrics"
        folds.append(
            f'<details class="fold"{" open" if index == 0 else ""}><summary><b>{escape(each.name)}</b> {last}</summary>'
            f'<div class="grid small">{"".join(charts)}</div></details>'
        )
    return section("curves", "Learning curves", "".join(folds))


def provenance(found: Found, made: dict[str, Any]) -> str:
    """How everything here was made, and what could not be read."""
    folds = []
    for run in found.runs:
        about = run.tables.get("provenance", {})
        inside = pairs((name, code(_plain(value))) for name, value in about.items() if name != "versions")
        versions = pairs((name, code(str(value))) for name, value in about.get("versions", {}).items())
        parts = [(name, table) for name, table in run.tables.items() if isinstance(table, dict) and "sha256" in table]
        sums = pairs((f"{name} ({table.get('class', '')})", code(str(table["sha256"]))) for name, table in parts)
        body = f"{inside}<h4>Versions</h4>{versions}<h4>Checksums (SHA-256)</h4>{sums}"
        folds.append(f'<details class="fold"><summary><b>{escape(run.name)}</b></summary>{body}</details>')
    made_by = pairs(
        [("command", code(made["command"])), ("commit", code(made["commit"] or UNKNOWN)), ("made", code(made["made"]))]
    )
    return section("provenance", "Provenance", f"{''.join(folds)}<h3>This page</h3>{made_by}")


def problems(found: Found) -> str:
    """What was left out, and why."""
    if not found.problems:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in found.problems)
    return f'<aside class="problems" role="note"><h2>Left out</h2><ul>{items}</ul></aside>'
