"""Scores, and how sure one can be of them: aggregates, bootstrap intervals, comparisons.

Definitions follow Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice", and give
the numbers of its library rliable. Scores are arrays (runs, tasks): one row per seed, one column per task; aggregates
also take leading axes, so that all bootstrap resamples are worked out at once. Scores stay on the scale of
`normalised_score`, where 100 is the reference policy (rliable's examples divide by 100).

All intervals are percentile bootstrap intervals. They are only as good as the runs they are drawn from: with three runs
they are coarse, and with a single run (or episode) they shrink to `low == high == value`, which means that the spread
is unknown, not that it is zero. The value itself need not lie in the middle; for the median over many tasks with
skewed runs it can even lie outside.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from refplan.errors import RefplanError

Numbers = ArrayLike | float | int
Aggregate = np.float64 | Float[np.ndarray, "..."]

# Resamples are drawn in blocks of about this many numbers, so that memory stays flat however many runs there are.
BLOCK = 2**21


class Interval(NamedTuple):
    """A number and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


class Profile(NamedTuple):
    """A performance profile with pointwise bounds: at each tau, the share of runs that score above it."""

    taus: Float[np.ndarray, " taus"]
    value: Float[np.ndarray, " taus"]
    low: Float[np.ndarray, " taus"]
    high: Float[np.ndarray, " taus"]


def normalised_score(returns: Numbers, ref_min: float, ref_max: float) -> Aggregate:
    """D4RL's normalised score, 100 (return - ref_min) / (ref_max - ref_min), elementwise (NaN stays NaN)."""
    span = _span(ref_min, ref_max)
    return 100 * (np.asarray(returns, np.float64) - ref_min) / span


def normalised_spread(spread: Numbers, ref_min: float, ref_max: float) -> Aggregate:
    """A standard deviation (or any width) of returns on the scale of scores: scaled, never shifted."""
    widths = np.asarray(spread, np.float64)
    if np.any(widths < 0):
        raise RefplanError(f"a spread cannot be negative, got {widths.min()}. For returns use normalised_score.")
    return 100 * widths / _span(ref_min, ref_max)


def mean(scores: Numbers) -> Aggregate:
    """Mean over tasks of the mean over runs."""
    return _checked(scores).mean(axis=(-2, -1))


def median(scores: Numbers) -> Aggregate:
    """Median over tasks of the mean over runs."""
    return np.median(_checked(scores).mean(axis=-2), axis=-1)


