"""The trained belief model, and what both stages of its training share."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array, Float

from refplan.data.dataset import Dataset
from refplan.dynamics.base import AbstractDynamics, AbstractLatentDynamics, AbstractTermination, Outcome
from refplan.dynamics.decoder import Decoder
from refplan.dynamics.encoder import (
    Encoder,
    HistoryBelief,
    Signals,
    empty_belief,
    sample_gaussian,
    standardise,
)
from refplan.nn import Normaliser, fit_normaliser, identity_normaliser
from refplan.types import Key, Obs, Scalar, Transition


class BeliefDynamics(AbstractLatentDynamics):
    """A trained belief model; a hypothesis is a latent vector m, and m ~ N(mu_t, sigma_t^2) after history tau_{:t}."""

    encoder: Encoder
    scale: Normaliser  # of [s, a, r], for the encoder
    decoder: Decoder
    termination: AbstractTermination

    @property
    def members(self) -> int:
        """The decoder's elites."""
        return self.decoder.elites

    def best(self, count: int) -> AbstractDynamics:
        """The first `count` elites."""
        return dataclasses.replace(self, decoder=self.decoder.best(count))

    def start(self) -> HistoryBelief:
        """z_{-1} = 0, a_{-1} = 0, r_{-1} = 0."""
        return empty_belief(self.encoder, self.scale.mean.shape[0] - self._obs - 1)

    @property
    def _obs(self) -> int:
        return self.encoder.obs.weight.shape[0]

    def observe(self, belief: HistoryBelief, transition: Transition) -> HistoryBelief:
        """z_t from s_t, a_{t-1}, r_{t-1}; a_t and r_t are kept for the next step."""
        now = standardise(self.scale, transition)
        memory = self.encoder.advance(belief.memory, Signals(now.obs, belief.action, belief.reward))
        return HistoryBelief(memory, now.action, now.reward)

    def posterior(self, belief: HistoryBelief, obs: Obs) -> tuple[Float[Array, " latent"], Float[Array, " latent"]]:
        """(mu_t, log sigma_t^2) of q(m | tau_{:t}), the agent standing at s_t = `obs`."""
        standing = (obs - self.scale.mean[: self._obs]) / self.scale.std[: self._obs]
        return self.encoder.posterior(
            self.encoder.advance(belief.memory, Signals(standing, belief.action, belief.reward))
        )

    def sample(self, belief: HistoryBelief, obs: Obs, key: Key) -> Float[Array, " latent"]:
        """m^j ~ N(mu_t, sigma_t^2)."""
        return sample_gaussian(*self.posterior(belief, obs), key)

    def centre(self, belief: HistoryBelief, obs: Obs) -> Float[Array, " latent"]:
        """mu_t."""
        return self.posterior(belief, obs)[0]

    def predict(
        self, hypothesis: Float[Array, " latent"], obs: Float[Array, "member obs"], action: Float[Array, "*member act"]
    ) -> Outcome:
        """What each elite expects in the world m."""
        return self.decoder.predict(hypothesis, obs, action)


class Scales(NamedTuple):
    """Statistics of the training rows: [s, a, r] for the encoder, [s, a] and [s' - s, r] for the decoder."""

    signals: Normaliser
    inputs: Normaliser
    targets: Normaliser


def fit_scales(data: Dataset, normalise_targets: bool) -> Scales:
    """The statistics a model is trained behind."""
    signals = fit_normaliser(np.concatenate([data.observations, data.actions, data.rewards[:, None]], axis=1))
    inputs = Normaliser(signals.mean[:-1], signals.std[:-1])
    if not normalise_targets:
        return Scales(signals, inputs, identity_normaliser(data.obs_dim + 1))
    change = data.next_observations - data.observations
    return Scales(signals, inputs, fit_normaliser(np.concatenate([change, data.rewards[:, None]], axis=1)))


def make_optimiser(rate: Scalar, decay: Scalar, clip: Scalar) -> optax.GradientTransformation:
    """AdamW behind a clipped gradient; matrices decay, biases and log-variance bounds do not."""
    return optax.chain(optax.clip_by_global_norm(clip), optax.adamw(rate, weight_decay=decay, mask=is_weight))


def is_weight(params: Any) -> Any:
    """Which arrays of a pytree are matrices of a layer."""

    def check(path: tuple, leaf: Any) -> bool:
        names = [getattr(entry, "name", "") for entry in path]
        return "inject" in names or names[-1] == "weight"

    return jax.tree_util.tree_map_with_path(check, params)
