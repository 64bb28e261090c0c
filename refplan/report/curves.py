"""Learning curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refplan.errors import MissingExtraError, RefplanError
from refplan.files import atomic_path
from refplan.logs import read_csv

FORMATS = (".png", ".svg", ".pdf")


def import_pyplot() -> Any:
    """matplotlib without a screen."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError("matplotlib", "plot", "Drawing figures") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def draw_curves(runs: Sequence[Path], out: Path) -> None:
    """One panel per metric, one line per run, from each folder's metrics.csv."""
    if out.suffix not in FORMATS:
        raise RefplanError(f"{out}: figures are written as {', '.join(FORMATS)}.")
    curves = {str(folder.relative_to(run.parent)): _curves(folder) for run in runs for folder in _trainings(run)}
    names = list(dict.fromkeys(name for metrics in curves.values() for name in metrics if name != "step"))
    plt = import_pyplot()
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 2.6 * rows), squeeze=False, layout="constrained")
    for panel, name in zip(axes.flat, names, strict=False):
        for label, metrics in curves.items():
            if name in metrics:
                panel.plot(metrics["step"], metrics[name], label=label, linewidth=1.2)
        panel.set_title(name, fontsize=10)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(names) :]:
        panel.axis("off")
    for panel in axes[-1]:
        panel.set_xlabel("updates")
    if len(curves) > 1:
        axes.flat[0].legend(fontsize=8)
    with atomic_path(out) as temporary:
        figure.savefig(temporary, format=out.suffix[1:], dpi=120)
    plt.close(figure)


def _trainings(run: Path) -> list[Path]:
    """The folders of a run that hold learning curves: itself, or the parts inside."""
    found = sorted(path.parent for path in run.rglob("metrics.csv"))
    if not found:
        raise RefplanError(f"{run}: no metrics.csv in it; is this a run folder?")
    return found


def _curves(run: Path) -> dict[str, np.ndarray]:
    rows = read_csv(run / "metrics.csv")
    if not rows:
        raise RefplanError(f"{run / 'metrics.csv'}: no row in it yet.")
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
