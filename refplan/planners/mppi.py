"""MPPI as MBOP (Argenson and Dulac-Arnold, 2021) uses it offline: one rollout per plan, mixed with the last plan."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from refplan.planners.base import AbstractModelPlanner, Considered, PlannerState
from refplan.types import Key, Obs, Scalar


class MPPI(AbstractModelPlanner):
    """w_n = softmax(kappa R_n), R_n what the plan earned in the rollout it was made in plus the value of its end.

    With the prior of `refplan.MBOP` (an ensemble of cloned policies and of n-step returns) this is MBOP's planner:
    a_h = prior + noise, mixed with the last plan (`mixing`, 0.2), H 15, 1000 plans, kappa 0.5, no discount.

    Departures from MBOP's code: the policy and the model that move a plan are redrawn at every step (there: one member
    per plan); terminations end a plan (there: none); actions are clipped to their bounds.
    """

    horizon: int = eqx.field(static=True, default=15, kw_only=True)
    plans: int = eqx.field(static=True, default=1000, kw_only=True)
    kappa: Scalar = eqx.field(converter=jnp.asarray, default=0.5, kw_only=True)
    sigma: Scalar = eqx.field(converter=jnp.asarray, default=0.8, kw_only=True)
    mixing: Scalar = eqx.field(converter=jnp.asarray, default=0.2, kw_only=True)
    shift: bool = eqx.field(static=True, default=False, kw_only=True)
    discount: Scalar = eqx.field(converter=jnp.asarray, default=1.0, kw_only=True)

    def consider(self, state: PlannerState, obs: Obs, key: Key) -> Considered:
        """The plans with what they earned on the way."""
        imagined = self.imagine(state, obs, key)
        returns = imagined.earned
        if self.value_at_end == "prior":
            value: Float[Array, " plan"] = jax.vmap(self.prior_here(state, obs).value)(imagined.states, imagined.obs)
            returns = returns + self.discount**self.horizon * jnp.where(imagined.alive, value, 0.0)
        return Considered(imagined.actions, returns[None, :, None], returns[None], jnp.isfinite(returns))
