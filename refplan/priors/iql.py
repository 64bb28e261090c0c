"""IQL (Kostrikov et al., 2022): never asks about an action outside the data; its value net makes planning cheap."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from refplan.data.dataset import Dataset
from refplan.data.sampling import sample_transitions
from refplan.learner import AbstractLearner
from refplan.nn import MLP, identity_normaliser, make_ensemble, make_mlp
from refplan.priors.actor_critic import (
    ActorValue,
    Critics,
    critics_in_world_units,
    in_world_units,
    prepare_rows,
    unit_box,
)
from refplan.priors.losses import advantage_weight, critic_loss, expectile_loss, likelihood_loss, td_target
from refplan.priors.policy import GaussianPolicy
from refplan.types import Action, Key, Metrics, Scalar, Transition


class IQLState(NamedTuple):
    """Policy, critics, value net and their optimisers; actions inside are in [-1, 1]."""

    policy: GaussianPolicy
    critics: Critics
    target: MLP
    value: MLP
    optimiser: optax.OptState
    beta: Scalar
    low: Action
    high: Action


class IQL(AbstractLearner):
    """V by expectile regression on Q, Q by TD on V, the policy by advantage-weighted likelihood.

    Departures from the paper: the policy's standard deviation depends on the state (IQL: one per action), no dropout,
    the policy's rate constant unless `anneal` is given, one Adam for all three networks (they share a rate and no
    gradients), all three moved from the same values (IQL: Q and the policy see V after its step), observations
    normalised. IQL's code rescales locomotion rewards so that returns span 1000; `rescale` scales `beta` instead, which
    weighs actions alike and keeps V in the units of the reward, as planners need it.
    """

    hidden: tuple[int, ...] = eqx.field(static=True, default=(256, 256))
    critics: int = eqx.field(static=True, default=2)
    batch_size: int = eqx.field(static=True, default=256)
    rate: Scalar = eqx.field(converter=jnp.asarray, default=3e-4)
    expectile: Scalar = eqx.field(converter=jnp.asarray, default=0.7)
    beta: Scalar = eqx.field(converter=jnp.asarray, default=3.0)
    discount: Scalar = eqx.field(converter=jnp.asarray, default=0.99)
    tau: Scalar = eqx.field(converter=jnp.asarray, default=0.005)
    normalise: bool = eqx.field(static=True, default=True)
    rescale: bool = eqx.field(static=True, default=True)
    # Updates in which the policy's rate falls to zero along half a cosine (IQL: its whole training); 0: it stays.
    anneal: Scalar = eqx.field(converter=jnp.asarray, default=0.0)

    def prepare(self, data: Dataset) -> Transition:
        """All rows, actions in [-1, 1]."""
        return prepare_rows(data)

    def init(self, data: Dataset, key: Key) -> IQLState:
        """Fresh networks."""
        keys = jr.split(key, 3)
        obs, act = data.obs_dim, data.action_dim
        normaliser = data.normaliser() if self.normalise else identity_normaliser(obs)
        net = make_mlp((obs, *self.hidden, 2 * act), keys[0])
        nets = make_ensemble(self.critics, (obs + act, *self.hidden, 1), keys[1])
        value = make_mlp((obs, *self.hidden, 1), keys[2])
        policy = GaussianPolicy(net, normaliser, *unit_box(act), head="gaussian_tanh_mean")
        optimiser = optax.adam(self.rate).init(eqx.filter((net, nets, value), eqx.is_array))
        bounds = jnp.asarray(data.task.low), jnp.asarray(data.task.high)
        critics = Critics(nets, normaliser, *unit_box(act))
        beta = self.beta * (return_scale(data) if self.rescale else 1.0)
        return IQLState(policy, critics, nets, value, optimiser, beta, *bounds)

    def batch(self, source: Transition, state: IQLState, key: Key) -> Transition:
        """Rows drawn uniformly with replacement."""
        return sample_transitions(source, key, self.batch_size)

    def update(self, state: IQLState, batch: Transition, key: Key) -> tuple[IQLState, Metrics]:
        """One step on all three networks, from the values they had before it."""
        seen = state.critics.normaliser
        slow = eqx.tree_at(lambda c: c.nets, state.critics, state.target)
        q_slow = jnp.min(slow(batch.obs, batch.action), axis=0)
        before = state.value(seen(batch.obs))[:, 0]
        target = td_target(batch.reward, batch.terminated, state.value(seen(batch.next_obs))[:, 0], self.discount)
        weight = advantage_weight(q_slow - before, state.beta)

        def objective(nets: tuple[MLP, MLP, MLP]) -> tuple[Scalar, Metrics]:
            net, critic_nets, value = nets
            policy = eqx.tree_at(lambda p: p.net, state.policy, net)
            critics = eqx.tree_at(lambda c: c.nets, state.critics, critic_nets)
            q_loss = critic_loss(critics(batch.obs, batch.action), target)
            v_loss = expectile_loss(q_slow - value(seen(batch.obs))[:, 0], self.expectile)
            actor = likelihood_loss(jax.vmap(policy.log_prob)(batch.obs, batch.action), weight)
            return q_loss + v_loss + actor, {"critic_loss": q_loss, "value_loss": v_loss, "actor_loss": actor}

        nets = (state.policy.net, state.critics.nets, state.value)
        (_, metrics), grads = eqx.filter_value_and_grad(objective, has_aux=True)(nets)
        done = optax.tree.get(state.optimiser, "count")
        updates, optimiser = optax.adam(self.rate).update(grads, state.optimiser)
        slower = lambda net: jax.tree.map(lambda step: step * annealed(done, self.anneal), net)  # noqa: E731
        updates = eqx.tree_at(lambda nets: nets[0], updates, replace_fn=slower)
        net, critic_nets, value = eqx.apply_updates(nets, updates)
        return self._moved(state, net, critic_nets, value, optimiser), {**metrics, **_levels(before, weight)}

    def _moved(self, state: IQLState, net: MLP, nets: MLP, value: MLP, optimiser: optax.OptState) -> IQLState:
        return state._replace(
            policy=eqx.tree_at(lambda p: p.net, state.policy, net),
            critics=eqx.tree_at(lambda c: c.nets, state.critics, nets),
            target=jax.tree.map(lambda old, new: old + self.tau * (new - old), state.target, nets),
            value=value,
            optimiser=optimiser,
        )

    def result(self, state: IQLState) -> ActorValue:
        """The policy, its critics and its value net, in the world's units."""
        policy = in_world_units(state.policy, state.low, state.high)
        critics = critics_in_world_units(state.critics, state.low, state.high)
        return ActorValue(policy, critics, state.value, state.critics.normaliser)


def return_scale(data: Dataset) -> float:
    """1000 / (best - worst return of an episode): what IQL's code multiplies locomotion rewards by."""
    span = float(np.ptp(data.returns)) if data.sequential and data.episodes > 1 else 0.0
    return 1000.0 / span if span > 0 else 1.0


def annealed(done: Int[Array, ""], updates: Scalar) -> Scalar:
    """0.5 (1 + cos(pi t / T)) after t of T updates, zero from then on; one throughout if T is zero."""
    part = jnp.minimum(done / jnp.maximum(updates, 1.0), 1.0)
    return jnp.where(updates > 0, 0.5 * (1.0 + jnp.cos(jnp.pi * part)), 1.0)


def _levels(value: Float[Array, " batch"], weight: Float[Array, " batch"]) -> Metrics:
    return {"value": jnp.mean(value), "weight": jnp.mean(weight)}
