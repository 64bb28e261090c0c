"""The five semantics other loaders get wrong, and the splits and cuts of a dataset."""

import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Dataset, Meta
from refplan.errors import RefplanError


def toy(lengths=(3, 2, 4), ends=("terminated", "truncated", "none"), final=True, successors=False) -> Dataset:
    """Episodes whose observations count: episode e, step t is 100 e + t, so successors are known by eye."""
    obs = np.concatenate([100.0 * e + np.arange(n) for e, n in enumerate(lengths)])[:, None]
    last = np.cumsum(lengths) - 1
    terminated, truncated = np.zeros(len(obs), bool), np.zeros(len(obs), bool)
    for row, end in zip(last, ends, strict=True):
        terminated[row], truncated[row] = end == "terminated", end == "truncated"
    finals = obs[last] + 1.0
    given_next = obs + 1.0 if successors else None
    return make_dataset(
        obs,
        np.zeros((len(obs), 2)),
        np.ones(len(obs)),
        terminated,
        truncated,
        next_observations=given_next,
        final_observations=finals if final and not successors else None,
        qpos=obs,
        qvel=-obs,
        meta=Meta("toy"),
    )


@pytest.mark.parametrize("successors", [False, True])
def test_terminal_rows_have_their_true_next_obs(successors):
    data = toy(successors=successors)
    rows = np.flatnonzero(data.terminated)
    np.testing.assert_array_equal(data.next_observations[rows], data.observations[rows] + 1.0)


def test_timeouts_are_not_terminals():
    data = toy()
    assert data.terminated.tolist() == [False, False, True, False, False, False, False, False, False]
    assert data.truncated[4] and not data.terminated[4]


@pytest.mark.parametrize("successors", [False, True])
def test_no_transition_crosses_episodes(successors):
    data = toy(successors=successors)
    np.testing.assert_array_equal(data.next_observations, data.observations + 1.0)


@pytest.mark.parametrize("successors", [False, True])
def test_the_last_row_is_kept(successors):
    data = toy(successors=successors)
    assert len(data) == 9
    assert data.observations[-1] == 203.0 and data.next_observations[-1] == 204.0


def test_end_of_file_without_a_flag_is_a_truncation():
    data = toy()
    assert data.truncated[-1] and not data.terminated[-1]
    assert data.lengths.tolist() == [3, 2, 4]


def test_without_any_successor_terminal_rows_stay_and_cut_rows_go():
    data = toy(final=False)
    assert data.lengths.tolist() == [3, 1, 3]
    assert data.known_next is not None and data.known_next.tolist() == [True, True, False, True, True, True, True]
    assert data.truncated.tolist() == [False, False, False, True, False, False, True]
    known = data.known_next
    np.testing.assert_array_equal(data.next_observations[known], data.observations[known] + 1.0)
    assert data.complete().lengths.tolist() == [2, 1, 3] and data.complete().known_next is None
    assert data.complete().truncated.tolist() == [False, True, True, False, False, True]


def test_dropping_a_one_step_episode_drops_the_episode():
    data = toy(lengths=(1, 2), ends=("truncated", "terminated"), final=False)
    assert data.lengths.tolist() == [2] and data.observations[0] == 100.0


def test_nothing_known_is_an_error():
    with pytest.raises(RefplanError, match="no row has a known successor"):
        toy(lengths=(1, 1), ends=("truncated", "truncated"), final=False)


def test_wrong_number_of_final_observations_is_an_error():
    with pytest.raises(RefplanError, match="2 final observations, but 1 episodes"):
        none = np.zeros(3, bool)
        make_dataset(np.zeros((3, 1)), np.zeros((3, 1)), np.zeros(3), none, none, final_observations=np.zeros((2, 1)))


