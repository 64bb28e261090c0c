"""The losses of the prior learners, each a pure function, each tested once against numbers worked out by hand.

`q` arrays have one row per critic. Targets are constants: whoever makes one stops its gradient, visibly, at the call.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from refplan.types import Keys, Scalar


def td_target(
    reward: Float[Array, " batch"],
    terminated: Bool[Array, " batch"],
    next_value: Float[Array, " batch"],
    discount: Scalar,
) -> Float[Array, " batch"]:
    """y = r + gamma (1 - terminated) V(s'). A truncated step is not terminated: it still bootstraps."""
    return reward + discount * jnp.where(terminated, 0.0, next_value)


def critic_loss(q: Float[Array, "critic batch"], target: Float[Array, " batch"]) -> Scalar:
    """sum_i mean (Q_i - y)^2: summed over critics, so that each learns as if alone."""
    return jnp.sum(jnp.mean((q - target[None]) ** 2, axis=1))


def actor_loss(log_prob: Float[Array, " batch"], q: Float[Array, " batch"], alpha: Scalar) -> Scalar:
    """mean (alpha log pi(a|s) - Q(s, a)) with a drawn from pi by reparametrisation (SAC)."""
    return jnp.mean(alpha * log_prob - q)


def cloning_loss(
    action: Float[Array, "batch act"], logged: Float[Array, "batch act"], q: Float[Array, " batch"]
) -> Scalar:
    """mean |Q| * mean (a - a_data)^2: TD3+BC's pull to the data, in units of Q (its alpha 2.5 is a weight of 0.4)."""
    return jax.lax.stop_gradient(jnp.mean(jnp.abs(q))) * jnp.mean((action - logged) ** 2)


def temperature_loss(log_alpha: Scalar, log_prob: Float[Array, " batch"], target_entropy: Scalar | float) -> Scalar:
    """-log alpha * mean (log pi + target entropy): raises alpha while the entropy is below its target."""
    return -log_alpha * jnp.mean(log_prob + target_entropy)


def conservative_gap(
    candidates: Float[Array, "critic batch candidate"],
    log_density: Float[Array, "batch candidate"],
    q_data: Float[Array, "critic data"],
) -> Float[Array, " critic"]:
    """mean_s log sum_k exp(Q(s, a_k) - log p(a_k)) - mean Q(s, a_data), per critic (CQL(H), importance-weighted).

    The candidates of one state lie on the last axis, all of them: the sum runs over 3n values per state. It pushes Q
    down where the policy would go and up at the data.
    """
    return conservative_spread(candidates, log_density) / candidates.shape[1] - jnp.mean(q_data, axis=1)


def conservative_spread(
    candidates: Float[Array, "critic batch candidate"], log_density: Float[Array, "batch candidate"]
) -> Float[Array, " critic"]:
    """sum_s log sum_k exp(Q(s, a_k) - log p(a_k)): what is pushed down, before it is divided by the states."""
    return jnp.sum(logsumexp(candidates - log_density[None], axis=2), axis=1)


def draw_candidates(
    candidates: Float[Array, "critic batch candidate"],
    log_density: Float[Array, "batch candidate"],
    keys: Keys,
    count: int,
) -> tuple[Int[Array, "batch drawn"], Float[Array, "critic batch drawn"]]:
    """`count` candidates of every state, drawn by their share in the LSE, and what each counts for.

    d LSE_i = sum_k p_ik dQ_i(a_k), p_i the softmax over candidates. Drawn from the mean p of the critics and weighed by
    p_ik / (count p_k), a few of them give the same gradient on average; no weight exceeds (critics / count).
    """
    share = jax.nn.softmax(candidates - log_density[None], axis=2)
    mean = jnp.mean(share, axis=0)
    drawn = jax.vmap(lambda key, p: jr.categorical(key, jnp.log(p), shape=(count,)))(keys, mean)
    taken = jnp.take_along_axis(share, drawn[None], axis=2)
    return drawn, taken / (count * jnp.take_along_axis(mean, drawn, axis=1)[None])


def drawn_spread(
    spread: Float[Array, " critic"],
    drawn: Float[Array, "critic batch drawn"],
    weight: Float[Array, "critic batch drawn"],
) -> Float[Array, " critic"]:
    """The value of `spread` with the gradient of the drawn candidates alone."""
    return jax.lax.stop_gradient(spread) + jnp.sum(weight * (drawn - jax.lax.stop_gradient(drawn)), axis=(1, 2))


def gradient_diversity(grads: Float[Array, "critic batch act"], edge: float = 1e-10) -> Scalar:
    """ES = 1/(N-1) mean_batch sum_{i != j} cos(grad_a Q_i, grad_a Q_j) (EDAC, eq. 4).

    With unit vectors g_i the double sum is |sum_i g_i|^2 - sum_i |g_i|^2: no N x N table is made.
    """
    square = jnp.sum(grads**2, axis=2, keepdims=True)
    # A critic whose units are all off has no gradient, and a norm no derivative there: NaN, unless it is kept out.
    norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
    unit = grads / (norm + edge)
    pairs = jnp.sum(jnp.sum(unit, axis=0) ** 2, axis=1) - jnp.sum(unit**2, axis=(0, 2))
    return jnp.mean(pairs) / (grads.shape[0] - 1)


def expectile_loss(difference: Float[Array, " batch"], expectile: Scalar) -> Scalar:
    """mean |tau - 1(u < 0)| u^2 with u = Q - V (IQL, eq. 5): tau > 1/2 leans V towards the better actions."""
    weight = jnp.where(difference > 0, expectile, 1.0 - expectile)
    return jnp.mean(weight * difference**2)


def advantage_weight(advantage: Float[Array, " batch"], beta: Scalar, most: float = 100.0) -> Float[Array, " batch"]:
    """min(exp(beta A), most): how much a data action counts when the policy is fitted (IQL, eq. 7)."""
    return jnp.minimum(jnp.exp(beta * advantage), most)


def likelihood_loss(log_prob: Float[Array, " batch"], weight: Float[Array, " batch"] | None = None) -> Scalar:
    """-mean w log pi(a|s): behaviour cloning with w = 1, advantage-weighted regression otherwise."""
    return -jnp.mean(log_prob if weight is None else weight * log_prob)
