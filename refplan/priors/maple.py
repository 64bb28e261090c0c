"""MAPLE (Chen et al., 2021): SAC with memory, trained in many imagined worlds so that it can adapt to the real one."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Bool, Float, Int

from refplan.data.dataset import Dataset
from refplan.data.sampling import take_rows
from refplan.dynamics.base import AbstractDynamics
from refplan.errors import RefplanError
from refplan.nn import MLP, identity_normaliser, make_ensemble, make_mlp, tanh_gaussian_sample
from refplan.priors.imagine import Ring, draw, states_along
from refplan.priors.imagining import (
    AbstractImaginingLearner,
    Dream,
    Imagination,
    Logged,
    first_dream,
    horizon,
    remember,
)
from refplan.priors.losses import td_target, temperature_loss
from refplan.priors.policy import to_world
from refplan.priors.recurrent import Context, Memory, RecurrentActorCritic, make_context
from refplan.priors.sac import SAC
from refplan.settings import digest_of
from refplan.types import Key, Metrics, Scalar, Transition


class Sequence(NamedTuple):
    """Consecutive steps, which of them count, what was remembered before the first, and the logged row they left."""

    steps: Transition
    valid: Bool[Array, "*batch time"]
    memory: Memory
    row: Int[Array, "*batch"]


class Limits(NamedTuple):
    """What imagined states, rewards and values are clipped to (MAPLE, appendix)."""

    obs: tuple[Float[Array, " obs"], Float[Array, " obs"]]
    reward: tuple[Scalar, Scalar]
    value: tuple[Scalar, Scalar]


class MAPLEState(NamedTuple):
    """Everything that is learned or carried; targets cover the critics' heads only, the GRU is shared with them."""

    agent: RecurrentActorCritic
    target: MLP
    log_alpha: Scalar
    actor_optimiser: optax.OptState
    critic_optimiser: optax.OptState
    alpha_optimiser: optax.OptState
    limits: Limits
    dream: Dream


