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
from refplan.dynamics.base import AbstractDynamics, Prediction
from refplan.errors import RefplanError
from refplan.types import Key, Obs, Scalar, Transition


class Range(NamedTuple):
    """Bounds of observations and rewards."""

    obs_low: Obs
    obs_high: Obs
    reward_low: Scalar
    reward_high: Scalar


class Judge(NamedTuple):
    """A world to be tried in and a value for where it stops; neither may be what the planner itself plans with."""

    model: AbstractDynamics
    critic: AbstractPrior | None  # None: what comes after the last step counts nothing
    discount: Scalar
    range: Range | None = None  # what may be imagined; None: anything


def logged_range(data: Dataset) -> Range:
    """The smallest and largest of everything logged: a model rolled out for long must not invent what never was."""
    return Range(*(jnp.asarray(f(x, axis=0)) for x in (data.observations, data.rewards) for f in (np.min, np.max)))


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
            made = _within(judge.range, judge.model.step_member(world, obs, action, member, key_step))
            state = agent.observe(state, Transition(obs, action, made.reward, made.next_obs, made.terminated))
            total = total + factor * jnp.where(alive, made.reward, 0.0)
            alive, after = alive & ~made.terminated, jnp.where(alive, made.next_obs, obs)
            return (state, after, alive, total, factor * judge.discount), None

        start = (agent.start(), obs, jnp.ones((), bool), jnp.zeros(()), jnp.ones(()))
        (_, obs, alive, total, factor), _ = jax.lax.scan(step, start, jr.split(key, steps))
        left = 0.0 if judge.critic is None else judge.critic.value(judge.critic.start(), obs)
        return total + factor * jnp.where(alive, left, 0.0)

    return jax.vmap(one)(starts, jnp.arange(len(starts)), jr.split(key, len(starts)))


def _within(known: Range | None, step: Prediction) -> Prediction:
    """The step, no farther out than the range; whether the world ended there was asked before."""
    if known is None:
        return step
    next_obs = jnp.clip(step.next_obs, known.obs_low, known.obs_high)
    return step._replace(next_obs=next_obs, reward=jnp.clip(step.reward, known.reward_low, known.reward_high))
