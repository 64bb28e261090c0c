"""The losses of the prior learners, each a pure function, each tested once against numbers worked out by hand.

`q` arrays have one row per critic. Targets are constants: whoever makes one stops its gradient, visibly, at the call.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from refplan.types import Scalar


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


def temperature_loss(log_alpha: Scalar, log_prob: Float[Array, " batch"], target_entropy: Scalar | float) -> Scalar:
    """-log alpha * mean (log pi + target entropy): raises alpha while the entropy is below its target."""
    return -log_alpha * jnp.mean(log_prob + target_entropy)
