"""Datasets from arrays: flags, episode bounds and true successors put together once, for every source."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from refplan.data.dataset import Dataset, Meta, drop_ends
from refplan.errors import RefplanError


def make_dataset(
    observations: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    *,
    next_observations: np.ndarray | None = None,
    final_observations: np.ndarray | None = None,
    known_final: np.ndarray | None = None,
    qpos: np.ndarray | None = None,
    qvel: np.ndarray | None = None,
    meta: Meta | None = None,
) -> Dataset:
    """A `Dataset` from flat arrays; episodes end where a flag is set, and the end of the arrays is a truncation.

    Successors come from `next_observations` if given, else from the next row inside an episode and from
    `final_observations` (one row per episode; `known_final` says which of them are real) after its last row. A last
    row without a known successor is kept after a termination (a critic needs no successor there) and marked in
    `known_next`; after a truncation it is dropped, because nobody could learn a true step or target from it.
    """
    optional = {
        "next_observations": next_observations,
        "final_observations": final_observations,
        "known_final": known_final,
        "qpos": qpos,
        "qvel": qvel,
    }
    arrays = {"observations": observations, "actions": actions, "rewards": rewards}
    arrays |= {"terminated": terminated, "truncated": truncated}
    return assemble(arrays | {k: v for k, v in optional.items() if v is not None}, meta or Meta())


def assemble(given: dict[str, np.ndarray], meta: Meta) -> Dataset:
    """`make_dataset` from a dict that is emptied on the way, so that a large file is not held twice."""
    rows = len(given["observations"])
    terminated, truncated = _flags(given.pop("terminated"), given.pop("truncated"), rows, meta.name)
    last = np.flatnonzero(terminated | truncated)
    starts = np.concatenate([[0], last[:-1] + 1]).astype(np.int64)
    final, known = given.pop("final_observations", None), given.pop("known_final", None)
    arrays = {"terminated": terminated, "truncated": truncated}
    for name in list(given):
        arrays[name] = _as_float(given.pop(name))
    arrays["rewards"] = arrays["rewards"].reshape(-1)
    if "next_observations" not in arrays:
        final, known = _final_observations(arrays["observations"], last, final, known, meta.name)
        cut = ~known & ~terminated[last]
        # Without its last row, a cut episode ends one step earlier, and that row's observation is what came after.
        final, known = final[~cut | (last > starts)], (known | cut)[~cut | (last > starts)]
        drop = np.zeros(rows, bool)
        drop[last[cut]] = True
        arrays, starts = drop_ends(arrays, starts, drop, meta.name)
        arrays |= _successors(arrays["observations"], starts, final, known)
    return Dataset(**arrays, starts=starts, meta=meta)  # ty: ignore[invalid-argument-type]


def _as_float(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, dtype=np.float32)


def _final_observations(
    observations: Float[np.ndarray, "rows obs"],
    last: Int[np.ndarray, " episodes"],
    final: np.ndarray | None,
    known: np.ndarray | None,
    name: str,
) -> tuple[Float[np.ndarray, "episodes obs"], Bool[np.ndarray, " episodes"]]:
    """What came after each episode and whether that is known; where it is not, the last observation stands in."""
    if final is None:
        return observations[last], np.zeros(len(last), bool)
    if len(final) != len(last):
        raise RefplanError(
            f"dataset '{name}': {len(final)} final observations, but {len(last)} episodes. "
            "Every episode needs one: the observation after its last step."
        )
    known = np.ones(len(last), bool) if known is None else np.asarray(known, bool).reshape(-1)
    return np.where(known[:, None], _as_float(final), observations[last]), known


def _successors(
    observations: Float[np.ndarray, "rows obs"],
    starts: Int[np.ndarray, " episodes"],
    final: Float[np.ndarray, "episodes obs"],
    known: Bool[np.ndarray, " episodes"],
) -> dict[str, np.ndarray]:
    """Each row's successor inside its episode, and which of them are known when not all are."""
    last = np.append(starts[1:], len(observations)) - 1
    successors = np.empty_like(observations)
    successors[:-1] = observations[1:]
    successors[last] = final
    if known.all():
        return {"next_observations": successors}
    known_next = np.ones(len(observations), bool)
    known_next[last] = known
    return {"next_observations": successors, "known_next": known_next}


def _flags(
    terminated: np.ndarray, truncated: np.ndarray, rows: int, name: str
) -> tuple[Bool[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
    """Both flags as booleans, the end of the arrays marked truncated when nothing else ended it."""
    terminated = np.array(terminated, dtype=bool).reshape(-1)
    truncated = np.array(truncated, dtype=bool).reshape(-1)
    if rows == 0:
        raise RefplanError(f"dataset '{name}': it is empty.")
    if len(terminated) != rows or len(truncated) != rows:
        raise RefplanError(
            f"dataset '{name}': {rows} observations, but {len(terminated)} termination and {len(truncated)} "
            "truncation flags. Every array needs one row per step."
        )
    truncated[-1] |= not terminated[-1]
    return terminated, truncated


def concatenate(parts: Sequence[Dataset], meta: Meta) -> Dataset:
    """Several datasets of one world, episodes one after another, under new metadata.

    Simulator states are kept if every part has them.
    """
    shapes = {(part.obs_dim, part.action_dim) for part in parts}
    if len(shapes) != 1 or not all(part.sequential for part in parts):
        raise RefplanError(
            f"cannot join {len(parts)} datasets into '{meta.name}': they need one size of observations and actions "
            f"(here {sorted(shapes)}) and whole episodes."
        )
    offsets = np.cumsum([0, *(len(part) for part in parts[:-1])])
    starts = np.concatenate([part.starts + offset for part, offset in zip(parts, offsets, strict=True)])
    rows = [{"known_next": np.ones(len(part), bool)} | part.arrays() for part in parts]
    common = set.intersection(*(set(arrays) for arrays in rows))
    joined = {name: np.concatenate([arrays[name] for arrays in rows]) for name in common}
    return dataclasses.replace(parts[0], **{"qpos": None, "qvel": None} | joined, starts=starts, meta=meta)
