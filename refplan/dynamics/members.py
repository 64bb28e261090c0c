"""How the members of an ensemble learn, whatever they are conditioned on: the part both models' learners share.

Every member has a bootstrap list of training rows and goes through it in a fresh order each epoch. After each epoch it
is judged by the squared error of its mean on held-out transitions, and its weights are kept when that fell.
"""

import math
from abc import abstractmethod
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Bool, Float, Int

from refplan.data.dataset import Dataset
from refplan.dynamics.decoder import (
    GaussianNet,
    bounds_penalty,
    decoder_rows,
    members_apart,
    negative_log_likelihood,
    take_members,
)
from refplan.dynamics.termination import TerminationLearner
from refplan.learner import AbstractReviewingLearner
from refplan.nn import Normaliser
from refplan.types import Flag, Key, Metrics, Scalar, Transition

S = TypeVar("S", bound=Any)  # a state with `nets`, `optimiser`, `order`, `position`, `best`, `since`, `termination`
Rows = tuple[Float[Array, "member rows inputs"], Float[Array, "member rows outputs"]]


class Snapshot(NamedTuple):
    """Every member as it was at its best, and its error then; the log-variance bounds are shared and not part of it."""

    weights: tuple[tuple, tuple]
    mse: Float[Array, " member"]


class AbstractMembersLearner(AbstractReviewingLearner):
    """A learner of Gaussian networks by maximum likelihood, member by member.

    Training stops when no member has improved by more than `min_improvement` for more than `patience` epochs.
    """

    batch_size: eqx.AbstractVar[int]  # rows per member
    bounds_weight: eqx.AbstractVar[Scalar]
    held_fraction: eqx.AbstractVar[float]
    held_most: eqx.AbstractVar[int]
    patience: eqx.AbstractVar[int]
    min_improvement: eqx.AbstractVar[Scalar]
    epochs: eqx.AbstractVar[int]
    termination: eqx.AbstractVar[TerminationLearner]

    @property
    @abstractmethod
    def optimiser(self) -> optax.GradientTransformation:
        """What makes a step of a gradient."""

    @abstractmethod
    def read(self, state: Any, batch: Any) -> tuple[Rows, Float[Array, "member rows latent"] | None]:
        """What every member reads and should say of a batch, in its units, and under which latents."""

    def penalty(self, nets: GaussianNet) -> Scalar:
        """What the loss has besides the likelihood."""
        return bounds_penalty(nets, self.bounds_weight)

    def schedule(self, data: Dataset) -> tuple[int, int]:
        """(updates per pass over the training rows, that times `epochs`)."""
        rows = len(data.complete())
        every = math.ceil((rows - self.held_rows(rows)) / self.batch_size)
        return every, every * self.epochs

    def held_rows(self, rows: int) -> int:
        """How many of so many transitions judge the members: `held_fraction` of them, at most `held_most`."""
        return max(min(int(self.held_fraction * rows), self.held_most), 1)

    def next_rows(self, state: Any) -> Int[Array, "member batch"]:
        """The next entries of every member's list, from the beginning again after its end."""
        return state.order[:, (state.position + jnp.arange(self.batch_size)) % state.order.shape[1]]

    def update(self, state: S, batch: Any, key: Key) -> tuple[S, Metrics]:
        """One step of all members, and of the termination classifier if there is one."""
        (x, y), latent = self.read(state, batch)

        def objective(nets: GaussianNet) -> tuple[Scalar, Scalar]:
            each = jnp.mean(negative_log_likelihood(*members_apart(nets, x, latent), y), axis=1)
            return jnp.sum(each) + self.penalty(nets), jnp.mean(each)

        (_, nll), grads = eqx.filter_value_and_grad(objective, has_aux=True)(state.nets)
        updates, optimiser = self.optimiser.update(grads, state.optimiser, eqx.filter(state.nets, eqx.is_array))
        termination, metrics = self.termination.update(state.termination, batch.ends)
        state = state._replace(
            nets=eqx.apply_updates(state.nets, updates),
            optimiser=optimiser,
            position=state.position + self.batch_size,
            termination=termination,
        )
        return state, {"nll": nll, **metrics}

    def judge(
        self, state: S, errors: tuple[Float[Array, "rows member"], Float[Array, "rows member"]], elites: int, key: Key
    ) -> tuple[S, Metrics]:
        """Keep the members that are better than ever on held-out rows, and shuffle every list."""
        mse, nll = (jnp.mean(each, axis=0) for each in errors)
        best, improved = keep_better(state.best, state.nets, mse, self.min_improvement)
        since = jnp.where(jnp.any(improved), 0, state.since + 1)
        metrics = {"held_mse": jnp.mean(mse), "best_mse": jnp.mean(jnp.sort(best.mse)[:elites])}
        metrics |= {"held_nll": jnp.mean(nll), "since_improved": since.astype(jnp.float32)}
        order = jr.permutation(key, state.order, axis=1, independent=True)
        return state._replace(best=best, since=since, order=order, position=jnp.zeros_like(state.position)), metrics

    def finished(self, state: Any) -> Flag:
        """Whether no member has improved for more than `patience` epochs."""
        return state.since > self.patience


def first_snapshot(nets: GaussianNet) -> Snapshot:
    """Before anything was judged: whatever comes is better."""
    return Snapshot((nets.layers, nets.inject), jnp.full(nets.layers[0].weight.shape[0], jnp.inf))


def keep_better(
    best: Snapshot, nets: GaussianNet, mse: Float[Array, " member"], min_improvement: Scalar
) -> tuple[Snapshot, Bool[Array, " member"]]:
    """The members whose error fell by more than `min_improvement` of it replace their snapshots; also says which."""
    improved = mse < best.mse * (1.0 - min_improvement)

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(improved.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    weights = jax.tree.map(pick, (nets.layers, nets.inject), best.weights)
    return Snapshot(weights, jnp.where(improved, mse, best.mse)), improved


def best_first(nets: GaussianNet, best: Snapshot) -> tuple[GaussianNet, Float[Array, " member"]]:
    """Every member at its best, in the order of its held-out error, and these errors."""
    order = jnp.argsort(best.mse)
    nets = eqx.tree_at(lambda n: (n.layers, n.inject), nets, best.weights)
    return take_members(nets, order), best.mse[order]


def member_errors(
    nets: GaussianNet,
    inputs: Normaliser,
    targets: Normaliser,
    rows: Transition,
    latent: Float[Array, "rows latent"] | None = None,
) -> tuple[Float[Array, "rows member"], Float[Array, "rows member"]]:
    """(squared error of the mean, negative log-likelihood) of every member at every row, in the units of training."""
    members = nets.layers[0].weight.shape[0]

    def one(at: tuple[Transition, Any]) -> tuple[Float[Array, " member"], Float[Array, " member"]]:
        x, y = decoder_rows(inputs, targets, at[0])
        x, y, m = jax.tree.map(lambda v: jnp.broadcast_to(v, (members, *v.shape)), (x, y, at[1]))
        mean, log_var = members_apart(nets, x, m)
        return jnp.mean((mean - y) ** 2, axis=1), negative_log_likelihood(mean, log_var, y)

    # In blocks: held-out data may be large.
    return jax.lax.map(one, (rows, latent), batch_size=1000)
