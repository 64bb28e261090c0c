"""Checking data at the door: one report of everything wrong and everything notable.

The checks run on the raw arrays, before a `Dataset` is made, so that a broken file gives one report of all its faults
instead of the first exception. Nothing is repaired here.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refplan.data.dataset import Dataset, Meta
from refplan.data.raw import FLAGS, PER_ROW, REQUIRED, Raw, blocks, gaps, raw_of
from refplan.errors import RefplanError

EDGE = 1e-5  # actions may exceed their box by rounding


@dataclass(frozen=True)
class Finding:
    """One thing found: a short code, a sentence, how many rows, and the first of them."""

    code: str
    message: str
    count: int = 1
    first_row: int | None = None


@dataclass(frozen=True)
class Report:
    """Everything wrong with a dataset (`errors`), everything worth knowing (`notes`), and its numbers (`summary`)."""

    name: str
    errors: tuple[Finding, ...]
    notes: tuple[Finding, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)
    replay: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """True when there is nothing wrong."""
        return not self.errors

    def to_dict(self) -> dict[str, Any]:
        """Plain values that are valid JSON: numbers that are not finite become null."""
        return plain({**dataclasses.asdict(self), "ok": self.ok})

    def text(self) -> str:
        """The report as lines to read."""
        lines = [f"{self.name}: " + ("no errors" if self.ok else f"{len(self.errors)} errors")]
        lines += [f"  error [{f.code}] {f.message}" for f in self.errors]
        lines += [f"  note  [{f.code}] {f.message}" for f in self.notes]
        lines += [f"  {key}: {_short(value)}" for key, value in self.summary.items()]
        if self.replay:
            lines += [f"  replay {key}: {_short(value)}" for key, value in self.replay.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def raise_errors(self) -> None:
        """Raise one `RefplanError` that names every error; do nothing when there is none."""
        if self.errors:
            listed = "\n".join(f"  - {f.message}" for f in self.errors)
            count = "1 error" if len(self.errors) == 1 else f"{len(self.errors)} errors"
            raise RefplanError(f"dataset '{self.name}' has {count}; correct the data first:\n{listed}")


def check_dataset(data: Dataset | Raw) -> Report:
    """Check a dataset, or the raw arrays of one that may be too broken to become a dataset."""
    from refplan.data.coverage import find_notes, summarise

    raw = raw_of(data) if isinstance(data, Dataset) else data
    errors, readable = find_errors(raw)
    if not readable:
        return Report(raw.meta.name, errors)
    unknown = None if not isinstance(data, Dataset) or data.known_next is None else int((~data.known_next).sum())
    return Report(raw.meta.name, errors, find_notes(raw, unknown), summarise(raw))


def find_errors(raw: Raw) -> tuple[tuple[Finding, ...], bool]:
    """Everything wrong, and whether types and shapes are right, so that the content could be looked at."""
    errors = [*_types(raw), *_shapes(raw)]
    if errors:
        usable = {n: a for n, a in raw.arrays.items() if a.dtype.kind in "fiub" and a.ndim <= 2}
        return (*errors, *_not_finite(usable)), False
    checks: tuple[Callable[[Raw], list[Finding]], ...] = (_bounds, _both_flags, _episodes, _continuity)
    found = [*_not_finite(raw.arrays), *_environment(raw)]
    for check in checks:
        found += check(raw)
    return tuple(found), True


def action_box(meta: Meta, action_dim: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The action bounds the metadata states, or those of a robot we know; None when nobody knows."""
    if meta.action_low is not None and meta.action_high is not None:
        return np.asarray(meta.action_low, np.float32), np.asarray(meta.action_high, np.float32)
    sizes = _known_sizes(meta)
    if sizes is None or sizes[1] != action_dim:
        return None
    return -np.ones(action_dim, np.float32), np.ones(action_dim, np.float32)


