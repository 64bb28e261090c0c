"""Imagined runs along given actions, and the sums a planner makes of them. One segment at a time; callers `vmap`."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float

from refplan.agent import AbstractPrior
from refplan.dynamics.base import AbstractDynamics, Belief, Hypothesis
from refplan.dynamics.diagnose_data import Keys
from refplan.types import Obs, State, Transition

STD_FLOOR = 1e-6  # in units of the data's std: keeps the density of a model without noise finite


class Imagined(NamedTuple):
    """Runs of every member, each from its own state; `alive` and `lives`: its world had not ended before, after."""

    obs: Float[Array, "*batch time member obs"]
    reward: Float[Array, "*batch time member"]
    alive: Bool[Array, "*batch time member"]
    lives: Bool[Array, "*batch time member"]

    def outputs(self) -> Float[Array, "*batch time member outputs"]:
        """Observation and reward side by side."""
        return jnp.concatenate([self.obs, self.reward[..., None]], axis=-1)


class Rollout(NamedTuple):
    """What is kept of the imagined runs of one segment; outputs are [obs, reward]."""

    centre: Float[Array, "*segments time outputs"]  # mean propagation, averaged over members
    spread: Float[Array, "*segments time outputs"]  # std over members of it
    average: Float[Array, "*segments time outputs"]  # of sampled runs
    deviation: Float[Array, "*segments time outputs"]  # their std
    draw: Float[Array, "*segments time outputs"]  # one of them
    below: Float[Array, "*segments time outputs"]  # share of sampled runs below the truth
    equal: Float[Array, "*segments time outputs"]  # share equal to it
    earned: Float[Array, "*segments horizons"]  # imagined return, mean propagation
    earned_sampled: Float[Array, "*segments horizons"]  # average over sampled runs
    valued: Float[Array, "*segments horizons"] | None  # the same discounted, plus the terminal value
    valued_sampled: Float[Array, "*segments horizons"] | None


def imagine(
    model: AbstractDynamics,
    hypothesis: Hypothesis,
    obs: Obs,
    actions: Float[Array, "time act"],
    noise: Float[Array, "time member outputs"],
) -> Imagined:
    """Every member along the actions from one state, `noise` stds off its means at every step (0: mean propagation).

    The noise is given, not drawn here: compiling a random generator inside a loop takes seconds.
    """

    def step(carry: tuple[Array, Array], x: tuple[Array, Array]) -> tuple[tuple[Array, Array], Imagined]:
        states, alive = carry
        action, noise = x
        outcome = model.predict(hypothesis, states, action)
        after = outcome.next_obs + outcome.next_obs_std * noise[:, :-1]
        reward = outcome.reward + outcome.reward_std * noise[:, -1]
        ended = jax.vmap(model.termination, in_axes=(0, None, 0))(states, action, after)
        lives = alive & ~ended
        return (after, lives), Imagined(after, reward, alive, lives)

    begin = jnp.broadcast_to(obs, (model.members, *obs.shape)), jnp.ones(model.members, bool)
    return jax.lax.scan(step, begin, (actions, noise))[1]


def imagine_mean(
    model: AbstractDynamics, hypothesis: Hypothesis, obs: Obs, actions: Float[Array, "time act"]
) -> Imagined:
    """Mean propagation."""
    return imagine(model, hypothesis, obs, actions, jnp.zeros((actions.shape[0], model.members, obs.shape[0] + 1)))


def sum_rewards(
    reward: Float[Array, "time *run"], alive: Bool[Array, "time *run"], discount: float, horizons: tuple[int, ...]
) -> Float[Array, "horizons *run"]:
    """The return of the first H steps for each H; what comes after an end counts nothing."""
    weight = discount ** jnp.arange(reward.shape[0], dtype=jnp.float32)
    totals = jnp.cumsum(jnp.where(alive, reward, 0.0) * weight.reshape(-1, *(1,) * (reward.ndim - 1)), axis=0)
    return totals[jnp.asarray(horizons) - 1]


def end_values(
    prior: AbstractPrior,
    state: State,
    obs: Float[Array, "time *run obs"],
    lives: Bool[Array, "time *run"],
    discount: float,
    horizons: tuple[int, ...],
) -> Float[Array, "horizons *run"]:
    """discount^H V(s_H) for each H, nothing where the world has ended."""
    last = jnp.asarray(horizons) - 1
    ends = obs[last]
    values = jax.vmap(lambda o: prior.value(state, o))(ends.reshape(-1, ends.shape[-1])).reshape(ends.shape[:-1])
    weight = discount ** jnp.asarray(horizons, jnp.float32)
    return jnp.where(lives[last], values, 0.0) * weight.reshape(-1, *(1,) * (values.ndim - 1))


def score(
    run: Imagined, prior: AbstractPrior | None, state: State, discount: float, horizons: tuple[int, ...]
) -> Float[Array, "horizons member"]:
    """What a planner gives each member's run for each H: the discounted return, plus the terminal value of a prior."""
    earned = sum_rewards(run.reward, run.alive, discount, horizons)
    return earned if prior is None else earned + end_values(prior, state, run.obs, run.lives, discount, horizons)


