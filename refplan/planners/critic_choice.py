"""The control every planner is measured against: choose among the prior's actions by its critics, without a model."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from refplan.dynamics.base import Belief
from refplan.errors import RefplanError
from refplan.planners.base import AbstractPlanner, Considered, PlannerState
from refplan.planners.core import propose_action
from refplan.types import Action, Key, Obs, Transition


class CriticChoice(AbstractPlanner):
    """w_n = softmax(kappa min_i Q_i(s, a_n)) over actions sampled from the prior: what the critic alone can gain."""

    def __check_init__(self):
        if not hasattr(self.prior, "critics"):
            raise RefplanError(
                f"the prior ({type(self.prior).__name__}) has no critics to choose by; fit some with refplan.FQE."
            )

    def start(self) -> PlannerState:
        """Nothing but the prior's state."""
        return PlannerState(self.prior.start(), (), jnp.zeros((1, *self.low.shape)), jnp.zeros(()))

    def observe(self, state: PlannerState, transition: Transition) -> PlannerState:
        """The prior reflects."""
        return state._replace(prior=self.prior.observe(state.prior, transition))

    def believed(self, belief: Belief, obs: Obs) -> tuple[Float[Array, " latent"], Float[Array, " latent"]]:
        """There is no belief."""
        return jnp.zeros(0), jnp.zeros(0)

    def consider(self, state: PlannerState, obs: Obs, key: Key) -> Considered:
        """Plans of one action, judged by the smallest critic."""
        critics: Any = getattr(self.prior, "critics")  # noqa: B009, checked when the planner was made

        def one(key: Key) -> tuple[Action, Float[Array, " critic"]]:
            key_action, key_noise = jr.split(key)
            action, _ = propose_action(self.prior, state.prior, obs, key_action, self.proposal, self.width)
            noisy = jnp.clip(action + self.sigma * jr.normal(key_noise, action.shape), self.low, self.high)
            return noisy, critics(obs, noisy)

        actions, values = jax.vmap(one)(jr.split(key, self.plans))
        scores = jnp.min(values, axis=1)
        return Considered(actions[:, None], values[None], scores[None], jnp.isfinite(scores))