def _known_sizes(meta: Meta) -> tuple[int, int] | None:
    """(obs, action) sizes of the env id, if it is one refplan knows without making it; their action box is [-1, 1]."""
    from refplan.data.envs import known_env
    from refplan.data.physics import ROBOTS

    found = known_env(meta.env_id) if meta.env_id else None
    return None if found is None else (ROBOTS[found[1].robot].obs_dim, ROBOTS[found[1].robot].action_dim)


def _types(raw: Raw) -> list[Finding]:
    missing = [name for name in REQUIRED if name not in raw.arrays]
    found = [Finding("missing", f"array '{name}' is missing") for name in missing]
    for name, array in raw.arrays.items():
        if array.dtype.kind not in "fiub":
            found.append(Finding("dtype", f"{name} has type {array.dtype}; it needs real numbers or flags"))
        elif name in FLAGS and array.dtype.kind != "b":
            odd = np.flatnonzero(~np.isin(array.reshape(-1), (0, 1)))
            if len(odd):
                message = f"{name} has {len(odd)} values that are neither 0 nor 1, first in row {odd[0]}"
                found.append(Finding("dtype", message, len(odd), int(odd[0])))
    return found


def _shapes(raw: Raw) -> list[Finding]:
    obs = raw.arrays.get("observations")
    if obs is None or obs.dtype.kind not in "fiub":
        return []
    if obs.ndim != 2:
        return [Finding("shape", f"observations has shape {obs.shape}; it needs (rows, size of an observation)")]
    if obs.shape[0] == 0 or obs.shape[1] == 0:
        return [Finding("empty", f"observations has shape {obs.shape}: there is nothing in it")]
    found = []
    for name, array in raw.arrays.items():
        if name in PER_ROW and array.shape[:1] != obs.shape[:1]:
            rows = array.shape[0] if array.ndim else "no"
            found.append(Finding("shape", f"{name} has {rows} rows, observations {obs.shape[0]}: one row per step"))
        if name in ("actions", "qpos", "qvel") and array.ndim != 2:
            found.append(
                Finding("shape", f"{name} has shape {array.shape}; it needs (rows, size): reshape(len(x), -1)")
            )
        if name in ("rewards", *FLAGS) and array.size != (array.shape[0] if array.ndim else 0):
            found.append(Finding("shape", f"{name} has shape {array.shape}; it needs one number per row"))
        if name in ("next_observations", "final_observations") and array.shape[1:] != obs.shape[1:]:
            found.append(Finding("shape", f"{name} has rows of shape {array.shape[1:]}, observations {obs.shape[1:]}"))
    return found


def _not_finite(arrays: dict[str, np.ndarray]) -> list[Finding]:
    found = []
    for name, array in arrays.items():
        if array.dtype.kind != "f" or array.ndim == 0:
            continue
        count, first = 0, None
        for block in blocks(len(array)):
            good = np.isfinite(array[block])
            if good.all():
                continue
            count += int((~good).sum())
            if first is None:
                first = np.argwhere(~good)[0]
                first[0] += block.start
        if first is not None:
            value = float(array[tuple(first)])
            where = f"row {first[0]}" + (f", column {first[1]}" if len(first) > 1 else "")
            message = f"{name} has {count} values that are NaN or infinite, first in {where} ({value})"
            found.append(Finding("not-finite", message, count, int(first[0])))
    return found


def _environment(raw: Raw) -> list[Finding]:
    sizes = _known_sizes(raw.meta)
    here = raw.arrays["observations"].shape[1], raw.arrays["actions"].shape[1]
    if sizes is None or sizes == here:
        return []
    message = (
        f"the environment {raw.meta.env_id} has observations of size {sizes[0]} and actions of size {sizes[1]}, "
        f"the data {here[0]} and {here[1]}: the env id is wrong"
    )
    return [Finding("environment", message)]


