"""Encoding whole datasets: every episode from its own beginning, many side by side, each row once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from refplan.data.dataset import Dataset
from refplan.data.lanes import BLOCK, Layout, pack_episodes
from refplan.data.sampling import take_rows
from refplan.dynamics.encoder import Encoder, empty_belief, encode_lanes
from refplan.errors import RefplanError
from refplan.nn import Normaliser
from refplan.types import Transition


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
