"""Statistics against numbers recorded from rliable, against exact enumeration, and by their laws."""

import itertools
import json
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from refplan import stats
from refplan.errors import RefplanError

RLIABLE = json.loads((Path(__file__).parent / "fixtures" / "rliable.json").read_text())
SCORES = {name: np.array(scores) for name, scores in RLIABLE["scores"].items()}
# rliable's scale: 1 is the reference policy, ours has it at 100.
STATISTICS = stats.STATISTICS | {"optimality_gap": lambda scores: stats.optimality_gap(scores, gamma=1.0)}

# Multiples of 1/8 are exact in binary, so that laws which hold exactly are not blurred by rounding.
exact_numbers = st.integers(-800, 1600).map(lambda eighths: eighths / 8)


def score_arrays(tasks=None):
    shapes = st.tuples(st.integers(1, 5), st.integers(1, 6) if tasks is None else st.just(tasks))
    return shapes.flatmap(lambda shape: arrays(np.float64, shape, elements=exact_numbers))


def assert_same_bounds(recorded, interval_at, reps, recorded_reps, level=0.95):
    """Recorded bounds agree with ours up to the Monte-Carlo error of both.

    A bound is the quantile at `tail` of R resamples, so it sits at a true quantile that scatters around `tail` with
    standard deviation sqrt(tail (1 - tail) / R). Four joint standard deviations either side is allowed, stated in
    quantiles rather than in scores: that also holds where the statistic takes few values and a bound jumps.
    """
    tail = (1 - level) / 2
    slack = 4 * np.sqrt(tail * (1 - tail) * (1 / reps + 1 / recorded_reps))
    wide, narrow = (interval_at(1 - 2 * (tail + sign * slack)) for sign in (-1, 1))
    low, high = np.reshape(recorded[0], np.shape(wide.low)), np.reshape(recorded[1], np.shape(wide.high))
    assert np.all(wide.low - 1e-10 <= low) and np.all(low <= narrow.low + 1e-10), (wide, recorded, narrow)
    assert np.all(narrow.high - 1e-10 <= high) and np.all(high <= wide.high + 1e-10), (wide, recorded, narrow)


