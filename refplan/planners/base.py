"""What planners have in common: settings, state, and the way from an observation to a `Plan`."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from refplan.agent import AbstractPrior, prior_bound
from refplan.dynamics.base import AbstractDynamics, Belief
from refplan.errors import RefplanError, unknown_name
from refplan.planners.core import (
    Mixing,
    Plan,
    around_own,
    combine,
    effective_count,
    kappa_for,
    propose,
    usable,
    weigh,
)
from refplan.types import Action, Flag, Key, Obs, Scalar, State, Transition

# What the settings that are words may say.
WORDS = {
    "proposal": ("sample", "mean"),
    "propagation": ("sample", "common", "mean"),
    "spread": ("std", "variance"),
    "choice": ("mean", "resample"),
    "value_at_end": ("prior", "none"),
    "across": ("weights", "scores"),
    "anchor": ("plans", "prior", "own"),
}
COUNTS = ("plans", "horizon", "latents", "repeats")
SHARES = ("effective", "share", "mixing", "discount")  # between 0 and 1
NOT_NEGATIVE = ("kappa", "sigma", "width", "shortlist")


def check_values(planner: str, values: Mapping[str, Any]) -> None:
    """Words must be known ones, counts at least 1, numbers where they mean something; what is traced is not known."""
    for name, value in values.items():
        if name in WORDS and value not in WORDS[name]:
            raise unknown_name(f"{name} of {planner}", value, WORDS[name])
        if name in COUNTS and value < 1:
            raise RefplanError(f"{name} of {planner} must be at least 1, got {value}.")
        if isinstance(value, Tracer):
            continue
        if name in SHARES and not np.all((np.asarray(value) >= 0) & (np.asarray(value) <= 1)):
            raise RefplanError(f"{name} of {planner} is a share and must lie between 0 and 1, got {value}.")
        if name in NOT_NEGATIVE and not np.all(np.asarray(value) >= 0):
            raise RefplanError(f"{name} of {planner} must not be negative, got {value}.")


class PlannerState(NamedTuple):
    """What a planner remembers: the prior's state, the model's belief, and the last plan (`known`: if there is one)."""

    prior: State
    belief: Belief
    previous: Float[Array, "horizon act"]
    known: Float[Array, ""]


class Considered(NamedTuple):
    """Proposals and what they would earn in every world under every member; minus infinity where none was asked for."""

    proposals: Float[Array, "plan horizon act"]
    returns: Float[Array, "world plan member"]
    scores: Float[Array, "world plan"]
    sound: Bool[Array, " plan"]  # what could be imagined, scored or not


class AbstractPlanner(AbstractPrior):
    """An agent that weighs plans and can show what its decision was made from.

    It is a prior too (its sampled action is one of its plans, drawn by their weights; its value is its own prior's), so
    that a planner can be the prior of another planner.
    """

    prior: AbstractPrior
    low: Any = eqx.field(default=None, kw_only=True)  # bounds of the actions, one per action; None: the prior's
    high: Any = eqx.field(default=None, kw_only=True)
    plans: int = eqx.field(static=True, default=100, kw_only=True)
    kappa: Scalar = eqx.field(converter=jnp.asarray, default=5.0, kw_only=True)
    sigma: Scalar = eqx.field(converter=jnp.asarray, default=0.05, kw_only=True)
    proposal: str = eqx.field(static=True, default="sample", kw_only=True)
    # How far a sampled proposal goes from the prior's own action: 1, all the way; 0, `proposal="mean"`. At least 1 in a
    # world that is known to have changed: there the prior's own action is not the good one it was.
    width: Scalar = eqx.field(converter=jnp.asarray, default=1.0, kw_only=True)
    choice: str = eqx.field(static=True, default="mean", kw_only=True)
    # The share of plans that should take part in the decision; 0: use kappa.
    effective: Scalar = eqx.field(converter=jnp.asarray, default=0.0, kw_only=True)
    # What the weights move: "plans", their mean (eq. 14), or "prior", at home its own action (see `core.around_own`).
    # "own": at home nothing, the prior acts by itself; away from home the plans.
    anchor: str = eqx.field(static=True, default="plans", kw_only=True)

    def __post_init__(self):
        self.low = prior_bound(self.prior, "low") if self.low is None else jnp.asarray(self.low)
        self.high = prior_bound(self.prior, "high") if self.high is None else jnp.asarray(self.high)

    def __check_init__(self):
        values = {
            name: getattr(self, name) for name in (*WORDS, *COUNTS, *SHARES, *NOT_NEGATIVE) if hasattr(self, name)
        }
        check_values(type(self).__name__, values)

    @property
    def rows(self) -> int:
        """Every plan."""
        return self.plans

    @abstractmethod
    def start(self) -> PlannerState:
        """Nothing seen yet."""

    @abstractmethod
    def observe(self, state: PlannerState, transition: Transition) -> PlannerState:
        """Reflect on one real step."""

    @abstractmethod
    def consider(self, state: PlannerState, obs: Obs, key: Key) -> Considered:
        """Propose plans and score them."""

    @abstractmethod
    def believed(self, belief: Belief, obs: Obs) -> tuple[Float[Array, " latent"], Float[Array, " latent"]]:
        """(mean, standard deviation) of a Gaussian belief; empty where there is none."""

    def plan(self, state: PlannerState, obs: Obs, key: Key) -> tuple[Plan, PlannerState]:
        """Algorithm 2 of the paper; what is not finite falls back to the prior's own action."""
        self._check(state, obs)
        key_own, key_consider, key_decide = jr.split(key, 3)
        own, prior_state = self.prior_here(state, obs).act(state.prior, obs, key_own)
        plan = self.decide(self.consider(state, obs, key_consider), own, key_decide, self.away(state))
        mean, std = self.believed(state.belief, obs)
        plan = plan._replace(belief_mean=mean, belief_std=std)
        known = (~plan.fallback).astype(jnp.float32)  # no weak type: another one would compile every act twice
        return plan, PlannerState(prior_state, state.belief, plan.mean_plan, known)

    def act(self, state: PlannerState, obs: Obs, key: Key) -> tuple[Action, PlannerState]:
        """The first action of the plan."""
        plan, state = self.plan(state, obs, key)
        return plan.action, state

    def sample(self, state: PlannerState, obs: Obs, key: Key) -> tuple[Action, Scalar]:
        """One of the plans drawn by its weight, and the logarithm of that weight."""
        key_plan, key_draw = jr.split(key)
        plan, _ = self.plan(state, obs, key_plan)
        log_weights = jnp.log(jnp.mean(plan.weights, axis=0))
        drawn = jr.categorical(key_draw, log_weights)
        action = jnp.where(plan.fallback, plan.action, plan.proposals[drawn, 0])
        return action, jnp.where(plan.fallback, 0.0, log_weights[drawn])

    def value(self, state: PlannerState, obs: Obs) -> Scalar:
        """The prior's value: a lower bound of what a planner on top of it should reach."""
        return self.prior_here(state, obs).value(state.prior, obs)

    def prior_here(self, state: PlannerState, obs: Obs) -> AbstractPrior:
        """The prior as the belief would have it."""
        return self.prior

    def away(self, state: PlannerState) -> Flag:
        """Whether this is known to be another world than the prior's: then being near the prior is no virtue."""
        return jnp.zeros((), bool)

    def decide(self, considered: Considered, own: Action, key: Key, away: Flag | bool = False) -> Plan:
        """Weigh the plans in every world (eq. 9) and average over worlds (eq. 14); `own` is the way out."""
        proposals, returns, scores, sound = considered
        wanted = jnp.maximum(self.effective * self.plans, 1.0)
        kappa = jax.vmap(lambda s: jnp.where(self.effective > 0, kappa_for(s, wanted), self.kappa))(scores)
        weights = jax.vmap(weigh)(scores, kappa)
        good = usable(scores)
        # A world in which nothing is finite has no say; if none has, the prior decides.
        kept = weights * good[:, None] * (scores.shape[0] / jnp.maximum(good.sum(), 1))
        mean_plan = combine(jnp.where(jnp.isfinite(proposals), proposals, 0.0), kept)
        if self.choice == "resample":
            mean_plan = proposals[jr.categorical(key, jnp.log(jnp.mean(kept, axis=0)))]
        if self.anchor != "plans":
            moved = self.anchor == "prior"
            near = around_own(mean_plan, proposals, sound, own) if moved else mean_plan.at[0].set(own)
            mean_plan = jnp.clip(jnp.where(away, mean_plan, near), self.low[None], self.high[None])
        fallback = ~good.any() | ~jnp.isfinite(mean_plan).all()
        middle = 0.5 * (self.low + self.high)
        safe = jnp.where(jnp.isfinite(own), own, middle)
        mean_plan = jnp.where(fallback, safe[None], mean_plan)
        action = jnp.clip(mean_plan[0], self.low, self.high)
        counts, none = jax.vmap(effective_count)(weights), jnp.zeros(0)
        return Plan(action, mean_plan, proposals, returns, scores, weights, counts, kappa, fallback, none, none)

    def _check(self, state: PlannerState, obs: Obs) -> None:
        """An observation of the wrong shape is found before anything is computed."""
        try:
            shape = jax.eval_shape(lambda o: self.prior.act(state.prior, o, jr.key(0))[0], obs).shape
        except (TypeError, ValueError) as error:
            detail = str(error).splitlines()[0]
            raise RefplanError(
                f"{type(self).__name__}: its prior does not accept an observation of shape {obs.shape} ({detail}). "
                "Give one observation of the task the prior was trained in."
            ) from None
        if shape != self.low.shape:
            raise RefplanError(
                f"{type(self).__name__}: the prior gives actions of shape {shape}, the bounds have {self.low.shape}."
            )


class AbstractModelPlanner(AbstractPlanner):
    """A planner that imagines: it has a model, a horizon, and may mix its last plan into the next proposals."""

    model: AbstractDynamics
    horizon: int = eqx.field(static=True, default=2, kw_only=True)
    discount: Scalar = eqx.field(converter=jnp.asarray, default=0.99, kw_only=True)
    value_at_end: str = eqx.field(static=True, default="prior", kw_only=True)
    mixing: Scalar = eqx.field(converter=jnp.asarray, default=0.0, kw_only=True)
    shift: bool = eqx.field(static=True, default=True, kw_only=True)  # the last plan moves on by one step

    def start(self) -> PlannerState:
        """Nothing seen yet, no plan to go on with."""
        empty = jnp.zeros((self.horizon, *self.low.shape))
        return PlannerState(self.prior.start(), self.model.start(), empty, jnp.zeros(()))

    def observe(self, state: PlannerState, transition: Transition) -> PlannerState:
        """Prior and model both reflect on the step."""
        prior = self.prior_here(state, transition.obs).observe(state.prior, transition)
        return state._replace(prior=prior, belief=self.model.observe(state.belief, transition))

    def prior_here(self, state: PlannerState, obs: Obs) -> AbstractPrior:
        """The prior in the world at the belief's centre."""
        return self.prior.under(self.model.centre(state.belief, obs))

    def believed(self, belief: Belief, obs: Obs) -> tuple[Float[Array, " latent"], Float[Array, " latent"]]:
        """The model's."""
        return self.model.believed(belief, obs)

    def away(self, state: PlannerState) -> Flag:
        """As the model believes."""
        return self.model.away(state.belief)

    def imagine(self, state: PlannerState, obs: Obs, key: Key) -> Any:
        """The prior's proposals, rolled through the model at the belief's centre (see `core.propose`)."""
        last = jnp.concatenate([state.previous[1:], state.previous[-1:]]) if self.shift else state.previous
        options: dict[str, Any] = {"plans": self.plans, "sigma": self.sigma, "low": self.low, "high": self.high}
        width = jnp.where(self.away(state), jnp.maximum(self.width, 1.0), self.width)
        options |= {"proposal": self.proposal, "width": width, "discount": self.discount}
        centre = self.model.centre(state.belief, obs)
        mixing = Mixing(last, self.mixing * state.known)
        return propose(self.prior.under(centre), self.model, state.prior, centre, obs, key, mixing=mixing, **options)
