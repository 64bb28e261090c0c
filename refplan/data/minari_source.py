"""Minari datasets: local ones are read with h5py alone; the `minari` package is needed to download or for arrow files.

A Minari episode has T+1 observations and both flags per step. An episode that ends without a flag was cut.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from refplan.data.dataset import Meta
from refplan.data.hdf5 import open_hdf5
from refplan.data.raw import Raw
from refplan.errors import MissingExtraError, RefplanError
from refplan.files import sha256

if TYPE_CHECKING:
    import h5py

_ID = re.compile(r"(?:[-_\w]+/)+[-_\w]+-v\d+")
_EXAMPLE = "mujoco/hopper/medium-v0"


def is_minari_id(name: str) -> bool:
    """Whether a name has the form of a Minari id with a namespace, such as `mujoco/hopper/medium-v0`."""
    return _ID.fullmatch(name) is not None


def minari_root() -> Path:
    """The folder Minari keeps its datasets in."""
    stated = os.environ.get("MINARI_DATASETS_PATH")
    return Path(stated) if stated else Path.home() / ".minari" / "datasets"


def local_minari_ids() -> list[str]:
    """The ids of the Minari datasets on this machine."""
    root = minari_root()
    found = (path.parent.parent for path in root.glob("**/data/metadata.json"))
    return sorted(path.relative_to(root).as_posix() for path in found)


def is_minari_folder(path: Path) -> bool:
    """Whether a folder is a Minari dataset (or its inner `data` folder)."""
    return (path / "data" / "metadata.json").is_file() or (path / "metadata.json").is_file()


def read_minari(name: str) -> Raw:
    """A Minari dataset by id: the local copy if there is one, else downloaded by the `minari` package."""
    folder = minari_root() / name
    if not is_minari_folder(folder):
        _download(name)
    return read_minari_folder(folder)


def read_minari_folder(folder: str | Path) -> Raw:
    """A Minari dataset from its folder."""
    folder = Path(folder)
    data = folder / "data" if (folder / "data").is_dir() else folder
    try:
        described = json.loads((data / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RefplanError(f"{folder}: its metadata.json cannot be read ({error}); fetch the dataset again.") from None
    spec = json.loads(described.get("env_spec") or "{}")
    meta = _meta(described, spec, folder, data)
    if described.get("data_format", "hdf5") == "hdf5":
        with open_hdf5(data / "main_data.hdf5") as file:
            raw = _gather([_hdf5_episode(file[key], key, folder) for key in _episode_keys(file, folder)], meta)
    else:
        raw = _gather(list(_package_episodes(data)), meta)
    if spec.get("kwargs"):
        raw.remarks.append(
            f"recorded in {spec.get('id')} with settings {spec['kwargs']}; the env id is left out, because the plain "
            "id is another world. Register that variant as a Gymnasium id and give it as task"
        )
    return raw


def _meta(described: dict[str, Any], spec: dict[str, Any], folder: Path, data: Path) -> Meta:
    low, high = _box(described, "action_space", folder)
    _box(described, "observation_space", folder)
    main = data / "main_data.hdf5"
    scores = described.get("ref_min_score"), described.get("ref_max_score")
    return Meta(
        name=described.get("dataset_id") or folder.name,
        env_id=None if spec.get("kwargs") else spec.get("id"),
        recipe=described.get("description") or described.get("algorithm_name") or "",
        ref_min=scores[0],
        ref_max=scores[1],
        ref_source="the Minari dataset's metadata" if None not in scores else "",
        source=str(folder),
        checksum=sha256(main) if main.is_file() else "",
        versions={"minari": str(described.get("minari_version", ""))},
        action_low=low,
        action_high=high,
    )


def _box(described: dict[str, Any], which: str, folder: Path) -> tuple[Any, Any]:
    """(low, high) of a space with one axis of real numbers, None where unbounded; another space is an error."""
    space = json.loads(described.get(which) or "{}")
    if space.get("type") != "Box" or len(space.get("shape", ())) != 1 or not space["dtype"].startswith("float"):
        kind = f"{space.get('type')} {space.get('shape', '')} {space.get('dtype', '')}"
        raise RefplanError(
            f"{folder}: its {which.replace('_', ' ')} is {kind.strip()}, but refplan needs a Box of real numbers with "
            "one axis. Flatten it and give the arrays as .npz or dict instead."
        )
    bounds = np.asarray(space["low"], float), np.asarray(space["high"], float)
    finite = all(np.isfinite(b).all() for b in bounds)
    return (tuple(bounds[0].tolist()), tuple(bounds[1].tolist())) if finite else (None, None)


def _episode_keys(file: "h5py.File", folder: Path) -> list[str]:
    keys = sorted((k for k in file if k.startswith("episode_")), key=lambda k: int(k.removeprefix("episode_")))
    if not keys:
        raise RefplanError(f"{folder}: holds no episodes.")
    return keys


def _hdf5_episode(group: Any, key: str, folder: Path) -> dict[str, np.ndarray]:
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    missing = [name for name in names if name not in group]
    if missing:
        raise RefplanError(f"{folder}: {key} lacks {', '.join(missing)}; the dataset is damaged, fetch it again.")
    episode = {name: group[name][()] for name in names}
    infos = group.get("infos", {})
    return episode | {name: infos[name][()] for name in ("qpos", "qvel") if name in infos}


def _package_episodes(data: Path) -> Iterator[dict[str, np.ndarray]]:
    """Episodes through the `minari` package, for formats only it can read."""
    minari = _package("reading this Minari dataset (not stored as HDF5)")
    try:
        dataset = minari.MinariDataset(data)
    except ImportError as error:
        raise RefplanError(f"{data}: {error}") from None
    for episode in dataset.iterate_episodes():
        infos = episode.infos or {}
        yield {
            "observations": np.asarray(episode.observations),
            "actions": np.asarray(episode.actions),
            "rewards": np.asarray(episode.rewards),
            "terminations": np.asarray(episode.terminations),
            "truncations": np.asarray(episode.truncations),
        } | {name: np.asarray(infos[name]) for name in ("qpos", "qvel") if name in infos}


def _gather(episodes: list[dict[str, np.ndarray]], meta: Meta) -> Raw:
    """All episodes end to end."""
    lengths = np.array([len(e["rewards"]) for e in episodes], np.int64)
    for number, (episode, steps) in enumerate(zip(episodes, lengths, strict=True)):
        if steps == 0 or len(episode["observations"]) != steps + 1 or len(episode["actions"]) != steps:
            raise RefplanError(
                f"dataset '{meta.name}', episode {number}: {len(episode['observations'])} observations, "
                f"{len(episode['actions'])} actions and {steps} rewards; Minari stores one observation more than steps."
            )
        episode["final"] = episode["observations"][steps:]
        episode["truncations"][-1] |= not episode["terminations"][-1]
    wanted = {
        "observations": "observations",
        "actions": "actions",
        "rewards": "rewards",
        "terminated": "terminations",
        "truncated": "truncations",
    }
    wanted |= {name: name for name in ("qpos", "qvel") if all(name in e for e in episodes)}
    arrays = {}
    for ours, theirs in wanted.items():
        parts = [e.pop(theirs)[:steps] for e, steps in zip(episodes, lengths, strict=True)]
        arrays[ours] = _joined(parts)
    arrays["final_observations"] = _joined([e["final"] for e in episodes])
    return Raw(arrays, meta, lengths, both_flags=True)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """The parts end to end, real numbers as float32."""
    kind = np.float32 if parts[0].dtype.kind == "f" else parts[0].dtype
    joined = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), kind)
    at = 0
    for part in parts:
        joined[at : at + len(part)] = part
        at += len(part)
    return joined


def _package(purpose: str) -> Any:
    try:
        import minari
    except ImportError:
        raise MissingExtraError("minari", "minari", purpose) from None
    return minari


def _download(name: str) -> None:
    local = local_minari_ids()
    here = f" On this machine: {', '.join(local)}." if local else ""
    advice = (
        f"Fetch it on a machine with network (minari download {name}) and copy the folder to "
        f"{minari_root() / name}.{here}"
    )
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        raise RefplanError(
            f"Minari dataset '{name}' is not on this machine and HF_HUB_OFFLINE forbids a download. {advice}"
        )
    minari = _package(f"downloading the Minari dataset '{name}'")
    try:
        minari.download_dataset(name)
    except ValueError as error:  # the remote answered: no such id or version
        raise RefplanError(f"Minari dataset '{name}': {error} An id looks like '{_EXAMPLE}'.{here}") from None
    except ImportError:
        raise MissingExtraError("huggingface_hub", "minari", f"downloading the Minari dataset '{name}'") from None
    except Exception as error:  # the hub client's network errors share no base class
        raise RefplanError(f"Minari dataset '{name}' cannot be downloaded ({type(error).__name__}). {advice}") from None
