"""The three steps every planner shares, as pure functions: propose, score, combine.

Shapes: `plan` plans of `horizon` actions; `world` hypotheses (latents, or repeats of one world); `member` the elites.
Rows are kept as (member, plan), so that one batched product serves all members.
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float

from refplan.agent import AbstractPolicy, AbstractPrior
from refplan.dynamics.base import AbstractDynamics, Hypothesis
from refplan.types import Action, Flag, Key, Obs, Scalar, State, Transition


class Plan(NamedTuple):
    """Everything a decision was made from; a model without a Gaussian belief leaves `belief_*` empty."""

    action: Action
    mean_plan: Float[Array, "horizon act"]
    proposals: Float[Array, "plan horizon act"]
    returns: Float[Array, "world plan member"]
    scores: Float[Array, "world plan"]
    weights: Float[Array, "world plan"]
    effective_plans: Float[Array, " world"]
    kappa: Float[Array, " world"]
    fallback: Flag
    belief_mean: Float[Array, " latent"]
    belief_std: Float[Array, " latent"]


class Imagined(NamedTuple):
    """The prior acting in the imagination: what it did, what it earned, where it ended."""

    actions: Float[Array, "plan horizon act"]
    earned: Float[Array, " plan"]  # discounted rewards
    states: State  # the prior's, one per plan
    obs: Float[Array, "plan obs"]
    alive: Bool[Array, " plan"]


class Mixing(NamedTuple):
    """How much of another plan is mixed into every proposal: a_h <- (1 - share) a_h + share plan_h (MBOP's beta)."""

    plan: Float[Array, "horizon act"]
    share: Scalar


def propose(
    prior: AbstractPolicy,
    model: AbstractDynamics,
    prior_state: State,
    centre: Hypothesis,
    obs: Obs,
    key: Key,
    *,
    plans: int,
    sigma: Scalar,
    low: Action,
    high: Action,
    proposal: str,
    width: Scalar,
    mixing: Mixing,
    discount: Scalar,
) -> Imagined:
    """Lines 5-8 of Algorithm 2: roll the prior through the model at the belief's centre.

    Each action is the prior's (see `propose_action`) plus N(0, sigma^2), mixed with another plan, clipped; what is
    executed in the imagination is that. Each plan is moved by one elite per step (see `move_plans`).
    """

    key_sample, key_draws = jr.split(key)
    draws = _draw(key_draws, mixing.plan.shape, plans, model.members, obs.shape[0])

    def choose(state: State, obs: Obs, planned: Action, noise: Action, key: Key) -> tuple[Action, State]:
        action, new = propose_action(prior, state, obs, key, proposal, width)
        mixed = (1.0 - mixing.share) * (action + sigma * noise) + mixing.share * planned
        return jnp.clip(mixed, low, high), new

    def step(carry: tuple, inputs: tuple[Action, _Draws, Array]) -> tuple[tuple, Float[Array, "plan act"]]:
        states, rows, alive, earned, factor = carry
        planned, draw, keys = inputs
        actions, states = jax.vmap(choose, (0, 0, None, 0, 0))(states, rows, planned, draw.action, keys)
        after, rewards = move_plans(model, centre, rows, actions, draw)
        ended = jax.vmap(model.termination)(rows, actions, after)
        steps = Transition(rows, actions, rewards, after, ended)
        states = jax.vmap(prior.observe)(states, steps)
        earned = earned + factor * jnp.where(alive, rewards, 0.0)
        rows = jnp.where(alive[:, None], after, rows)
        return (states, rows, alive & ~ended, earned, factor * discount), actions

    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (plans, *jnp.shape(x))), (prior_state, obs))
    start = (*many, jnp.ones(plans, bool), jnp.zeros(plans), jnp.ones(()))
    inputs = (mixing.plan, draws, jr.split(key_sample, (mixing.plan.shape[0], plans)))
    (states, rows, alive, earned, _), actions = jax.lax.scan(step, start, inputs)
    return Imagined(jnp.swapaxes(actions, 0, 1), earned, states, rows, alive)


