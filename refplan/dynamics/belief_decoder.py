"""The paper's belief model, second stage: the decoder alone, by maximum likelihood, behind the frozen encoder.

L(psi) = E[-log p(s_{h+1}, r_h | s_h, a_h, m_h)], m_h ~ q(m | tau_{:h}). The encoder does not change, so every belief is
made once and kept; training then draws single transitions with a fresh m_h each time, every member from a bootstrap of
its own, and judges members as the Markov ensemble does.
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, Int

from refplan.data.dataset import Dataset
from refplan.data.sampling import take_rows
from refplan.dynamics.belief_dynamics import BeliefDynamics, Scales, decoder_rows, make_optimiser
from refplan.dynamics.decoder import Decoder, GaussianNet, bounds_penalty, negative_log_likelihood, take_members
from refplan.dynamics.elbo import members_apart
from refplan.dynamics.encoder import sample_gaussian
from refplan.dynamics.encoding import encode_rows, place_episodes
from refplan.dynamics.ensemble import Snapshot, keep_better
from refplan.dynamics.termination import Ends, TerminationLearner, TerminationState, find_ends
from refplan.train import AbstractReviewingLearner
from refplan.types import Flag, Key, Metrics, Scalar, Transition


class CachedRows(NamedTuple):
    """Logged rows and the belief at each of them."""

    rows: Transition
    mean: Float[Array, "rows latent"]
    log_var: Float[Array, "rows latent"]
    ends: Ends | None


class DecoderBatch(NamedTuple):
    """Every member's own rows with a drawn m, and balanced ones for the termination classifier."""

    rows: Transition
    latent: Float[Array, "member batch latent"]
    ends: Transition | None


class DecoderState(NamedTuple):
    """Everything the second stage learns or carries; `order` is each member's bootstrap in this epoch's order."""

    nets: GaussianNet
    optimiser: optax.OptState
    order: Int[Array, "member rows"]
    position: Int[Array, ""]
    held: Int[Array, " held"]  # training rows no member learns from
    best: Snapshot
    since: Int[Array, ""]
    termination: TerminationState


