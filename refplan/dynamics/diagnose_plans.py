"""How much of the difference between plans is their actions, and how much is the noise of imagining them."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from refplan.agent import AbstractPrior
from refplan.dynamics.base import AbstractDynamics, Belief, Hypothesis
from refplan.dynamics.diagnose_data import Keys
from refplan.dynamics.diagnose_rollout import imagine, score
from refplan.types import Action, Obs, State, Transition


class PlanDraws(NamedTuple):
    """Everything random about the plans: drawn outside, because compiling generators inside loops takes seconds."""

    action: Float[Array, "*batch time act"]  # standard normal, for logged actions where there is no prior
    keys: Keys  # (*batch, time, 2) for the prior
    member: Int[Array, "*batch time"]  # whom to believe while proposing
    noise: Float[Array, "*batch repeats time member outputs"]  # of transitions, for scoring


def propose(
    model: AbstractDynamics, prior: AbstractPrior, hypothesis: Hypothesis, state: State, obs: Obs, draws: PlanDraws
) -> Float[Array, "time act"]:
    """One plan: actions sampled from the prior while it is imagined to act, by the means of one member per step."""

    def step(carry: tuple[State, Obs], x: tuple[Keys, Array]) -> tuple[tuple[State, Obs], Action]:
        (state, obs), (keys, member) = carry, x
        action, _ = prior.sample(state, obs, keys[0])
        _, state = prior.act(state, obs, keys[1])
        outcome = model.predict_from(hypothesis, obs, action)
        after, reward = outcome.next_obs[member], outcome.reward[member]
        ended = model.termination(obs, action, after)
        return (prior.observe(state, Transition(obs, action, reward, after, ended)), after), action

    return jax.lax.scan(step, (state, obs), (draws.keys, draws.member))[1]


@eqx.filter_jit
def score_plans(
    model: AbstractDynamics,
    prior: AbstractPrior | None,
    beliefs: Belief,
    states: State,
    steps: Transition,
    noise: Float[Array, " act"],
    bounds: tuple[Float[Array, " act"], Float[Array, " act"]],
    draws: PlanDraws,
    *,
    horizons: tuple[int, ...],
    discount: float,
) -> Float[Array, "states plans repeats1 horizons"]:
    """Scores of several plans from each state, members averaged: the first by mean propagation, the others drawn.

    Plans are sampled from the prior, or are the logged actions plus Gaussian `noise`, inside the bounds.
    """

    def one_plan(hypothesis: Hypothesis, state: State, steps: Transition, draws: PlanDraws) -> Array:
        obs = steps.obs[0]
        if prior is None:
            actions = jnp.clip(steps.action + noise[None] * draws.action, bounds[0][None], bounds[1][None])
        else:
            actions = propose(model, prior, hypothesis, state, obs, draws)
        shocks = jnp.concatenate([jnp.zeros_like(draws.noise[:1]), draws.noise])
        judge = lambda n: score(imagine(model, hypothesis, obs, actions, n), prior, state, discount, horizons)  # noqa: E731
        return jnp.mean(jax.vmap(judge)(shocks), axis=-1)

    def one_state(belief: Belief, state: State, steps: Transition, draws: PlanDraws) -> Array:
        hypothesis = model.centre(belief, steps.obs[0])
        return jax.vmap(lambda d: one_plan(hypothesis, state, steps, d))(draws)

    return jax.vmap(one_state)(beliefs, states, steps, draws)
