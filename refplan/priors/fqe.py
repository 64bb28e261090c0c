"""Fitted Q evaluation: critics for a policy that has none, and what a policy is worth, from data alone."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from refplan.agent import AbstractPolicy
from refplan.data.dataset import Dataset
from refplan.errors import RefplanError
from refplan.learner import AbstractLearner
from refplan.nn import MLP, identity_normaliser, make_ensemble
from refplan.priors.actor_critic import (
    ActorCritic,
    ActorValue,
    Critics,
    critics_in_world_units,
    prepare_rows,
    unit_box,
)
from refplan.priors.losses import td_target
from refplan.priors.policy import to_unit
from refplan.settings import digest_of
from refplan.types import Action, Key, Metrics, Scalar, Transition


class FQERows(NamedTuple):
    """Rows with what the policy would do after each of them, and how much each row counts for each critic."""

    rows: Transition
    next_action: Float[Array, "rows sample act"]  # in [-1, 1]
    weight: Float[Array, "rows critic"]


class FQEState(NamedTuple):
    """Critics, their slow copies and the optimiser; actions inside are in [-1, 1]."""

    critics: Critics
    target: MLP
    optimiser: optax.OptState
    low: Action
    high: Action


class FQE(AbstractLearner):
    """y_i = r + gamma (1 - d) mean_k Qbar_i(s', a'_k), a'_k ~ pi(.|s'): every critic follows its own target.

    The policy is asked once, before training (it may be slow Python), so its next actions are fixed draws: `samples`
    per row, 0 meaning 1 for a policy that always answers the same and 4 otherwise. With `bootstrap` every critic sees
    its own resample of the episodes, so that the spread over critics also holds the luck of the data (Hao et al., 2021,
    "Bootstrapping fitted Q-evaluation"); without it, critics differ by their start alone. Departures: none known.
    """

    policy: AbstractPolicy
    own_action: bool = eqx.field(static=True, default=False)  # judge `act` (what `evaluate` runs), not `sample`
    samples: int = eqx.field(static=True, default=0)
    bootstrap: bool = eqx.field(static=True, default=True)
    hidden: tuple[int, ...] = eqx.field(static=True, default=(256, 256))
    critics: int = eqx.field(static=True, default=4)
    batch_size: int = eqx.field(static=True, default=256)
    rate: Scalar = eqx.field(converter=jnp.asarray, default=3e-4)
    discount: Scalar = eqx.field(converter=jnp.asarray, default=0.99)
    # Values spread backwards at a rate of tau (1 - gamma) per update: at 0.005, 10k updates stop at 40 % of the way.
    tau: Scalar = eqx.field(converter=jnp.asarray, default=0.05)
    normalise: bool = eqx.field(static=True, default=True)
    seed: int = eqx.field(static=True, default=0)  # of the policy's next actions and the resampled episodes
    # Tells policies of the same shape apart, so that a checkpoint is never continued with another policy.
    digest: Int[Array, "4"] = eqx.field(init=False)

    def __post_init__(self):
        if jax.tree.leaves(self.policy.start()):
            raise RefplanError(
                f"FQE cannot judge {type(self.policy).__name__}: it remembers earlier steps of an episode, and logged "
                "rows are drawn one by one. Use a policy that only looks at the current observation."
            )
        self.digest = digest_of(self.policy)

    def prepare(self, data: Dataset) -> FQERows:
        """All rows, actions in [-1, 1], the policy's actions after each row, and each critic's resample."""
        key_action, key_weight = jr.split(jr.key(self.seed))
        _check_fits(self.policy, data)
        action = self._next_actions(data, key_action)
        low, high = jnp.asarray(data.task.low), jnp.asarray(data.task.high)
        unit = jax.vmap(jax.vmap(to_unit, (0, None, None)), (0, None, None))(action, low, high)
        return FQERows(prepare_rows(data), unit, self._weights(data, key_weight))

    def _next_actions(self, data: Dataset, key: Key) -> Float[Array, "rows sample act"]:
        obs = jnp.asarray(data.next_observations)
        samples = self.samples
        if samples == 0 and not self.own_action:
            twice = policy_actions(self.policy, obs[:64], key, 2)
            samples = 1 if jnp.array_equal(twice[:, 0], twice[:, 1]) else 4
        return policy_actions(self.policy, obs, key, 0 if self.own_action else samples)

    def _weights(self, data: Dataset, key: Key) -> Float[Array, "rows critic"]:
        if not self.bootstrap:
            return jnp.ones((len(data), self.critics))
        lengths = data.lengths if data.sequential else np.ones(len(data), np.int64)
        episodes = len(lengths)
        drawn = np.asarray(jr.randint(key, (self.critics, episodes), 0, episodes))
        times = np.stack([np.bincount(each, minlength=episodes) for each in drawn], axis=1)
        return jnp.asarray(np.repeat(times, lengths, axis=0), jnp.float32)

    def init(self, data: Dataset, key: Key) -> FQEState:
        """Fresh critics."""
        obs, act = data.obs_dim, data.action_dim
        normaliser = data.normaliser() if self.normalise else identity_normaliser(obs)
        nets = make_ensemble(self.critics, (obs + act, *self.hidden, 1), key)
        optimiser = optax.adam(self.rate).init(eqx.filter(nets, eqx.is_array))
        bounds = jnp.asarray(data.task.low), jnp.asarray(data.task.high)
        return FQEState(Critics(nets, normaliser, *unit_box(act)), nets, optimiser, *bounds)

    def batch(self, source: FQERows, state: FQEState, key: Key) -> FQERows:
        """Rows drawn uniformly with replacement."""
        index = jr.randint(key, (self.batch_size,), 0, source.rows.reward.shape[0])
        return jax.tree.map(lambda array: array[index], source)

    def update(self, state: FQEState, batch: FQERows, key: Key) -> tuple[FQEState, Metrics]:
        """One step of every critic towards its own target."""
        rows = batch.rows
        slow = eqx.tree_at(lambda c: c.nets, state.critics, state.target)
        shape = (*batch.next_action.shape[:2], rows.next_obs.shape[1])
        after = jnp.mean(slow(jnp.broadcast_to(rows.next_obs[:, None], shape), batch.next_action), axis=2)
        target = jax.vmap(td_target, (None, None, 0, None))(rows.reward, rows.terminated, after, self.discount)
        target = jax.lax.stop_gradient(target)

        def objective(nets: MLP) -> tuple[Scalar, Metrics]:
            q = eqx.tree_at(lambda c: c.nets, state.critics, nets)(rows.obs, rows.action)
            loss = evaluation_loss(q, target, batch.weight.T)
            return loss, {"critic_loss": loss, "q": jnp.mean(q), "spread": jnp.mean(jnp.std(q, axis=0))}

        (_, metrics), grads = eqx.filter_value_and_grad(objective, has_aux=True)(state.critics.nets)
        updates, optimiser = optax.adam(self.rate).update(grads, state.optimiser)
        nets = eqx.apply_updates(state.critics.nets, updates)
        critics = eqx.tree_at(lambda c: c.nets, state.critics, nets)
        moved = jax.tree.map(lambda old, new: old + self.tau * (new - old), state.target, nets)
        return state._replace(critics=critics, target=moved, optimiser=optimiser), metrics

    def result(self, state: FQEState) -> ActorCritic:
        """The policy with its new critics; V(s) is their mean, since nothing was optimised against them."""
        critics = critics_in_world_units(state.critics, state.low, state.high)
        return ActorCritic(self.policy, critics, aggregate="mean")


def evaluation_loss(
    q: Float[Array, "critic batch"], target: Float[Array, "critic batch"], weight: Float[Array, "critic batch"]
) -> Scalar:
    """sum_i mean w_i (Q_i - y_i)^2: every critic has its own target and its own weights."""
    return jnp.sum(jnp.mean(weight * (q - target) ** 2, axis=1))


@eqx.filter_jit
def policy_actions(
    policy: AbstractPolicy, obs: Float[Array, "rows obs"], key: Key, samples: int
) -> Float[Array, "rows sample act"]:
    """`samples` sampled actions at every observation, or the policy's own one if 0; thousands of rows per call."""

    def at(row: tuple[Array, Key]) -> Float[Array, "sample act"]:
        obs, key = row
        if samples == 0:
            return policy.act(policy.start(), obs, key)[0][None]
        return jax.vmap(lambda k: policy.sample(policy.start(), obs, k)[0])(jr.split(key, samples))

    return jax.lax.map(at, (obs, jr.split(key, obs.shape[0])), batch_size=8192)


