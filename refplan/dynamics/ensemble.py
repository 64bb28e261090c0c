"""Probabilistic ensemble (Chua et al., 2018; settings of MOPO, Yu et al., 2020): a world without memory."""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from refplan.data.dataset import Dataset
from refplan.data.sampling import take_rows
from refplan.dynamics.base import AbstractDynamics, AbstractTermination, Outcome
from refplan.dynamics.decoder import (
    Decoder,
    GaussianNet,
    apply_members,
    bounds_penalty,
    make_gaussian_nets,
    negative_log_likelihood,
    take_members,
)
from refplan.dynamics.termination import Ends, TerminationLearner, TerminationState, find_ends
from refplan.errors import RefplanError
from refplan.nn import Normaliser, fit_normaliser, identity_normaliser
from refplan.train import AbstractReviewingLearner
from refplan.types import Action, Flag, Key, Metrics, Obs, Scalar, Transition


class EnsembleDynamics(AbstractDynamics):
    """The trained ensemble: its belief is empty, all its doubt is in the members."""

    decoder: Decoder
    termination: AbstractTermination
    held_mse: Float[Array, " member"]  # of every member, best first, in the units the nets were trained in

    @property
    def members(self) -> int:
        """The elites."""
        return self.decoder.elites

    def start(self) -> tuple[()]:
        """Nothing to remember."""
        return ()

    def observe(self, belief: tuple[()], transition: Transition) -> tuple[()]:
        """Nothing to learn from one step."""
        return ()

    def sample(self, belief: tuple[()], obs: Obs, key: Key) -> tuple[()]:
        """There is one world."""
        return ()

    def centre(self, belief: tuple[()], obs: Obs) -> tuple[()]:
        """There is one world."""
        return ()

    def predict(self, hypothesis: tuple[()], obs: Float[Array, "member obs"], action: Action) -> Outcome:
        """What each elite expects, each from a state of its own."""
        return self.decoder.predict(None, obs, action)


class EnsembleSource(NamedTuple):
    """Rows with a known successor and, where the end of the world must be learned, which of them are ends."""

    rows: Transition
    ends: Ends | None


class EnsembleBatch(NamedTuple):
    """Every member's own rows, and balanced ones for the termination classifier."""

    rows: Transition
    ends: Transition | None


class Snapshot(NamedTuple):
    """Every member as it was at its best, and its error then; the log-variance bounds are shared and not part of it."""

    weights: tuple[tuple, tuple]
    mse: Float[Array, " member"]


class EnsembleState(NamedTuple):
    """Everything that is learned or carried; `order` is each member's bootstrap list in the order of this epoch."""

    nets: GaussianNet
    optimiser: optax.OptState
    inputs: Normaliser
    targets: Normaliser
    order: Int[Array, "member rows"]
    position: Int[Array, ""]  # in `order`: rows used since the last review
    best: Snapshot
    since: Int[Array, ""]  # reviews since any member improved
    termination: TerminationState


