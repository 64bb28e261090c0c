"""From imagined and logged runs to the numbers of a `Diagnosis`; plain NumPy in double precision."""

import numpy as np
from jaxtyping import Bool, Float

from refplan.data.dataset import Dataset
from refplan.dynamics.diagnose_data import Randomness, Scale, Segments
from refplan.dynamics.diagnose_record import Doubt, Ends, Errors, PlanNoise, ReturnMatch
from refplan.dynamics.diagnose_rollout import Rollout

LEVELS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
SHOWN = 300  # points of a scatter plot
Vector = Float[np.ndarray, " n"]
Cube = Float[np.ndarray, "segments steps outputs"]
Valid = Bool[np.ndarray, "segments steps"]


def rank(x: Vector) -> Vector:
    """Ranks from 1; equal values share their average rank."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def pearson(x: Vector, y: Vector) -> float:
    """Pearson's correlation; NaN where one side does not vary or is not finite."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def spearman(x: Vector, y: Vector) -> float:
    """Spearman's rank correlation; infinite values have a rank too, NaN has none."""
    return float("nan") if np.isnan(x).any() or np.isnan(y).any() else pearson(rank(x), rank(y))


def root_mean(square: Float[np.ndarray, "segments steps *more"], valid: Valid) -> Float[np.ndarray, "steps *more"]:
    """Root of the mean over valid segments; NaN where there is none."""
    mask = valid.reshape(*valid.shape, *(1,) * (square.ndim - 2))
    total = np.where(mask, square, 0.0).sum(axis=0)
    count = mask.sum(axis=0)
    return np.sqrt(np.where(count > 0, total, np.nan) / np.maximum(count, 1))


def measure_errors(
    roll: Rollout,
    truth: Cube,
    start: Float[np.ndarray, "segments obs"],
    valid: Valid,
    scale: Scale,
    nll: tuple[np.ndarray, np.ndarray],
    runs: int,
    random: Randomness,
) -> Errors:
    """k-step errors, their trivial rivals, and calibration. `nll`: log densities (mixture, member) at k = 1."""
    square = lambda guess: ((guess - truth) / scale.std) ** 2  # noqa: E731
    total = lambda guess: root_mean(square(guess).mean(axis=2), valid)  # noqa: E731
    stays, drifts = trivial_guesses(start, scale, truth.shape[1])
    single = square(roll.centre)
    low, high = _bootstrap(single.mean(axis=2), valid, random)
    coverage = _coverage(place_among(roll, runs, random), valid)
    ahead = (truth[:, 0] - np.concatenate([start, np.zeros_like(start[:, :1])], axis=1) - scale.mean) / scale.std
    return Errors(
        outputs=(*(f"obs[{i}]" for i in range(start.shape[1])), "reward"),
        count=valid.sum(axis=0),
        rmse=total(roll.centre),
        rmse_low=low,
        rmse_high=high,
        median=np.array([_median(np.sqrt(single[:, k].mean(axis=1))[valid[:, k]]) for k in range(truth.shape[1])]),
        rmse_sampled=total(roll.average),
        rmse_draw=total(roll.draw),
        rmse_stays=total(stays),
        rmse_drifts=total(drifts),
        rmse_per_output=root_mean(single, valid),
        coverage_50=coverage[list(LEVELS).index(0.5)],
        coverage_90=coverage[list(LEVELS).index(0.9)],
        levels=LEVELS,
        coverage=coverage.mean(axis=2).T,
        calibration_error=np.abs(coverage - LEVELS[:, None, None]).mean(axis=(0, 2)),
        nll=-np.asarray(nll[0], np.float64).mean(axis=0),
        nll_member=-np.asarray(nll[1], np.float64).mean(axis=0),
        nll_trivial=0.5 * (ahead**2 + np.log(2 * np.pi)).mean(axis=0),
    )


def trivial_guesses(start: Float[np.ndarray, "segments obs"], scale: Scale, steps: int) -> tuple[Cube, Cube]:
    """The state stays; the state drifts by the data's mean change. The reward is the data's mean in both."""
    reward = np.full((len(start), steps, 1), scale.mean[-1])
    stays = np.repeat(start[:, None], steps, axis=1)
    drift = np.arange(1, steps + 1)[None, :, None] * scale.mean[:-1]
    return np.concatenate([stays, reward], axis=2), np.concatenate([stays + drift, reward], axis=2)


def _median(x: Vector) -> float:
    return float(np.median(x)) if len(x) else float("nan")


def place_among(roll: Rollout, runs: int, random: Randomness) -> Cube:
    """Randomised probability integral transform: uniform if the truth is one more draw from the same distribution."""
    ties = random.host.random(np.shape(roll.below)) * (runs * np.asarray(roll.equal) + 1.0)
    return (runs * np.asarray(roll.below) + ties) / (runs + 1.0)


def _bootstrap(
    square: Float[np.ndarray, "segments steps"], valid: Valid, random: Randomness, reps: int = 300
) -> Float[np.ndarray, "2 steps"]:
    """95 % interval of the RMSE over resampled segments."""
    weight = random.host.multinomial(len(square), np.full(len(square), 1 / len(square)), size=reps)
    count = weight @ valid
    total = weight @ np.where(valid, square, 0.0)
    roots = np.sqrt(np.where(count > 0, total, np.nan) / np.maximum(count, 1))
    empty = ~valid.any(axis=0)
    return np.where(empty, np.nan, np.nanquantile(np.where(empty, 0.0, roots), [0.025, 0.975], axis=0))


