"""A model's diagnosis in the report: the verdict, key numbers, and the figures redrawn from diagnosis.json."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from refplan.report.charts import Line, line_chart, number, scatter_chart
from refplan.report.gather import Judgement
from refplan.report.html import UNKNOWN, figures, grid, section, table, words

MOST_POINTS = 300


def judgements(found: Sequence[Judgement], problems: list[str]) -> str:
    """All diagnosed models; one whose numbers cannot be read becomes a problem."""
    folds = []
    for index, each in enumerate(found):
        try:
            folds.append(_fold(each, is_open=index == 0))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as problem:
            problems.append(f"{each.name}: its diagnosis.json cannot be read ({type(problem).__name__}: {problem}).")
    if not folds:
        return ""
    lead = "Can the learned model be planned with? Errors are in units of the std of one-step changes in the data."
    return section("diagnosis", "Model diagnosis", "".join(folds), lead)


def _fold(each: Judgement, is_open: bool) -> str:
    diagnoses: dict[str, dict[str, Any]] = each.document["diagnoses"]
    said = "".join(
        f'<p><b>{escape(name)}</b> <span class="where">{escape(str(d["data"]))}</span><br>{escape(str(d["verdict"]))} '
        f"{''.join(f'<span class=chip>{escape(str(flag))}</span>' for flag in d['flags'])}</p>"
        for name, d in diagnoses.items()
    )
    if each.document.get("home_is_training_data"):
        said += '<p class="note">The home data is what the model was trained on; on new data expect larger errors.</p>'
    body = said + _numbers(diagnoses) + grid(_charts(diagnoses))
    state = " open" if is_open else ""
    return f'<details class="fold"{state}><summary><b>{escape(each.name)}</b></summary>{body}</details>'


def _array(values: Any) -> np.ndarray:
    """Numbers of the file; what could not be measured (null) is NaN."""
    return np.array(
        [[np.nan if v is None else v for v in row] if isinstance(row, list) else _one(row) for row in values], float
    )


def _one(value: Any) -> float:
    return np.nan if value is None else float(value)


def _numbers(diagnoses: dict[str, dict[str, Any]]) -> str:
    """A table with one line per data the model was judged on."""
    headings = ["data", "members", "error, 1 step", "error, last step", "best trivial, last", "in 90 %, 1 step"]
    headings += ["in 90 %, last", "rank of returns", "noise in scores", "latent saves"]
    rows = []
    for name, d in diagnoses.items():
        errors = d["errors"]
        rmse, inside = _array(errors["rmse"]), _array(errors["coverage_90"]).mean(axis=1)
        trivial = np.minimum(_array(errors["rmse_stays"]), _array(errors["rmse_drifts"]))
        plain = [r for r in d["returns"] if not r["with_value"]]
        deepest = max(d["plans"], key=lambda p: p["horizon"]) if d["plans"] else {}
        latent = d.get("latent")
        saves = None if not latent else _one(latent["nll_constant"]) - _one(latent["nll_mean"])
        rank = _one(plain[-1]["spearman"]) if plain else None
        noise = deepest.get("noise_share")
        rows.append(
            [
                words(name),
                figures(str(d["members"]), d["members"]),
                figures(number(rmse[0]), rmse[0]),
                figures(number(rmse[-1]), rmse[-1]),
                figures(number(trivial[-1]), trivial[-1]),
                figures(_percent(inside[0]), inside[0]),
                figures(_percent(inside[-1]), inside[-1]),
                figures(f"{number(rank)} at H={plain[-1]['horizon']}" if plain else UNKNOWN, rank),
                figures(_percent(noise), noise),
                figures(UNKNOWN if saves is None else f"{number(saves)} nat", saves),
            ]
        )
    return table("diagnosis", headings, rows)


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None or not np.isfinite(value) else f"{100 * value:.0f} %"


def _charts(diagnoses: dict[str, dict[str, Any]]) -> list[str]:
    charts = [_errors(diagnoses), _coverage(diagnoses), _calibration(diagnoses)]
    charts += [_returns(name, d) for name, d in diagnoses.items()]
    return [*charts, *([_latent(diagnoses)] if any(d.get("latent") for d in diagnoses.values()) else [])]


def _errors(diagnoses: dict[str, dict[str, Any]]) -> str:
    lines = []
    for colour, (name, d) in enumerate(diagnoses.items()):
        e = d["errors"]
        steps = np.arange(1.0, len(e["rmse"]) + 1)
        low, high = _array(e["rmse_low"]), _array(e["rmse_high"])
        trivial = np.minimum(_array(e["rmse_stays"]), _array(e["rmse_drifts"]))
        lines.append(Line(f"{name}: model", steps, _array(e["rmse"]), colour, "", low, high))
        lines.append(Line(f"{name}: best trivial guess", steps, trivial, colour, "dashed"))
    return line_chart("Error ahead (RMSE, 95 % band)", lines, "steps ahead", zero=True)


def _coverage(diagnoses: dict[str, dict[str, Any]]) -> str:
    lines = []
    for colour, (name, d) in enumerate(diagnoses.items()):
        for level, dash in ((90, ""), (50, "dotted")):
            inside = _array(d["errors"][f"coverage_{level}"]).mean(axis=1)
            steps = np.arange(1.0, len(inside) + 1)
            lines.append(Line(f"{name}: inside {level} %", steps, inside, colour, dash))
    title = "Share of truths inside the model's intervals"
    return line_chart(title, lines, "steps ahead", y_range=(0.0, 1.02), guides=(0.5, 0.9))


def _calibration(diagnoses: dict[str, dict[str, Any]]) -> str:
    lines = []
    for colour, (name, d) in enumerate(diagnoses.items()):
        levels, coverage = _array(d["errors"]["levels"]), _array(d["errors"]["coverage"])
        lines.append(Line(f"{name}: 1 step", levels, coverage[0], colour))
        lines.append(Line(f"{name}: {len(coverage)} steps", levels, coverage[-1], colour, "dotted"))
    title = "Calibration (below the diagonal: overconfident)"
    return line_chart(title, lines, "central interval", y_range=(0.0, 1.02), diagonal=True)


def _returns(name: str, d: dict[str, Any]) -> str:
    plain = [r for r in d["returns"] if not r["with_value"]]
    if not plain:
        return ""
    match = plain[-1]
    title = f"{name}: returns of {match['horizon']} steps, rank correlation {number(_one(match['spearman']))}"
    imagined, realised = _array(match["imagined"])[:MOST_POINTS], _array(match["realised"])[:MOST_POINTS]
    return scatter_chart(title, imagined, realised, "imagined", "realised")


def _latent(diagnoses: dict[str, dict[str, Any]]) -> str:
    lines = []
    for colour, (name, d) in enumerate(diagnoses.items()):
        if d.get("latent"):
            distance = _array(d["latent"]["distance"])
            lines.append(
                Line(
                    f"{name}: distance of the mean from its late mean",
                    np.arange(float(len(distance))),
                    distance,
                    colour,
                )
            )
    return line_chart("How the belief settles", lines, "step of the episode", zero=True)
