"""Run folders: what was trained, how, and what came of it, readable without anything else.

runs/x/
  run.toml                settings of every part, provenance (command, commit, versions, machine, seeds, wall time)
  prior.safetensors       one file per saved object: its structure and its arrays
  metrics.csv             learning curves (written by `fit`)
  results.csv             one row per evaluation
"""

import csv
import io
import json
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from refplan.errors import RefplanError
from refplan.files import sha256, write_text
from refplan.logs import read_csv
from refplan.modules import load_module, save_module
from refplan.provenance import command, commit, provenance
from refplan.settings import settings_of, to_toml

FORMAT = 1
COLUMNS = (
    "dataset",
    "prior",
    "planner",
    "world",
    "seed",
    "episodes",
    "return",
    "score",
    "score_lo",
    "score_hi",
    "ms_per_action",
    "wall_s",
    "settings",
    "command",
    "commit",
)


def save(
    folder: str | Path,
    *,
    seeds: list[int] | None = None,
    wall_s: float | None = None,
    without: Collection[str] = (),
    **parts: Any,
) -> Path:
    """Write agents, models and plain notes (dicts of numbers and words) into a run folder; known parts are replaced.

    Other parts of an earlier save stay, but for those named in `without`.
    """
    folder = Path(folder)
    tables = read_tables(folder) if (folder / "run.toml").exists() else {}
    tables = {name: table for name, table in tables.items() if name not in without}
    for name, part in parts.items():
        if not name.replace("-", "_").isidentifier():
            raise RefplanError(f"'{name}' is not a usable part name; use letters, digits, underscores and hyphens.")
        if isinstance(part, dict):
            tables[name] = part
            continue
        path = folder / f"{name}.safetensors"
        save_module(path, part)
        tables[name] = {"class": type(part).__name__, "sha256": sha256(path), **settings_of(part)}
    tables["provenance"] = _flat(provenance(seeds, wall_s))
    # The table of contents is written last: a folder without it is unfinished, never half-right.
    write_text(folder / "run.toml", to_toml({"refplan": {"format": FORMAT}, **tables}))
    return folder


def load_run(folder: str | Path) -> dict[str, Any]:
    """Every part of a run folder by name; needs nothing but the folder."""
    folder = Path(folder)
    tables = read_tables(folder)
    parts: dict[str, Any] = {}
    for name, table in tables.items():
        if "sha256" not in table:
            parts[name] = table
            continue
        path = folder / f"{name}.safetensors"
        if not path.is_file():
            raise RefplanError(f"{path}: missing, though run.toml lists it. The folder was not copied whole.")
        if sha256(path) != table["sha256"]:
            raise RefplanError(f"{path}: does not match its checksum in run.toml; it is damaged or from another run.")
        parts[name] = load_module(path)
    return parts


def read_tables(folder: Path) -> dict[str, dict[str, Any]]:
    """What run.toml says about every part, without loading any."""
    path = folder / "run.toml"
    if not folder.is_dir():
        raise RefplanError(f"{folder}: no such run folder.")
    if not path.is_file():
        raise RefplanError(f"{folder}: not a finished refplan run folder (no run.toml in it).")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        made_with = int(tables.pop("refplan")["format"])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise RefplanError(f"{path}: cannot be read as a run description ({error!r}).") from None
    if made_with > FORMAT:
        raise RefplanError(f"{path}: format {made_with} is newer than this refplan reads ({FORMAT}); upgrade refplan.")
    return tables


def _flat(nested: dict[str, Any]) -> dict[str, Any]:
    """TOML tables hold plain values; a nested mapping becomes an inline table."""
    return {name: value for name, value in nested.items() if value is not None}


def result_row(result: Any, **labels: Any) -> dict[str, Any]:
    """One CSV row of an evaluation `Result`; labels fill `dataset`, `prior`, `planner`, `seed`, `settings` and more."""
    score = result.score_interval
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row |= {
        "world": result.task,
        "episodes": len(result.returns),
        "return": result.return_interval.value,
        "score": "" if score is None else score.value,
        "score_lo": "" if score is None else score.low,
        "score_hi": "" if score is None else score.high,
        "ms_per_action": result.ms_per_action,
        "wall_s": result.wall_s,
        "command": command(),
        "commit": commit(),
        # One number per episode: agents evaluated under one seed met the same starts, so they can be compared in pairs.
        "returns": json.dumps([float(f"{value:.7g}") for value in result.returns]),
    }
    settings = labels.pop("settings", {})
    return {**row, "settings": json.dumps(settings, sort_keys=True), **labels}


def append_results(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a results CSV; the whole file is rewritten atomically, so a kill loses nothing."""
    path = Path(path)
    old: list[dict[str, Any]] = list(read_csv(path)) if path.exists() else []
    write_results(path, [*old, *rows])


def write_results(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """A results CSV with exactly these rows, written atomically."""
    missing = [c for c in COLUMNS for row in rows if c not in row]
    if missing:
        raise RefplanError(f"{path}: results need the column '{missing[0]}'; is this another kind of CSV file?")
    columns = list(COLUMNS) + sorted({c for row in rows for c in row} - set(COLUMNS))
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(Path(path), out.getvalue())


def read_results(path: str | Path) -> list[dict[str, str]]:
    """The rows of a results CSV."""
    if not Path(path).is_file():
        raise RefplanError(f"{path}: no such results file.")
    return read_csv(path)
