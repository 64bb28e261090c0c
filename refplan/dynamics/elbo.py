"""The evidence lower bound of the belief model (eq. 2 of the paper), subsampled.

For a belief q(m | tau_{:t}) the decoder explains steps h <= t: the past, and the next step, which the encoder has not
seen. All of them would be O(L^2) per chunk, so a few t are drawn, and a few h for each, h = t always among them.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from refplan.dynamics.decoder import GaussianNet, members_apart, negative_log_likelihood
from refplan.dynamics.encoder import Encoder, gaussian_kl
from refplan.dynamics.encoding import Episodes, encode_rows
from refplan.nn import Normaliser
from refplan.types import Key, Scalar

Posterior = tuple[Float[Array, "*batch latent"], Float[Array, "*batch latent"]]  # mean, log-variance


def choose_steps(
    first: Bool[Array, "lanes time"], key: Key, beliefs: int, past: int
) -> tuple[Int[Array, "lanes belief"], Int[Array, "lanes belief past"], Bool[Array, "lanes belief past"]]:
    """(t, h, valid): `beliefs` columns per lane, and for each up to `past` columns h <= t of its episode, h = t first.

    Drawn without replacement; `valid` is false where the episode has fewer steps in this chunk.
    """
    lanes, time = first.shape
    beliefs, past = min(beliefs, time), min(past, time)
    # Flat draws compile several times faster than shaped ones.
    chance = jr.uniform(key, (lanes * (beliefs + 1) * time,)).reshape(lanes, beliefs + 1, time)
    t = jax.lax.top_k(chance[:, 0], beliefs)[1]
    column, at = jnp.arange(time)[None, None], t[..., None]
    begin = jnp.max(jnp.where(first[:, None] & (column <= at), column, 0), axis=2, keepdims=True)
    chance = jnp.where((column >= begin) & (column <= at), chance[:, 1:], -1.0)
    rank, h = jax.lax.top_k(jnp.where(column == at, 2.0, chance), past)
    return t, h, rank >= 0.0


def reconstruction(
    nets: GaussianNet,
    x: Float[Array, "rows inputs"],
    latent: Float[Array, "rows latent"],
    target: Float[Array, "rows outputs"],
    key: Key | None = None,
) -> Float[Array, " rows"]:
    """Each row's negative log-likelihood: mean over members or, with a key, that of one member drawn for the row."""
    members, rows = nets.layers[0].weight.shape[0], x.shape[0]
    if key is None:
        spread = [jnp.broadcast_to(v, (members, *v.shape)) for v in (x, latent)]
        mean, log_var = members_apart(nets, *spread)
        return jnp.mean(negative_log_likelihood(mean, log_var, jnp.broadcast_to(target, mean.shape)), axis=0)
    share = -(-rows // members)
    order = jr.permutation(key, members * share)  # the last few places are padding
    deal = order.reshape(members, share) % rows
    mean, log_var = members_apart(nets, x[deal], latent[deal])
    values = negative_log_likelihood(mean, log_var, target[deal]).reshape(-1)
    return jnp.zeros(members * share).at[order].set(values, unique_indices=True)[:rows]


def one_step_earlier(
    now: Posterior, start: tuple[Float[Array, "lanes latent"], Float[Array, "lanes latent"]]
) -> Posterior:
    """q(m | tau_{:t-1}) beside each q(m | tau_{:t}) of lanes by time; `start` stands before the first column."""
    mean, log_var = (jnp.concatenate([x[:, None], y[:, :-1]], axis=1) for x, y in zip(start, now, strict=True))
    return mean, log_var


def belief_kl(
    now: Posterior, earlier: Posterior, first: Bool[Array, "*batch"], target: str, stop_gradient: bool = False
) -> Float[Array, "*batch latent"]:
    """KL of q(m | tau_{:t}) to q(m | tau_{:t-1}), or to N(0, I): always to the latter where an episode begins."""
    if target == "standard":
        return gaussian_kl(*now, *jax.tree.map(jnp.zeros_like, now))
    earlier = jax.lax.stop_gradient(earlier) if stop_gradient else earlier
    other_mean, other_log_var = (jnp.where(first[..., None], 0.0, value) for value in earlier)
    return gaussian_kl(*now, other_mean, other_log_var)


def free_kl(kl: Float[Array, "*batch latent"], free_bits: Scalar) -> Scalar:
    """Sum over dimensions of max(free_bits, mean KL): nats below `free_bits` per dimension cost nothing."""
    return jnp.sum(jnp.maximum(jnp.mean(kl, axis=tuple(range(kl.ndim - 1))), free_bits))


def spaced_past(
    t: Int[Array, " beliefs"], begin: Int[Array, " beliefs"], past: int, length: int
) -> tuple[Int[Array, "beliefs past"], Bool[Array, "beliefs past"]]:
    """(h, valid): up to `past` evenly spaced rows among the last `length` up to t in its episode, t first."""
    available = jnp.minimum(t - begin + 1, length)[:, None]
    back = jnp.arange(past)[None] * jnp.maximum(available, past) // past
    return jnp.maximum(t[:, None] - back, begin[:, None]), back < available


def held_out_elbo(
    encoder: Encoder,
    nets: GaussianNet,
    scale: Normaliser,
    held: Episodes,
    decoded: tuple[Float[Array, "rows inputs"], Float[Array, "rows outputs"]],
    *,
    kl_weight: Scalar,
    kl_target: str,
    past: int,
    length: int,
    most: int = 1024,
) -> tuple[Scalar, Scalar]:
    """(bound, next-step negative log-likelihood) with m = mu, from up to `most` beliefs spread evenly over the rows.

    Both are means within an episode and medians over episodes. `decoded` is what the decoder reads and should say.
    """
    rows, episodes = held.number.shape[0], held.starts.shape[0]
    mean, log_var = encode_rows(encoder, scale, held)
    t = jnp.asarray(np.linspace(0, rows - 1, min(most, rows)).astype(int))
    begin = held.starts[held.number[t]]
    h, valid = spaced_past(t, begin, past, length)
    latent = jnp.broadcast_to(mean[t][:, None], (*h.shape, mean.shape[1])).reshape(h.size, -1)
    x, y = (values[h.reshape(-1)] for values in decoded)
    nll = reconstruction(nets, x, latent, y).reshape(h.shape)
    kl = belief_kl((mean[t], log_var[t]), (mean[t - 1], log_var[t - 1]), t == begin, kl_target)
    loss = jnp.sum(jnp.where(valid, nll, 0.0), axis=1) + kl_weight * jnp.sum(kl, axis=1)

    def typical(values: Float[Array, " beliefs"]) -> Scalar:
        total = jax.ops.segment_sum(jnp.stack([values, jnp.ones_like(values)]).T, held.number[t], episodes)
        return jnp.nanmedian(total[:, 0] / total[:, 1])  # a very short episode may have no belief among them

    return -typical(loss), typical(nll[:, 0])
