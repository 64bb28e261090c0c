"""A policy with critics: what SAC and its kin train, and the prior that planners use."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from refplan.agent import AbstractPolicy, AbstractPrior
from refplan.data.dataset import Dataset
from refplan.nn import MLP, Normaliser, ensemble_apply, tanh_gaussian_sample
from refplan.priors.policy import GaussianPolicy
from refplan.types import Action, Key, Obs, Scalar, State, Transition

Aggregate = Literal["min", "mean", "first"]


class Critics(eqx.Module):
    """Q_i(s, a) of several critics; actions are given in the world's units and seen by the nets in [-1, 1]."""

    nets: MLP
    normaliser: Normaliser
    low: Action
    high: Action

    def __call__(
        self, obs: Float[Array, "*batch obs"], action: Float[Array, "*batch act"]
    ) -> Float[Array, "critic *batch"]:
        """Every critic's value of every (observation, action)."""
        shape = (1,) * (action.ndim - 1) + self.low.shape
        low, high = self.low.reshape(shape), self.high.reshape(shape)
        unit = (2.0 * action - low - high) / (high - low)
        return ensemble_apply(self.nets, jnp.concatenate([self.normaliser(obs), unit], axis=-1))[..., 0]


def aggregate_critics(q: Float[Array, "critic *batch"], how: Aggregate) -> Float[Array, "*batch"]:
    """One number from several critics."""
    if how == "first":
        return q[0]
    return jnp.min(q, axis=0) if how == "min" else jnp.mean(q, axis=0)


class AbstractActor(AbstractPrior):
    """A prior that acts as its policy does; what a state is worth is up to the kind."""

    policy: eqx.AbstractVar[AbstractPolicy]

    def start(self) -> State:
        """The policy's start."""
        return self.policy.start()

    def observe(self, state: State, transition: Transition) -> State:
        """The policy's reflection."""
        return self.policy.observe(state, transition)

    def act(self, state: State, obs: Obs, key: Key) -> tuple[Action, State]:
        """The policy's own action."""
        return self.policy.act(state, obs, key)

    def sample(self, state: State, obs: Obs, key: Key) -> tuple[Action, Scalar]:
        """A sampled action of the policy."""
        return self.policy.sample(state, obs, key)


class ActorCritic(AbstractActor):
    """A policy and its critics; V(s) = aggregate_i Q_i(s, pi(s)) with the policy's own action."""

    policy: AbstractPolicy
    critics: Critics
    aggregate: Aggregate = eqx.field(static=True, default="min")

    def value(self, state: State, obs: Obs) -> Scalar:
        """Aggregated critics at the policy's own action."""
        action, _ = self.policy.act(state, obs, jax.random.key(0))
        return aggregate_critics(self.critics(obs, action), self.aggregate)


class ActorValue(AbstractActor):
    """A policy with a value net beside its critics: V(s) costs one pass instead of an actor and all critics."""

    policy: AbstractPolicy
    critics: Critics
    value_net: MLP
    normaliser: Normaliser

    def value(self, state: State, obs: Obs) -> Scalar:
        """The value net."""
        return self.value_net(self.normaliser(obs))[0]


def prepare_rows(data: Dataset) -> Transition:
    """All rows on the device, actions in [-1, 1]: what every model-free learner draws from."""
    low, high = data.task.low, data.task.high
    rows = data.device()
    return rows._replace(action=(2.0 * rows.action - low[None] - high[None]) / (high - low)[None])


def unit_box(size: int) -> tuple[Action, Action]:
    """The bounds learners work in."""
    return -jnp.ones(size), jnp.ones(size)


def in_world_units(policy: GaussianPolicy, low: Action, high: Action) -> GaussianPolicy:
    """A policy trained in [-1, 1], acting in the world's bounds."""
    return eqx.tree_at(lambda p: (p.low, p.high), policy, (low, high))


def critics_in_world_units(critics: Critics, low: Action, high: Action) -> Critics:
    """Critics trained on actions in [-1, 1], judging the world's."""
    return eqx.tree_at(lambda c: (c.low, c.high), critics, (low, high))


def sample_actions(
    policy: GaussianPolicy, obs: Float[Array, "batch obs"], key: Key
) -> tuple[Float[Array, "batch act"], Float[Array, " batch"]]:
    """One action per observation from a policy whose actions are in [-1, 1]; all noise in one draw."""
    mean, log_std = jax.vmap(policy.distribution)(obs)
    return tanh_gaussian_sample(mean, log_std, key)
