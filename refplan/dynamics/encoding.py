"""Encoding whole datasets: every episode from its own beginning, many side by side, each row once."""

import heapq
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from refplan.data.dataset import Dataset
from refplan.data.sampling import take_rows
from refplan.dynamics.encoder import Encoder, empty_belief, encode_lanes
from refplan.errors import RefplanError
from refplan.nn import Normaliser
from refplan.types import Transition

BLOCK = 50  # steps encoded in one piece: bounds the memory for the gates


class Layout(NamedTuple):
    """Episodes laid end to end in lanes of equal length; a lane's rest is padding."""

    row: Int[Array, "lanes time"]
    first: Bool[Array, "lanes time"]
    valid: Bool[Array, "lanes time"]


class Episodes(NamedTuple):
    """Logged rows on the device and where their episodes lie."""

    rows: Transition
    starts: Int[Array, " episodes"]
    lengths: Int[Array, " episodes"]
    number: Int[Array, " rows"]  # the episode of each row
    layout: Layout


def place_episodes(data: Dataset) -> Episodes:
    """The rows whose successor is known, with their episodes."""
    if not data.sequential:
        raise RefplanError(
            f"dataset '{data.meta.name}' was split by transition, so its rows are no longer episodes; "
            "a belief needs a split by='episode'."
        )
    data = data.complete()
    number = np.repeat(np.arange(data.episodes), data.lengths)
    starts, lengths = jnp.asarray(data.starts), jnp.asarray(data.lengths)
    return Episodes(data.device(), starts, lengths, jnp.asarray(number), pack_episodes(data.starts, data.lengths))


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


def encode_rows(
    encoder: Encoder, scale: Normaliser, episodes: Episodes
) -> tuple[Float[Array, "rows latent"], Float[Array, "rows latent"]]:
    """(mu_t, log sigma_t^2) of every row, the agent standing at its `obs` with the episode so far behind it."""
    layout, rows = episodes.layout, episodes.rows
    lanes, time = layout.row.shape

    def block(belief, at):
        index, first = at
        _, memory, belief = encode_lanes(encoder, scale, belief, take_rows(rows, index), first)
        return belief, encoder.posterior(memory)

    def blocks(x: Array) -> Array:
        return x.reshape(lanes, time // BLOCK, BLOCK).swapaxes(0, 1)

    start = empty_belief(encoder, rows.action.shape[1], (lanes,))
    _, posteriors = jax.lax.scan(block, start, (blocks(layout.row), blocks(layout.first)))
    count = rows.reward.shape[0]
    target = jnp.where(layout.valid, layout.row, count)  # padding goes out of bounds and is dropped

    def scatter(values: Float[Array, "blocks lanes block latent"]) -> Float[Array, "rows latent"]:
        flat = values.swapaxes(0, 1).reshape(lanes * time, -1)
        return jnp.zeros((count, flat.shape[1])).at[target.reshape(-1)].set(flat, mode="drop")

    mean, log_var = posteriors
    return scatter(mean), scatter(log_var)