def iqm(scores: Numbers) -> Aggregate:
    """Interquartile mean: the mean of the middle half of all runs of all tasks (25 % cut at each end, rounded down)."""
    array = _checked(scores)
    flat = np.sort(array.reshape(*array.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    return flat[..., cut : flat.shape[-1] - cut].mean(axis=-1)


def optimality_gap(scores: Numbers, gamma: float = 100.0) -> Aggregate:
    """How far the runs fall short of `gamma` on average, gamma - mean(min(score, gamma)); lower is better."""
    return gamma - np.minimum(_checked(scores), gamma).mean(axis=(-2, -1))


STATISTICS: dict[str, Callable[..., Aggregate]] = {
    "mean": mean,
    "median": median,
    "iqm": iqm,
    "optimality_gap": optimality_gap,
}


def probability_of_improvement(x: Numbers, y: Numbers) -> Aggregate:
    """P(a run of x beats a run of y on the same task), ties counted half, averaged over tasks."""
    left, right = _paired(x, y)
    left, right = left[..., :, None, :], right[..., None, :, :]
    # The sum lies in {0, 1, 2}, which a byte holds: eight times less memory than floats.
    twice = (left > right).view(np.uint8) + (left >= right).view(np.uint8)
    return twice.mean(axis=(-3, -2, -1)) / 2


def performance_profile(scores: Numbers, taus: Numbers) -> Float[np.ndarray, "... taus"]:
    """Share of all runs of all tasks that score strictly above each threshold tau."""
    array = _checked(scores)
    shares = [np.count_nonzero(array > tau, axis=(-2, -1)) for tau in _thresholds(taus)]
    return np.stack(shares, axis=-1) / (array.shape[-2] * array.shape[-1])


def interval(
    scores: Numbers,
    statistic: Callable[[np.ndarray], Aggregate],
    *,
    reps: int = 50_000,
    level: float = 0.95,
    seed: int = 0,
    task_bootstrap: bool = False,
) -> Interval:
    """Percentile interval of a statistic by the stratified bootstrap: runs are resampled within each task.

    `statistic` reduces the last two axes (runs, tasks) of its argument and keeps any before them. `task_bootstrap` also
    resamples the tasks, for claims about tasks like these rather than about exactly these.
    """
    array = _matrix(scores)
    return Interval(*map(float, _bootstrap(statistic, (array,), reps, level, seed, task_bootstrap)))


def mean_interval(values: Numbers, *, reps: int = 10_000, level: float = 0.95, seed: int = 0) -> Interval:
    """Mean and percentile bootstrap interval of a list of numbers, e.g. episode returns."""
    return interval(_list(values)[:, None], mean, reps=reps, level=level, seed=seed)


def nested_interval(groups: Sequence[Numbers], *, reps: int = 10_000, level: float = 0.95, seed: int = 0) -> Interval:
    """Mean over groups (training seeds) of the means of their numbers (episodes), resampled on both levels.

    Episodes of one training are alike: to draw them as if each were a training of its own gives intervals that another
    training falls out of. With one group it is `mean_interval`.
    """
    if not len(groups):
        raise RefplanError("no scores given: nested_interval needs at least one group of numbers.")
    if len(groups) == 1:
        return mean_interval(groups[0], reps=reps, level=level, seed=seed)
    _check_draws(reps, level)
    generator, arrays = np.random.default_rng(seed), [_list(group) for group in groups]
    drawn = generator.integers(len(arrays), size=(reps, len(arrays)))
    means = np.empty(drawn.shape)
    for number, array in enumerate(arrays):
        places = drawn == number
        means[places] = array[generator.integers(len(array), size=(places.sum(), len(array)))].mean(axis=1)
    value = np.mean([array.mean() for array in arrays])
    return Interval(*map(float, (value, *_bounds(means.mean(axis=1), level))))


def improvement_interval(x: Numbers, y: Numbers, *, reps: int = 50_000, level: float = 0.95, seed: int = 0) -> Interval:
    """Probability of improvement of x over y with its interval; x and y are resampled independently."""
    pair = _paired(_matrix(x), _matrix(y))
    return Interval(*map(float, _bootstrap(probability_of_improvement, pair, reps, level, seed)))


def profile_interval(
    scores: Numbers,
    taus: Numbers,
    *,
    reps: int = 2_000,
    level: float = 0.95,
    seed: int = 0,
    task_bootstrap: bool = False,
) -> Profile:
    """Performance profile with a stratified bootstrap interval at each tau (pointwise, not for the whole curve)."""
    array, thresholds = _matrix(scores), _thresholds(taus)
    profile = partial(performance_profile, taus=thresholds)
    return Profile(thresholds, *_bootstrap(profile, (array,), reps, level, seed, task_bootstrap))


def _bootstrap(
    statistic: Callable[..., Aggregate],
    arrays: tuple[Float[np.ndarray, "_ tasks"], ...],
    reps: int,
    level: float,
    seed: int,
    task_bootstrap: bool = False,
) -> Float[np.ndarray, "3 *shape"]:
    _check_draws(reps, level)
    value, generator = np.asarray(statistic(*arrays)), np.random.default_rng(seed)
    # A statistic of two arrays compares every run of one with every run of the other, hence the product.
    block = max(1, BLOCK // (math.prod(len(array) for array in arrays) * arrays[0].shape[1]))
    parts = []
    for start in range(0, reps, block):
        size = min(block, reps - start)
        parts.append(statistic(*(_resample(array, size, generator, task_bootstrap) for array in arrays)))
        if np.shape(parts[-1]) != (size, *value.shape):
            raise RefplanError(
                f"the statistic made shape {np.shape(parts[-1])} of ({size}, runs, tasks), not {(size, *value.shape)}. "
                "It must reduce only the last two axes, e.g. lambda s: s.max(axis=(-2, -1))."
            )
    return np.stack([value, *_bounds(np.concatenate(parts), level)])


def _check_draws(reps: int, level: float) -> None:
    if reps < 1 or not 0 < level < 1:
        raise RefplanError(f"need reps >= 1 and 0 < level < 1 (e.g. 0.95), got reps={reps}, level={level}.")


def _bounds(draws: Float[np.ndarray, "reps *shape"], level: float) -> Float[np.ndarray, "2 *shape"]:
    tail = (1 - level) / 2
    return np.quantile(draws, [tail, 1 - tail], axis=0)


def _resample(
    array: Float[np.ndarray, "runs tasks"], size: int, generator: np.random.Generator, task_bootstrap: bool
) -> Float[np.ndarray, "size runs tasks"]:
    runs, tasks = array.shape
    rows = generator.integers(runs, size=(size, runs, tasks))
    columns = generator.integers(tasks, size=(size, 1, tasks)) if task_bootstrap else np.arange(tasks)
    return array.ravel()[rows * tasks + columns]


def _span(ref_min: float, ref_max: float) -> float:
    if not (np.isfinite(ref_min) and np.isfinite(ref_max) and ref_min < ref_max):
        raise RefplanError(f"reference scores need finite ref_min < ref_max, got {ref_min} and {ref_max}.")
    return ref_max - ref_min


def _numbers(values: Numbers) -> Float[np.ndarray, "..."]:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise RefplanError(f"scores are not a rectangular array of numbers: {error}.") from error
    if array.size == 0:
        raise RefplanError(f"no scores given: the array has shape {array.shape}.")
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        raise RefplanError(
            f"{len(bad)} of {array.size} scores are NaN or infinite, the first at index {tuple(bad[0].tolist())}. "
            "Find out why that run failed, or leave it out on purpose."
        )
    return array


def _list(values: Numbers) -> Float[np.ndarray, " numbers"]:
    array = _numbers(values)
    if array.ndim != 1:
        raise RefplanError(f"a mean needs a list of numbers, got shape {array.shape}. For runs x tasks: interval.")
    return array


def _checked(scores: Numbers) -> Float[np.ndarray, "*batch runs tasks"]:
    array = _numbers(scores)
    if array.ndim < 2:
        raise RefplanError(
            f"scores need the axes (runs, tasks), got shape {array.shape}. For one task: scores[:, None]."
        )
    return array


def _matrix(scores: Numbers) -> Float[np.ndarray, "runs tasks"]:
    array = _checked(scores)
    if array.ndim != 2:
        raise RefplanError(f"an interval needs scores of exactly the axes (runs, tasks), got shape {array.shape}.")
    return array


def _paired(x: Numbers, y: Numbers) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    left, right = _checked(x), _checked(y)
    if left.shape[-1] != right.shape[-1]:
        raise RefplanError(f"x has {left.shape[-1]} tasks and y has {right.shape[-1]}; compare them on the same tasks.")
    return left, right


def _thresholds(taus: Numbers) -> Float[np.ndarray, " taus"]:
    array = _numbers(taus)
    if array.ndim != 1:
        raise RefplanError(f"taus need to be a list of thresholds, got shape {array.shape}.")
    return array
