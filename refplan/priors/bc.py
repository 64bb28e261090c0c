"""Behaviour cloning: the policy that makes the data most likely; the prior of MBOP and the floor of every table."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from refplan.data.dataset import Dataset
from refplan.data.sampling import sample_transitions
from refplan.learner import AbstractLearner
from refplan.nn import MLP, identity_normaliser, make_mlp
from refplan.priors.actor_critic import in_world_units, prepare_rows, unit_box
from refplan.priors.losses import likelihood_loss
from refplan.priors.policy import GaussianPolicy
from refplan.types import Action, Key, Metrics, Scalar, Transition


class BCState(NamedTuple):
    """A policy and its optimiser."""

    policy: GaussianPolicy
    optimiser: optax.OptState
    low: Action
    high: Action


class BC(AbstractLearner):
    """-mean log pi(a|s) of a tanh-Gaussian.

    Actions within `edge` of the border are moved in: at the border itself atanh has no bound, and a few such rows would
    pull the mean of all others. Departures from the paper: none known (it names no details).
    """

    hidden: tuple[int, ...] = eqx.field(static=True, default=(256, 256))
    batch_size: int = eqx.field(static=True, default=256)
    rate: Scalar = eqx.field(converter=jnp.asarray, default=3e-4)
    normalise: bool = eqx.field(static=True, default=True)
    edge: float = eqx.field(static=True, default=1e-3)

    def prepare(self, data: Dataset) -> Transition:
        """All rows, actions in [-1, 1], a little inside."""
        rows = prepare_rows(data)
        return rows._replace(action=jnp.clip(rows.action, -1.0 + self.edge, 1.0 - self.edge))

    def init(self, data: Dataset, key: Key) -> BCState:
        """A fresh policy."""
        normaliser = data.normaliser() if self.normalise else identity_normaliser(data.obs_dim)
        net = make_mlp((data.obs_dim, *self.hidden, 2 * data.action_dim), key)
        policy = GaussianPolicy(net, normaliser, *unit_box(data.action_dim))
        optimiser = optax.adam(self.rate).init(eqx.filter(net, eqx.is_array))
        return BCState(policy, optimiser, jnp.asarray(data.task.low), jnp.asarray(data.task.high))

    def batch(self, source: Transition, state: BCState, key: Key) -> Transition:
        """Rows drawn uniformly with replacement."""
        return sample_transitions(source, key, self.batch_size)

    def update(self, state: BCState, batch: Transition, key: Key) -> tuple[BCState, Metrics]:
        """One step up the likelihood."""

        def objective(net: MLP) -> Scalar:
            policy = eqx.tree_at(lambda p: p.net, state.policy, net)
            return likelihood_loss(jax.vmap(policy.log_prob)(batch.obs, batch.action))

        loss, grads = eqx.filter_value_and_grad(objective)(state.policy.net)
        updates, optimiser = optax.adam(self.rate).update(grads, state.optimiser)
        policy = eqx.tree_at(lambda p: p.net, state.policy, eqx.apply_updates(state.policy.net, updates))
        return state._replace(policy=policy, optimiser=optimiser), {"loss": loss}

    def result(self, state: BCState) -> GaussianPolicy:
        """The policy; it has no critic (fit one with FQE)."""
        return in_world_units(state.policy, state.low, state.high)
