"""`Diagnosis`: the numbers that say whether a model of the world can be planned with."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class Errors:
    """Error and calibration k = 1 ... horizon steps ahead along logged actions.

    Errors are in units of the std of one-step changes in the data (for the reward: of rewards), so 1 is as wrong as the
    mean change is at k = 1. Outputs are the observation's entries, then the reward.
    """

    outputs: tuple[str, ...]
    count: Int[np.ndarray, " steps"]  # segments that reach this far
    rmse: Float[np.ndarray, " steps"]  # mean propagation, members averaged
    rmse_low: Float[np.ndarray, " steps"]  # 95 % bootstrap interval over segments
    rmse_high: Float[np.ndarray, " steps"]
    median: Float[np.ndarray, " steps"]  # median over segments; far below rmse: a few segments go very wrong
    rmse_sampled: Float[np.ndarray, " steps"]  # average of sampled runs
    rmse_draw: Float[np.ndarray, " steps"]  # one sampled run
    rmse_stays: Float[np.ndarray, " steps"]  # trivial: the state stays, the reward is the data's mean
    rmse_drifts: Float[np.ndarray, " steps"]  # trivial: the state moves by the data's mean change at every step
    rmse_per_output: Float[np.ndarray, "steps outputs"]
    coverage_50: Float[np.ndarray, "steps outputs"]  # share of truths inside the central 50 % of sampled runs
    coverage_90: Float[np.ndarray, "steps outputs"]
    levels: Float[np.ndarray, " levels"]
    coverage: Float[np.ndarray, "steps levels"]  # over all outputs, for each central level
    calibration_error: Float[np.ndarray, " steps"]  # mean over outputs and levels of |coverage - level|
    nll: Float[np.ndarray, " outputs"]  # at k = 1, of the members' mixture; nats, in the units of the errors
    nll_member: Float[np.ndarray, " outputs"]  # at k = 1, of single members on average
    nll_trivial: Float[np.ndarray, " outputs"]  # of one Gaussian with the data's mean and std


@dataclass(frozen=True, eq=False)
class Doubt:
    """Whether the model knows where it is wrong; NaN where there is one member only."""

    member_rank: Float[np.ndarray, " steps"]  # rank correlation of members' spread with the error
    member_ratio: Float[np.ndarray, " steps"]  # members' spread over the error (rms); below 1: too little doubt
    sampled_rank: Float[np.ndarray, " steps"]  # the same for the std of sampled runs
    sampled_ratio: Float[np.ndarray, " steps"]  # 1 if calibrated


@dataclass(frozen=True, eq=False)
class ReturnMatch:
    """Imagined against realised return of H logged steps, across states.

    Logged data has one plan per state, so this ranks states with their plans, not plans at one state; `given_state`
    and `spearman_shuffled` show how much of it the states alone explain.
    """

    horizon: int
    with_value: bool  # discounted, plus the prior's value of the state reached; else the plain sum of rewards
    count: int
    pearson: float
    spearman: float
    spearman_sampled: float  # average of sampled runs instead of mean propagation
    spearman_shuffled: float  # mean propagation along the actions of another segment
    given_state: float  # Pearson correlation of what a linear function of the state does not explain
    bias: float  # imagined minus realised, in units of the std of realised returns
    imagined: Float[np.ndarray, " shown"]  # some pairs for a figure
    realised: Float[np.ndarray, " shown"]


@dataclass(frozen=True)
class PlanNoise:
    """Scores of several plans from one state, averaged over members as planners do; H steps."""

    horizon: int
    noise_std: float  # of the same plan imagined again with new noise
    action_std: float  # between plans, noise removed
    noise_share: float  # noise^2 / (noise^2 + action^2): how much of a score difference is luck
    ranking: float  # rank correlation, within a state, of one sampled score with the score of mean propagation


@dataclass(frozen=True)
class Ends:
    """Terminations one step ahead; precision and recall are NaN where their denominator is 0."""

    logged: int
    precision: float  # of the ends most members predict, the share that was logged
    recall: float  # of the logged ends, the share most members predict
    false_alarm: float  # share of other steps at which an end is predicted
    rule_precision: float  # the same three, given the true next observation
    rule_recall: float
    rule_false_alarm: float


@dataclass(frozen=True, eq=False)
class LatentUse:
    """What the latent carries. NLLs are per output at k = 1, members averaged, nats in the units of the errors."""

    kl_previous: float  # nats per step from the posterior before
    kl_first: float  # of the first posterior from N(0, I)
    kl_standard: float  # mean over steps, from N(0, I)
    posterior_std: float
    means_std: float  # spread of posterior means over all steps
    episode_std: float  # spread of episodes' average means: what differs between episodes
    nll_mean: float  # m = mu
    nll_sampled: float
    nll_shuffled: float  # mu of another step
    nll_constant: float  # the average mu
    nll_zero: float
    settled_after: int  # steps until 90 % of the way from the first mu to the episode's late mu is gone
    movement: Float[np.ndarray, " time"]  # |mu_t - mu_(t-1)|, mean over episodes
    distance: Float[np.ndarray, " time1"]  # |mu_t - late mu|, mean over episodes


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Everything `diagnose` measured; `str` gives tables, `to_dict` JSON, `verdict` a few sentences."""

    data: str
    transitions: int
    episodes: int
    segments: int
    members: int
    horizon: int
    diverged: float  # share of segments whose imagined runs left the finite numbers; they are left out of all else
    errors: Errors
    doubt: Doubt
    returns: tuple[ReturnMatch, ...]
    plans: tuple[PlanNoise, ...]
    ends: Ends
    latent: LatentUse | None

    @property
    def flags(self) -> tuple[str, ...]:
        """Short names of what stands out, for programs."""
        from refplan.dynamics.diagnose_text import find_flags

        return find_flags(self)

    @property
    def verdict(self) -> str:
        """Can planning help? A few sentences."""
        from refplan.dynamics.diagnose_text import make_verdict

        return make_verdict(self)

    def text(self) -> str:
        """Tables a person reads."""
        from refplan.dynamics.diagnose_text import make_text

        return make_text(self)

    def __str__(self) -> str:
        return self.text()

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON; what could not be measured is None."""
        return {**plain(self), "flags": list(self.flags), "verdict": self.verdict}


def plain(value: Any) -> Any:
    """A record, or a part of one, as JSON has it: six digits, and None for what is not a finite number."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
