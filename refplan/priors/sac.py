"""SAC (Haarnoja et al., 2018): the skeleton under CQL, EDAC, MOPO and COMBO, and the online learner that makes data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float

from refplan.data.dataset import Dataset
from refplan.data.sampling import sample_transitions
from refplan.learner import AbstractLearner
from refplan.nn import MLP, Normaliser, identity_normaliser, make_ensemble, make_mlp
from refplan.priors.actor_critic import (
    ActorCritic,
    Critics,
    critics_in_world_units,
    in_world_units,
    prepare_rows,
    sample_actions,
    unit_box,
)
from refplan.priors.losses import actor_loss, cloning_loss, critic_loss, td_target, temperature_loss
from refplan.priors.policy import GaussianPolicy
from refplan.types import Action, Key, Metrics, Scalar, Transition


class SACState(NamedTuple):
    """Everything SAC learns or carries. Inside, actions are in [-1, 1]; `low` and `high` are the world's bounds."""

    policy: GaussianPolicy
    critics: Critics
    target: MLP
    log_alpha: Scalar
    actor_optimiser: optax.OptState
    critic_optimiser: optax.OptState
    alpha_optimiser: optax.OptState
    low: Action
    high: Action


# (nets being trained, state, batch, key) -> (what is added to the critics' loss, metrics)
Penalty = Callable[[MLP, SACState, Transition, Key], tuple[Scalar, Metrics]]