def _check_fits(policy: AbstractPolicy, data: Dataset) -> None:
    try:
        action = eqx.filter_eval_shape(policy.act, policy.start(), jnp.asarray(data.observations[0]), jr.key(0))[0]
    except (TypeError, ValueError) as error:
        raise RefplanError(
            f"the policy cannot read dataset '{data.meta.name}' with observations of size {data.obs_dim} ({error})."
        ) from None
    if action.shape != (data.action_dim,):
        raise RefplanError(
            f"the policy's actions have shape {action.shape}, those of dataset '{data.meta.name}' "
            f"({data.action_dim},). Use a policy and a dataset of the same task."
        )


class ValueEstimate(NamedTuple):
    """What a policy is expected to earn: the mean over critics, their lowest and highest, and each of them."""

    value: float
    low: float
    high: float
    per_critic: tuple[float, ...]


def value_estimate(
    prior: ActorCritic | ActorValue, data: Dataset, *, key: Key, own_action: bool = False, samples: int = 16
) -> ValueEstimate:
    """mean over the first states s0 of the episodes of Q_i(s0, a0): the discounted return each critic expects.

    `a0` are sampled actions of the policy or, with `own_action`, its own choice; use the setting FQE was trained with.
    """
    if not data.sequential:
        raise RefplanError(
            f"dataset '{data.meta.name}' was split by transition, so its first states are lost; split by='episode'."
        )
    obs = jnp.asarray(data.observations[data.starts])
    action = policy_actions(prior.policy, obs, key, 0 if own_action else samples)
    seen = jnp.broadcast_to(obs[:, None], (*action.shape[:2], obs.shape[1]))
    each = np.asarray(jnp.mean(prior.critics(seen, action), axis=(1, 2)), np.float64)
    return ValueEstimate(float(each.mean()), float(each.min()), float(each.max()), tuple(each.tolist()))
