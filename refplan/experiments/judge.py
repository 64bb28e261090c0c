"""Whether a planner's scores order plans as the world does: what no model and no critic can say about itself.

At states the prior visits, every plan and the planner's own decision are carried out in the true world, the prior going
on from there. A planner can only gain where its scores rank plans as these returns do.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float

from refplan.agent import AbstractPrior
from refplan.dynamics.base import AbstractDynamics
from refplan.dynamics.diagnose_measure import spearman
from refplan.planners.base import AbstractPlanner
from refplan.types import Key, Scalar, State, Transition


class Judgement(NamedTuple):
    """One entry per state; returns are discounted, over as many steps as were asked for."""

    rank: Float[np.ndarray, " state"]  # Spearman's correlation of scores and true returns over plans
    scored: Float[np.ndarray, " state"]  # standard deviation over plans of the scores
    earned: Float[np.ndarray, " state"]  # and of what they earn
    gain: Float[np.ndarray, " state"]  # what the decision earns more than the prior's own action

    def summary(self) -> dict[str, float | int]:
        """Means over states; a rank that does not exist (all plans alike) is left out."""
        known = self.rank[np.isfinite(self.rank)]
        return {
            "states": len(self.rank),
            "rank": float(known.mean()) if known.size else float("nan"),
            "scored": float(self.scored.mean()),
            "earned": float(self.earned.mean()),
            "gain": float(self.gain.mean()),
            "gain_error": float(self.gain.std() / np.sqrt(len(self.gain))),
        }

    def text(self) -> str:
        """For people."""
        s = self.summary()
        return (
            f"scores rank plans as the world does: {s['rank']:+.2f} (1: always, 0: not at all; {s['states']} states)\n"
            f"standard deviation over plans: {s['scored']:.2f} scored, {s['earned']:.2f} earned\n"
            f"a decision earns {s['gain']:+.2f} ± {s['gain_error']:.2f} more than the prior's own action"
        )


@eqx.filter_jit
def true_returns(
    prior: AbstractPrior,
    truth: AbstractDynamics,
    obs: Float[Array, "plan obs"],
    plans: Float[Array, "plan horizon act"],
    discount: Scalar,
    steps: int,
) -> tuple[Float[Array, " plan"], Float[Array, "step plan obs"], Bool[Array, "step plan"]]:
    """Carry out each plan from its observation, then let the prior go on: returns, what was seen, and who was alive."""
    count, horizon, _ = plans.shape
    hypothesis = truth.centre(truth.start(), obs[0])

    def step(carry: tuple, number: Array) -> tuple[tuple, tuple]:
        states, rows, alive, total, factor = carry
        own, states = jax.vmap(prior.act, (0, 0, None))(states, rows, jr.key(0))
        actions = jnp.where(number < horizon, plans[:, jnp.minimum(number, horizon - 1)], own)
        seen = jnp.broadcast_to(rows[:, None], (count, truth.members, rows.shape[1]))
        outcome = jax.vmap(truth.predict, (None, 0, 0))(hypothesis, seen, actions)
        after, reward = outcome.next_obs[:, 0], outcome.reward[:, 0]
        ended = jax.vmap(truth.termination)(rows, actions, after)
        states = jax.vmap(prior.observe)(states, Transition(rows, actions, reward, after, ended))
        total = total + factor * jnp.where(alive, reward, 0.0)
        moved = jnp.where(alive[:, None], after, rows)
        return (states, moved, alive & ~ended, total, factor * discount), (rows, alive)

    many: State = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), prior.start())
    start = (many, obs, jnp.ones(count, bool), jnp.zeros(count), jnp.ones(()))
    (_, _, _, total, _), (seen, alive) = jax.lax.scan(step, start, jnp.arange(steps))
    return total, seen, alive


def visited(
    prior: AbstractPrior, truth: AbstractDynamics, starts: Float[Array, "start obs"], *, steps: int, every: int
) -> Float[Array, "state obs"]:
    """These observations, and what the prior sees on its way from them every so many steps, until it falls."""
    own = jax.vmap(lambda obs: prior.act(prior.start(), obs, jr.key(0))[0])(starts)
    _, seen, alive = true_returns(prior, truth, starts, own[:, None], jnp.ones(()), steps)
    rows, kept = np.asarray(seen)[::every], np.asarray(alive)[::every]
    return jnp.asarray(rows[kept])


def judge_plans(
    planner: AbstractPlanner,
    truth: AbstractDynamics,
    obs: Float[Array, "state obs"],
    *,
    key: Key,
    steps: int = 200,
    discount: float = 0.99,
) -> Judgement:
    """Ask the planner for a decision at every observation, and the true world for what all its plans are worth.

    The planner decides as at the start of an episode: with nothing seen yet.
    """
    decide = eqx.filter_jit(lambda agent, row, key: agent.plan(agent.start(), row, key)[0])
    prior, gamma, found = planner.prior, jnp.asarray(discount), []
    for row, each in zip(obs, jr.split(key, len(obs)), strict=True):
        plan = decide(planner, row, each)
        own = prior.act(prior.start(), row, each)[0]
        # The decision and the prior's own action are one step long: the plan is made anew at the next.
        single = jnp.stack([plan.action, own])[:, None]
        rows = lambda plans, row=row: jnp.broadcast_to(row, (len(plans), row.shape[0]))  # noqa: E731
        earned = np.asarray(true_returns(prior, truth, rows(plan.proposals), plan.proposals, gamma, steps)[0])
        decided = np.asarray(true_returns(prior, truth, rows(single), single, gamma, steps)[0])
        scores = np.asarray(plan.scores.mean(axis=0), np.float64)
        scored = np.isfinite(scores)  # a shortlist leaves plans out
        scores, earned = scores[scored], earned[scored]
        found.append((spearman(scores, earned), scores.std(), earned.std(), decided[0] - decided[1]))
    return Judgement(*(np.asarray(column, np.float64) for column in zip(*found, strict=True)))
