"""`load`: one door for every kind of data, each checked before it comes in."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from refplan.data.arrays import read_dict, read_episodes, read_npz
from refplan.data.check import Report, find_errors
from refplan.data.dataset import Dataset
from refplan.data.download import Progress, fetch_d4rl, find_d4rl, verify
from refplan.data.hdf5 import read_hdf5
from refplan.data.minari_source import (
    is_minari_folder,
    is_minari_id,
    local_minari_ids,
    minari_root,
    read_minari,
    read_minari_folder,
)
from refplan.data.names import D4RL_NAMES
from refplan.data.raw import Raw, cut_gaps
from refplan.errors import RefplanError, unknown_name

BUNDLED_FOLDER = Path(__file__).parent / "bundled"
_SUFFIXES = (".hdf5", ".h5", ".npz")
Source = str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]]


def load(
    source: Source,
    *,
    task: str | None = None,
    gaps: Literal["error", "truncate"] = "error",
    progress: Progress | None = None,
) -> Dataset:
    """A dataset by name, path or value; anything wrong with it raises one error that lists all of it.

    `source` is a bundled name, a D4RL name (downloaded once), a Minari id, a `.hdf5`, `.h5` or `.npz` path, a Minari
    folder, a dict of arrays, or a list of episodes. `task` names the task or Gymnasium id of data that does not say so
    itself. `gaps="truncate"` makes an episode end wherever the recording jumps without a flag.
    """
    raw = read(source, task=task, progress=progress)
    if gaps not in ("error", "truncate"):
        raise RefplanError(f"gaps='{gaps}' is unknown; use gaps='error' or gaps='truncate'.")
    errors, readable = find_errors(raw)
    if gaps == "truncate" and readable and any(e.code == "continuity" for e in errors):
        cut_gaps(raw)
        errors, _ = find_errors(raw)
    Report(raw.meta.name, errors).raise_errors()
    return raw.build()


def read(source: Source, *, task: str | None = None, progress: Progress | None = None) -> Raw:
    """What `load` reads, before it is checked and made a dataset."""
    if isinstance(source, str | Path):
        raw = _read_named(source, progress)
    elif isinstance(source, Mapping):
        raw = read_dict(source)
    elif isinstance(source, Sequence):
        raw = read_episodes(source)
    else:
        raise RefplanError(
            f"cannot load a {type(source).__name__}: give a name, a path, a dict of arrays or a list of episodes."
        )
    if task is not None:
        _set_task(raw, task)
    return raw


def _read_named(source: str | Path, progress: Progress | None) -> Raw:
    name, path = str(source), Path(source).expanduser()
    if name in bundled_index():
        return _read_bundled(name)
    if name in D4RL_NAMES:
        file = fetch_d4rl(name, progress)
        raw = read_hdf5(file)
        verify(file, raw.meta.checksum)
        return raw
    if path.exists() or path.suffix in _SUFFIXES:
        return _read_path(path)
    if is_minari_id(name) or is_minari_folder(minari_root() / name):
        return read_minari(name)
    more = " Or give a path (.hdf5, .h5, .npz, a Minari folder) or a Minari id (namespace/name-v0)."
    raise unknown_name("dataset", name, known_names(), more)


def _read_path(path: Path) -> Raw:
    if path.is_dir():
        if is_minari_folder(path):
            return read_minari_folder(path)
        raise RefplanError(f"{path}: a folder, but not a Minari dataset (no data/metadata.json in it).")
    if path.suffix == ".npz":
        return read_npz(path)
    if path.suffix in _SUFFIXES:
        return read_hdf5(path)
    raise RefplanError(f"{path}: unknown kind of file '{path.suffix}'. refplan reads {', '.join(_SUFFIXES)}.")


def _set_task(raw: Raw, name: str) -> None:
    """Metadata of a task for data that lacks its own; what the data states itself wins for reference returns."""
    from refplan.data import tasks

    found = tasks.task(name)
    raw.replace_meta(env_id=found.env_id, action_low=tuple(found.low.tolist()), action_high=tuple(found.high.tolist()))
    if found.references is not None and raw.meta.ref_min is None:
        low, high, said = found.references.low, found.references.high, found.references.source
        raw.replace_meta(ref_min=low, ref_max=high, ref_source=said)


@cache
def bundled_index() -> dict[str, dict[str, Any]]:
    """The datasets inside the package: name -> file, sizes, checksum and a sentence about it."""
    return json.loads((BUNDLED_FOLDER / "index.json").read_text(encoding="utf-8"))


def bundled_policies() -> dict[str, Path]:
    """The policy files inside the package, by name."""
    return {path.stem: path for path in sorted((BUNDLED_FOLDER / "policies").glob("*.safetensors"))}


def _read_bundled(name: str) -> Raw:
    entry = bundled_index()[name]
    raw = read_hdf5(BUNDLED_FOLDER / entry["file"])
    if raw.meta.checksum != entry["sha256"]:
        raise RefplanError(f"the bundled dataset '{name}' is damaged: its checksum is wrong. Install refplan again.")
    raw.replace_meta(source="bundled with refplan")
    return raw


def known_names() -> list[str]:
    """Every name `load` knows without a path: bundled, D4RL, and the Minari datasets on this machine."""
    return [*bundled_index(), *D4RL_NAMES, *local_minari_ids()]


@dataclass(frozen=True)
class Listed:
    """One line of `refplan data list`."""

    name: str
    kind: str  # "bundled", "d4rl" or "minari"
    here: bool  # whether it can be loaded without network
    about: str


def list_datasets() -> list[Listed]:
    """What can be loaded by name, what of it is on this machine, and what it is."""
    bundled = [Listed(name, "bundled", True, entry["about"]) for name, entry in bundled_index().items()]
    d4rl = [Listed(name, "d4rl", find_d4rl(name) is not None, "D4RL, physics of 2020") for name in D4RL_NAMES]
    minari = [Listed(name, "minari", True, "local Minari dataset") for name in local_minari_ids()]
    return bundled + d4rl + minari
