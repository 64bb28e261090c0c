"""How returns under several members or worlds become one number.

Each function takes an array whose axis `axis` runs over hypotheses and removes that axis. Order relations hold and are
tested: worst <= CVaR <= mean, CVaR(1) = mean, and the penalty at zero is the mean.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from refplan.types import Scalar


def mean_minus_std(returns: Float[Array, "..."], penalty: Scalar, axis: int) -> Float[Array, "..."]:
    """mean - penalty * std: the paper's and LOOP's uncertainty penalty, in the units of the return."""
    return jnp.mean(returns, axis) - penalty * jnp.std(returns, axis)


def mean_minus_variance(returns: Float[Array, "..."], penalty: Scalar, axis: int) -> Float[Array, "..."]:
    """mean - penalty * variance: the paper's words taken literally; its scale depends on the reward's."""
    return jnp.mean(returns, axis) - penalty * jnp.var(returns, axis)


def worst(returns: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """The smallest return."""
    return jnp.min(returns, axis)


def conditional_value_at_risk(returns: Float[Array, "..."], share: Scalar, axis: int) -> Float[Array, "..."]:
    """The mean of the worst `share` of the returns; the one on the border counts in part."""
    ordered = jnp.moveaxis(jnp.sort(returns, axis), axis, -1)
    count = ordered.shape[-1]
    weight = jnp.clip(share * count - jnp.arange(count), 0.0, 1.0)
    return ordered @ weight / jnp.sum(weight)