@eqx.filter_jit
def roll_segments(
    model: AbstractDynamics,
    prior: AbstractPrior | None,
    beliefs: Belief,
    states: State,
    steps: Transition,
    noise: Float[Array, "segments draws time member outputs"],
    keys: Keys,
    *,
    horizons: tuple[int, ...],
    discount: float,
) -> Rollout:
    """Mean and sampled runs of every segment along its logged actions; `keys` (segments, draws) draw hypotheses."""
    draws = keys.shape[1]

    def one(belief: Belief, state: State, steps: Transition, noise: Array, keys: Keys) -> Rollout:
        obs = steps.obs[0]
        sampled = jax.vmap(lambda k: model.sample(belief, obs, k))(keys)
        hypotheses = jax.tree.map(lambda c, s: jnp.concatenate([c[None], s]), model.centre(belief, obs), sampled)
        noise = jnp.concatenate([jnp.zeros_like(noise[:1]), noise])  # the first run is that of the means
        run = lambda h, n: imagine(model, h, obs, steps.action, n)  # noqa: E731
        runs = jax.vmap(run, axis_size=draws + 1)(hypotheses, noise)
        plain = jax.vmap(lambda r: jnp.mean(score(r, None, (), 1.0, horizons), axis=-1))(runs)
        valued = jax.vmap(lambda r: jnp.mean(score(r, prior, state, discount, horizons), axis=-1))(runs)
        truth = jnp.concatenate([steps.next_obs, steps.reward[:, None]], axis=1)
        return _summarise(runs.outputs(), truth, plain, None if prior is None else valued)

    return jax.vmap(one)(beliefs, states, steps, noise, keys)


def _summarise(
    outputs: Float[Array, "runs time member outputs"],
    truth: Float[Array, "time outputs"],
    plain: Float[Array, "runs horizons"],
    valued: Float[Array, "runs horizons"] | None,
) -> Rollout:
    mean = outputs[0]
    cloud = jnp.moveaxis(outputs[1:], 1, 0).reshape(truth.shape[0], -1, truth.shape[1])
    return Rollout(
        jnp.mean(mean, axis=1),
        jnp.std(mean, axis=1, ddof=min(mean.shape[1] - 1, 1)),
        jnp.mean(cloud, axis=1),
        jnp.std(cloud, axis=1, ddof=1),
        cloud[:, 0],
        jnp.mean(cloud < truth[:, None], axis=1),
        jnp.mean(cloud == truth[:, None], axis=1),
        plain[0],
        jnp.mean(plain[1:], axis=0),
        None if valued is None else valued[0],
        None if valued is None else jnp.mean(valued[1:], axis=0),
    )