def propose_action(
    prior: AbstractPolicy, state: State, obs: Obs, key: Key, proposal: str, width: Scalar
) -> tuple[Action, State]:
    """The prior's own action or, on the way from there to a sampled one, (1 - width) own + width sampled."""
    own, new = prior.act(state, obs, key)
    if proposal == "mean":
        return own, new
    return (1.0 - width) * own + width * prior.sample(state, obs, key)[0], new


class _Draws(NamedTuple):
    """Standard normals of one step of all plans: on actions, who moves whom, and of the transitions."""

    action: Float[Array, "*time plan act"]
    deal: Float[Array, "*time seat"]
    outcome: Float[Array, "*time member group outputs"]


def _draw(key: Key, shape: tuple[int, ...], plans: int, members: int, obs: int) -> _Draws:
    """All numbers in one flat draw: every separate generator costs about a second to compile."""
    horizon, size = shape
    group = -(-plans // members)
    shapes = ((plans, size), (group * members,), (members, group, obs + 1))
    counts = [math.prod(each) for each in shapes]
    flat = jr.normal(key, (horizon * sum(counts),)).reshape(horizon, sum(counts))
    parts = jnp.split(flat, list(itertools.accumulate(counts))[:-1], axis=1)
    return _Draws(*(part.reshape(horizon, *each) for part, each in zip(parts, shapes, strict=True)))


def move_plans(
    model: AbstractDynamics,
    hypothesis: Hypothesis,
    obs: Float[Array, "plan obs"],
    actions: Float[Array, "plan act"],
    draw: _Draws,
) -> tuple[Float[Array, "plan obs"], Float[Array, " plan"]]:
    """One sampled step of every plan under an elite of its own, redrawn each step.

    Elites are dealt out evenly at random: a random permutation of the plans (the order of `draw.deal`) is cut into one
    group per member. Each plan still has a uniformly random elite, and every member moves only its own group instead
    of all plans.
    """
    plans, members = obs.shape[0], model.members
    dealt = jnp.argsort(draw.deal)
    back = jnp.argsort(dealt)[:plans]  # where each plan was dealt to; the rest only fill the last groups
    dealt = dealt % plans
    shape = (members, dealt.shape[0] // members)
    rows, acts = obs[dealt].reshape(*shape, -1), actions[dealt].reshape(*shape, -1)
    outcome = jax.vmap(model.predict, (None, 1, 1), 1)(hypothesis, rows, acts)
    after = outcome.next_obs + outcome.next_obs_std * draw.outcome[..., :-1]
    rewards = outcome.reward + outcome.reward_std * draw.outcome[..., -1]
    return after.reshape(dealt.shape[0], -1)[back], rewards.reshape(-1)[back]


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
    propagation: str,
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
        outcome = jax.vmap(model.predict, (None, 1, 0), 1)(hypothesis, rows, actions)
        acts = jnp.broadcast_to(actions, (members, *actions.shape))
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


def _propagate(outcome: tuple, key: Key, propagation: str) -> tuple[Array, Array]:
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


def around_own(
    mean_plan: Float[Array, "horizon act"],
    proposals: Float[Array, "plan horizon act"],
    scored: Bool[Array, " plan"],
    own: Action,
) -> Float[Array, "horizon act"]:
    """The plan whose first action is own + (weighted mean - plain mean of the scored proposals): what weights add.

    A mean of sampled actions is not the prior's own action: where tanh bends, it lies further inside.
    """
    first = proposals[:, 0]
    good = scored & jnp.isfinite(first).all(axis=1)
    plain = jnp.sum(jnp.where(good[:, None], first, 0.0), axis=0) / jnp.maximum(good.sum(), 1)
    return mean_plan.at[0].add(jnp.where(jnp.isfinite(own), own - plain, 0.0))


def usable(scores: Float[Array, "world plan"]) -> Bool[Array, " world"]:
    """Worlds in which at least one plan has a finite score."""
    return jnp.isfinite(scores).any(axis=1)
