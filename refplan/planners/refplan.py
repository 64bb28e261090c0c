"""RefPlan: plans weighed in worlds drawn from the belief, then averaged over them (the paper's Algorithm 2)."""

import equinox as eqx
import jax
import jax.random as jr

from refplan.dynamics.base import Belief, Hypothesis
from refplan.planners.shooting import AbstractShootingPlanner
from refplan.types import Key, Obs


class RefPlan(AbstractShootingPlanner):
    """E[a] = (1/n) sum_j sum_k w_k^j a^k, w^j the softmax of kappa times the scores in the world m^j (eq. 14).

    Departures from the paper: elites of proposals are dealt out evenly instead of drawn independently; imagined
    transitions are propagated by their means by default (`propagation="sample"` is the paper's reading).
    """

    latents: int = eqx.field(static=True, default=4, kw_only=True)

    @property
    def world_count(self) -> int:
        """One world per latent."""
        return self.latents

    def worlds(self, belief: Belief, obs: Obs, key: Key) -> Hypothesis:
        """Draws from the belief."""
        return jax.vmap(lambda k: self.model.sample(belief, obs, k))(jr.split(key, self.latents))
