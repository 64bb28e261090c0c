"""Probabilistic ensemble (Chua et al., 2018; settings of MOPO, Yu et al., 2020): a world without memory."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from refplan.data.dataset import Dataset
from refplan.data.sampling import take_rows
from refplan.dynamics.base import AbstractDynamics, AbstractMarkovDynamics, AbstractTermination, Outcome
from refplan.dynamics.decoder import Decoder, GaussianNet, decoder_rows, make_gaussian_nets
from refplan.dynamics.members import AbstractMembersLearner, Rows, Snapshot, best_first, first_snapshot, member_errors
from refplan.dynamics.termination import Ends, TerminationLearner, TerminationState, find_ends
from refplan.errors import RefplanError
from refplan.nn import Normaliser, fit_normaliser, identity_normaliser
from refplan.types import Key, Metrics, Scalar, Transition


class EnsembleDynamics(AbstractMarkovDynamics):
    """The trained ensemble: its belief is empty, all its doubt is in the members."""

    decoder: Decoder
    termination: AbstractTermination
    held_mse: Float[Array, " member"]  # of every member, best first, in the units the nets were trained in

    @property
    def members(self) -> int:
        """The elites."""
        return self.decoder.elites

    def best(self, count: int) -> AbstractDynamics:
        """The first `count` elites."""
        return dataclasses.replace(self, decoder=self.decoder.best(count))

    def predict(
        self, hypothesis: tuple[()], obs: Float[Array, "member obs"], action: Float[Array, "*member act"]
    ) -> Outcome:
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


class Ensemble(AbstractMembersLearner):
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

    def hold_out(self, data: Dataset, key: Key) -> tuple[Dataset, Dataset]:
        """The smaller of `held_fraction` and `held_most` transitions, drawn one by one."""
        if len(data) < 2:
            raise RefplanError(f"dataset '{data.meta.name}' has one row; an ensemble needs rows to train and to judge.")
        return data.split(1.0 - self.held_rows(len(data)) / len(data), key=key, by="transition")

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
            self.optimiser.init(eqx.filter(nets, eqx.is_array)),
            inputs,
            targets,
            jr.randint(key_rows, (self.members, len(rows)), 0, len(rows)),
            jnp.zeros((), int),
            first_snapshot(nets),
            jnp.zeros((), int),
            self.termination.init(data, key_termination),
        )

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam."""
        return optax.adam(self.rate)

    def penalty(self, nets: GaussianNet) -> Scalar:
        """The bounds' and the decay of the weights."""
        return super().penalty(nets) + weight_decay(nets, self.decay)

    def batch(self, source: EnsembleSource, state: EnsembleState, key: Key) -> EnsembleBatch:
        """The next rows of every member's list."""
        ends = self.termination.batch(source.rows, source.ends, key)
        return EnsembleBatch(take_rows(source.rows, self.next_rows(state)), ends)

    def read(self, state: EnsembleState, batch: EnsembleBatch) -> tuple[Rows, None]:
        """[s, a] and [s' - s, r], without a latent."""
        return decoder_rows(state.inputs, state.targets, batch.rows), None

    def review(
        self, state: EnsembleState, source: EnsembleSource, held: EnsembleSource | None, key: Key
    ) -> tuple[EnsembleState, Metrics]:
        """Judge every member on held-out rows, keep those at their best, and shuffle every list."""
        if held is None:
            raise RefplanError("an ensemble needs held-out data: without it nothing says which members are the best.")
        errors = member_errors(state.nets, state.inputs, state.targets, held.rows)
        state, metrics = self.judge(state, errors, self.elites, key)
        termination, more = self.termination.review(state.termination, held.rows)
        return state._replace(termination=termination), metrics | more

    def result(self, state: EnsembleState) -> EnsembleDynamics:
        """Every member at its best, in the order of its held-out error."""
        nets, mse = best_first(state.nets, state.best)
        return EnsembleDynamics(
            decoder=Decoder(nets, state.inputs, state.targets, self.elites),
            termination=self.termination.result(state.termination),
            held_mse=mse,
        )


def weight_decay(nets: GaussianNet, decay: Float[Array, " layer"]) -> Scalar:
    """sum_l 0.5 decay_l |W_l|^2 over all members; `decay` is stretched linearly over the layers there are."""
    places = jnp.linspace(0.0, 1.0, len(nets.layers))
    per_layer = jnp.interp(places, jnp.linspace(0.0, 1.0, decay.shape[0]), decay)
    return sum(
        (0.5 * per_layer[number] * jnp.sum(layer.weight**2) for number, layer in enumerate(nets.layers)), jnp.zeros(())
    )
