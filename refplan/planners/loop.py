"""LOOP (Sikchi et al., 2021): the same plans scored in a Markov ensemble, without a belief."""

import equinox as eqx
import jax
import jax.numpy as jnp

from refplan.dynamics.base import Belief, Hypothesis
from refplan.planners.shooting import AbstractShootingPlanner
from refplan.types import Key, Obs


class LOOP(AbstractShootingPlanner):
    """Plans scored at the centre of the belief, `repeats` times with fresh noise.

    With `repeats` equal to RefPlan's `latents` both spend the same and average the same amount of transition noise, so
    the difference between them is what the belief is worth. The paper's 16x budget is `plans=1600`.

    Departures from the paper: proposals are sampled from the prior and the noise is fed back into their rollout, as in
    RefPlan (LOOP's code: the prior's mean, noise added afterwards); returns are discounted and end with V (its code:
    H-1 rewards and Q, undiscounted); terminations end a plan (its code: in effect never).
    """

    repeats: int = eqx.field(static=True, default=1, kw_only=True)

    @property
    def world_count(self) -> int:
        """One world, as often as asked."""
        return self.repeats

    def worlds(self, belief: Belief, obs: Obs, key: Key) -> Hypothesis:
        """The centre of the belief, repeated."""
        centre = self.model.centre(belief, obs)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.repeats, *jnp.shape(x))), centre)