class BeliefDecoder(AbstractReviewingLearner):
    """Stage 2 of `BeliefModel`: fine-tunes the decoder of `start`, whose encoder stays as it is, to the bit.

    Members are judged on single transitions held out of the training episodes: whole held-out episodes, of which a
    few odd ones decide, broke early stopping. Their error on the held-out episodes is logged (median over rows).
    """

    start: BeliefDynamics
    batch_size: int = eqx.field(static=True, default=256)  # rows per member
    rate: Scalar = eqx.field(converter=jnp.asarray, default=1e-3)
    decay: Scalar = eqx.field(converter=jnp.asarray, default=0.01)
    clip: Scalar = eqx.field(converter=jnp.asarray, default=1.0)
    bounds_weight: Scalar = eqx.field(converter=jnp.asarray, default=0.01)
    held_fraction: float = eqx.field(static=True, default=0.2)
    held_most: int = eqx.field(static=True, default=1000)
    epochs: int = eqx.field(static=True, default=200)
    patience: int = eqx.field(static=True, default=5)
    min_improvement: Scalar = eqx.field(converter=jnp.asarray, default=0.01)
    termination: TerminationLearner = TerminationLearner()

    def schedule(self, data: Dataset) -> tuple[int, int]:
        """(updates per pass over the training rows, that times `epochs`)."""
        rows = len(data.complete())
        every = math.ceil((rows - self._held_rows(rows)) / self.batch_size)
        return every, every * self.epochs

    def _held_rows(self, rows: int) -> int:
        return max(min(int(self.held_fraction * rows), self.held_most), 1)

    def hold_out(self, data: Dataset, key: Key) -> tuple[Dataset, None]:
        """No episodes: what judges the members is taken from the training rows."""
        return data, None

    def prepare(self, data: Dataset) -> CachedRows:
        """Every row with its belief, each episode encoded once from its beginning."""
        episodes = place_episodes(data)
        mean, log_var = eqx.filter_jit(encode_rows)(self.start.encoder, self.start.scale, episodes)
        return CachedRows(episodes.rows, mean, log_var, find_ends(data))

    def init(self, data: Dataset, key: Key) -> DecoderState:
        """The first stage's decoder, held-out rows, and every member's bootstrap of the others."""
        key_held, key_rows, key_termination = jr.split(key, 3)
        nets = self.start.decoder.nets
        members, rows = nets.layers[0].weight.shape[0], len(data.complete())
        held, train = jnp.split(jr.permutation(key_held, rows), [self._held_rows(rows)])
        return DecoderState(
            nets,
            self._optimiser.init(eqx.filter(nets, eqx.is_array)),
            train[jr.randint(key_rows, (members * train.size,), 0, train.size)].reshape(members, train.size),
            jnp.zeros((), int),
            held,
            Snapshot((nets.layers, nets.inject), jnp.full(members, jnp.inf)),
            jnp.zeros((), int),
            self.termination.init(data, key_termination),
        )

    @property
    def _optimiser(self) -> optax.GradientTransformation:
        return make_optimiser(self.rate, self.decay, self.clip)

    @property
    def _scales(self) -> Scales:
        return Scales(self.start.scale, self.start.decoder.inputs, self.start.decoder.targets)

    def batch(self, source: CachedRows, state: DecoderState, key: Key) -> DecoderBatch:
        """The next rows of every member's list, each with an m drawn from its belief."""
        key_latent, key_ends = jr.split(key)
        index = state.order[:, (state.position + jnp.arange(self.batch_size)) % state.order.shape[1]]
        latent = sample_gaussian(source.mean[index], source.log_var[index], key_latent)
        ends = self.termination.batch(source.rows, source.ends, key_ends)
        return DecoderBatch(take_rows(source.rows, index), latent, ends)

    def update(self, state: DecoderState, batch: DecoderBatch, key: Key) -> tuple[DecoderState, Metrics]:
        """One AdamW step of all members, and of the termination classifier if there is one."""
        x, y = decoder_rows(self._scales, batch.rows)

        def objective(nets: GaussianNet) -> tuple[Scalar, Scalar]:
            each = jnp.mean(negative_log_likelihood(*members_apart(nets, x, batch.latent), y), axis=1)
            return jnp.sum(each) + bounds_penalty(nets, self.bounds_weight), jnp.mean(each)

        (_, nll), grads = eqx.filter_value_and_grad(objective, has_aux=True)(state.nets)
        updates, optimiser = self._optimiser.update(grads, state.optimiser, eqx.filter(state.nets, eqx.is_array))
        termination, metrics = self.termination.update(state.termination, batch.ends)
        state = state._replace(
            nets=eqx.apply_updates(state.nets, updates),
            optimiser=optimiser,
            position=state.position + self.batch_size,
            termination=termination,
        )
        return state, {"nll": nll, **metrics}

    def review(
        self, state: DecoderState, source: CachedRows, held: CachedRows | None, key: Key
    ) -> tuple[DecoderState, Metrics]:
        """Judge every member on the held-out rows with m = mu, keep those at their best, and shuffle every list."""
        picked = jax.tree.map(lambda x: x[state.held], (source.rows, source.mean))
        mse, nll = member_errors(state.nets, self._scales, *picked)
        mse, nll = jnp.mean(mse, axis=0), jnp.mean(nll, axis=0)
        best, improved = keep_better(state.best, state.nets, mse, self.min_improvement)
        since = jnp.where(jnp.any(improved), 0, state.since + 1)
        metrics = {"held_mse": jnp.mean(mse), "best_mse": jnp.mean(jnp.sort(best.mse)[: self.start.decoder.elites])}
        metrics |= {"held_nll": jnp.mean(nll), "since_improved": since.astype(jnp.float32)}
        if held is not None:
            mse, nll = member_errors(state.nets, self._scales, held.rows, held.mean)
            metrics |= {"episodes_mse": jnp.median(jnp.mean(mse, axis=1)), "episodes_nll": jnp.median(nll)}
        order = jr.permutation(key, state.order, axis=1, independent=True)
        return state._replace(best=best, since=since, order=order, position=jnp.zeros_like(state.position)), metrics

    def finished(self, state: DecoderState) -> Flag:
        """Whether no member has improved for more than `patience` epochs."""
        return state.since > self.patience

    def result(self, state: DecoderState) -> BeliefDynamics:
        """Every member at its best, in the order of its held-out error, behind the untouched encoder."""
        nets = eqx.tree_at(lambda n: (n.layers, n.inject), state.nets, state.best.weights)
        nets = take_members(nets, jnp.argsort(state.best.mse))
        old = self.start.decoder
        decoder = Decoder(nets, old.inputs, old.targets, old.elites)
        return BeliefDynamics(
            encoder=self.start.encoder,
            scale=self.start.scale,
            decoder=decoder,
            termination=self.termination.result(state.termination),
        )


def member_errors(
    nets: GaussianNet, scales: Scales, rows: Transition, latent: Float[Array, "rows latent"]
) -> tuple[Float[Array, "rows member"], Float[Array, "rows member"]]:
    """(squared error of the mean, negative log-likelihood) of every member at every row, in the units of training."""
    members = nets.layers[0].weight.shape[0]

    def one(at: tuple[Transition, Float[Array, " latent"]]) -> tuple[Float[Array, " member"], Float[Array, " member"]]:
        x, y = decoder_rows(scales, at[0])
        x, y, m = (jnp.broadcast_to(v, (members, 1, v.shape[0])) for v in (x, y, at[1]))
        mean, log_var = members_apart(nets, x, m)
        return jnp.mean((mean - y) ** 2, axis=2)[:, 0], negative_log_likelihood(mean, log_var, y)[:, 0]

    # In blocks: held-out data may be large.
    return jax.lax.map(one, (rows, latent), batch_size=1000)