class Ensemble(AbstractReviewingLearner):
    """Gaussian networks for (s' - s, r), each trained on a bootstrap of its own by maximum likelihood.

    Every member draws its own list of training rows, with replacement, once; each epoch goes through it in a fresh
    order. After each epoch every member is judged by the squared error of its mean on held-out transitions (in the
    units it is trained in), and kept if that fell by more than `min_improvement`. Training stops when no member has
    improved for more than `patience` epochs; every member goes back to its best, and the best `elites` predict.

    Departures from MOPO: targets standardised unless `normalise_targets` is off (raw ones learn several times slower
    where dimensions differ in scale); one output layer for mean and variance (as in OfflineRL-Kit; MOPO has two).
    As in MOPO, a member goes back to its best weights but not to the log-variance bounds of that time: all share them.
    """

    members: int = eqx.field(static=True, default=7)
    elites: int = eqx.field(static=True, default=5)
    hidden: tuple[int, ...] = eqx.field(static=True, default=(200, 200, 200, 200))
    residual: bool = eqx.field(static=True, default=False)
    batch_size: int = eqx.field(static=True, default=256)  # rows per member
    rate: Scalar = eqx.field(converter=jnp.asarray, default=1e-3)
    # Per layer, on weights only: 0.5 decay |W|^2 in the loss. With another number of layers it is interpolated.
    decay: Float[Array, " layer"] = eqx.field(converter=jnp.asarray, default=(2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4))
    bounds_weight: Scalar = eqx.field(converter=jnp.asarray, default=0.01)
    normalise_targets: bool = eqx.field(static=True, default=True)
    held_fraction: float = eqx.field(static=True, default=0.2)
    held_most: int = eqx.field(static=True, default=1000)
    patience: int = eqx.field(static=True, default=5)
    min_improvement: Scalar = eqx.field(converter=jnp.asarray, default=0.01)
    epochs: int = eqx.field(static=True, default=200)
    termination: TerminationLearner = TerminationLearner()

    def __check_init__(self):
        if not 1 <= self.elites <= self.members:
            raise RefplanError(f"elites must lie between 1 and members ({self.members}), got {self.elites}.")
        if not 0.0 < self.held_fraction < 1.0 or self.held_most < 1:
            raise RefplanError(
                f"held_fraction must lie between 0 and 1 and held_most be at least 1, got {self.held_fraction} and "
                f"{self.held_most}: without held-out rows nothing says which members are the best."
            )

    def schedule(self, data: Dataset) -> tuple[int, int]:
        """(updates per pass over the training rows, that times `epochs`)."""
        rows = len(data.complete())
        every = math.ceil((rows - self._held_rows(rows)) / self.batch_size)
        return every, every * self.epochs

    def _held_rows(self, rows: int) -> int:
        return max(min(int(self.held_fraction * rows), self.held_most), 1)

    def hold_out(self, data: Dataset, key: Key) -> tuple[Dataset, Dataset]:
        """The smaller of `held_fraction` and `held_most` transitions, drawn one by one."""
        if len(data) < 2:
            raise RefplanError(f"dataset '{data.meta.name}' has one row; an ensemble needs rows to train and to judge.")
        return data.split(1.0 - self._held_rows(len(data)) / len(data), key=key, by="transition")

    def prepare(self, data: Dataset) -> EnsembleSource:
        """The rows whose successor is known."""
        return EnsembleSource(data.complete().device(), find_ends(data))

    def init(self, data: Dataset, key: Key) -> EnsembleState:
        """Fresh networks, every member's bootstrap, and the statistics of the training rows."""
        key_nets, key_rows, key_termination = jr.split(key, 3)
        rows = data.complete()
        inputs = fit_normaliser(np.concatenate([rows.observations, rows.actions], axis=1))
        outputs = rows.obs_dim + 1
        targets = identity_normaliser(outputs)
        if self.normalise_targets:
            change = rows.next_observations - rows.observations
            targets = fit_normaliser(np.concatenate([change, rows.rewards[:, None]], axis=1))
        size = rows.obs_dim + rows.action_dim
        nets = make_gaussian_nets(self.members, size, 0, outputs, self.hidden, key_nets, residual=self.residual)
        return EnsembleState(
            nets,
            optax.adam(self.rate).init(eqx.filter(nets, eqx.is_array)),
            inputs,
            targets,
            jr.randint(key_rows, (self.members, len(rows)), 0, len(rows)),
            jnp.zeros((), int),
            Snapshot((nets.layers, nets.inject), jnp.full(self.members, jnp.inf)),
            jnp.zeros((), int),
            self.termination.init(data, key_termination),
        )

    def batch(self, source: EnsembleSource, state: EnsembleState, key: Key) -> EnsembleBatch:
        """The next rows of every member's list, from the beginning again after its end."""
        at = (state.position + jnp.arange(self.batch_size)) % state.order.shape[1]
        ends = self.termination.batch(source.rows, source.ends, key)
        return EnsembleBatch(take_rows(source.rows, state.order[:, at]), ends)

    def update(self, state: EnsembleState, batch: EnsembleBatch, key: Key) -> tuple[EnsembleState, Metrics]:
        """One Adam step of all members, and of the termination classifier if there is one."""
        x, y = state.inputs(_inputs(batch.rows)), state.targets(_targets(batch.rows))

        def objective(nets: GaussianNet) -> tuple[Scalar, Scalar]:
            each = jnp.mean(negative_log_likelihood(*apply_members(nets, x), y), axis=1)
            penalty = bounds_penalty(nets, self.bounds_weight) + weight_decay(nets, self.decay)
            return jnp.sum(each) + penalty, jnp.mean(each)

        (_, nll), grads = eqx.filter_value_and_grad(objective, has_aux=True)(state.nets)
        updates, optimiser = optax.adam(self.rate).update(grads, state.optimiser)
        termination, metrics = self.termination.update(state.termination, batch.ends)
        state = state._replace(
            nets=eqx.apply_updates(state.nets, updates),
            optimiser=optimiser,
            position=state.position + self.batch_size,
            termination=termination,
        )
        return state, {"nll": nll, **metrics}

    def review(
        self, state: EnsembleState, source: EnsembleSource, held: EnsembleSource | None, key: Key
    ) -> tuple[EnsembleState, Metrics]:
        """Judge every member on held-out rows, keep those at their best, and shuffle every list."""
        if held is None:
            raise RefplanError("an ensemble needs held-out data: without it nothing says which members are the best.")
        mse, nll = held_out_errors(state.nets, state.inputs, state.targets, held.rows)
        best, improved = keep_better(state.best, state.nets, mse, self.min_improvement)
        since = jnp.where(jnp.any(improved), 0, state.since + 1)
        termination, metrics = self.termination.review(state.termination, held.rows)
        elites = jnp.sort(best.mse)[: self.elites]
        metrics = {"held_mse": jnp.mean(mse), "best_mse": jnp.mean(elites), "held_nll": jnp.mean(nll), **metrics}
        metrics["since_improved"] = since.astype(jnp.float32)
        order = jr.permutation(key, state.order, axis=1, independent=True)
        state = state._replace(best=best, since=since, termination=termination)
        return state._replace(order=order, position=jnp.zeros_like(state.position)), metrics

    def finished(self, state: EnsembleState) -> Flag:
        """Whether no member has improved for more than `patience` epochs."""
        return state.since > self.patience

    def result(self, state: EnsembleState) -> EnsembleDynamics:
        """Every member at its best, in the order of its held-out error."""
        nets = eqx.tree_at(lambda n: (n.layers, n.inject), state.nets, state.best.weights)
        order = jnp.argsort(state.best.mse)
        decoder = Decoder(take_members(nets, order), state.inputs, state.targets, self.elites)
        return EnsembleDynamics(
            decoder=decoder,
            termination=self.termination.result(state.termination),
            held_mse=state.best.mse[order],
        )