@eqx.filter_jit
def roll_returns(
    model: AbstractDynamics,
    prior: AbstractPrior | None,
    beliefs: Belief,
    states: State,
    steps: Transition,
    *,
    horizons: tuple[int, ...],
    discount: float,
) -> tuple[Float[Array, "segments horizons"], Float[Array, "segments horizons"] | None]:
    """(return, discounted return plus terminal value) imagined by mean propagation."""

    def one(belief: Belief, state: State, steps: Transition) -> tuple[Array, Array | None]:
        obs = steps.obs[0]
        run = imagine_mean(model, model.centre(belief, obs), obs, steps.action)
        valued = None if prior is None else jnp.mean(score(run, prior, state, discount, horizons), axis=-1)
        return jnp.mean(score(run, None, (), 1.0, horizons), axis=-1), valued

    return jax.vmap(one)(beliefs, states, steps)


@eqx.filter_jit
def real_returns(
    prior: AbstractPrior | None,
    states: State,
    steps: Transition,
    valid: Bool[Array, "segments time"],
    *,
    horizons: tuple[int, ...],
    discount: float,
) -> tuple[Float[Array, "segments horizons"], Float[Array, "segments horizons"] | None]:
    """(return, discounted return plus the value of the state reached) of the logged steps."""

    def one(state: State, steps: Transition, valid: Bool[Array, " time"]) -> tuple[Array, Array | None]:
        plain = sum_rewards(steps.reward, valid, 1.0, horizons)
        if prior is None:
            return plain, None
        lives = valid & ~steps.terminated
        ends = end_values(prior, state, steps.next_obs, lives, discount, horizons)
        return plain, sum_rewards(steps.reward, valid, discount, horizons) + ends

    return jax.vmap(one)(states, steps, valid)


def log_density(
    model: AbstractDynamics,
    hypothesis: Hypothesis,
    step: Transition,
    scale: Float[Array, " outputs"],
) -> tuple[Float[Array, " outputs"], Float[Array, " outputs"]]:
    """log p of the next step per output, in units of the data's std: of the members' mixture, and members averaged."""
    outcome = model.predict_from(hypothesis, step.obs, step.action)
    mean = jnp.concatenate([outcome.next_obs, outcome.reward[:, None]], axis=1) / scale[None]
    std = jnp.concatenate([outcome.next_obs_std, outcome.reward_std[:, None]], axis=1) / scale[None]
    truth = jnp.append(step.next_obs, step.reward) / scale
    single = norm.logpdf(truth[None], mean, jnp.maximum(std, STD_FLOOR))
    return logsumexp(single, axis=0) - jnp.log(model.members), jnp.mean(single, axis=0)


@eqx.filter_jit
def first_step_density(
    model: AbstractDynamics, beliefs: Belief, first: Transition, scale: Float[Array, " outputs"]
) -> tuple[Float[Array, "segments outputs"], Float[Array, "segments outputs"]]:
    """`log_density` at the centre of each belief."""
    one = lambda b, step: log_density(model, model.centre(b, step.obs), step, scale)  # noqa: E731
    return jax.vmap(one)(beliefs, first)


@eqx.filter_jit
def predict_ends(
    model: AbstractDynamics, beliefs: Belief, steps: Transition
) -> tuple[Bool[Array, " rows"], Bool[Array, " rows"]]:
    """Whether most members see an end in their own next state, and whether the rule sees one in the logged one."""

    def one(belief: Belief, step: Transition) -> tuple[Array, Array]:
        outcome = model.predict_from(model.centre(belief, step.obs), step.obs, step.action)
        ends = jax.vmap(lambda after: model.termination(step.obs, step.action, after))(outcome.next_obs)
        return jnp.mean(ends) > 0.5, model.termination(step.obs, step.action, step.next_obs)

    return jax.vmap(one)(beliefs, steps)