class MAPLE(AbstractImaginingLearner):
    """SAC on whole imagined sequences, each moved by one elite: a policy with memory can find out by which.

    Losses are means over steps before the end. y = clip(r - lambda min(u, most) + gamma (1 - d) (min Qbar - alpha log
    pi)). Sequences start with what the policy of that moment remembers at a logged row; logged sequences start at the
    same rows. Follows the authors' second code (OfflineRL of polixir), in which the policy's GRU is trained.
    Departures from it: memories at logged rows are made anew in every round (there: every fourth); logged sequences
    start anywhere (there: every `length` steps); log-std in [-5, 2] (there: [-20, 2]).
    """

    model: AbstractDynamics | None = None
    penalty: Scalar = eqx.field(converter=jnp.asarray, default=0.25)  # lambda
    penalty_most: Scalar = eqx.field(converter=jnp.asarray, default=40.0)  # the uncertainty is clipped to this
    memory: int = eqx.field(static=True, default=128)  # units of each GRU
    context: int = eqx.field(static=True, default=16)  # numbers read from it
    imagined: Imagination = Imagination(length=10, one_member=True)
    sac: SAC = eqx.field(default_factory=SAC)  # batch_size: sequences
    # Tells models of the same shape apart, so that a checkpoint is never continued in another world.
    digest: Int[Array, "4"] = eqx.field(init=False)

    def __post_init__(self):
        self.digest = digest_of(self.model)

    @property
    def discount(self) -> Scalar:
        """SAC's."""
        return self.sac.discount

    def init(self, data: Dataset, key: Key) -> MAPLEState:
        """Fresh networks, and nothing imagined."""
        agent = self._agent(data, key)
        log_alpha = jnp.log(self.sac.alpha_start)
        nothing = jnp.zeros((self.imagined.length, data.obs_dim)), jnp.zeros((self.imagined.length, data.action_dim))
        flags = jnp.zeros(self.imagined.length, bool)
        steps = Transition(*nothing, jnp.zeros(self.imagined.length), nothing[0], flags)
        example = Sequence(steps, flags, agent.start(), jnp.zeros((), int))
        return MAPLEState(
            agent,
            jax.tree.map(lambda x: x, agent.critics),
            log_alpha,
            optax.adam(self.sac.actor_rate).init(eqx.filter(_policy_part(agent), eqx.is_array)),
            optax.adam(self.sac.critic_rate).init(eqx.filter(_value_part(agent), eqx.is_array)),
            optax.adam(self.sac.alpha_rate).init(log_alpha),
            self.limits(data),
            first_dream(example, self.imagined.retain * self.imagined.starts, data),
        )

    def _agent(self, data: Dataset, key: Key) -> RecurrentActorCritic:
        keys = jr.split(key, 4)
        obs, act, hidden = data.obs_dim, data.action_dim, self.sac.hidden
        normaliser = data.normaliser() if self.sac.normalise else identity_normaliser(obs)
        contexts = [make_context(obs, act, self.memory, self.context, k) for k in keys[:2]]
        actor = make_mlp((obs + self.context, *hidden, 2 * act), keys[2])
        critics = make_ensemble(self.sac.critics, (obs + self.context + act, *hidden, 1), keys[3])
        bounds = jnp.asarray(data.task.low), jnp.asarray(data.task.high)
        return RecurrentActorCritic(*contexts, actor, critics, normaliser, *bounds)

    def limits(self, data: Dataset) -> Limits:
        """The data's range of states and 5 % more, at least ±100; its rewards, less the largest penalty; their sums."""
        low, high = jnp.asarray(data.observations.min(axis=0)), jnp.asarray(data.observations.max(axis=0))
        room = 0.05 * (high - low)
        obs = jnp.minimum(low - room, -100.0), jnp.maximum(high + room, 100.0)
        reward = data.rewards.min() - self.penalty * self.penalty_most, jnp.asarray(data.rewards.max())
        # An episode may also end at once: then the sum is one reward, which matters where all of them have one sign.
        worst, best = (each * horizon(self.discount) for each in reward)
        return Limits(obs, reward, (jnp.minimum(worst, reward[0]), jnp.maximum(best, reward[1])))

    def renew(self, state: MAPLEState, logged: Logged, key: Key) -> Dream:
        """Sequences from logged rows, each with what the present policy and critics remember there."""
        if logged.layout is None:
            raise RefplanError("MAPLE remembers episodes; its data was split by transition. Split by='episode'.")
        key_row, key_roll = jr.split(key)
        agent, rows = state.agent, logged.rows
        rows = rows._replace(action=jax.vmap(to_world, (0, None, None))(rows.action, logged.low, logged.high))
        row = self.imagined.choose(logged, key_row)
        memory = jax.tree.map(lambda x: x[row], states_along(agent, rows, logged.layout))
        rollouts = self.imagined.roll(self.world, agent, logged, row, memory, key_roll, state.limits.obs)
        penalty = self.penalty * jnp.minimum(rollouts.uncertainty, self.penalty_most)
        reward = jnp.clip(rollouts.steps.reward, *state.limits.reward) - penalty
        new = Sequence(rollouts.steps._replace(reward=reward), rollouts.valid, memory, row)
        return remember(state.dream, new, jnp.ones(row.shape, bool), rollouts, penalty)

    def sequences(self, ring: Ring, logged: Logged, key: Key) -> Sequence:
        """A batch: what really followed on some of the rows imagined from, and what was imagined from others."""
        key_real, key_imagined = jr.split(key)
        count = self.imagined.real_rows(self.sac.batch_size)
        real = follow(draw(ring, key_real, count), logged)
        imagined = draw(ring, key_imagined, self.sac.batch_size - count)
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), real, imagined)

    def improve(self, state: MAPLEState, logged: Logged, key: Key) -> tuple[MAPLEState, Metrics]:
        """One step on critics, actor, temperature and target."""
        key_rows, key_critic, key_actor = jr.split(key, 3)
        batch = self.sequences(state.dream.ring, logged, key_rows)
        state, context, critic_metrics = self._critic_step(state, batch, key_critic)
        state, actor_metrics = self._actor_step(state, batch, context, key_actor)
        return state, {**critic_metrics, **actor_metrics}

    def target(
        self, state: MAPLEState, batch: Sequence, context: Float[Array, "batch time context"], key: Key
    ) -> Float[Array, "batch time"]:
        """y of every step, from the critics' contexts after it."""
        agent = state.agent
        seen, action = standing(agent, batch)
        policy = agent.policy_context.run(batch.memory.policy, seen, action)[:, 1:]
        unit, log_prob = tanh_gaussian_sample(*agent.distribution(policy, seen[:, 1:]), key)
        value = jnp.min(agent.judge(state.target, context, seen[:, 1:], unit), axis=0)
        if self.sac.entropy_in_backup:
            value = value - jnp.exp(state.log_alpha) * log_prob
        flat = (x.reshape(-1) for x in (batch.steps.reward, batch.steps.terminated, value))
        return jnp.clip(td_target(*flat, self.discount), *state.limits.value).reshape(value.shape)

    def _critic_step(
        self, state: MAPLEState, batch: Sequence, key: Key
    ) -> tuple[MAPLEState, Float[Array, "batch time context"], Metrics]:
        agent = state.agent
        seen, action = standing(agent, batch)

        def objective(part: tuple[Context, MLP]) -> tuple[Scalar, tuple[Array, Metrics]]:
            context = part[0].run(batch.memory.value, seen, action)
            target = jax.lax.stop_gradient(self.target(state, batch, context[:, 1:], key))
            q = agent.judge(part[1], context[:, :-1], seen[:, :-1], batch.steps.action)
            loss = sum((masked_mean((each - target) ** 2, batch.valid) for each in q), jnp.zeros(()))
            metrics = {"critic_loss": loss, "q": masked_mean(jnp.mean(q, axis=0), batch.valid)}
            return loss, (context[:, :-1], metrics)

        part = _value_part(agent)
        (_, (context, metrics)), grads = eqx.filter_value_and_grad(objective, has_aux=True)(part)
        updates, optimiser = optax.adam(self.sac.critic_rate).update(grads, state.critic_optimiser)
        part = eqx.apply_updates(part, updates)
        slow = jax.tree.map(lambda old, new: old + self.sac.tau * (new - old), state.target, part[1])
        agent = eqx.tree_at(_value_part, agent, part)
        return state._replace(agent=agent, target=slow, critic_optimiser=optimiser), context, metrics

    def _actor_step(
        self, state: MAPLEState, batch: Sequence, context: Float[Array, "batch time context"], key: Key
    ) -> tuple[MAPLEState, Metrics]:
        agent, alpha = state.agent, jnp.exp(state.log_alpha)
        seen, action = (x[:, :-1] for x in standing(agent, batch))

        def objective(part: tuple[Context, MLP]) -> tuple[Scalar, Scalar]:
            own = part[0].run(batch.memory.policy, seen, action)
            head = eqx.tree_at(lambda a: a.actor, agent, part[1]).distribution(own, seen)
            unit, log_prob = tanh_gaussian_sample(*head, key)
            q = jnp.min(agent.judge(agent.critics, jax.lax.stop_gradient(context), seen, unit), axis=0)
            return masked_mean(alpha * log_prob - q, batch.valid), masked_mean(log_prob, batch.valid)

        part = _policy_part(agent)
        (loss, log_prob), grads = eqx.filter_value_and_grad(objective, has_aux=True)(part)
        updates, optimiser = optax.adam(self.sac.actor_rate).update(grads, state.actor_optimiser)
        agent = eqx.tree_at(_policy_part, agent, eqx.apply_updates(part, updates))
        grad = jax.grad(temperature_loss)(state.log_alpha, log_prob[None], -float(agent.low.shape[0]))
        change, alpha_optimiser = optax.adam(self.sac.alpha_rate).update(grad, state.alpha_optimiser)
        log_alpha: Any = optax.apply_updates(state.log_alpha, change)
        state = state._replace(agent=agent, actor_optimiser=optimiser, log_alpha=log_alpha)
        metrics = {"actor_loss": loss, "entropy": -log_prob, "alpha": alpha}
        return state._replace(alpha_optimiser=alpha_optimiser), metrics

    def result(self, state: MAPLEState) -> RecurrentActorCritic:
        """The agent; its values are those of penalised rewards."""
        return state.agent


