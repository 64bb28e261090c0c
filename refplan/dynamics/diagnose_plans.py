"""How much of the difference between plans is their actions, and how much is the noise of imagining them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from refplan.agent import AbstractPrior
from refplan.dynamics.base import AbstractDynamics, Belief, Hypothesis
from refplan.dynamics.diagnose_rollout import imagine, score
from refplan.types import Action, Key, Obs, State, Transition


def propose(
    model: AbstractDynamics,
    prior: AbstractPrior,
    hypothesis: Hypothesis,
    state: State,
    obs: Obs,
    horizon: int,
    key: Key,
) -> Float[Array, "time act"]:
    """One plan: actions sampled from the prior while it is imagined to act."""

    def step(carry: tuple[State, Obs], key: Key) -> tuple[tuple[State, Obs], Action]:
        state, obs = carry
        key_action, key_act, key_step = jr.split(key, 3)
        action, _ = prior.sample(state, obs, key_action)
        _, state = prior.act(state, obs, key_act)
        after = model.step(hypothesis, obs, action, key_step)
        state = prior.observe(state, Transition(obs, action, after.reward, after.next_obs, after.terminated))
        return (state, after.next_obs), action

    return jax.lax.scan(step, (state, obs), jr.split(key, horizon))[1]


@eqx.filter_jit
def score_plans(
    model: AbstractDynamics,
    prior: AbstractPrior | None,
    beliefs: Belief,
    states: State,
    steps: Transition,
    noise: Float[Array, " act"],
    bounds: tuple[Float[Array, " act"], Float[Array, " act"]],
    key: Key,
    *,
    plans: int,
    repeats: int,
    horizons: tuple[int, ...],
    discount: float,
) -> tuple[Float[Array, "states plans repeats horizons"], Float[Array, "states plans horizons"]]:
    """Scores of several plans from each state, members averaged: drawn `repeats` times, and by mean propagation.

    Plans are sampled from the prior, or are the logged actions plus Gaussian `noise` inside the bounds.
    """

    def plan_of(hypothesis: Hypothesis, state: State, steps: Transition, key: Key) -> Float[Array, "time act"]:
        if prior is not None:
            return propose(model, prior, hypothesis, state, steps.obs[0], steps.reward.shape[0], key)
        wanted = steps.action + noise[None] * jr.normal(key, steps.action.shape)
        return jnp.clip(wanted, bounds[0][None], bounds[1][None])

    def one_plan(hypothesis: Hypothesis, state: State, steps: Transition, key: Key) -> tuple[Array, Array]:
        key_plan, key_noise = jr.split(key)
        actions = plan_of(hypothesis, state, steps, key_plan)
        judge = lambda k: jnp.mean(  # noqa: E731
            score(imagine(model, hypothesis, steps.obs[0], actions, k), prior, state, discount, horizons), axis=-1
        )
        return jax.vmap(judge)(jr.split(key_noise, repeats)), judge(None)

    def one_state(belief: Belief, state: State, steps: Transition, key: Key) -> tuple[Array, Array]:
        hypothesis = model.centre(belief, steps.obs[0])
        return jax.vmap(lambda k: one_plan(hypothesis, state, steps, k))(jr.split(key, plans))

    return jax.vmap(one_state)(beliefs, states, steps, jr.split(key, steps.reward.shape[0]))
