"""What planners have in common: settings, state, and the way from an observation to a `Plan`."""

from abc import abstractmethod
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from refplan.agent import AbstractAgent, AbstractPrior
from refplan.dynamics.base import AbstractDynamics, Belief, Hypothesis
from refplan.planners.core import (
    Plan,
    Propagation,
    Proposal,
    combine,
    effective_count,
    kappa_for,
    propose,
    score,
    usable,
    weigh,
)
from refplan.risk import mean_minus_std, mean_minus_variance
from refplan.types import Action, Key, Obs, Scalar, State, Transition

Spread = Literal["std", "variance"]
Choice = Literal["mean", "resample"]


class PlannerState(NamedTuple):
    """What a planner remembers: the prior's state and the model's belief."""

    prior: State
    belief: Belief


class AbstractPlanner(AbstractAgent):
    """An agent that can show what its decision was made from."""

    @abstractmethod
    def plan(self, state: State, obs: Obs, key: Key) -> tuple[Plan, State]:
        """The decision with its reasons, and the new state."""


class AbstractShootingPlanner(AbstractPlanner):
    """Propose with the prior, score in the model, weigh, execute the first action.

    LOOP and RefPlan differ only in `worlds`: which hypotheses plans are scored under.
    """

    prior: AbstractPrior
    model: AbstractDynamics
    low: Action
    high: Action
    horizon: int = eqx.field(static=True, default=2)
    plans: int = eqx.field(static=True, default=100)
    kappa: Scalar = eqx.field(converter=jnp.asarray, default=5.0)
    sigma: Scalar = eqx.field(converter=jnp.asarray, default=0.05)
    penalty: Scalar = eqx.field(converter=jnp.asarray, default=0.1)
    discount: Scalar = eqx.field(converter=jnp.asarray, default=0.99)
    proposal: Proposal = eqx.field(static=True, default="sample")
    propagation: Propagation = eqx.field(static=True, default="mean")
    spread: Spread = eqx.field(static=True, default="std")
    choice: Choice = eqx.field(static=True, default="mean")
    effective: Scalar = eqx.field(converter=jnp.asarray, default=0.0)  # share of plans to take part; 0: use kappa
    terminal: bool = eqx.field(static=True, default=True)

    @abstractmethod
    def worlds(self, belief: Belief, obs: Obs, key: Key) -> Hypothesis:
        """The hypotheses to score under, stacked on a leading axis."""

    @property
    @abstractmethod
    def world_count(self) -> int:
        """How many there are."""

    def start(self) -> PlannerState:
        """Nothing seen yet."""
        return PlannerState(self.prior.start(), self.model.start())

    def observe(self, state: PlannerState, transition: Transition) -> PlannerState:
        """Prior and model both reflect on the step."""
        prior = self.prior.observe(state.prior, transition)
        return PlannerState(prior, self.model.observe(state.belief, transition))

    def act(self, state: PlannerState, obs: Obs, key: Key) -> tuple[Action, PlannerState]:
        """The first action of the plan."""
        plan, state = self.plan(state, obs, key)
        return plan.action, state

    def plan(self, state: PlannerState, obs: Obs, key: Key) -> tuple[Plan, PlannerState]:
        """Algorithm 2 of the paper; what is not finite falls back to the prior's own action."""
        keys = jr.split(key, 5)
        own, prior_state = self.prior.act(state.prior, obs, keys[0])
        proposals = self._propose(state, obs, keys[1])
        worlds = self.worlds(state.belief, obs, keys[2])
        returns = self._score(state.prior, worlds, obs, proposals, keys[3])
        risk = mean_minus_std if self.spread == "std" else mean_minus_variance
        scores = risk(returns, self.penalty, 2)
        plan = self._decide(proposals, returns, scores, own, keys[4])
        return plan, PlannerState(prior_state, state.belief)

    def _propose(self, state: PlannerState, obs: Obs, key: Key) -> Float[Array, "plan horizon act"]:
        centre = self.model.centre(state.belief, obs)
        shape: dict[str, Any] = {"plans": self.plans, "horizon": self.horizon, "proposal": self.proposal}
        box = {"sigma": self.sigma, "low": self.low, "high": self.high}
        return propose(self.prior, self.model, state.prior, centre, obs, key, **shape, **box)

    def _score(
        self, prior_state: State, worlds: Hypothesis, obs: Obs, proposals: Float[Array, "plan horizon act"], key: Key
    ) -> Float[Array, "world plan member"]:
        options: dict[str, Any] = {"discount": self.discount, "propagation": self.propagation}

        def one(world: Hypothesis, key: Key) -> Float[Array, "plan member"]:
            inputs = (prior_state, world, obs, proposals, key)
            return score(self.prior, self.model, *inputs, **options, terminal=self.terminal)

        return jax.vmap(one)(worlds, jr.split(key, self.world_count))

    def _decide(
        self,
        proposals: Float[Array, "plan horizon act"],
        returns: Float[Array, "world plan member"],
        scores: Float[Array, "world plan"],
        own: Action,
        key: Key,
    ) -> Plan:
        wanted = jnp.maximum(self.effective * self.plans, 1.0)
        kappa = jax.vmap(lambda s: jnp.where(self.effective > 0, kappa_for(s, wanted), self.kappa))(scores)
        weights = jax.vmap(weigh)(scores, kappa)
        good = usable(scores)
        # A world in which nothing is finite has no say; if none has, the prior decides.
        kept = weights * good[:, None] * (self.world_count / jnp.maximum(good.sum(), 1))
        mean_plan = combine(jnp.where(jnp.isfinite(proposals), proposals, 0.0), kept)
        if self.choice == "resample":
            mean_plan = proposals[jr.categorical(key, jnp.log(jnp.mean(kept, axis=0)))]
        fallback = ~good.any() | ~jnp.isfinite(mean_plan[0]).all()
        middle = 0.5 * (self.low + self.high)
        safe = jnp.where(jnp.isfinite(own), own, middle)
        action = jnp.clip(jnp.where(fallback, safe, mean_plan[0]), self.low, self.high)
        counts = jax.vmap(effective_count)(weights)
        return Plan(action, mean_plan, proposals, returns, scores, weights, counts, kappa, fallback)
