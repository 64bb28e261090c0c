"""What an agent would earn in a model: evaluation without the real world, for choosing settings offline."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from refplan.agent import AbstractAgent, AbstractPrior
from refplan.data.dataset import Dataset
from refplan.dynamics.base import AbstractDynamics
from refplan.errors import RefplanError
from refplan.types import Key, Obs, Scalar, Transition


class Judge(NamedTuple):
    """A world to be tried in and a value for where it stops; neither may be what the planner itself plans with."""

    model: AbstractDynamics
    critic: AbstractPrior
    discount: Scalar


def held_out_starts(data: Dataset, count: int, *, key: Key) -> Float[np.ndarray, "starts obs"]:
    """Observations to begin at: drawn from all rows, because an agent must cope wherever it comes to."""
    if count < 1:
        raise RefplanError(f"at least one start is needed, got {count}.")
    rows = np.asarray(jr.choice(key, len(data), (count,), replace=count > len(data)))
    return data.observations[rows]


@eqx.filter_jit
def imagined_returns(
    agent: AbstractAgent, judge: Judge, starts: Float[Array, "starts obs"], steps: int, key: Key
) -> Float[Array, " starts"]:
    """sum_{t<T} gamma^t r_t + gamma^T V(s_T) of an agent acting in the judge's model, one world per start.

    One member of the model is the world of one start, from its first step to its last.
    """

    def one(obs: Obs, number: Array, key: Key) -> Scalar:
        member = number % judge.model.members
        world = judge.model.centre(judge.model.start(), obs)

        def step(carry: tuple, key: Key) -> tuple[tuple, None]:
            state, obs, alive, total, factor = carry
            key_act, key_step = jr.split(key)
            action, state = agent.act(state, obs, key_act)
            made = judge.model.step_member(world, obs, action, member, key_step)
            state = agent.observe(state, Transition(obs, action, made.reward, made.next_obs, made.terminated))
            total = total + factor * jnp.where(alive, made.reward, 0.0)
            alive, after = alive & ~made.terminated, jnp.where(alive, made.next_obs, obs)
            return (state, after, alive, total, factor * judge.discount), None

        start = (agent.start(), obs, jnp.ones((), bool), jnp.zeros(()), jnp.ones(()))
        (_, obs, alive, total, factor), _ = jax.lax.scan(step, start, jr.split(key, steps))
        left = judge.critic.value(judge.critic.start(), obs)
        return total + factor * jnp.where(alive, left, 0.0)

    return jax.vmap(one)(starts, jnp.arange(len(starts)), jr.split(key, len(starts)))