class SAC(AbstractLearner):
    """Soft actor-critic with a learned temperature.

    Departures from the paper: none known. As an offline learner it has no defence against unseen actions; use it
    through CQL, EDAC, MOPO or COMBO.
    """

    hidden: tuple[int, ...] = eqx.field(static=True, default=(256, 256))
    critics: int = eqx.field(static=True, default=2)
    batch_size: int = eqx.field(static=True, default=256)
    actor_rate: Scalar = eqx.field(converter=jnp.asarray, default=3e-4)
    critic_rate: Scalar = eqx.field(converter=jnp.asarray, default=3e-4)
    alpha_rate: Scalar = eqx.field(converter=jnp.asarray, default=3e-4)
    alpha_start: Scalar = eqx.field(converter=jnp.asarray, default=1.0)
    discount: Scalar = eqx.field(converter=jnp.asarray, default=0.99)
    tau: Scalar = eqx.field(converter=jnp.asarray, default=0.005)
    entropy_in_backup: bool = eqx.field(static=True, default=True)
    normalise: bool = eqx.field(static=True, default=False)
    # How much the policy is also drawn to the logged actions (see `cloning_loss`); 0: not at all, as in SAC.
    cloning: Scalar = eqx.field(converter=jnp.asarray, default=0.0)

    def prepare(self, data: Dataset) -> Transition:
        """All rows, actions in [-1, 1]."""
        return prepare_rows(data)

    def init(self, data: Dataset, key: Key) -> SACState:
        """Fresh networks for the sizes, bounds and, if asked, the observation statistics of the data."""
        normaliser = data.normaliser() if self.normalise else identity_normaliser(data.obs_dim)
        return self.create(normaliser, jnp.asarray(data.task.low), jnp.asarray(data.task.high), key)

    def create(self, normaliser: Normaliser, low: Action, high: Action, key: Key) -> SACState:
        """Fresh networks without any data."""
        key_actor, key_critics = jr.split(key)
        obs, act = normaliser.mean.shape[0], low.shape[0]
        box = unit_box(act)
        net = make_mlp((obs, *self.hidden, 2 * act), key_actor)
        nets = make_ensemble(self.critics, (obs + act, *self.hidden, 1), key_critics)
        log_alpha = jnp.log(self.alpha_start)
        return SACState(
            GaussianPolicy(net, normaliser, *box),
            Critics(nets, normaliser, *box),
            jax.tree.map(lambda x: x, nets),
            log_alpha,
            optax.adam(self.actor_rate).init(eqx.filter(net, eqx.is_array)),
            optax.adam(self.critic_rate).init(eqx.filter(nets, eqx.is_array)),
            optax.adam(self.alpha_rate).init(log_alpha),
            low,
            high,
        )

    def batch(self, source: Transition, state: SACState, key: Key) -> Transition:
        """Rows drawn uniformly with replacement."""
        return sample_transitions(source, key, self.batch_size)

    def update(self, state: SACState, batch: Transition, key: Key) -> tuple[SACState, Metrics]:
        """One step on critics, actor, temperature and target."""
        return self.step(state, batch, key)

    def step(
        self, state: SACState, batch: Transition, key: Key, penalty: Penalty | None = None
    ) -> tuple[SACState, Metrics]:
        """The update with something added to the critics' loss: how CQL, EDAC and COMBO differ from SAC."""
        key_critic, key_actor = jr.split(key)
        state, critic_metrics = self._critic_step(state, batch, key_critic, penalty)
        state, actor_metrics = self._actor_step(state, batch, key_actor)
        return state, {**critic_metrics, **actor_metrics}

    def target(self, state: SACState, batch: Transition, key: Key) -> Float[Array, " batch"]:
        """y = r + gamma (1 - d) (min_i Qbar_i(s', a') - alpha log pi(a'|s')), a' ~ pi(.|s'); the last term optional."""
        action, log_prob = sample_actions(state.policy, batch.next_obs, key)
        slow = eqx.tree_at(lambda c: c.nets, state.critics, state.target)
        value = jnp.min(slow(batch.next_obs, action), axis=0)
        if self.entropy_in_backup:
            value = value - jnp.exp(state.log_alpha) * log_prob
        return td_target(batch.reward, batch.terminated, value, self.discount)

    def _critic_step(
        self, state: SACState, batch: Transition, key: Key, penalty: Penalty | None
    ) -> tuple[SACState, Metrics]:
        key_target, key_penalty = jr.split(key)
        target = jax.lax.stop_gradient(self.target(state, batch, key_target))

        def objective(nets: MLP) -> tuple[Scalar, Metrics]:
            q = eqx.tree_at(lambda c: c.nets, state.critics, nets)(batch.obs, batch.action)
            loss = critic_loss(q, target)
            metrics = {"critic_loss": loss, "q": jnp.mean(q)}
            if penalty is None:
                return loss, metrics
            extra, more = penalty(nets, state, batch, key_penalty)
            return loss + extra, {**metrics, **more}

        (_, metrics), grads = eqx.filter_value_and_grad(objective, has_aux=True)(state.critics.nets)
        updates, optimiser = optax.adam(self.critic_rate).update(grads, state.critic_optimiser)
        nets = eqx.apply_updates(state.critics.nets, updates)
        slow = jax.tree.map(lambda old, new: old + self.tau * (new - old), state.target, nets)
        critics = eqx.tree_at(lambda c: c.nets, state.critics, nets)
        return state._replace(critics=critics, target=slow, critic_optimiser=optimiser), metrics

    def _actor_step(self, state: SACState, batch: Transition, key: Key) -> tuple[SACState, Metrics]:
        alpha, obs = jnp.exp(state.log_alpha), batch.obs

        def objective(net: MLP) -> tuple[Scalar, Float[Array, " batch"]]:
            policy = eqx.tree_at(lambda p: p.net, state.policy, net)
            action, log_prob = sample_actions(policy, obs, key)
            q = jnp.min(state.critics(obs, action), axis=0)
            return actor_loss(log_prob, q, alpha) + self.cloning * cloning_loss(action, batch.action, q), log_prob

        (loss, log_prob), grads = eqx.filter_value_and_grad(objective, has_aux=True)(state.policy.net)
        updates, actor_optimiser = optax.adam(self.actor_rate).update(grads, state.actor_optimiser)
        policy = eqx.tree_at(lambda p: p.net, state.policy, eqx.apply_updates(state.policy.net, updates))
        log_alpha, alpha_optimiser = self._temperature_step(state, log_prob)
        metrics = {"actor_loss": loss, "entropy": -jnp.mean(log_prob), "alpha": alpha}
        state = state._replace(policy=policy, actor_optimiser=actor_optimiser)
        return state._replace(log_alpha=log_alpha, alpha_optimiser=alpha_optimiser), metrics

    def _temperature_step(self, state: SACState, log_prob: Float[Array, " batch"]) -> tuple[Scalar, optax.OptState]:
        log_prob = jax.lax.stop_gradient(log_prob)
        entropy = -float(state.low.shape[0])  # the usual target: minus the number of action dimensions
        grad = jax.grad(temperature_loss)(state.log_alpha, log_prob, entropy)
        update, optimiser = optax.adam(self.alpha_rate).update(grad, state.alpha_optimiser)
        log_alpha: Any = optax.apply_updates(state.log_alpha, update)
        return log_alpha, optimiser

    def result(self, state: SACState) -> ActorCritic:
        """The policy and its critics, in the world's units."""
        policy = in_world_units(state.policy, state.low, state.high)
        return ActorCritic(policy, critics_in_world_units(state.critics, state.low, state.high))
