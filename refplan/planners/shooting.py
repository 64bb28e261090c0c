"""What LOOP and RefPlan have in common: plans of the prior, scored in worlds under every member of a model."""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from refplan.dynamics.base import AbstractDynamics, Belief, Hypothesis
from refplan.planners.base import AbstractModelPlanner, Considered, PlannerState
from refplan.planners.core import score
from refplan.risk import conditional_value_at_risk, mean_minus_std, mean_minus_variance
from refplan.turns import at_once, in_turns
from refplan.types import Key, Obs, Scalar, State

GLANCE = 2  # members asked for a first look at plans: one alone is too often wrong about the next ones' opinion


class AbstractShootingPlanner(AbstractModelPlanner):
    """Propose with the prior, score every plan in every world under every member, weigh, execute the first action.

    LOOP and RefPlan differ only in `worlds`: which hypotheses plans are scored under.
    """

    penalty: Scalar = eqx.field(converter=jnp.asarray, default=0.1, kw_only=True)
    spread: str = eqx.field(static=True, default="std", kw_only=True)
    propagation: str = eqx.field(static=True, default="mean", kw_only=True)
    members: int = eqx.field(static=True, default=0, kw_only=True)  # how many elites score; 0: all
    # "weights": plans are weighed in every world, weights averaged (the paper). "scores": scores are joined over worlds
    # first, by the mean of the worst `share` of them (1: the plain mean), and weighed once.
    across: str = eqx.field(static=True, default="weights", kw_only=True)
    share: Scalar = eqx.field(converter=jnp.asarray, default=1.0, kw_only=True)
    # How many plans, the best at a first glance, are scored in full; the others get no weight. 0: all of them.
    shortlist: int = eqx.field(static=True, default=0, kw_only=True)

    @abstractmethod
    def worlds(self, belief: Belief, obs: Obs, key: Key) -> Hypothesis:
        """The hypotheses to score under, stacked on a leading axis."""

    @property
    @abstractmethod
    def world_count(self) -> int:
        """How many there are."""

    def consider(self, state: PlannerState, obs: Obs, key: Key) -> Considered:
        """Lines 5 to 14 of Algorithm 2."""
        key_propose, key_worlds, key_score = jr.split(key, 3)
        proposals = self.imagine(state, obs, key_propose).actions
        worlds = self.worlds(state.belief, obs, key_worlds)
        if self.scored_plans == self.plans:
            returns, scores = self.judge(state.prior, worlds, obs, proposals, key_score)
            return Considered(proposals, returns, scores, jnp.isfinite(scores).any(axis=0))
        looks = self.glance(state, obs, proposals)
        _, kept = jax.lax.top_k(looks, self.scored_plans)
        judged = self.judge(state.prior, worlds, obs, proposals[kept], key_score)
        nothing = ((x.shape[0], self.plans, *x.shape[2:]) for x in judged)
        returns, scores = (
            jnp.full(shape, -jnp.inf).at[:, kept].set(x) for shape, x in zip(nothing, judged, strict=True)
        )
        return Considered(proposals, returns, scores, jnp.isfinite(looks))

    def judge(
        self, prior_state: State, worlds: Hypothesis, obs: Obs, proposals: Float[Array, "plan horizon act"], key: Key
    ) -> tuple[Float[Array, "world plan member"], Float[Array, "judges plan"]]:
        """What plans earn in every world under every member, and their scores in every world or over all of them."""
        returns = self.evaluate(prior_state, worlds, obs, proposals, key)
        risk = mean_minus_std if self.spread == "std" else mean_minus_variance
        scores = risk(returns, self.penalty, 2)
        if self.across == "scores":
            scores = conditional_value_at_risk(scores, self.share, 0)[None]
        return returns, scores

    def glance(
        self, state: PlannerState, obs: Obs, proposals: Float[Array, "plan horizon act"]
    ) -> Float[Array, " plan"]:
        """The mean return under the two best members at the belief's centre, without noise; not finite: the last."""
        centre, model = self.model.centre(state.belief, obs), self.model.best(min(GLANCE, self.members or GLANCE))
        any_key = jr.key(0)  # nothing is drawn
        looks = jnp.mean(self.earned(model, state.prior, centre, obs, proposals, any_key, "mean"), axis=1)
        return jnp.where(jnp.isfinite(looks), looks, -jnp.inf)

    @property
    def scored_plans(self) -> int:
        """How many plans are scored in full."""
        return min(self.shortlist or self.plans, self.plans)

    @property
    def rows(self) -> int:
        """Every scored plan under every member, in as many worlds as are scored at once."""
        each = self.scored_plans * min(self.members or self.model.members, self.model.members)
        return each * at_once(self.world_count, each)

    def evaluate(
        self, prior_state: State, worlds: Hypothesis, obs: Obs, proposals: Float[Array, "plan horizon act"], key: Key
    ) -> Float[Array, "world plan member"]:
        """What every plan earns in every world under every member."""
        model = self.model.best(self.members) if self.members else self.model

        def one(world: Hypothesis, key: Key) -> Float[Array, "plan member"]:
            return self.earned(model, prior_state, world, obs, proposals, key, self.propagation)

        rows = len(proposals) * model.members
        return in_turns(one, rows, worlds, jr.split(key, self.world_count))

    def earned(
        self,
        model: AbstractDynamics,
        prior_state: State,
        world: Hypothesis,
        obs: Obs,
        proposals: Float[Array, "plan horizon act"],
        key: Key,
        propagation: str,
    ) -> Float[Array, "plan member"]:
        """What every plan earns in one world under every member of `model` (see `core.score`)."""
        inputs = (self.prior.under(world), model, prior_state, world, obs, proposals, key)
        terminal = self.value_at_end == "prior"
        return score(*inputs, discount=self.discount, propagation=propagation, terminal=terminal)
