"""Worlds around s' = A s + c tanh(s)^3 + B a: with other gains, shifted, pulled; linear for c = 0."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Meta
from refplan.types import Transition

A = jnp.array([[0.9, 0.1], [0.0, 0.8]])
B = jnp.array([[0.5, 0.0], [0.2, 0.4]])
STD = 0.05
HOME = (jnp.ones(2), jnp.zeros(2), jnp.zeros(2))  # (gain, offset, drift)


def live(curve, world, steps, key, scale=1.0, climb=(0.0, 0.0)):
    """Real steps in a world: (gain, offset, drift); the offset may climb."""
    gain, start, drift = (jnp.asarray(x) for x in world)

    def step(carry, key):
        obs, offset = carry
        key_action, key_noise = jr.split(key)
        action = scale * jr.uniform(key_action, (2,), minval=-1.0)
        flat, lifted = obs - offset, offset + jnp.asarray(climb)
        after = A @ flat + curve * jnp.tanh(flat) ** 3 + B @ (gain * action) + lifted + drift
        after = after + STD * jr.normal(key_noise, (2,))
        return (after, lifted), Transition(obs, action, jnp.zeros(()), after, jnp.zeros((), bool))

    return jax.lax.scan(step, (jnp.zeros(2), start), jr.split(key, steps))[1]


def logged(rows=2000):
    """Episodes of a hundred steps at home; the reward is the first coordinate."""
    steps = live(0.0, HOME, rows, jr.key(0))
    ends = np.arange(rows) % 100 == 99
    arrays = (steps.obs, steps.action, steps.obs[:, 0], np.zeros(rows, bool), ends)
    return make_dataset(
        *(np.asarray(x) for x in arrays), next_observations=np.asarray(steps.next_obs), meta=Meta(name="bent")
    )
