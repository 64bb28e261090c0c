"""The three steps every planner shares, as pure functions: propose, score, combine.

Shapes: `plan` plans of `horizon` actions; `world` hypotheses (latents, or repeats of one world); `member` the elites.
Rows are kept as (member, plan), so that one batched product serves all members.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float

from refplan.agent import AbstractPrior
from refplan.dynamics.base import AbstractDynamics, Hypothesis
from refplan.types import Action, Flag, Key, Obs, Scalar, State, Transition

Proposal = Literal["sample", "mean"]
Propagation = Literal["sample", "common", "mean"]


class Plan(NamedTuple):
    """Everything a decision was made from."""

    action: Action
    mean_plan: Float[Array, "horizon act"]
    proposals: Float[Array, "plan horizon act"]
    returns: Float[Array, "world plan member"]
    scores: Float[Array, "world plan"]
    weights: Float[Array, "world plan"]
    effective_plans: Float[Array, " world"]
    kappa: Float[Array, " world"]
    fallback: Flag


def propose(
    prior: AbstractPrior,
    model: AbstractDynamics,
    prior_state: State,
    centre: Hypothesis,
    obs: Obs,
    key: Key,
    *,
    plans: int,
    horizon: int,
    sigma: Scalar,
    low: Action,
    high: Action,
    proposal: Proposal,
) -> Float[Array, "plan horizon act"]:
    """Lines 5-8 of Algorithm 2: roll the prior through the model at the belief's centre.

    Each action is the prior's (sampled, or its own choice) plus N(0, sigma^2), clipped; what is executed in the
    imagination is the noisy one. Each plan is moved by one elite per step (see `move_plans`).
    """

    def choose(state: State, obs: Obs, key: Key) -> tuple[Action, State]:
        key_action, key_noise, key_own = jr.split(key, 3)
        own, new = prior.act(state, obs, key_own)
        action = prior.sample(state, obs, key_action)[0] if proposal == "sample" else own
        return jnp.clip(action + sigma * jr.normal(key_noise, action.shape), low, high), new

    def step(carry: tuple, key: Key) -> tuple[tuple, Float[Array, "plan act"]]:
        states, rows, alive = carry
        key_choose, key_move = jr.split(key)
        actions, states = jax.vmap(choose)(states, rows, jr.split(key_choose, plans))
        after, rewards = move_plans(model, centre, rows, actions, key_move)
        ended = jax.vmap(model.termination)(rows, actions, after)
        steps = Transition(rows, actions, rewards, after, ended)
        states = jax.vmap(prior.observe)(states, steps)
        rows = jnp.where(alive[:, None], after, rows)
        return (states, rows, alive & ~ended), actions

    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (plans, *jnp.shape(x))), (prior_state, obs))
    start = (*many, jnp.ones(plans, bool))
    _, actions = jax.lax.scan(step, start, jr.split(key, horizon), unroll=min(horizon, 8))
    return jnp.swapaxes(actions, 0, 1)


def move_plans(
    model: AbstractDynamics,
    hypothesis: Hypothesis,
    obs: Float[Array, "plan obs"],
    actions: Float[Array, "plan act"],
    key: Key,
) -> tuple[Float[Array, "plan obs"], Float[Array, " plan"]]:
    """One sampled step of every plan under an elite of its own, redrawn each step.

    Elites are dealt out evenly at random: a random permutation of the plans is cut into one group per member. Each plan
    still has a uniformly random elite, and every member moves only its own group instead of all plans.
    """
    plans, members = obs.shape[0], model.members
    group = -(-plans // members)
    key_deal, key_noise = jr.split(key)
    dealt = jr.permutation(key_deal, group * members)
    back = jnp.argsort(dealt)[:plans]  # where each plan was dealt to; the rest only fill the last groups
    dealt = dealt % plans
    shape = (members, group)
    rows, acts = obs[dealt].reshape(*shape, -1), actions[dealt].reshape(*shape, -1)
    outcome = jax.vmap(model.predict, (None, 1, 1), 1)(hypothesis, rows, acts)
    noise = jr.normal(key_noise, (*shape, obs.shape[1] + 1))
    after = outcome.next_obs + outcome.next_obs_std * noise[..., :-1]
    rewards = outcome.reward + outcome.reward_std * noise[..., -1]
    after, rewards = after.reshape(group * members, -1), rewards.reshape(-1)
    return after[back], rewards[back]


def score(
    prior: AbstractPrior,
    model: AbstractDynamics,
    prior_state: State,
    hypothesis: Hypothesis,
    obs: Obs,
    proposals: Float[Array, "plan horizon act"],
    key: Key,
    *,
    discount: Scalar,
    propagation: Propagation,
    terminal: bool = True,
) -> Float[Array, "plan member"]:
    """Lines 9-14 of Algorithm 2 for one hypothesis: every plan under every elite, the elite fixed along the plan.

    R = sum_h gamma^h r_h + gamma^H V(s_H) (eq. 1). The reward of a terminating step counts, nothing after it does, and
    there is no terminal value then.
    """
    plans, horizon, _ = proposals.shape
    members, size = model.members, obs.shape[0]

    def step(carry: tuple, inputs: tuple[Array, Key]) -> tuple[tuple, None]:
        states, rows, alive, total, factor = carry
        actions, key = inputs
        acts = jnp.broadcast_to(actions, (members, *actions.shape))
        outcome = jax.vmap(model.predict, (None, 1, 1), 1)(hypothesis, rows, acts)
        after, rewards = _propagate(outcome, key, propagation)
        ended = jax.vmap(jax.vmap(model.termination))(rows, acts, after)
        total = total + factor * jnp.where(alive, rewards, 0.0)
        # The prior's memory follows the imagined steps; for a memoryless prior there is nothing to follow.
        states = jax.vmap(jax.vmap(prior.observe))(states, Transition(rows, acts, rewards, after, ended))
        rows = jnp.where(alive[..., None], after, rows)
        return (states, rows, alive & ~ended, total, factor * discount), None

    shape = (members, plans)
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *jnp.shape(x))), prior_state)
    start = (states, jnp.broadcast_to(obs, (*shape, size)), jnp.ones(shape, bool), jnp.zeros(shape), jnp.ones(()))
    inputs = (jnp.swapaxes(proposals, 0, 1), jr.split(key, horizon))
    (states, rows, alive, total, factor), _ = jax.lax.scan(step, start, inputs, unroll=min(horizon, 8))
    if terminal:
        value = jax.vmap(jax.vmap(prior.value))(states, rows)
        total = total + factor * jnp.where(alive, value, 0.0)
    return total.T


def _propagate(outcome: tuple, key: Key, propagation: Propagation) -> tuple[Array, Array]:
    """Means, independent draws, or draws with the same noise for all plans of a member."""
    mean, reward, std, reward_std = outcome
    if propagation == "mean":
        return mean, reward
    members, plans, size = mean.shape
    noise = jr.normal(key, (members, plans if propagation == "sample" else 1, size + 1))
    return mean + std * noise[..., :-1], reward + reward_std * noise[..., -1]


def weigh(scores: Float[Array, " plan"], kappa: Scalar) -> Float[Array, " plan"]:
    """w_n = exp(kappa R_n) / sum_i exp(kappa R_i) (eq. 9), the best score subtracted first; not finite: no weight."""
    good = jnp.isfinite(scores)
    best = jnp.max(jnp.where(good, scores, -jnp.inf))
    lifted = jnp.where(good, jnp.exp(kappa * (jnp.where(good, scores, 0.0) - jnp.where(good.any(), best, 0.0))), 0.0)
    return lifted / jnp.maximum(jnp.sum(lifted), 1e-30)


def effective_count(weights: Float[Array, " plan"]) -> Scalar:
    """1 / sum w^2: how many plans really take part."""
    return 1.0 / jnp.maximum(jnp.sum(weights**2), 1e-30)


def kappa_for(scores: Float[Array, " plan"], count: Scalar, rounds: int = 30) -> Scalar:
    """The kappa at which `count` plans take part, by bisection on log kappa: free of the critic's scale."""

    def halve(_: Array, bounds: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        low, high = bounds
        middle = 0.5 * (low + high)
        too_many = effective_count(weigh(scores, jnp.exp(middle))) > count
        return jnp.where(too_many, middle, low), jnp.where(too_many, high, middle)

    low, high = jax.lax.fori_loop(0, rounds, halve, (jnp.asarray(-12.0), jnp.asarray(12.0)))
    return jnp.exp(0.5 * (low + high))


def combine(
    proposals: Float[Array, "plan horizon act"], weights: Float[Array, "world plan"]
) -> Float[Array, "horizon act"]:
    """(1/worlds) sum_j sum_n w_n^j a^n (eq. 14): the plain mean over worlds of the weighted plans."""
    return jnp.einsum("wn,nha->ha", weights, proposals) / weights.shape[0]


def usable(scores: Float[Array, "world plan"]) -> Bool[Array, " world"]:
    """Worlds in which at least one plan has a finite score."""
    return jnp.isfinite(scores).any(axis=1)
