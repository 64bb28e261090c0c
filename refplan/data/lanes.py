"""Episodes of unequal length side by side: packed into lanes of equal length, with little padding."""

import heapq
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

BLOCK = 50  # lanes are a multiple of this: what walks along them may do so in pieces


class Layout(NamedTuple):
    """Episodes laid end to end in lanes of equal length; a lane's rest is padding."""

    row: Int[Array, "lanes time"]
    first: Bool[Array, "lanes time"]
    valid: Bool[Array, "lanes time"]


def pack_episodes(
    starts: Int[np.ndarray, " episodes"], lengths: Int[np.ndarray, " episodes"], most_lanes: int = 256
) -> Layout:
    """Longest episode first, each into the lane that is shortest so far: as many lanes as waste little padding."""
    lanes = int(min(most_lanes, len(starts), -(-lengths.sum() // lengths.max())))
    filled = [(0, lane) for lane in range(lanes)]
    places = []
    for episode in np.argsort(-lengths, kind="stable"):
        at, lane = heapq.heappop(filled)
        places.append((lane, at, episode))
        heapq.heappush(filled, (at + int(lengths[episode]), lane))
    time = -(-max(at for at, _ in filled) // BLOCK) * BLOCK
    row, first, valid = np.zeros((lanes, time), np.int32), np.ones((lanes, time), bool), np.zeros((lanes, time), bool)
    for lane, at, episode in places:
        span = slice(at, at + lengths[episode])
        row[lane, span] = starts[episode] + np.arange(lengths[episode])
        first[lane, span] = np.arange(lengths[episode]) == 0
        valid[lane, span] = True
    return Layout(jnp.asarray(row), jnp.asarray(first), jnp.asarray(valid))