def _coverage(pit: Cube, valid: Valid) -> Float[np.ndarray, "levels steps outputs"]:
    """Share of truths in the central part of the sampled runs, per level, step and output."""
    inside = np.abs(pit - 0.5)[None] <= LEVELS[:, None, None, None] / 2
    count = valid.sum(axis=0)[None, :, None]
    share = (inside & valid[None, :, :, None]).sum(axis=1) / np.maximum(count, 1)
    return np.where(count > 0, share, np.nan)


def measure_doubt(roll: Rollout, truth: Cube, valid: Valid, scale: Scale, members: int) -> Doubt:
    """Whether spread and error go together, over segments, and whether they have the same size."""
    size = lambda x: np.sqrt(((np.asarray(x, np.float64) / scale.std) ** 2).mean(axis=2))  # noqa: E731
    spread, error = size(roll.spread), size(roll.centre - truth)
    deviation = size(roll.deviation)
    steps = range(truth.shape[1])
    ranks = lambda a, b: np.array([spearman(a[valid[:, k], k], b[valid[:, k], k]) for k in steps])  # noqa: E731
    ratio = lambda a, b: _ratio(root_mean(a**2, valid), root_mean(b**2, valid))  # noqa: E731
    absent = np.full(truth.shape[1], np.nan)
    return Doubt(
        absent if members < 2 else ranks(spread, error),
        absent if members < 2 else ratio(spread, error),
        ranks(deviation, error),
        ratio(deviation, error),
    )


def _ratio(a: Vector, b: Vector) -> Vector:
    return np.where(b > 0, a / np.where(b > 0, b, 1.0), np.nan)


def match_returns(
    horizon: int,
    with_value: bool,
    imagined: Vector,
    sampled: Vector,
    realised: Vector,
    shuffled: Vector,
    start: Float[np.ndarray, "n obs"],
) -> ReturnMatch:
    """How well imagined returns rank realised ones."""
    spread = realised.std()
    return ReturnMatch(
        horizon=horizon,
        with_value=with_value,
        count=len(realised),
        pearson=pearson(imagined, realised),
        spearman=spearman(imagined, realised),
        spearman_sampled=spearman(sampled, realised),
        spearman_shuffled=spearman(shuffled, realised),
        given_state=partial_correlation(imagined, realised, start),
        bias=float((imagined - realised).mean() / spread) if spread > 0 else float("nan"),
        imagined=imagined[:SHOWN],
        realised=realised[:SHOWN],
    )


def partial_correlation(x: Vector, y: Vector, given: Float[np.ndarray, "n obs"]) -> float:
    """Pearson's correlation of the residuals of both after least squares on (1, given)."""
    if len(x) < given.shape[1] + 10:
        return float("nan")
    spread = given.std(axis=0)
    design = np.column_stack([np.ones(len(x)), (given - given.mean(axis=0)) / np.where(spread > 0, spread, 1.0)])
    both = np.column_stack([x, y])
    rest = both - design @ np.linalg.lstsq(design, both, rcond=None)[0]
    # What least squares leaves of a quantity it explains fully is rounding, not signal.
    if np.any(rest.std(axis=0) <= 1e-6 * np.maximum(both.std(axis=0), 1e-12)):
        return float("nan")
    return pearson(rest[:, 0], rest[:, 1])


def measure_plans(scores: Float[np.ndarray, "states plans repeats1"], horizon: int) -> PlanNoise:
    """Variance of scores within a plan and between the plans of one state (one-way analysis of variance)."""
    scores = scores[np.isfinite(scores).all(axis=(1, 2))]
    if not len(scores):
        return PlanNoise(horizon, *[float("nan")] * 4)
    mean, sampled = scores[..., 0], scores[..., 1:]
    noise = sampled.var(axis=2, ddof=1).mean()
    action = max(sampled.mean(axis=2).var(axis=1, ddof=1).mean() - noise / sampled.shape[2], 0.0)
    share = noise / (noise + action) if noise + action > 0 else float("nan")
    ranks = np.array([spearman(one[:, 0], centre) for one, centre in zip(sampled, mean, strict=True)])
    ranking = float(ranks[np.isfinite(ranks)].mean()) if np.isfinite(ranks).any() else float("nan")
    return PlanNoise(horizon, float(np.sqrt(noise)), float(np.sqrt(action)), float(share), ranking)


def measure_ends(
    data: Dataset,
    row: np.ndarray,
    predicted: Bool[np.ndarray, " rows"],
    rule: Bool[np.ndarray, " rows"],
) -> Ends:
    """Precision and recall; rows without an end stand for all of the data's, of which they are a sample."""
    ended = data.terminated[row]
    for_end = data.terminated.sum() / max(ended.sum(), 1)
    for_other = (~data.terminated).sum() / max((~ended).sum(), 1)
    weight = np.where(ended, for_end, for_other)

    def rates(flag: Bool[np.ndarray, " rows"]) -> tuple[float, float, float]:
        hit, alarm = weight[flag & ended].sum(), weight[flag & ~ended].sum()
        precision = hit / (hit + alarm) if hit + alarm > 0 else float("nan")
        recall = hit / weight[ended].sum() if ended.any() else float("nan")
        return float(precision), float(recall), float(alarm / max(weight[~ended].sum(), 1.0))

    return Ends(int(data.terminated.sum()), *rates(predicted), *rates(rule))


def truth_of(segments: Segments) -> Cube:
    """The logged [obs, reward] after each step."""
    steps = segments.steps
    return np.concatenate([steps.next_obs, np.asarray(steps.reward)[..., None]], axis=2).astype(np.float64)
