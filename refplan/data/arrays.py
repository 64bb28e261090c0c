"""People's own logs: `.npz` files, a dict of arrays, or a list of episodes; no environment needed."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refplan.data.dataset import Meta
from refplan.data.raw import REQUIRED, Raw
from refplan.errors import RefplanError, unknown_name
from refplan.files import sha256

_SPELLINGS = {
    "observations": ("observations", "obs", "observation"),
    "actions": ("actions", "action"),
    "rewards": ("rewards", "reward"),
    "terminated": ("terminated", "terminals", "terminations"),
    "truncated": ("truncated", "timeouts", "truncations"),
    "next_observations": ("next_observations", "next_obs", "next_observation"),
    "final_observations": ("final_observations",),
    "known_final": ("known_final",),
    "qpos": ("qpos", "infos/qpos"),
    "qvel": ("qvel", "infos/qvel"),
}
_NAMES = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings}
_META = ("name", "env_id", "flavour", "recipe", "ref_min", "ref_max", "ref_source", "action_low", "action_high")


def read_npz(path: str | Path) -> Raw:
    """An `.npz` file with the arrays of `read_dict`; nothing in it is ever unpickled."""
    path = Path(path)
    if not path.is_file():
        raise RefplanError(f"{path}: no such file.")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not a zip of arrays as numpy.savez makes it, or it is cut short")
        with np.load(path, allow_pickle=False) as file:
            content = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise RefplanError(
            f"{path}: cannot be read as .npz ({error}). Save plain arrays of numbers with numpy.savez_compressed; "
            "pickled objects are never loaded."
        ) from None
    raw = read_dict(content, str(path))
    if raw.meta.name == Meta().name:
        raw.replace_meta(name=path.stem)
    raw.replace_meta(source=str(path), checksum=sha256(path))
    return raw


def read_dict(content: Mapping[str, Any], where: str = "the dict of arrays") -> Raw:
    """Flat arrays by name (`observations` or `obs`, ...), plus metadata such as `env_id`, `action_low`, `ref_min`."""
    arrays, stated = {}, {}
    for key, value in content.items():
        if value is None:
            continue
        if key in _META:
            stated[key] = _meta_value(value)
        elif key in ("dones", "done"):
            raise RefplanError(_TWO_FLAGS.format(where=where, key=key))
        elif key not in _NAMES:
            raise unknown_name(f"array in {where}", key, [*_NAMES, *_META])
        elif _NAMES[key] in arrays:
            raise RefplanError(f"{where}: holds '{_NAMES[key]}' twice, under two spellings. Keep one of them.")
        else:
            arrays[_NAMES[key]] = np.asarray(value)
    missing = [name for name in REQUIRED if name not in arrays and name != "truncated"]
    if missing:
        raise RefplanError(
            f"{where}: lacks {', '.join(missing)}. Needed: observations, actions, rewards and terminated, one row per "
            "step; truncated where episodes were cut; next_observations, or final_observations per episode."
        )
    raw = Raw(arrays, Meta(**stated))
    if "truncated" not in arrays:
        arrays["truncated"] = np.zeros(len(arrays["terminated"]), bool)
        raw.remarks.append("no 'truncated' given: only terminations end an episode")
    return raw


_TWO_FLAGS = (
    "{where}: '{key}' does not say whether the world ended or only the recording did, and learning from data needs to "
    "know. Give 'terminated' (the world ended) and 'truncated' (time limit or cut)."
)


def _meta_value(value: Any) -> Any:
    value = np.asarray(value)
    return value.item() if value.ndim == 0 else tuple(value.tolist())


def read_episodes(episodes: Sequence[Mapping[str, Any]]) -> Raw:
    """A list of episodes, each a dict of arrays with T rows; `observations` may have T+1.

    `terminated` and `truncated` may be arrays or one bool for the end of the episode. An episode that ends without a
    flag was cut: a truncation.
    """
    if len(episodes) == 0:
        raise RefplanError("the list of episodes is empty.")
    read = [_read_episode(episode, f"episode {number} of the list") for number, episode in enumerate(episodes)]
    for number, (rows, _) in enumerate(read):
        if set(rows) != set(read[0][0]):
            odd = ", ".join(sorted(set(rows) ^ set(read[0][0])))
            raise RefplanError(f"episode {number} of the list: holds other arrays than episode 0: {odd}.")
    arrays = {name: _join(name, [rows[name] for rows, _ in read]) for name in read[0][0]}
    if "next_observations" not in arrays:
        final = [rows["observations"][-1:] if last is None else last for rows, last in read]
        arrays["final_observations"] = _join("observations", final)
        arrays["known_final"] = np.array([last is not None for _, last in read])
    return Raw(arrays, Meta(name="episodes"), np.array([len(rows["rewards"]) for rows, _ in read], np.int64))


def _read_episode(episode: Any, where: str) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """The arrays of one episode with T rows each, and the observation after them (one row) if there is one."""
    if not isinstance(episode, Mapping):
        raise RefplanError(f"{where}: is a {type(episode).__name__}; it needs a dict of arrays.")
    arrays = read_dict({"terminated": False, "truncated": False, **_respelt(episode)}, where).arrays
    steps = arrays["rewards"].size
    if steps == 0:
        raise RefplanError(f"{where}: has no steps. Leave it out.")
    for name in ("terminated", "truncated"):
        arrays[name] = _flag_rows(arrays[name], steps, where, name)
    arrays["truncated"][-1] |= not arrays["terminated"][-1]
    last = None
    if len(arrays["observations"]) == steps + 1:
        last, arrays["observations"] = arrays["observations"][steps:], arrays["observations"][:steps]
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != steps:
            raise RefplanError(
                f"{where}: {name} has shape {array.shape}, but there are {steps} rewards. Every array needs one row "
                "per step (observations may have one more: the observation after the last step)."
            )
    return arrays, last


def _respelt(episode: Mapping[str, Any]) -> dict[str, Any]:
    return {_NAMES.get(key, key): value for key, value in episode.items()}


def _flag_rows(flag: np.ndarray, steps: int, where: str, name: str) -> np.ndarray:
    """A flag per row; a single one stands for the end of the episode."""
    if not np.isin(flag, (0, 1)).all():
        raise RefplanError(f"{where}: {name} is {flag}; it needs true or false.")
    if flag.ndim > 0:
        return np.array(flag, bool).reshape(-1)
    rows = np.zeros(steps, bool)
    rows[-1] = bool(flag)
    return rows


def _join(name: str, arrays: list[np.ndarray]) -> np.ndarray:
    sizes = {a.shape[1:] for a in arrays}
    if len(sizes) > 1:
        raise RefplanError(f"the episodes disagree on the size of {name}: {', '.join(map(str, sorted(sizes)))}.")
    return np.concatenate(arrays)