def _bounds(raw: Raw) -> list[Finding]:
    actions = raw.arrays["actions"]
    box = action_box(raw.meta, actions.shape[1])
    if box is None:
        return []
    if box[0].shape != actions.shape[1:] or box[1].shape != actions.shape[1:]:
        return [Finding("bounds", f"the action bounds have {len(box[0])} values, an action {actions.shape[1]}")]
    low, high = box[0] - EDGE * (1.0 + np.abs(box[0])), box[1] + EDGE * (1.0 + np.abs(box[1]))
    outside = np.zeros(len(actions), bool)
    for block in blocks(len(actions)):
        outside[block] = ((actions[block] < low) | (actions[block] > high)).any(axis=1)
    rows = np.flatnonzero(outside)
    if len(rows) == 0:
        return []
    message = f"{len(rows)} actions lie outside their bounds, first in row {rows[0]}: {_short(actions[rows[0]])}"
    return [Finding("bounds", message, len(rows), int(rows[0]))]


def _both_flags(raw: Raw) -> list[Finding]:
    if raw.both_flags:
        return []
    terminated, truncated = flags(raw)
    rows = np.flatnonzero(terminated & truncated)
    if len(rows) == 0:
        return []
    message = (
        f"{len(rows)} rows are both terminated and truncated, first row {rows[0]}: a row may end one way only "
        "(clear 'truncated' where the world really ended)"
    )
    return [Finding("both-flags", message, len(rows), int(rows[0]))]


def _episodes(raw: Raw) -> list[Finding]:
    ends = episode_ends(raw)
    found = []
    if raw.lengths is not None:
        stated = np.cumsum(raw.lengths)
        odd = np.setxor1d(stated, ends)
        if len(odd):
            message = (
                f"the flags end {len(ends)} episodes, the stated lengths {len(stated)}; they first disagree in row "
                f"{odd[0] - 1}: every episode needs a flag in its last row and nowhere else"
            )
            found.append(Finding("episodes", message, len(odd), int(odd[0] - 1)))
    final = raw.arrays.get("final_observations")
    if final is not None and len(final) != len(ends):
        message = f"{len(final)} final observations, but the flags end {len(ends)} episodes: one per episode is needed"
        found.append(Finding("episodes", message))
    return found


def _continuity(raw: Raw) -> list[Finding]:
    if "next_observations" not in raw.arrays or not raw.sequential:
        return []
    rows = gaps(raw)
    if len(rows) == 0:
        return []
    message = (
        f"{len(rows)} rows inside an episode have a next observation that is not the next row's observation, first row "
        f"{rows[0]}: next_observations is wrong, or an episode ends there without a flag (if the recording only jumps "
        "there, load(..., gaps='truncate') makes these rows episode ends)"
    )
    return [Finding("continuity", message, len(rows), int(rows[0]))]


def flags(raw: Raw) -> tuple[np.ndarray, np.ndarray]:
    """(terminated, truncated) as flat booleans."""
    return np.asarray(raw.arrays["terminated"], bool).reshape(-1), np.asarray(raw.arrays["truncated"], bool).reshape(-1)


def episode_ends(raw: Raw) -> np.ndarray:
    """One past the last row of each episode; the end of the arrays ends the last one."""
    terminated, truncated = flags(raw)
    ends = np.flatnonzero(terminated | truncated) + 1
    return ends if len(ends) and ends[-1] == len(terminated) else np.append(ends, len(terminated))


def plain(value: Any) -> Any:
    """Arrays and records as lists, dicts and numbers JSON can hold; a number that is not finite becomes None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    """Numbers with few digits, in the notation of JSON without quotes."""

    def rounded(x: Any) -> Any:
        if isinstance(x, float):
            return float(f"{x:.4g}")
        return (
            {k: rounded(v) for k, v in x.items()}
            if isinstance(x, dict)
            else ([rounded(v) for v in x] if isinstance(x, list) else x)
        )

    return json.dumps(rounded(plain(value))).replace('"', "")
