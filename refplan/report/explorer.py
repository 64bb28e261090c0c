"""Recordings as the data of the episode explorer: arrays as base64, actions in 256 steps between their bounds."""

import base64
from typing import Any

import numpy as np

from refplan.report.gain import title_of
from refplan.report.record import Recording

TAIL = 0.05  # a return realised so far counts as known when what is missing weighs less than this


def payload(name: str, recording: Recording) -> dict[str, Any]:
    """What the page's script needs of one recording; null where the agent has no such thing."""
    arrays, about = recording.arrays, recording.about
    low, high = action_bounds(recording)
    path, shares = principal_components(arrays["belief_mean"])
    planned = arrays["proposals"].shape[1] > 0
    return {
        "name": name,
        "about": {key: about.get(key, "") for key in ("planner", "prior", "dataset", "world", "seed", "command")},
        "title": _title(about),
        "steps": len(arrays["rewards"]),
        "low": low.tolist(),
        "high": high.tolist(),
        "terminated": bool(about.get("terminated")),
        "rewards": packed(arrays["rewards"]),
        "actions": packed(arrays["actions"]),
        "own": packed(arrays["own"]),
        "proposals": packed(_levels(arrays["proposals"], low, high)) if planned else None,
        "weights": packed(_relative(arrays["weights"])) if planned else None,
        "topWeight": packed(arrays["weights"].max(axis=1)) if planned else None,
        "plans": arrays["proposals"].shape[1],
        **{key: packed(arrays[key]) for key in ("best", "mean", "spread", "effective", "value")},
        "fallback": packed(arrays["fallback"].astype(np.uint8)),
        "toGo": packed(realised(arrays["rewards"], about)),
        "beliefMean": packed(arrays["belief_mean"]),
        "beliefStd": packed(arrays["belief_std"]),
        "path": packed(path),
        "shares": shares,
        "pictures": [base64.b64encode(picture).decode() for picture in recording.pictures],
        "pictureSteps": recording.picture_steps,
        "noPictures": str(about.get("no_pictures", "")),
    }


def _title(about: dict[str, Any]) -> str:
    planner = str(about.get("planner", "none"))
    who = (
        f"{about.get('prior', '?')} alone" if planner == "none" else f"{title_of(planner)} on {about.get('prior', '?')}"
    )
    return f"{who} in {about.get('world', '?')}, seed {about.get('seed', '?')}"


def packed(array: np.ndarray) -> dict[str, Any] | None:
    """An array for the page; None if it is empty."""
    if not array.size:
        return None
    kind = "u1" if array.dtype == np.uint8 else "<f4"
    data = np.ascontiguousarray(array, kind).tobytes()
    return {"kind": kind[-2:], "shape": list(array.shape), "data": base64.b64encode(data).decode()}


def action_bounds(recording: Recording) -> tuple[np.ndarray, np.ndarray]:
    """The agent's bounds, or the range of what was done and proposed."""
    arrays = recording.arrays
    seen = np.concatenate([arrays["actions"], arrays["proposals"].reshape(-1, arrays["actions"].shape[1])])
    low, high = (recording.about.get(side) for side in ("low", "high"))
    size = arrays["actions"].shape[1]
    low = np.nanmin(seen, axis=0) if low is None or len(low) != size else np.array(low)
    high = np.nanmax(seen, axis=0) if high is None or len(high) != size else np.array(high)
    return low.astype(float), np.where(high > low, high, low + 1.0).astype(float)


def _levels(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    share = (np.nan_to_num(values.astype(np.float32)) - low) / (high - low)
    return np.clip(np.round(255 * share), 0, 255).astype(np.uint8)


def _relative(weights: np.ndarray) -> np.ndarray:
    """Weights beside the heaviest of their step."""
    weights = np.nan_to_num(weights.astype(np.float32))
    return np.round(255 * weights / np.maximum(weights.max(axis=1, keepdims=True), 1e-12)).astype(np.uint8)


def realised(rewards: np.ndarray, about: dict[str, Any]) -> np.ndarray:
    """Discounted return from each step on, as it really came; NaN where too much of it lies behind the end."""
    discount = about.get("discount")
    if discount is None:
        return np.zeros(0)
    total, found = 0.0, np.zeros(len(rewards), np.float32)
    for step in range(len(rewards) - 1, -1, -1):
        total = float(rewards[step]) + discount * total
        found[step] = total
    if not about.get("terminated"):
        missing = discount ** np.arange(len(rewards), 0, -1)
        found[missing > TAIL] = np.nan
    return found


def principal_components(means: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """The two directions in which the belief's mean moved most, and the share of its movement they carry."""
    if means.shape[1] < 2 or len(means) < 2 or not np.isfinite(means).all():
        return np.zeros(0), []
    centred = (means - means.mean(axis=0)).astype(np.float64)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    total = float(np.sum(sizes**2)) or 1.0
    return centred @ directions[:2].T, [float(size**2 / total) for size in sizes[:2]]
