"""What is notable about a dataset: its numbers, its quality, what it covers and what it lacks."""

import hashlib
from typing import Any

import numpy as np

from refplan.data.check import Finding, action_box, episode_ends, flags
from refplan.data.raw import Raw, blocks

LITTLE = 1000  # transitions; the smallest benchmarks have thousands
EXACT_LIMIT = 1e-7  # an action this near to its bound was clipped there


def summarise(raw: Raw) -> dict[str, Any]:
    """Counts, lengths, returns, scores and the range of every column."""
    terminated, _ = flags(raw)
    ends = episode_ends(raw)
    rows = len(terminated)
    summary: dict[str, Any] = {
        "env_id": raw.meta.env_id,
        "transitions": rows,
        "obs_size": raw.arrays["observations"].shape[1],
        "action_size": raw.arrays["actions"].shape[1],
        "simulator_states": "qpos" in raw.arrays and "qvel" in raw.arrays,
    }
    if raw.sequential:
        lengths = np.diff(ends, prepend=0)
        returns = np.add.reduceat(raw.arrays["rewards"].astype(np.float64).reshape(-1), ends - lengths)
        summary |= {
            "episodes": len(ends),
            "terminated_episodes": int(terminated.sum()),
            "incomplete_episodes": len(incomplete_episodes(raw)),
            "length": _spread(lengths),
            "return": _spread(returns),
        }
        if raw.meta.ref_min is not None and raw.meta.ref_max is not None:
            summary["score"] = _spread(100.0 * (returns - raw.meta.ref_min) / (raw.meta.ref_max - raw.meta.ref_min))
    return summary | {"reward": _spread(raw.arrays["rewards"].reshape(-1))} | _ranges(raw)


def _spread(values: np.ndarray) -> dict[str, float]:
    values = values.astype(np.float64)
    with np.errstate(invalid="ignore"):  # data with NaN or inf: the numbers then say so
        return {
            "mean": float(values.mean()),
            "std": float(values.std()),
            "min": float(values.min()),
            "median": float(np.median(values)) if not np.isnan(values).any() else float("nan"),
            "max": float(values.max()),
        }


def _ranges(raw: Raw) -> dict[str, Any]:
    obs, actions = raw.arrays["observations"], raw.arrays["actions"]
    ranges = {
        "obs_min": obs.min(axis=0),
        "obs_max": obs.max(axis=0),
        "action_min": actions.min(axis=0),
        "action_max": actions.max(axis=0),
    }
    box = action_box(raw.meta, actions.shape[1])
    if box is not None:
        ranges["action_saturation"] = float(_near_limit(actions, *box, margin=0.01).mean())
    return ranges


def _near_limit(actions: np.ndarray, low: np.ndarray, high: np.ndarray, margin: float) -> np.ndarray:
    """Per action component, whether it lies within `margin` of the box's width from a bound."""
    width = margin * (high - low)
    near = np.zeros(actions.shape, bool)
    for block in blocks(len(actions)):
        near[block] = (actions[block] <= low + width) | (actions[block] >= high - width)
    return near


def incomplete_episodes(raw: Raw) -> np.ndarray:
    """Episodes cut before the world or the time limit ended them; the longest episode stands for the limit."""
    terminated, _ = flags(raw)
    ends = episode_ends(raw)
    lengths = np.diff(ends, prepend=0)
    return np.flatnonzero(~terminated[ends - 1] & (lengths < lengths.max()))


def _little(raw: Raw) -> list[Finding]:
    """So few rows that networks learn them by heart."""
    rows = len(raw.arrays["rewards"])
    if rows >= LITTLE:
        return []
    message = f"only {rows} transitions: far too few to learn a policy or a model that holds anywhere else"
    return [Finding("little", message, rows)]


def find_notes(raw: Raw, unknown: int | None = None) -> tuple[Finding, ...]:
    """Everything worth knowing that is not wrong; `unknown` counts successors a dataset already knows to lack."""
    notes = [Finding("source", remark) for remark in raw.remarks]
    notes += _little(raw) + _type_notes(raw) + _constant_columns(raw) + _action_notes(raw)
    if raw.sequential:
        notes += _episode_notes(raw) + _successor_notes(raw, unknown) + _duplicates(raw)
    return tuple(notes)


def _type_notes(raw: Raw) -> list[Finding]:
    names = ("observations", "actions", "rewards", "next_observations", "qpos", "qvel")
    odd = [f"{n} ({raw.arrays[n].dtype})" for n in names if n in raw.arrays and raw.arrays[n].dtype != np.float32]
    return [Finding("dtype", f"converted to float32: {', '.join(odd)}", len(odd))] if odd else []


def _constant_columns(raw: Raw) -> list[Finding]:
    notes = []
    for name in ("observations", "actions", "rewards"):
        array = raw.arrays[name].reshape(len(raw.arrays[name]), -1)
        columns = np.flatnonzero(array.min(axis=0) == array.max(axis=0))
        if len(columns):
            message = f"{name}: {len(columns)} of {array.shape[1]} columns are constant: {columns.tolist()}"
            notes.append(Finding("constant", message, len(columns)))
    return notes


def _action_notes(raw: Raw) -> list[Finding]:
    actions = raw.arrays["actions"]
    box = action_box(raw.meta, actions.shape[1])
    if box is None:
        return [Finding("bounds", "action bounds are unknown: no env id we know and none stated, so none were checked")]
    rows = np.flatnonzero(_near_limit(actions, *box, margin=EXACT_LIMIT).any(axis=1))
    if len(rows) == 0:
        return []
    message = f"{len(rows)} rows have an action component at or beyond its bound, first row {rows[0]}"
    return [Finding("at-bound", message, len(rows), int(rows[0]))]


def _episode_notes(raw: Raw) -> list[Finding]:
    notes = []
    terminated, truncated = flags(raw)
    if not (terminated[-1] or truncated[-1]):
        notes.append(Finding("end", "the last row has no flag; the end of the data counts as a truncation"))
    both = int((terminated & truncated).sum())
    if raw.both_flags and both:
        notes.append(Finding("both-flags", f"{both} episodes end both ways at once; they count as terminated", both))
    cut = incomplete_episodes(raw)
    if len(cut):
        message = f"{len(cut)} episodes are incomplete: truncated before the length of the longest episode"
        notes.append(Finding("incomplete", message, len(cut)))
    return notes


def _successor_notes(raw: Raw, unknown: int | None) -> list[Finding]:
    if unknown is None:
        if "next_observations" in raw.arrays:
            return []
        known = raw.arrays.get("known_final")
        if known is None and "final_observations" in raw.arrays:
            return []
        unknown = len(episode_ends(raw)) if known is None else int((~np.asarray(known, bool)).sum())
    if unknown == 0:
        return []
    message = (
        f"{unknown} rows, each the last of its episode, have no known successor: terminated ones serve critics only, "
        "truncated ones are left out"
    )
    return [Finding("successor", message, unknown)]


def _duplicates(raw: Raw) -> list[Finding]:
    seen: dict[bytes, int] = {}
    copies, first = 0, None
    start = 0
    for number, end in enumerate(episode_ends(raw)):
        digest = hashlib.blake2b(digest_size=16)
        for name in ("observations", "actions"):
            digest.update(np.ascontiguousarray(raw.arrays[name][start:end]).data)
        original = seen.setdefault(digest.digest(), number)
        if original != number:
            copies += 1
            first = first or (number, original, start)
        start = end
    if first is None:
        return []
    message = f"{copies} episodes repeat an earlier one exactly; episode {first[0]} is a copy of episode {first[1]}"
    return [Finding("duplicate", message, copies, int(first[2]))]
