"""The encoder of the belief model: a GRU over an episode that gives a Gaussian over worlds after every step.

It reads (s_t, a_{t-1}, r_{t-1}), all standardised, with zeros for what came before the first step, and gives
q(m | tau_{:t}) = N(mu_t, diag sigma_t^2) (VariBAD's encoder with the sizes of the paper's appendix).
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float

from refplan.gru import GRU
from refplan.nn import Linear, Normaliser
from refplan.types import Key, Transition


class Signals(NamedTuple):
    """What the encoder reads at one step, standardised: s_t, a_{t-1}, r_{t-1}."""

    obs: Float[Array, "*batch obs"]
    action: Float[Array, "*batch act"]
    reward: Float[Array, "*batch one"]


class HistoryBelief(NamedTuple):
    """What the model remembers before it looks at s_t: z_{t-1}, and a_{t-1}, r_{t-1} as the encoder will read them."""

    memory: Float[Array, "*batch memory"]
    action: Float[Array, "*batch act"]
    reward: Float[Array, "*batch one"]


class Encoder(eqx.Module):
    """Embeddings, GRU, and two linear heads for mean and log-variance."""

    obs: Linear
    action: Linear
    reward: Linear
    gru: GRU
    mean: Linear
    log_var: Linear

    def embed(self, seen: Signals) -> Float[Array, "*batch inputs"]:
        """What the GRU reads."""
        parts = [self.obs(seen.obs), self.action(seen.action), self.reward(seen.reward)]
        return jax.nn.relu(jnp.concatenate(parts, axis=-1))

    def advance(self, memory: Float[Array, "*batch memory"], seen: Signals) -> Float[Array, "*batch memory"]:
        """z_t from z_{t-1} and what is seen at t."""
        return self.gru(self.gru.inputs(self.embed(seen)), memory)

    def posterior(
        self, memory: Float[Array, "*batch memory"]
    ) -> tuple[Float[Array, "*batch latent"], Float[Array, "*batch latent"]]:
        """(mu_t, log sigma_t^2) from z_t."""
        return self.mean(memory), self.log_var(memory)

    @property
    def memory_size(self) -> int:
        """Numbers in z."""
        return self.gru.recurrent.weight.shape[-2]

    @property
    def latent_size(self) -> int:
        """Numbers in m."""
        return self.mean.bias.shape[-1]


def make_encoder(
    obs: int, action: int, key: Key, embed: tuple[int, int, int] = (16, 16, 4), memory: int = 256, latent: int = 16
) -> Encoder:
    """A fresh encoder: linear layers as PyTorch's default, the GRU's matrices orthogonal and its biases zero (VariBAD).

    `embed` holds the embedding sizes of state, action and reward.
    """
    key_linear, key_gru = jr.split(key)
    # One draw for all linear layers and one for the GRU: separate ones compile separately and cost seconds.
    shapes = [(obs, embed[0]), (action, embed[1]), (1, embed[2]), (memory, latent), (memory, latent)]
    flat = jr.uniform(key_linear, (sum((i + 1) * o for i, o in shapes),), minval=-1.0, maxval=1.0)
    layers, at = [], 0
    for i, o in shapes:
        both = flat[at : at + (i + 1) * o].reshape(i + 1, o) * i**-0.5
        layers.append(Linear(both[:-1], both[-1]))
        at += (i + 1) * o
    bias, inputs = jnp.zeros(3 * memory), sum(embed)
    gates = jr.normal(key_gru, (3 * memory * (inputs + memory),)).reshape(3 * memory, inputs + memory)
    gru = GRU(*(Linear(_orthogonal(x), bias) for x in jnp.split(gates, [inputs], axis=1)))
    return Encoder(obs=layers[0], action=layers[1], reward=layers[2], gru=gru, mean=layers[3], log_var=layers[4])


def _orthogonal(normal: Float[Array, "outputs inputs"]) -> Float[Array, "inputs outputs"]:
    """A matrix whose shorter side is orthonormal, drawn evenly from all of them (QR with the signs of R's diagonal)."""
    if normal.shape[0] < normal.shape[1]:
        return _orthogonal(normal.T).T
    q, r = jnp.linalg.qr(normal)
    return (q * jnp.sign(jnp.diagonal(r))[None]).T


def empty_belief(encoder: Encoder, action: int, lanes: tuple[int, ...] = ()) -> HistoryBelief:
    """Before anything was seen: zeros (z_{-1}, a_{-1}, r_{-1} of the paper)."""
    return HistoryBelief(jnp.zeros((*lanes, encoder.memory_size)), jnp.zeros((*lanes, action)), jnp.zeros((*lanes, 1)))


def standardise(scale: Normaliser, steps: Transition) -> Signals:
    """(s_t, a_t, r_t) of the same step, standardised by the statistics of [s, a, r]."""
    joined = scale(jnp.concatenate([steps.obs, steps.action, steps.reward[..., None]], axis=-1))
    obs, action, reward = jnp.split(joined, (steps.obs.shape[-1], joined.shape[-1] - 1), axis=-1)
    return Signals(obs, action, reward)


def encode_lanes(
    encoder: Encoder,
    scale: Normaliser,
    belief: HistoryBelief,
    steps: Transition,
    first: Bool[Array, "lanes time"],
) -> tuple[Float[Array, "lanes time memory"], Float[Array, "lanes time memory"], HistoryBelief]:
    """(z_{t-1}, z_t, belief afterwards) along consecutive steps, a lane per row of `steps`, anew where `first` is set.

    Where `first` is set z_{t-1} is the memory of another episode, or of none: do not use it there.
    """
    now = standardise(scale, steps)
    shifted = (
        jnp.concatenate([old[:, None], new[:, :-1]], axis=1) for old, new in zip(belief[1:], now[1:], strict=True)
    )
    past = (jnp.where(first[..., None], 0.0, values) for values in shifted)
    inputs = encoder.embed(Signals(now.obs, *past)).swapaxes(0, 1)
    after = encoder.gru.run(inputs, belief.memory, first.T).swapaxes(0, 1)
    before = jnp.concatenate([belief.memory[:, None], after[:, :-1]], axis=1)
    return before, after, HistoryBelief(after[:, -1], now.action[:, -1], now.reward[:, -1])


def sample_gaussian(
    mean: Float[Array, "*batch latent"], log_var: Float[Array, "*batch latent"], key: Key
) -> Float[Array, "*batch latent"]:
    """m = mu + sigma * noise."""
    noise = jr.normal(key, (mean.size,)).reshape(mean.shape)  # flat draws compile several times faster than shaped ones
    return mean + jnp.exp(0.5 * log_var) * noise


def gaussian_kl(
    mean: Float[Array, "*batch latent"],
    log_var: Float[Array, "*batch latent"],
    other_mean: Float[Array, "*batch latent"],
    other_log_var: Float[Array, "*batch latent"],
) -> Float[Array, "*batch latent"]:
    """KL(N(mu, e^v) || N(mu', e^v')) of each dimension: 1/2 [v' - v - 1 + e^{v - v'} + (mu - mu')^2 e^{-v'}]."""
    ratio = jnp.exp(log_var - other_log_var)
    distance = (mean - other_mean) ** 2 * jnp.exp(-other_log_var)
    return 0.5 * (other_log_var - log_var - 1.0 + ratio + distance)
