"""Figures of a `Diagnosis`: error and calibration ahead, imagined against realised returns, the latent's movement."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from refplan.dynamics.diagnose_record import Diagnosis
from refplan.errors import RefplanError
from refplan.files import atomic_path
from refplan.report.curves import FORMATS, import_pyplot

Diagnoses = Mapping[str, Diagnosis]


def draw_diagnoses(diagnoses: Diagnoses, folder: Path, suffix: str = ".png") -> list[Path]:
    """One file per figure in `folder`; diagnoses on several data share each figure, told apart by their names."""
    if suffix not in FORMATS:
        raise RefplanError(f"figures are written as {', '.join(FORMATS)}, not '{suffix}'.")
    plt = import_pyplot()
    figures: dict[str, Callable[[Any, Diagnoses], Any]] = {
        "errors": _draw_errors,
        "calibration": _draw_calibration,
        "returns": _draw_returns,
    }
    if any(d.latent is not None for d in diagnoses.values()):
        figures["latent"] = _draw_latent
    written = []
    for name, draw in figures.items():
        figure = draw(plt, diagnoses)
        path = folder / f"{name}{suffix}"
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=suffix[1:], dpi=100)
        plt.close(figure)
        written.append(path)
    return written


def _draw_errors(plt: Any, diagnoses: Diagnoses) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for number, (name, d) in enumerate(diagnoses.items()):
        steps, colour = np.arange(1, d.horizon + 1), f"C{number}"
        left.plot(steps, d.errors.rmse, color=colour, label=name)
        left.fill_between(steps, d.errors.rmse_low, d.errors.rmse_high, color=colour, alpha=0.2, linewidth=0)
        left.plot(steps, d.errors.median, color=colour, linestyle=":")
        trivial = np.minimum(d.errors.rmse_stays, d.errors.rmse_drifts)
        left.plot(steps, trivial, color=colour, linestyle="--", linewidth=0.8)
        right.plot(steps, d.errors.coverage_90.mean(axis=1), color=colour, label=f"{name}, 90 %")
        right.plot(steps, d.errors.coverage_50.mean(axis=1), color=colour, linestyle=":", label=f"{name}, 50 %")
    left.set_title("RMSE (95 % band), median dotted, best trivial dashed", fontsize=9)
    left.set_ylabel("std of one-step changes")
    left.set_ylim(bottom=0)
    right.set_title("share of truths inside intervals", fontsize=9)
    for level in (0.5, 0.9):
        right.axhline(level, color="grey", linewidth=0.6)
    right.set_ylim(0, 1.02)
    _finish((left, right), "steps ahead")
    return figure


def _draw_calibration(plt: Any, diagnoses: Diagnoses) -> Any:
    figure, axis = plt.subplots(figsize=(4, 3.6), layout="constrained")
    axis.plot([0, 1], [0, 1], color="grey", linewidth=0.6)
    for number, (name, d) in enumerate(diagnoses.items()):
        axis.plot(d.errors.levels, d.errors.coverage[0], color=f"C{number}", marker=".", label=f"{name}, 1 step")
        far = f"{name}, {d.horizon} steps"
        axis.plot(d.errors.levels, d.errors.coverage[-1], color=f"C{number}", marker=".", linestyle=":", label=far)
    axis.set_title("calibration (below the line: overconfident)", fontsize=9)
    axis.set_ylabel("share of truths inside")
    _finish((axis,), "central interval")
    return figure


def _draw_returns(plt: Any, diagnoses: Diagnoses) -> Any:
    horizons = [r.horizon for r in next(iter(diagnoses.values())).returns if not r.with_value]
    shape = (len(diagnoses), len(horizons))
    figure, axes = plt.subplots(*shape, figsize=(2.7 * shape[1], 2.6 * shape[0]), squeeze=False, layout="constrained")
    for line, (name, d) in zip(axes, diagnoses.items(), strict=True):
        for axis, match in zip(line, (r for r in d.returns if not r.with_value), strict=True):
            axis.scatter(match.imagined, match.realised, s=4, alpha=0.5, linewidths=0)
            axis.axline((match.realised.mean(), match.realised.mean()), slope=1, color="grey", linewidth=0.6)
            axis.set_title(f"{name}, H={match.horizon}, rank {match.spearman:.2f}", fontsize=9)
            axis.grid(alpha=0.3)
        line[0].set_ylabel("realised return")
    for axis in axes[-1]:
        axis.set_xlabel("imagined return")
    return figure


def _draw_latent(plt: Any, diagnoses: Diagnoses) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for number, (name, d) in enumerate(diagnoses.items()):
        if d.latent is not None:
            left.plot(d.latent.distance, color=f"C{number}", linewidth=1, label=name)
            right.plot(np.arange(1, 1 + len(d.latent.movement)), d.latent.movement, color=f"C{number}", linewidth=1)
            left.axvline(d.latent.settled_after, color=f"C{number}", linestyle=":", linewidth=0.8)
    left.set_title("distance of mu from its late mean (dotted: settled)", fontsize=9)
    right.set_title("movement of mu per step", fontsize=9)
    _finish((left, right), "step of the episode")
    return figure


def _finish(axes: tuple[Any, ...], label: str) -> None:
    for axis in axes:
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    if len(axes) > 1 and axes[1].get_legend_handles_labels()[0]:
        axes[1].legend(fontsize=7)
