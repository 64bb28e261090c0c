"""The paper's belief model, second stage: the decoder alone, by maximum likelihood, behind the frozen encoder.

L(psi) = E[-log p(s_{h+1}, r_h | s_h, a_h, m_h)], m_h ~ q(m | tau_{:h}). The encoder does not change, so every belief is
made once and kept; training then draws single transitions with a fresh m_h each time, every member from a bootstrap of
its own, and judges members as the Markov ensemble does.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, Int

from refplan.data.dataset import Dataset
from refplan.data.sampling import take_rows
from refplan.dynamics.belief_dynamics import BeliefDynamics, make_optimiser
from refplan.dynamics.decoder import Decoder, GaussianNet, decoder_rows
from refplan.dynamics.encoder import sample_gaussian
from refplan.dynamics.encoding import encode_rows, place_episodes
from refplan.dynamics.members import AbstractMembersLearner, Rows, Snapshot, best_first, first_snapshot, member_errors
from refplan.dynamics.termination import Ends, TerminationLearner, TerminationState, find_ends
from refplan.types import Key, Metrics, Scalar, Transition


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


class BeliefDecoder(AbstractMembersLearner):
    """Stage 2 of `BeliefModel`: fine-tunes the decoder of `start`, whose encoder stays as it is, to the bit.

    Members are judged on single transitions held out of the training episodes: whole held-out episodes, of which a
    few odd ones decide, broke early stopping. Their error on the held-out episodes is logged (median over rows). A
    termination classifier learns from all training rows, so it is judged on the held-out episodes.
    """

    start: BeliefDynamics = eqx.field(kw_only=True)
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
        held, train = jnp.split(jr.permutation(key_held, rows), [self.held_rows(rows)])
        return DecoderState(
            nets,
            self.optimiser.init(eqx.filter(nets, eqx.is_array)),
            train[jr.randint(key_rows, (members * train.size,), 0, train.size)].reshape(members, train.size),
            jnp.zeros((), int),
            held,
            first_snapshot(nets),
            jnp.zeros((), int),
            self.termination.init(data, key_termination),
        )

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """AdamW behind a clipped gradient."""
        return make_optimiser(self.rate, self.decay, self.clip)

    def batch(self, source: CachedRows, state: DecoderState, key: Key) -> DecoderBatch:
        """The next rows of every member's list, each with an m drawn from its belief."""
        key_latent, key_ends = jr.split(key)
        index = self.next_rows(state)
        latent = sample_gaussian(source.mean[index], source.log_var[index], key_latent)
        ends = self.termination.batch(source.rows, source.ends, key_ends)
        return DecoderBatch(take_rows(source.rows, index), latent, ends)

    def read(self, state: DecoderState, batch: DecoderBatch) -> tuple[Rows, Float[Array, "member rows latent"]]:
        """[s, a] and [s' - s, r], under the drawn m."""
        old = self.start.decoder
        return decoder_rows(old.inputs, old.targets, batch.rows), batch.latent

    def review(
        self, state: DecoderState, source: CachedRows, held: CachedRows | None, key: Key
    ) -> tuple[DecoderState, Metrics]:
        """Judge every member on the held-out rows with m = mu, keep those at their best, and shuffle every list."""
        old = self.start.decoder

        def errors(rows: Transition, latent: Float[Array, "rows latent"]) -> tuple[Array, Array]:
            return member_errors(state.nets, old.inputs, old.targets, rows, latent)

        picked = jax.tree.map(lambda x: x[state.held], (source.rows, source.mean))
        judged, metrics = self.judge(state, errors(*picked), old.elites, key)
        if held is None:
            return judged, metrics
        mse, nll = errors(held.rows, held.mean)
        metrics |= {"episodes_mse": jnp.median(jnp.mean(mse, axis=1)), "episodes_nll": jnp.median(nll)}
        termination, more = self.termination.review(judged.termination, held.rows)
        return judged._replace(termination=termination), metrics | more

    def result(self, state: DecoderState) -> BeliefDynamics:
        """Every member at its best, in the order of its held-out error, behind the untouched encoder."""
        old = self.start.decoder
        nets, _ = best_first(state.nets, state.best)
        return BeliefDynamics(
            encoder=self.start.encoder,
            scale=self.start.scale,
            decoder=Decoder(nets, old.inputs, old.targets, old.elites),
            termination=self.termination.result(state.termination),
        )
