"""Drawing from data inside compiled loops: single transitions, windows with context, and tapes of whole episodes.

All indices are computed on the device; nothing here costs Python time per batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Int

from refplan.types import Key, Transition, Window


def take_rows(rows: Transition, index: Int[Array, "*batch"]) -> Transition:
    """The rows at `index`, in its shape."""
    return jax.tree.map(lambda array: array[index], rows)


def sample_transitions(rows: Transition, key: Key, batch: int) -> Transition:
    """`batch` rows drawn uniformly with replacement."""
    return take_rows(rows, jr.randint(key, (batch,), 0, rows.reward.shape[0]))


def sample_windows(
    rows: Transition,
    starts: Int[Array, " episodes"],
    ends: Int[Array, " episodes"],
    key: Key,
    batch: int,
    length: int,
    context: int = 0,
) -> Window:
    """`batch` windows of `context + length` consecutive steps, each inside one episode.

    Column `context` is a row drawn uniformly from all rows. The columns before it are the steps that came before, to
    warm up a recurrent state; `valid` is false where the episode had not begun yet, and after its end. `first` marks
    the first valid column: there a recurrent state begins anew.
    """
    target = jr.randint(key, (batch,), 0, rows.reward.shape[0])
    episode = jnp.searchsorted(starts, target, side="right") - 1
    begin, end = starts[episode][:, None], ends[episode][:, None]
    row = target[:, None] + jnp.arange(-context, length)[None, :]
    first = row == jnp.maximum(begin, row[:, :1])
    inside = jnp.clip(row, begin, end - 1)
    return Window(take_rows(rows, inside), (row >= begin) & (row < end), first, inside)


class Tape(NamedTuple):
    """All rows once: a random order of whole episodes laid end to end; `first` marks where each begins."""

    row: Int[Array, " rows"]
    first: Bool[Array, " rows"]


def make_tape(starts: Int[Array, " episodes"], lengths: Int[Array, " episodes"], key: Key, rows: int) -> Tape:
    """A new tape for one epoch; `rows` is the (static) sum of the lengths."""
    order = jr.permutation(key, starts.shape[0])
    end = jnp.cumsum(lengths[order])
    begin = end - lengths[order]
    position = jnp.arange(rows)
    segment = jnp.searchsorted(end, position, side="right")
    return Tape(starts[order][segment] + position - begin[segment], position == begin[segment])


def chunks_per_epoch(rows: int, lanes: int, length: int) -> int:
    """How many chunks of (lanes, length) rows one tape gives; the few rows left over change with every tape."""
    return rows // lanes // length


def tape_chunk(
    tape: Tape, lanes: int, length: int, number: Int[Array, ""] | int
) -> tuple[Int[Array, "lanes length"], Bool[Array, "lanes length"]]:
    """(row, first) of chunk `number`: `lanes` places on the tape, each `length` steps on from the chunk before.

    A recurrent state carried from chunk to chunk in each lane sees whole episodes, and begins anew where `first` is
    set: at every episode's start, and in the first column of chunk 0, where a lane may begin inside an episode.
    """
    span = tape.row.shape[0] // lanes
    position = span * jnp.arange(lanes)[:, None] + number * length + jnp.arange(length)[None, :]
    lane_start = (jnp.arange(length)[None, :] == 0) & (jnp.asarray(number) == 0)
    return tape.row[position], tape.first[position] | lane_start