@pytest.mark.parametrize("name", SCORES)
def test_point_values_are_those_of_rliable(name):
    for statistic, recorded in zip(RLIABLE["statistics"], RLIABLE["values"][name], strict=True):
        assert STATISTICS[statistic](SCORES[name]) == pytest.approx(recorded, abs=1e-10), statistic
    profile = stats.performance_profile(SCORES[name], RLIABLE["taus"])
    np.testing.assert_allclose(profile, RLIABLE["profiles"][name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("pair", RLIABLE["improvement"])
def test_probability_of_improvement_is_that_of_rliable(pair):
    x, y = SCORES[pair[0]], SCORES[pair[1]]
    assert stats.probability_of_improvement(x, y) == pytest.approx(RLIABLE["improvement"][pair], abs=1e-10)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    ("recorded", "level", "task_bootstrap"),
    [("bounds", 0.95, False), ("narrow_bounds", 0.8, False), ("task_bounds", 0.95, True)],
)
def test_intervals_are_those_of_rliable(name, recorded, level, task_bootstrap):
    for index, statistic in enumerate(RLIABLE["statistics"]):
        assert_same_bounds(
            [bound[index] for bound in RLIABLE[recorded][name]],
            lambda at, f=STATISTICS[statistic]: stats.interval(
                SCORES[name], f, level=at, reps=50_000, task_bootstrap=task_bootstrap
            ),
            50_000,
            RLIABLE["reps"],
            level,
        )


@pytest.mark.parametrize("pair", RLIABLE["improvement"])
def test_improvement_intervals_are_those_of_rliable(pair):
    assert_same_bounds(
        RLIABLE["improvement_bounds"][pair],
        lambda level: stats.improvement_interval(SCORES[pair[0]], SCORES[pair[1]], level=level, reps=20_000),
        20_000,
        RLIABLE["pair_reps"],
    )


@pytest.mark.parametrize("name", SCORES)
def test_profile_intervals_are_those_of_rliable(name):
    assert_same_bounds(
        RLIABLE["profile_bounds"][name],
        lambda level: stats.profile_interval(SCORES[name], RLIABLE["taus"], level=level, reps=20_000),
        20_000,
        RLIABLE["pair_reps"],
    )


def test_values_worked_out_by_hand():
    scores = np.array([[0.0, 10.0, 200.0], [20.0, 30.0, 100.0]])  # task means 10, 20, 150
    assert stats.mean(scores) == 60
    assert stats.median(scores) == 20
    assert stats.iqm(scores) == (10 + 20 + 30 + 100) / 4  # one of six is cut at each end
    assert stats.optimality_gap(scores) == pytest.approx((100 + 90 + 0 + 80 + 70 + 0) / 6)
    np.testing.assert_allclose(stats.performance_profile(scores, [-1, 20, 200]), [1, 3 / 6, 0])
    # Task 1: 0 and 20 against 20 is one loss and one tie; task 2: two wins; task 3: two wins.
    assert stats.probability_of_improvement(scores, [[20.0, 5.0, 50.0]]) == pytest.approx((0.25 + 1 + 1) / 3)


def test_interval_is_the_exact_bootstrap_quantile():
    scores = np.array([[0.0, 5.0], [1.0, 7.0], [4.0, 13.0]])
    picks = list(itertools.product(range(3), repeat=3))
    exact = [scores[list(p), 0].mean() / 2 + scores[list(q), 1].mean() / 2 for p in picks for q in picks]
    exact = np.sort(exact)  # all 729 equally likely resamples
    for level in (0.5, 0.8, 0.95):
        tail = (1 - level) / 2
        slack = 4 * np.sqrt(tail * (1 - tail) / 50_000)
        found = stats.interval(scores, stats.mean, level=level)
        for bound, at in ((found.low, tail), (found.high, 1 - tail)):
            lowest, highest = np.quantile(exact, [at - slack, at + slack])
            assert lowest - 1e-10 <= bound <= highest + 1e-10


def test_interval_of_many_normal_numbers_is_the_textbook_one():
    values = np.random.default_rng(3).normal(50, 10, size=400)
    found = stats.mean_interval(values)
    half = 1.96 * values.std() / np.sqrt(len(values))
    np.testing.assert_allclose(found, [values.mean(), values.mean() - half, values.mean() + half], atol=0.1 * half)


def test_normalised_score_maps_the_references_to_0_and_100():
    assert stats.normalised_score(-20.27, -20.27, 3234.3) == 0
    assert stats.normalised_score(3234.3, -20.27, 3234.3) == pytest.approx(100)
    for returns in ([[1, 2]], np.float32([[1, 2]]), jnp.array([[1.0, 2.0]])):
        np.testing.assert_allclose(stats.normalised_score(returns, 1.0, 5.0), [[0.0, 25.0]])


@given(st.lists(exact_numbers, min_size=1, max_size=8))
def test_normalised_spread_is_the_spread_of_normalised_scores(returns):
    spread = stats.normalised_spread(np.std(returns), -20.27, 3234.3)
    assert spread == pytest.approx(np.std(stats.normalised_score(returns, -20.27, 3234.3)), abs=1e-9)


def test_normalised_spread_of_constant_returns_is_zero():
    assert stats.normalised_spread(np.std([700.0] * 5), -280.18, 12135.0) == 0


@given(exact_numbers, st.integers(1, 5), st.integers(1, 5))
def test_aggregates_of_a_constant_are_the_constant(constant, runs, tasks):
    scores = np.full((runs, tasks), constant)
    for statistic in (stats.mean, stats.median, stats.iqm):
        assert statistic(scores) == pytest.approx(constant, abs=1e-9)
        assert stats.interval(scores, statistic, reps=20) == pytest.approx([constant] * 3, abs=1e-9)


@given(score_arrays(), exact_numbers)
def test_laws_of_aggregates(scores, shift):
    for statistic in (stats.mean, stats.median, stats.iqm):
        assert scores.min() - 1e-9 <= statistic(scores) <= scores.max() + 1e-9
        assert statistic(scores + shift) == pytest.approx(statistic(scores) + shift, abs=1e-9)
    gap = stats.optimality_gap(scores)
    assert gap >= max(0.0, 100 - stats.mean(scores)) - 1e-9
    assert stats.optimality_gap(scores / 100, gamma=1.0) == pytest.approx(gap / 100, abs=1e-9)


@given(score_arrays(tasks=3), score_arrays(tasks=3))
def test_laws_of_improvement(x, y):
    there, back = stats.probability_of_improvement(x, y), stats.probability_of_improvement(y, x)
    assert 0 <= there <= 1
    assert there + back == pytest.approx(1, abs=1e-12)
    assert stats.probability_of_improvement(x, x) == pytest.approx(0.5, abs=1e-12)
    assert stats.probability_of_improvement(x + 1e4, y) == 1


@given(score_arrays(), st.lists(exact_numbers, min_size=1, max_size=10))
def test_profile_falls_from_one_to_zero(scores, taus):
    profile = stats.performance_profile(scores, [scores.min() - 1, *sorted(taus), scores.max()])
    inside = profile[1:-1]
    assert np.all(np.diff(inside) <= 0)
    assert profile[0] == 1 and profile[-1] == 0


@settings(max_examples=25)
@given(score_arrays(), st.integers(0, 2**32))
def test_wider_levels_hold_narrower_ones_and_the_value(scores, seed):
    # Only means: the test below shows that the bootstrap of a median does not promise to hold the value.
    for statistic in (stats.mean, stats.optimality_gap):
        wide = stats.interval(scores, statistic, reps=1_000, level=0.99, seed=seed)
        narrow = stats.interval(scores, statistic, reps=1_000, level=0.5, seed=seed)
        assert wide.low - 1e-9 <= wide.value <= wide.high + 1e-9
        assert wide.low <= narrow.low <= narrow.high <= wide.high
        assert wide.value == narrow.value == statistic(scores)


def test_the_value_is_reported_as_it_is_even_outside_its_interval():
    # One run in eight is lucky, so a resampled task mean lies more often below the mean than above; many tasks show it.
    lucky = 2.0 ** np.arange(8)
    scores = np.repeat(lucky[:, None], 3_000, axis=1)
    found = stats.interval(scores, stats.median, reps=200)
    assert found.value == lucky.mean()
    assert found.high < found.value


def test_profile_bounds_hold_the_profile():
    profile = stats.profile_interval(SCORES["a"], RLIABLE["taus"])
    assert np.all(profile.low <= profile.value) and np.all(profile.value <= profile.high)
    assert np.any(profile.low < profile.high)


def test_one_run_has_no_width_but_tasks_can_be_resampled():
    one = SCORES["a"][:1]
    assert stats.mean_interval([42.0]) == (42.0, 42.0, 42.0)
    found = stats.interval(one, stats.mean)
    assert found.low == found.high == pytest.approx(found.value)
    over_tasks = stats.interval(one, stats.mean, task_bootstrap=True)
    assert over_tasks.low < over_tasks.value < over_tasks.high


def test_episodes_of_one_training_do_not_stand_for_other_trainings():
    low, high = np.linspace(-0.1, 0.1, 10), np.linspace(9.9, 10.1, 10)
    pooled, nested = stats.mean_interval([*low, *high]), stats.nested_interval([low, high])
    assert nested.value == pytest.approx(pooled.value) == 5.0
    assert nested.low == pytest.approx(0.0, abs=0.1) and nested.high == pytest.approx(10.0, abs=0.1)
    assert pooled.low > 2.0 and pooled.high < 8.0
    assert stats.nested_interval([low]) == stats.mean_interval(low), "one training: over its episodes"
    alike = stats.nested_interval([low, low, low])
    assert 0.5 < (alike.high - alike.low) / (stats.mean_interval(low).high - stats.mean_interval(low).low) < 0.8
    uneven = stats.nested_interval([[0.0], [1.0, 1.0, 1.0]])
    assert uneven.value == 0.5, "every training counts once"


def test_more_runs_narrow_the_interval():
    generator = np.random.default_rng(1)
    few, many = (stats.mean_interval(generator.normal(size=size)) for size in (20, 2_000))
    # Ten times narrower for a hundred times the numbers, up to the scatter of a spread estimated from 20.
    assert 5 < (few.high - few.low) / (many.high - many.low) < 20


def test_seed_decides_the_interval_and_global_randomness_is_left_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first, again, other = (stats.interval(SCORES["a"] * 1.01, stats.iqm, reps=500, seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_blocks_do_not_change_what_is_drawn(monkeypatch):
    whole = stats.interval(SCORES["c"], stats.mean, reps=1_001)
    monkeypatch.setattr(stats, "BLOCK", 75 * 10)  # ten resamples at a time, the last block holds one
    assert stats.interval(SCORES["c"], stats.mean, reps=1_001) == whole


def test_fifty_thousand_resamples_are_quick():
    started = time.perf_counter()
    stats.interval(SCORES["a"], stats.iqm, reps=50_000)
    assert time.perf_counter() - started < 5  # 0.05 s on an idle core; rliable needs about 20 s


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stats.mean([1.0, 2.0]), r"axes \(runs, tasks\).*\(2,\)"),
        (lambda: stats.iqm(np.zeros((0, 3))), r"no scores"),
        (lambda: stats.median([[1.0, np.nan]]), r"1 of 2 scores are NaN.*\(0, 1\)"),
        (lambda: stats.optimality_gap([[np.inf]]), r"infinite"),
        (lambda: stats.mean([[1.0, 2.0], [3.0]]), r"rectangular"),
        (lambda: stats.mean([["high", "low"]]), r"rectangular array of numbers"),
        (lambda: stats.interval(np.zeros((2, 2, 2)), stats.mean), r"exactly the axes"),
        (lambda: stats.interval(np.zeros((3, 2)), np.mean), r"reduce only the last two axes"),
        (lambda: stats.interval(np.zeros((3, 2)), stats.mean, reps=0), r"reps=0"),
        (lambda: stats.interval(np.zeros((3, 2)), stats.mean, level=95.0), r"level=95.0"),
        (lambda: stats.mean_interval([[1.0]]), r"list of numbers"),
        (lambda: stats.mean_interval([]), r"no scores"),
        (lambda: stats.nested_interval([]), r"at least one group"),
        (lambda: stats.nested_interval([[1.0], []]), r"no scores"),
        (lambda: stats.nested_interval([[1.0], [[1.0]]]), r"list of numbers"),
        (lambda: stats.nested_interval([[1.0], [2.0]], reps=0), r"reps=0"),
        (lambda: stats.improvement_interval(np.zeros((3, 2)), np.zeros((3, 4))), r"2 tasks and y has 4"),
        (lambda: stats.performance_profile(np.zeros((3, 2)), [[0.5]]), r"list of thresholds"),
        (lambda: stats.normalised_score(1.0, 5.0, 5.0), r"ref_min < ref_max"),
        (lambda: stats.normalised_score(1.0, float("nan"), 5.0), r"finite"),
        (lambda: stats.normalised_spread(-1.0, 0.0, 5.0), r"cannot be negative"),
    ],
)
def test_bad_input_is_refused_in_words(call, words):
    with pytest.raises(RefplanError, match=words):
        call()
