"""Sampling on the device: properties over many shapes of data."""

import functools
import itertools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from refplan.data.sampling import chunks_per_epoch, make_tape, sample_transitions, sample_windows, tape_chunk
from refplan.types import Transition

ROWS = 24
# Always four episodes and as many rows, so that every example runs the same compiled function.
four_lengths = st.sets(st.integers(1, ROWS - 1), min_size=3, max_size=3).map(
    lambda cuts: np.diff([0, *sorted(cuts), ROWS]).tolist()
)
windows = jax.jit(sample_windows, static_argnums=(4, 5, 6))
tapes = jax.jit(make_tape, static_argnums=3)
chunk = jax.jit(tape_chunk, static_argnums=(1, 2))


def rows_of(rows: int) -> Transition:
    """Rows that carry their own number."""
    number = jnp.arange(rows, dtype=jnp.float32)
    return Transition(number[:, None], number[:, None], number, number[:, None] + 1.0, jnp.zeros(rows, bool))


def bounds(lengths):
    ends = np.cumsum(lengths)
    return jnp.asarray(ends - lengths), jnp.asarray(ends), np.repeat(np.arange(len(lengths)), lengths)


def test_transitions_come_from_one_row_each_and_reach_all_rows():
    batch = jax.jit(sample_transitions, static_argnums=2)(rows_of(7), jr.key(0), 500)
    np.testing.assert_array_equal(batch.obs[:, 0], batch.reward)
    np.testing.assert_array_equal(batch.next_obs[:, 0], batch.reward + 1.0)
    assert set(np.asarray(batch.reward).astype(int)) == set(range(7))


@settings(max_examples=40, deadline=None)
@given(lengths=four_lengths, size=st.sampled_from([(1, 0), (4, 3), (30, 5)]), seed=st.integers(0, 9))
def test_windows_stay_inside_one_episode_and_context_precedes(lengths, size, seed):
    length, context = size
    starts, ends, episode = bounds(lengths)
    window = windows(rows_of(ROWS), starts, ends, jr.key(seed), 16, length, context)
    row, valid, first = (np.asarray(x) for x in (window.row, window.valid, window.first))
    assert row.shape == (16, context + length)
    np.testing.assert_array_equal(window.steps.reward, row)
    assert valid[:, context].all()  # the drawn row itself
    for r, v, f in zip(row, valid, first, strict=True):
        inside = r[v]
        assert len(set(episode[inside])) == 1
        np.testing.assert_array_equal(inside, np.arange(inside[0], inside[0] + len(inside)))
        own = np.flatnonzero(episode == episode[inside[0]])
        assert v[:context].sum() == min(context, r[context] - own[0])  # all the context there is
        assert v[context:].sum() == min(length, own[-1] + 1 - r[context])
        assert f.sum() == 1 and f.argmax() == v.argmax()  # a state begins at the first valid column


def test_windows_begin_at_every_row_equally_often():
    starts, ends, _ = bounds([3, 1, 4])
    window = windows(rows_of(8), starts, ends, jr.key(0), 8000, 3, 2)
    counts = np.bincount(np.asarray(window.row[:, 2]), minlength=8)
    assert np.abs(counts - 1000).max() < 150


@settings(max_examples=40, deadline=None)
@given(lengths=four_lengths, seed=st.integers(0, 9))
def test_a_tape_holds_every_row_once_in_whole_episodes(lengths, seed):
    starts, _, episode = bounds(lengths)
    tape = tapes(starts, jnp.asarray(lengths), jr.key(seed), ROWS)
    row, first = np.asarray(tape.row), np.asarray(tape.first)
    np.testing.assert_array_equal(np.sort(row), np.arange(ROWS))
    np.testing.assert_array_equal(first, np.isin(row, np.asarray(starts)))
    follows = ~first[1:]
    np.testing.assert_array_equal(row[1:][follows], row[:-1][follows] + 1)
    assert (episode[row[1:]] == episode[row[:-1]])[follows].all()


@settings(max_examples=40, deadline=None)
@given(lengths=four_lengths, size=st.sampled_from([(1, 1), (2, 5), (3, 2), (5, 4)]), seed=st.integers(0, 9))
def test_chunks_visit_rows_once_up_to_the_remainder_and_flag_every_start(lengths, size, seed):
    lanes, length = size
    starts, _, _ = bounds(lengths)
    tape = tapes(starts, jnp.asarray(lengths), jr.key(seed), ROWS)
    chunks = [chunk(tape, lanes, length, n) for n in range(chunks_per_epoch(ROWS, lanes, length))]
    chunks = [(np.asarray(row), np.asarray(first)) for row, first in chunks]
    seen = np.concatenate([row.reshape(-1) for row, _ in chunks])
    assert len(set(seen)) == len(seen) == len(chunks) * lanes * length
    assert ROWS - len(seen) < lanes * length + lanes
    for number, (row, first) in enumerate(chunks):
        expected = np.isin(row, np.asarray(starts))
        if number == 0:
            expected[:, 0] = True
        np.testing.assert_array_equal(first, expected)
    for (before, _), (after, first) in itertools.pairwise(chunks):
        carried = ~first[:, 0]
        np.testing.assert_array_equal(after[:, 0][carried], before[:, -1][carried] + 1)


def test_the_whole_epoch_compiles_into_one_scan():
    starts, _, _ = bounds([5, 3, 8])

    @functools.partial(jax.jit, static_argnums=1)
    def epoch(key, rows):
        tape = make_tape(starts, jnp.array([5, 3, 8]), key, rows)
        return jax.lax.scan(lambda carry, n: (carry, tape_chunk(tape, 2, 4, n)[0]), 0, jnp.arange(2))[1]

    np.testing.assert_array_equal(np.sort(epoch(jr.key(0), 16).reshape(-1)), np.arange(16))


def test_tapes_differ_between_epochs():
    starts, _, _ = bounds([2] * 20)
    first, second = (make_tape(starts, jnp.full(20, 2), jr.key(k), 40).row for k in (0, 1))
    assert not np.array_equal(first, second)