def follow(sequences: Sequence, logged: Logged) -> Sequence:
    """What really followed on the rows that sequences started from, up to the end of each episode."""
    row, last = sequences.row[:, None], logged.last[sequences.row][:, None]
    index = row + jnp.arange(sequences.valid.shape[1])[None]
    return sequences._replace(steps=take_rows(logged.rows, jnp.minimum(index, last)), valid=index <= last)


def standing(
    agent: RecurrentActorCritic, batch: Sequence
) -> tuple[Float[Array, "batch after obs"], Float[Array, "batch after act"]]:
    """The normalised observation before the first and after every step, and the action before each of them."""
    obs = jnp.concatenate([batch.steps.obs[:, :1], batch.steps.next_obs], axis=1)
    return agent.normaliser(obs), jnp.concatenate([batch.memory.action[:, None], batch.steps.action], axis=1)


def masked_mean(x: Float[Array, "batch time"], valid: Bool[Array, "batch time"]) -> Scalar:
    """The mean over valid steps; the others add nothing, whatever they hold."""
    return jnp.sum(jnp.where(valid, x, 0.0)) / jnp.sum(valid)


def _policy_part(agent: RecurrentActorCritic) -> tuple[Context, MLP]:
    return agent.policy_context, agent.actor


def _value_part(agent: RecurrentActorCritic) -> tuple[Context, MLP]:
    return agent.value_context, agent.critics
