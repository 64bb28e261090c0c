"""How much a planner's action varies when nothing but its own randomness changes (figure 5 of the paper)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from refplan.agent import AbstractAgent
from refplan.evaluation import AbstractWatcher
from refplan.types import Action, Key, Obs, State


class ActionSpread(AbstractWatcher):
    """Decides `repeats` times at every step of an episode, on keys of its own, and averages the variance.

    The variance is the unbiased one, averaged over the action's dimensions, then over steps.
    """

    def __init__(self, repeats: int):
        self.repeats = repeats
        self.variances: list[float] = []

    def before(self, agent: AbstractAgent, state: State, obs: Obs, key: Key, step: int, simulator: Any) -> None:
        """Repeat the decision that is about to be made; none of these actions is executed."""
        keys = jr.split(jr.fold_in(key, 1), self.repeats)
        self.variances.append(float(_actions(agent, state, obs, keys).var(axis=0, ddof=1).mean()))

    def after(self, action: Float[np.ndarray, " act"], reward: float, terminated: bool) -> None:
        """What came of it does not matter."""

    @property
    def variance(self) -> float:
        """The mean over the steps so far."""
        return float(np.mean(self.variances))


@eqx.filter_jit
def _actions(agent: AbstractAgent, state: State, obs: Obs, keys: Any) -> Float[Array, "repeats act"]:
    def one(key: Key) -> Action:
        return agent.act(state, obs, key)[0]

    return jnp.asarray(jax.lax.map(one, keys))
