"""HDF5 files: D4RL's layout and our own, which differ in how they keep an episode's last observation.

Both hold one row per step: `observations, actions, rewards, terminals, timeouts`, optional `infos/qpos, infos/qvel`.
D4RL adds `next_observations` (the same data twice); ours adds `final_observations`, one row per episode.
"""

import contextlib
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from refplan.data.dataset import Dataset, Meta
from refplan.data.names import d4rl_meta, d4rl_name_of_file
from refplan.data.raw import REQUIRED, Raw
from refplan.errors import RefplanError
from refplan.files import atomic_path, sha256

if TYPE_CHECKING:
    import h5py

_KEYS = {
    "observations": ("observations",),
    "actions": ("actions",),
    "rewards": ("rewards",),
    "terminated": ("terminals", "terminated", "terminations"),
    "truncated": ("timeouts", "truncated", "truncations"),
    "next_observations": ("next_observations",),
    "final_observations": ("final_observations",),
    "known_final": ("episodes/known_final",),
    "qpos": ("infos/qpos",),
    "qvel": ("infos/qvel",),
}


def read_hdf5(path: str | Path) -> Raw:
    """The arrays and attributes of a D4RL file or one of ours."""
    path = Path(path)
    with open_hdf5(path) as file:
        if "episode_0" in file:
            raise RefplanError(
                f"{path}: this is the inner file of a Minari dataset. Give the dataset's folder "
                "(the one that contains 'data') or its id."
            )
        keys = {name: next((k for k in spelt if k in file), None) for name, spelt in _KEYS.items()}
        missing = [name for name in REQUIRED if keys[name] is None and name != "truncated"]
        if missing:
            raise RefplanError(
                f"{path}: not a dataset in a layout refplan knows: it lacks {', '.join(missing)}. "
                f"It holds: {', '.join(sorted(file)) or 'nothing'}."
            )
        arrays = {name: read_array(file, key, path) for name, key in keys.items() if key is not None}
        lengths = read_array(file, "episodes/length", path) if "episodes/length" in file else None
        raw = Raw(arrays, _read_meta(file, path), lengths)
    if "truncated" not in arrays:
        arrays["truncated"] = np.zeros(len(arrays["terminated"]), bool)
        raw.remarks.append("the file has no 'timeouts': only terminations end an episode")
    return raw


@contextlib.contextmanager
def open_hdf5(path: Path) -> Generator["h5py.File"]:
    """An HDF5 file opened for reading; one that cannot be read is a clear error."""
    import h5py

    if not path.is_file():
        raise RefplanError(f"{path}: no such file.")
    try:
        if not h5py.is_hdf5(path):
            raise OSError("its first bytes are not those of HDF5")
        with h5py.File(path, "r") as file:
            yield file
    except OSError as error:
        raise RefplanError(
            f"{path}: cannot be read as HDF5 ({error}). It may be another kind of file, "
            "or damaged or cut short; restore or download it again."
        ) from None


def read_array(file: Any, key: str, path: Path) -> np.ndarray:
    """One dataset; real numbers come as float32 without a second copy, everything else as stored."""
    import h5py

    dataset = file[key]
    if not isinstance(dataset, h5py.Dataset):
        raise RefplanError(f"{path}: '{key}' is a group, not an array. refplan reads plain arrays of numbers.")
    if dataset.dtype.kind == "f" and dataset.dtype != np.float32:
        return dataset.astype(np.float32)[()]
    return np.asarray(dataset[()])


def _read_meta(file: "h5py.File", path: Path) -> Meta:
    attributes = {key: _plain_attribute(value) for key, value in file.attrs.items()}
    known = d4rl_name_of_file(path.stem)
    if known is not None and "env_id" not in attributes:
        base = replace(d4rl_meta(known), recipe=_d4rl_recipe(file, known))
    else:
        base = Meta(name=path.stem)
    fields = {
        "name": "dataset",
        "env_id": "env_id",
        "flavour": "flavour",
        "recipe": "recipe",
        "ref_min": "ref_min_score",
        "ref_max": "ref_max_score",
        "ref_source": "ref_source",
        "action_low": "action_low",
        "action_high": "action_high",
    }
    found: dict[str, Any] = {ours: attributes[key] for ours, key in fields.items() if key in attributes}
    versions = {k.removesuffix("_version"): str(v) for k, v in attributes.items() if k.endswith("_version")}
    return replace(base, **found, source=str(path), checksum=sha256(path), versions=versions)


def _plain_attribute(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    return value.item() if isinstance(value, np.generic) else value


def _d4rl_recipe(file: "h5py.File", name: str) -> str:
    """D4RL's `metadata/*` in one line, without the weights it may hold."""
    import h5py

    said = []
    for key, value in file.get("metadata", {}).items():
        if isinstance(value, h5py.Dataset) and value.shape == ():
            said.append(f"{key} {_plain_attribute(value[()])}")
    return f"D4RL {name}" + (f" ({', '.join(said)})" if said else "")


def save_hdf5(data: Dataset, path: str | Path) -> None:
    """Write a dataset in our layout, compressed, atomically; `load` gives back the same arrays."""
    import h5py

    if not data.sequential:
        raise RefplanError(
            f"dataset '{data.meta.name}' was split by transition, so its rows are no longer episodes and cannot be "
            "written as such. Save the dataset before splitting it."
        )
    # Composed in memory: on a full disk HDF5 would end the whole process.
    with h5py.File(Path(path).name, "w", driver="core", backing_store=False) as file:
        for key, array in _layout(data).items():
            compression = {"compression": "gzip", "compression_opts": 9, "shuffle": True} if array.size else {}
            file.create_dataset(key, data=array, **compression)
        for key, value in _attributes(data).items():
            file.attrs[key] = value
        file.flush()
        image = file.id.get_file_image()
    with atomic_path(path) as temporary:
        temporary.write_bytes(image)


def _layout(data: Dataset) -> dict[str, np.ndarray]:
    last = data.ends - 1
    arrays = {
        "observations": data.observations,
        "actions": data.actions,
        "rewards": data.rewards,
        "terminals": data.terminated,
        "timeouts": data.truncated,
        "episodes/length": data.lengths.astype(np.int32),
        "episodes/return": data.returns,
    }
    inside = np.delete(np.arange(len(data)), last)
    if np.array_equal(data.next_observations[inside], data.observations[inside + 1]):
        arrays["final_observations"] = data.next_observations[last]
    else:  # successors that are not exactly the next row's observation are worth their space
        arrays["next_observations"] = data.next_observations
    if data.known_next is not None:
        arrays["episodes/known_final"] = data.known_next[last]
    if data.qpos is not None and data.qvel is not None:
        arrays |= {"infos/qpos": data.qpos, "infos/qvel": data.qvel}
    return arrays


def _attributes(data: Dataset) -> dict[str, Any]:
    meta = data.meta
    stated = {
        "dataset": meta.name,
        "env_id": meta.env_id,
        "flavour": meta.flavour,
        "recipe": meta.recipe,
        "ref_min_score": meta.ref_min,
        "ref_max_score": meta.ref_max,
        "ref_source": meta.ref_source,
        "action_low": meta.action_low,
        "action_high": meta.action_high,
        "transitions": len(data),
        "episodes": data.episodes,
        "return_mean": float(data.returns.mean()),
        "return_std": float(data.returns.std()),
        "return_min": float(data.returns.min()),
        "return_max": float(data.returns.max()),
    }
    versions = {f"{package}_version": version for package, version in meta.versions.items()}
    return {key: value for key, value in {**stated, **versions}.items() if value is not None}