def weight_decay(nets: GaussianNet, decay: Float[Array, " layer"]) -> Scalar:
    """sum_l 0.5 decay_l |W_l|^2 over all members; `decay` is stretched linearly over the layers there are."""
    places = jnp.linspace(0.0, 1.0, len(nets.layers))
    per_layer = jnp.interp(places, jnp.linspace(0.0, 1.0, decay.shape[0]), decay)
    return sum(
        (0.5 * per_layer[number] * jnp.sum(layer.weight**2) for number, layer in enumerate(nets.layers)), jnp.zeros(())
    )


def held_out_errors(
    nets: GaussianNet, inputs: Normaliser, targets: Normaliser, rows: Transition
) -> tuple[Float[Array, " member"], Float[Array, " member"]]:
    """(squared error of the mean, negative log-likelihood) of every member, in the units it is trained in."""
    members = nets.layers[0].weight.shape[0]

    def one(row: Transition) -> tuple[Float[Array, " member"], Float[Array, " member"]]:
        x, y = inputs(_inputs(row)), targets(_targets(row))
        mean, log_var = apply_members(nets, jnp.broadcast_to(x, (members, *x.shape)))
        y = jnp.broadcast_to(y, mean.shape)
        return jnp.mean((mean - y) ** 2, axis=1), negative_log_likelihood(mean, log_var, y)

    # In blocks: a caller's own held-out data may be large.
    mse, nll = jax.lax.map(one, rows, batch_size=1000)
    return jnp.mean(mse, axis=0), jnp.mean(nll, axis=0)


def keep_better(
    best: Snapshot, nets: GaussianNet, mse: Float[Array, " member"], min_improvement: Scalar
) -> tuple[Snapshot, Array]:
    """The members whose error fell by more than `min_improvement` of it replace their snapshots; also says which."""
    improved = mse < best.mse * (1.0 - min_improvement)

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(improved.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    weights = jax.tree.map(pick, (nets.layers, nets.inject), best.weights)
    return Snapshot(weights, jnp.where(improved, mse, best.mse)), improved


def _inputs(rows: Transition) -> Float[Array, "*batch inputs"]:
    return jnp.concatenate([rows.obs, rows.action], axis=-1)


def _targets(rows: Transition) -> Float[Array, "*batch outputs"]:
    return jnp.concatenate([rows.next_obs - rows.obs, rows.reward[..., None]], axis=-1)