def test_returns_are_per_episode():
    assert toy().returns.tolist() == [3.0, 2.0, 4.0]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 99),
)
def test_split_by_episode_keeps_episodes_whole_and_loses_none(lengths, fraction, seed):
    data = toy(lengths, ("terminated",) * len(lengths))
    train, held = data.split(fraction, key=jr.key(seed))
    assert sorted([*train.lengths, *held.lengths]) == sorted(lengths)
    rows = np.concatenate([train.observations, held.observations])
    np.testing.assert_array_equal(np.sort(rows, axis=0), data.observations)
    for part in (train, held):
        np.testing.assert_array_equal(part.next_observations, part.observations + 1.0)


def test_split_by_transition_is_a_bag_that_refuses_episodes():
    train, held = toy().split(0.5, key=jr.key(0), by="transition")
    assert len(train) + len(held) == 9 and not train.sequential
    with pytest.raises(RefplanError, match="split by transition"):
        train.returns  # noqa: B018
    with pytest.raises(RefplanError, match="split by transition"):
        train.take_episodes(np.array([0]))


def test_the_same_key_splits_the_same_way_and_another_key_otherwise():
    data = toy((1,) * 30, ("terminated",) * 30)
    first = data.split(0.5, key=jr.key(0))[0].observations
    np.testing.assert_array_equal(first, data.split(0.5, key=jr.key(0))[0].observations)
    assert not np.array_equal(first, data.split(0.5, key=jr.key(1))[0].observations)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), share=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_subsample_takes_whole_episodes_and_cuts_the_last(lengths, share, seed):
    data = toy(lengths, ("terminated",) * len(lengths))
    wanted = max(1, int(share * len(data)))
    part = data.subsample(wanted, key=jr.key(seed))
    assert len(part) == wanted
    np.testing.assert_array_equal(part.next_observations, part.observations + 1.0)
    assert (part.terminated | part.truncated)[part.ends - 1].all()
    assert part.terminated[part.ends[:-1] - 1].all()
    whole = {int(data.observations[s, 0]): n for s, n in zip(data.starts, data.lengths, strict=True)}
    for start, length in zip(part.starts[:-1], part.lengths[:-1], strict=True):
        assert whole[int(part.observations[start, 0])] == length
    last_is_whole = whole[int(part.observations[part.starts[-1], 0])] == part.lengths[-1]
    assert part.terminated[-1] == last_is_whole and part.truncated[-1] == (not last_is_whole)
    assert len(np.unique(part.observations)) == wanted  # without replacement


@pytest.mark.parametrize("wanted", [0, 10])
def test_subsample_of_an_impossible_size_is_an_error(wanted):
    with pytest.raises(RefplanError, match="cannot subsample"):
        toy().subsample(wanted, key=jr.key(0))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0])
def test_split_fraction_must_leave_something_on_both_sides(fraction):
    with pytest.raises(RefplanError, match="strictly between"):
        toy().split(fraction, key=jr.key(0))


def test_device_rows_equal_host_rows():
    data = toy()
    rows = data.device()
    np.testing.assert_array_equal(rows.obs, data.observations)
    np.testing.assert_array_equal(rows.next_obs, data.next_observations)
    np.testing.assert_array_equal(rows.terminated, data.terminated)


def test_states_travel_with_their_rows():
    part = toy().take_episodes(np.array([2, 0]))
    np.testing.assert_array_equal(part.qpos, part.observations)
    np.testing.assert_array_equal(part.qvel, -part.observations)
    assert part.starts.tolist() == [0, 4]


def test_flags_of_another_length_are_an_error():
    with pytest.raises(RefplanError, match="3 observations, but 2 termination"):
        make_dataset(np.zeros((3, 1)), np.zeros((3, 1)), np.zeros(3), np.zeros(2, bool), np.zeros(3, bool))


def test_an_empty_dataset_is_an_error():
    with pytest.raises(RefplanError, match="empty"):
        make_dataset(np.zeros((0, 1)), np.zeros((0, 1)), np.zeros(0), np.zeros(0), np.zeros(0))
