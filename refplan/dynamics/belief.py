"""The paper's belief model, first stage: encoder and decoder trained together on the evidence lower bound.

`fit(BeliefModel(), data, key=...)` runs this stage, then `BeliefDecoder` on its result (frozen encoder), and gives a
`BeliefDynamics`: a world whose hypotheses are latent vectors m, and whose belief is a GRU's memory of the episode.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Bool, Int

from refplan.data.dataset import Dataset
from refplan.data.sampling import Tape, chunks_per_epoch, make_tape, take_rows, tape_chunk
from refplan.dynamics.base import NeverTerminates
from refplan.dynamics.belief_decoder import BeliefDecoder
from refplan.dynamics.belief_dynamics import BeliefDynamics, Scales, fit_scales, make_optimiser
from refplan.dynamics.decoder import Decoder, GaussianNet, bounds_penalty, decoder_rows, make_gaussian_nets
from refplan.dynamics.elbo import (
    belief_kl,
    choose_steps,
    free_kl,
    held_out_elbo,
    one_step_earlier,
    reconstruction,
)
from refplan.dynamics.encoder import (
    Encoder,
    HistoryBelief,
    empty_belief,
    encode_lanes,
    make_encoder,
    sample_gaussian,
)
from refplan.dynamics.encoding import Episodes, place_episodes
from refplan.dynamics.termination import TerminationLearner
from refplan.errors import RefplanError, unknown_name
from refplan.learner import AbstractLearner, AbstractStagedLearner
from refplan.types import Flag, Key, Metrics, Scalar, Transition

__all__ = ["BeliefDynamics", "BeliefModel"]


class Networks(NamedTuple):
    """What the first stage trains."""

    encoder: Encoder
    nets: GaussianNet


class Chunk(NamedTuple):
    """The next steps of every lane, and the tape they were read from."""

    tape: Tape
    steps: Transition
    first: Bool[Array, "lanes time"]


class BeliefState(NamedTuple):
    """Everything the first stage learns or carries."""

    networks: Networks
    optimiser: optax.OptState
    scales: Scales
    tape: Tape
    chunk: Int[Array, ""]  # the next one on the tape; 0 asks for a new tape
    belief: HistoryBelief  # of every lane, carried from chunk to chunk
    best: Networks
    best_elbo: Scalar
    since: Int[Array, ""]  # reviews since the held-out bound improved


class BeliefModel(AbstractStagedLearner):
    """Stage 1: E_q[sum_h -log p(s_{h+1}, r_h | s_h, a_h, m)] + kl_weight KL(q_t || prior), subsampled (see `elbo.py`).

    Episodes pass in `lanes` side by side, `length` steps at a time; the GRU's memory is carried from chunk to chunk,
    gradients are not. After each epoch the bound is taken on held-out episodes with m = mu (median over episodes: one
    odd episode must not decide); training stops after `patience` epochs without any improvement, and the best state
    counts. The paper leaves open what is decoded, in which chunks, by which member, and how targets are scaled: those
    choices are fields. `kl_weight` is calibrated (the belief as wide as Bayes' rule makes it) with the target
    "standard", every past step decoded and weight 2 / (outputs): the reconstruction is a mean over outputs.
    """

    embed: tuple[int, int, int] = eqx.field(static=True, default=(16, 16, 4))  # of state, action, reward
    memory: int = eqx.field(static=True, default=256)
    latent: int = eqx.field(static=True, default=16)
    members: int = eqx.field(static=True, default=7)
    elites: int = eqx.field(static=True, default=5)
    hidden: tuple[int, ...] = eqx.field(static=True, default=(200, 200, 200, 200))
    residual: bool = eqx.field(static=True, default=True)  # the paper's "skip connection": adds between equal layers
    inject: bool = eqx.field(static=True, default=False)  # m also enters every later hidden layer
    normalise_targets: bool = eqx.field(static=True, default=False)
    lanes: int = eqx.field(static=True, default=64)
    length: int = eqx.field(static=True, default=50)
    beliefs: int = eqx.field(static=True, default=8)  # t drawn per lane and chunk
    past: int = eqx.field(static=True, default=16)  # h <= t decoded for each
    row_members: str = eqx.field(static=True, default="one")  # a decoded row goes to "one" drawn member or to "all"
    kl_target: str = eqx.field(static=True, default="previous")  # posterior, or "standard": N(0, I)
    stop_gradient: bool = eqx.field(static=True, default=False)  # at the previous posterior, in the KL
    kl_weight: Scalar = eqx.field(converter=jnp.asarray, default=0.1)
    free_bits: Scalar = eqx.field(converter=jnp.asarray, default=0.0)  # nats per latent dimension
    rate: Scalar = eqx.field(converter=jnp.asarray, default=1e-3)
    decay: Scalar = eqx.field(converter=jnp.asarray, default=0.01)
    clip: Scalar = eqx.field(converter=jnp.asarray, default=1.0)
    bounds_weight: Scalar = eqx.field(converter=jnp.asarray, default=0.01)
    epochs: int = eqx.field(static=True, default=200)
    patience: int = eqx.field(static=True, default=5)
    held_fraction: float = eqx.field(static=True, default=0.05)
    decoder_batch: int = eqx.field(static=True, default=256)  # stage 2: rows per member and update
    decoder_epochs: int = eqx.field(static=True, default=200)
    min_improvement: Scalar = eqx.field(converter=jnp.asarray, default=0.01)  # stage 2: of a member's held-out error
    termination: TerminationLearner = TerminationLearner()

    def __check_init__(self):
        if not 1 <= self.elites <= self.members:
            raise RefplanError(f"elites must lie between 1 and members ({self.members}), got {self.elites}.")
        if self.kl_target not in ("previous", "standard"):
            raise unknown_name("kl_target", self.kl_target, ("previous", "standard"))
        if self.row_members not in ("one", "all"):
            raise unknown_name("row_members", self.row_members, ("one", "all"))

    def schedule(self, data: Dataset) -> tuple[int, int]:
        """(updates per pass over the training rows, that times `epochs`)."""
        rows = int(len(data) * (1.0 - self.held_fraction))
        every = max(chunks_per_epoch(rows, self.lanes, self.length), 1)
        return every, every * self.epochs

    def hold_out(self, data: Dataset, key: Key) -> tuple[Dataset, Dataset | None]:
        """`held_fraction` of the episodes, at least 10 of them but never more than a fifth; none of a single one."""
        data = data.complete()
        if data.episodes < 2:
            return data, None
        held = max(round(self.held_fraction * data.episodes), min(10, data.episodes // 5), 1)
        return data.split(1.0 - held / data.episodes, key=key, by="episode")

    def prepare(self, data: Dataset) -> Episodes:
        """Rows and episodes on the device."""
        return place_episodes(data)

    def init(self, data: Dataset, key: Key) -> BeliefState:
        """Fresh networks, and the statistics of the training rows."""
        data = data.complete()
        rows = len(data)
        if chunks_per_epoch(rows, self.lanes, self.length) < 1:
            length = min(self.length, rows)
            raise RefplanError(
                f"dataset '{data.meta.name}' has {rows} rows to train on, one update needs lanes x length = "
                f"{self.lanes * self.length}. Bring more data, or choose fewer lanes or a smaller length: "
                f"lanes={rows // length} and length={length} would do."
            )
        key_encoder, key_nets = jr.split(key)
        inputs, outputs = data.obs_dim + data.action_dim, data.obs_dim + 1
        encoder = make_encoder(data.obs_dim, data.action_dim, key_encoder, self.embed, self.memory, self.latent)
        nets = make_gaussian_nets(
            self.members,
            inputs,
            self.latent,
            outputs,
            self.hidden,
            key_nets,
            residual=self.residual,
            inject=self.inject,
        )
        networks = Networks(encoder, nets)
        return BeliefState(
            networks=networks,
            optimiser=make_optimiser(self.rate, self.decay, self.clip).init(eqx.filter(networks, eqx.is_array)),
            scales=fit_scales(data, self.normalise_targets),
            tape=Tape(jnp.zeros(rows, int), jnp.zeros(rows, bool)),
            chunk=jnp.zeros((), int),
            belief=empty_belief(encoder, data.action_dim, (self.lanes,)),
            best=networks,
            best_elbo=jnp.asarray(-jnp.inf),
            since=jnp.zeros((), int),
        )

    def batch(self, source: Episodes, state: BeliefState, key: Key) -> Chunk:
        """The next chunk of this epoch's tape; the first chunk of an epoch lays a new tape."""
        rows = state.tape.row.shape[0]
        tape = jax.lax.cond(
            state.chunk == 0, lambda: make_tape(source.starts, source.lengths, key, rows), lambda: state.tape
        )
        row, first = tape_chunk(tape, self.lanes, self.length, state.chunk)
        return Chunk(tape, take_rows(source.rows, row), first)

    def update(self, state: BeliefState, batch: Chunk, key: Key) -> tuple[BeliefState, Metrics]:
        """One AdamW step on the bound of one chunk."""

        def objective(networks: Networks) -> tuple[Scalar, tuple[HistoryBelief, Metrics]]:
            return self.loss(networks, state.scales, state.belief, batch, key)

        (_, (belief, metrics)), grads = eqx.filter_value_and_grad(objective, has_aux=True)(state.networks)
        optimiser = make_optimiser(self.rate, self.decay, self.clip)
        params = eqx.filter(state.networks, eqx.is_array)
        updates, memory = optimiser.update(eqx.filter(grads, eqx.is_array), state.optimiser, params)
        chunks = chunks_per_epoch(batch.tape.row.shape[0], self.lanes, self.length)
        state = state._replace(
            networks=eqx.apply_updates(state.networks, updates),
            optimiser=memory,
            tape=batch.tape,
            chunk=(state.chunk + 1) % chunks,
            belief=belief,
        )
        return state, metrics

    def loss(
        self, networks: Networks, scales: Scales, belief: HistoryBelief, batch: Chunk, key: Key
    ) -> tuple[Scalar, tuple[HistoryBelief, Metrics]]:
        """The negative bound of one chunk, the belief at its end, and what to log."""
        key_steps, key_noise, key_members = jr.split(key, 3)
        encoder, nets = networks
        start = encoder.posterior(belief.memory)
        _, memory, belief = encode_lanes(encoder, scales.signals, belief, batch.steps, batch.first)
        now = encoder.posterior(memory)
        t, h, valid = choose_steps(batch.first, key_steps, self.beliefs, self.past)
        mean, log_var = (jnp.take_along_axis(value, t[..., None], axis=1) for value in now)
        latent = sample_gaussian(mean, log_var, key_noise)
        latent = jnp.broadcast_to(latent[:, :, None], (*h.shape, self.latent)).reshape(-1, self.latent)
        decoded = jax.tree.map(lambda x: x[jnp.arange(h.shape[0])[:, None, None], h], batch.steps)
        x, y = decoder_rows(
            scales.inputs, scales.targets, jax.tree.map(lambda x: x.reshape(h.size, *x.shape[3:]), decoded)
        )
        key_members = key_members if self.row_members == "one" else None
        nll = reconstruction(nets, x, latent, y, key_members).reshape(h.shape)
        kl = belief_kl(now, one_step_earlier(now, start), batch.first, self.kl_target, self.stop_gradient)
        explained = jnp.mean(jnp.sum(jnp.where(valid, nll, 0.0), axis=2))
        loss = explained + self.kl_weight * free_kl(kl, self.free_bits) + bounds_penalty(nets, self.bounds_weight)
        metrics = {
            "loss": loss,
            "next_nll": jnp.mean(nll[..., 0]),
            "kl": jnp.mean(jnp.sum(kl, axis=-1)),
            "posterior_std": jnp.mean(jnp.exp(0.5 * log_var)),
            "mean_spread": jnp.mean(jnp.std(mean, axis=(0, 1))),
        }
        return loss, (jax.lax.stop_gradient(belief), metrics)

    def review(
        self, state: BeliefState, source: Episodes, held: Episodes | None, key: Key
    ) -> tuple[BeliefState, Metrics]:
        """Take the bound on held-out episodes and remember the best state; without any, the last state counts."""
        if held is None:
            return state._replace(best=state.networks), {}
        elbo, next_nll = held_out_elbo(
            *state.networks,
            state.scales.signals,
            held,
            decoder_rows(state.scales.inputs, state.scales.targets, held.rows),
            kl_weight=self.kl_weight,
            kl_target=self.kl_target,
            past=self.past,
            length=self.length,
        )
        better = elbo > state.best_elbo
        best = jax.tree.map(lambda new, old: jnp.where(better, new, old), state.networks, state.best)
        since = jnp.where(better, 0, state.since + 1)
        metrics = {"held_elbo": elbo, "held_nll": next_nll, "since_improved": since.astype(jnp.float32)}
        return state._replace(best=best, best_elbo=jnp.maximum(elbo, state.best_elbo), since=since), metrics

    def finished(self, state: BeliefState) -> Flag:
        """Whether the held-out bound has not improved for `patience` epochs."""
        return state.since >= self.patience

    def result(self, state: BeliefState) -> BeliefDynamics:
        """The model at its best; its members are not yet judged, and it knows no end of the world."""
        decoder = Decoder(state.best.nets, state.scales.inputs, state.scales.targets, self.elites)
        return BeliefDynamics(
            encoder=state.best.encoder, scale=state.scales.signals, decoder=decoder, termination=NeverTerminates()
        )

    def following(self, result: BeliefDynamics) -> AbstractLearner:
        """The decoder's own training behind the frozen encoder."""
        return BeliefDecoder(
            start=result,
            batch_size=self.decoder_batch,
            rate=self.rate,
            decay=self.decay,
            clip=self.clip,
            bounds_weight=self.bounds_weight,
            epochs=self.decoder_epochs,
            patience=self.patience,
            min_improvement=self.min_improvement,
            termination=self.termination,
        )
