"""MBOP's prior (Argenson and Dulac-Arnold, 2021): cloned policies and n-step returns, both as small ensembles."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from refplan.agent import AbstractPrior
from refplan.data.dataset import Dataset
from refplan.errors import RefplanError
from refplan.learner import AbstractLearner
from refplan.nn import MLP, Normaliser, ensemble_apply, fit_normaliser, make_ensemble
from refplan.priors.policy import to_unit, to_world
from refplan.types import Action, Key, Metrics, Obs, Scalar, State, Transition


class ClonedEnsemble(AbstractPrior):
    """Acts by the mean of its policies; a sample is the action of one of them. Its value is an n-step return."""

    policies: MLP
    values: MLP
    normaliser: Normaliser
    returns: Normaliser  # of the n-step returns, one number
    low: Action
    high: Action

    def start(self) -> State:
        """Nothing to remember."""
        return ()

    def observe(self, state: State, transition: Transition) -> State:
        """Nothing to learn."""
        return state

    def act(self, state: State, obs: Obs, key: Key) -> tuple[Action, State]:
        """The mean of the members' actions."""
        unit = jnp.mean(jnp.tanh(ensemble_apply(self.policies, self.normaliser(obs))), axis=0)
        return to_world(unit, self.low, self.high), state

    def sample(self, state: State, obs: Obs, key: Key) -> tuple[Action, Scalar]:
        """One member's action, and the logarithm of one over their number."""
        units = jnp.tanh(ensemble_apply(self.policies, self.normaliser(obs)))
        unit = units[jr.randint(key, (), 0, units.shape[0])]
        return to_world(unit, self.low, self.high), -jnp.log(1.0 * units.shape[0])

    def value(self, state: State, obs: Obs) -> Scalar:
        """The undiscounted return of the next n steps, averaged over members."""
        values = ensemble_apply(self.values, self.normaliser(obs))[:, 0]
        return jnp.mean(values) * self.returns.std[0] + self.returns.mean[0]


class MBOPSource(NamedTuple):
    """Rows, and what the next n steps earned; `known` is false where the recording ended before that."""

    obs: Float[Array, "rows obs"]
    unit: Float[Array, "rows act"]
    earned: Float[Array, " rows"]
    known: Bool[Array, " rows"]


class MBOPState(NamedTuple):
    """The prior, its networks in training, their optimiser."""

    prior: ClonedEnsemble
    optimiser: optax.OptState


class MBOP(AbstractLearner):
    """mean (tanh pi_i(s) - a)^2 + mean (V_i(s) - sum_{k<n} r_{t+k})^2, every member on batches of its own.

    Departures from MBOP: networks read the state only (there also the previous action); the return head is a function
    of the state; actions are squashed by tanh.
    """

    steps: int = eqx.field(static=True, default=15)
    members: int = eqx.field(static=True, default=5)
    hidden: tuple[int, ...] = eqx.field(static=True, default=(64, 64))
    batch_size: int = eqx.field(static=True, default=256)
    rate: Scalar = eqx.field(converter=jnp.asarray, default=3e-4)

    def prepare(self, data: Dataset) -> MBOPSource:
        """All rows with their n-step returns."""
        low, high = jnp.asarray(data.task.low), jnp.asarray(data.task.high)
        rows = data.device()
        earned, known = n_step_returns(data, self.steps)
        unit = jnp.clip(jax.vmap(lambda a: to_unit(a, low, high))(rows.action), -1.0, 1.0)
        return MBOPSource(rows.obs, unit, jnp.asarray(earned), jnp.asarray(known))

    def init(self, data: Dataset, key: Key) -> MBOPState:
        """Fresh networks."""
        earned, known = n_step_returns(data, self.steps)
        if not known.any():
            raise RefplanError(
                f"dataset '{data.meta.name}': no {self.steps} consecutive steps to sum rewards over; use a smaller n."
            )
        key_policy, key_value = jr.split(key)
        sizes = (data.obs_dim, *self.hidden)
        prior = ClonedEnsemble(
            make_ensemble(self.members, (*sizes, data.action_dim), key_policy),
            make_ensemble(self.members, (*sizes, 1), key_value),
            data.normaliser(),
            fit_normaliser(earned[known][:, None]),
            jnp.asarray(data.task.low),
            jnp.asarray(data.task.high),
        )
        return MBOPState(prior, optax.adam(self.rate).init(eqx.filter(_nets(prior), eqx.is_array)))

    def batch(self, source: MBOPSource, state: MBOPState, key: Key) -> MBOPSource:
        """Rows of every member."""
        index = jr.randint(key, (self.members, self.batch_size), 0, len(source.earned))
        return jax.tree.map(lambda x: x[index], source)

    def update(self, state: MBOPState, batch: MBOPSource, key: Key) -> tuple[MBOPState, Metrics]:
        """One step on both ensembles."""
        prior = state.prior
        seen = prior.normaliser(batch.obs)
        target = (batch.earned - prior.returns.mean[0]) / prior.returns.std[0]

        def objective(nets: tuple[MLP, MLP]) -> tuple[Scalar, Metrics]:
            each = eqx.filter_vmap(lambda net, x: net(x))
            cloning = jnp.mean((jnp.tanh(each(nets[0], seen)) - batch.unit) ** 2)
            misses = jnp.where(batch.known, (each(nets[1], seen)[..., 0] - target) ** 2, 0.0)
            value = jnp.sum(misses) / jnp.maximum(jnp.sum(batch.known), 1)
            # Members do not share weights: summed over them, each learns as if alone.
            return self.members * (cloning + value), {"cloning": cloning, "value": value}

        nets = _nets(prior)
        (_, metrics), grads = eqx.filter_value_and_grad(objective, has_aux=True)(nets)
        updates, optimiser = optax.adam(self.rate).update(grads, state.optimiser)
        prior = eqx.tree_at(_nets, prior, eqx.apply_updates(nets, updates))
        return MBOPState(prior, optimiser), metrics

    def result(self, state: MBOPState) -> ClonedEnsemble:
        """The prior."""
        return state.prior


def _nets(prior: ClonedEnsemble) -> tuple[MLP, MLP]:
    return prior.policies, prior.values


def n_step_returns(data: Dataset, steps: int) -> tuple[Float[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
    """sum_{k<n} r_{t+k} inside the episode, and whether all of it was recorded (an end of the world is no gap)."""
    if not data.sequential:
        raise RefplanError(f"dataset '{data.meta.name}' was split by transition; n-step returns need whole episodes.")
    sums = np.concatenate([[0.0], np.cumsum(data.rewards, dtype=np.float64)])
    ends = np.repeat(data.ends, data.lengths)
    until = np.minimum(np.arange(len(data)) + steps, ends)
    known = (until == np.arange(len(data)) + steps) | data.terminated[ends - 1]
    return (sums[until] - sums[:-1]).astype(np.float32), known
