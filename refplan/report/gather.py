"""Everything a report can show, found in run folders and files; what cannot be read is listed, not dropped."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from refplan.errors import RefplanError
from refplan.logs import read_csv
from refplan.report.record import Recording, is_recording, load_recording
from refplan.store import COLUMNS, read_tables


@dataclass(frozen=True)
class Run:
    """A run folder: what its run.toml says."""

    name: str
    tables: dict[str, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One row of a results file."""

    dataset: str
    prior: str
    planner: str  # "none" for a prior alone
    world: str
    seed: str
    episodes: int
    earned: float  # mean return
    score: float | None
    score_low: float | None
    score_high: float | None
    ms_per_action: float | None
    settings: dict[str, Any]
    command: str
    commit: str
    returns: Float[np.ndarray, " episodes"] | None  # per episode, where the file has them


@dataclass(frozen=True, eq=False)
class Training:
    """Learning curves of one folder."""

    name: str
    steps: Float[np.ndarray, " rows"]
    metrics: dict[str, Float[np.ndarray, " rows"]]


@dataclass(frozen=True)
class Judgement:
    """One diagnosis.json: a model judged on some data (`refplan diagnose --out`)."""

    name: str
    document: dict[str, Any]


@dataclass
class Found:
    """All of it, in the order it was found."""

    runs: list[Run] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    recordings: dict[str, Recording] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show, and nothing to complain about."""
        return not any((self.runs, self.evaluations, self.trainings, self.judgements, self.recordings, self.problems))


def gather(sources: Sequence[str | Path]) -> Found:
    """Look through run folders, folders of run folders, and single files (.csv, .npz, .json)."""
    found, seen = Found(), set[Path]()
    for source in map(Path, sources):
        if not source.exists():
            raise RefplanError(f"{source}: no such file or folder to report on.")
        for path, name in _files(source):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                _read(path, name, found, alone=path == source)
    if found.empty:
        raise RefplanError(
            f"{', '.join(map(str, sources))}: nothing to report on. A run folder has a run.toml, metrics.csv or "
            "results; make one with 'refplan fit' and 'refplan evaluate ... --out FOLDER/results.csv'."
        )
    return found


def _files(source: Path) -> Iterator[tuple[Path, str]]:
    """Files that may hold something, each with the name its folder has in the report."""
    if source.is_file():
        yield source, source.stem
        return
    root = source.resolve()
    base = root.parent if (root / "run.toml").exists() else root
    for path in sorted(root.rglob("*")):
        # `stages` is where `refplan run` keeps its work; what counts of it is in the run folder itself.
        skip = any(part.startswith(".") or part == "stages" for part in path.relative_to(root).parts)
        if path.is_file() and not skip and (path.suffix in (".csv", ".npz") or path.name in _NAMED):
            folder = path.parent.relative_to(base).as_posix()
            yield path, root.name if folder == "." else folder


def _read(path: Path, name: str, found: Found, alone: bool) -> None:
    """Put what one file holds into `found`; `alone` means that the user named the file."""
    kind: Callable[[Path, str, Found], None] | None = _NAMED.get(path.name)
    if kind is None and path.suffix == ".csv" and (alone or _is_results(path)):
        kind = _read_results
    if kind is None and path.suffix == ".npz" and (alone or is_recording(path)):
        kind = _read_recording
    if kind is None and path.suffix == ".json" and alone:
        kind = _read_judgement
    if kind is None and alone:
        raise RefplanError(f"{path}: a report reads folders, results (.csv), recordings (.npz) and diagnosis.json.")
    if kind is not None:
        try:
            kind(path, name, found)
        except (RefplanError, OSError, ValueError, KeyError, TypeError, csv.Error) as problem:
            text = str(problem) if isinstance(problem, RefplanError) else f"{path}: {problem or type(problem).__name__}"
            found.problems.append(text)


def _read_run(path: Path, name: str, found: Found) -> None:
    found.runs.append(Run(name, read_tables(path.parent)))


def _read_training(path: Path, name: str, found: Found) -> None:
    rows = read_csv(path)
    if not rows:
        raise RefplanError(f"{path}: no row in it yet.")
    columns = {key: np.array([float(row[key]) for row in rows]) for key in rows[0]}
    found.trainings.append(Training(name, columns.pop("step"), columns))


def _read_judgement(path: Path, name: str, found: Found) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or not isinstance(document.get("diagnoses"), dict):
        raise RefplanError(f"{path}: not the diagnosis.json that 'refplan diagnose --out' writes.")
    found.judgements.append(Judgement(name, document))


def _read_recording(path: Path, name: str, found: Found) -> None:
    folder = name.removesuffix("/episodes")
    found.recordings[path.stem if folder == path.stem else f"{folder}: {path.stem}"] = load_recording(path)


def _is_results(path: Path) -> bool:
    with open(path, encoding="utf-8", errors="replace") as file:
        return set(COLUMNS) <= set(file.readline().strip().split(","))


def _read_results(path: Path, name: str, found: Found) -> None:
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline=""))
    missing = set(COLUMNS) - set(reader.fieldnames or ())
    if missing:
        raise RefplanError(f"{path}: no results file: it lacks the columns {', '.join(sorted(missing))}.")
    for row in reader:
        try:
            found.evaluations.append(_evaluation(row))
        except (ValueError, TypeError, KeyError) as problem:
            found.problems.append(f"{path}, line {reader.line_num}: a damaged row was left out ({problem}).")


def _evaluation(row: dict[Any, Any]) -> Evaluation:
    if None in row or None in row.values():
        raise ValueError("it has too many or too few columns")
    settings = json.loads(row["settings"] or "{}")
    returns = json.loads(row.get("returns") or "[]")
    words = {name: row[name] for name in ("dataset", "prior", "world", "seed", "command", "commit")}
    score, low, high, ms = (_number(row[name]) for name in ("score", "score_lo", "score_hi", "ms_per_action"))
    earned = _number(row["return"])
    if earned is None or not isinstance(settings, dict):
        raise ValueError("it has no return, or its settings are not JSON")
    return Evaluation(
        **words,
        planner=row["planner"] or "none",
        episodes=int(row["episodes"]),
        earned=earned,
        score=score,
        score_low=low,
        score_high=high,
        ms_per_action=ms,
        settings=settings,
        returns=np.array(returns, np.float64) if returns else None,
    )


def _number(text: str) -> float | None:
    if text == "":
        return None
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"'{text}' is not a finite number")
    return value


_NAMED: dict[str, Callable[[Path, str, Found], None]] = {
    "run.toml": _read_run,
    "metrics.csv": _read_training,
    "diagnosis.json": _read_judgement,
}
