"""What is known about the three robots without asking a simulator: sizes, rewards, when an episode ends.

The termination rules are pure JAX functions of (obs, action, next_obs), true when the world ends at next_obs. They are
written from Gymnasium's `is_healthy`, not from the common copies, whose test of the lower state bound never bites.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from refplan.types import Action, Flag, Obs

Termination = Callable[[Obs, Action, Obs], Flag]


def never(obs: Obs, action: Action, next_obs: Obs) -> Flag:
    """HalfCheetah: the episode only ends by the clock."""
    return jnp.zeros((), bool)


def hopper_fell(obs: Obs, action: Action, next_obs: Obs) -> Flag:
    """Hopper: unhealthy unless z > 0.7, |angle| < 0.2 and |every other entry| < 100; NaN is unhealthy.

    The robot itself also ends when a velocity passes 100; observations clip velocities to 10, so that is not seen here.
    """
    z, rest = next_obs[0], next_obs[1:]
    healthy = (z > 0.7) & (z < jnp.inf) & (jnp.abs(rest[0]) < 0.2) & jnp.all(jnp.abs(rest) < 100.0)
    return ~healthy


def walker2d_fell(obs: Obs, action: Action, next_obs: Obs) -> Flag:
    """Walker2d: unhealthy unless 0.8 < z < 2 and |angle| < 1; no other entry matters."""
    z, angle = next_obs[0], next_obs[1]
    return ~((z > 0.8) & (z < 2.0) & (jnp.abs(angle) < 1.0))


@dataclass(frozen=True)
class Robot:
    """The constants of one robot; `-v5` and D4RL's physics share them all but the pay on the last step."""

    name: str
    positions: int  # entries of qpos, the x coordinate included
    action_dim: int
    control_cost: float
    velocity_limit: float  # observed velocities are clipped to this
    healthy_bonus: float
    termination: Termination
    return_min: float  # D4RL's reference returns: random policy and expert
    return_max: float

    @property
    def obs_dim(self) -> int:
        """Positions without x, then velocities (the robots are planar chains: as many as positions)."""
        return 2 * self.positions - 1

    def observe(self, qpos: Float[np.ndarray, "n q"], qvel: Float[np.ndarray, "n v"]) -> Float[np.ndarray, "n obs"]:
        """What Gymnasium's `_get_obs` returns, for many states at once."""
        if np.isfinite(self.velocity_limit):
            qvel = np.clip(qvel, -self.velocity_limit, self.velocity_limit)
        return np.concatenate([qpos[:, 1:], qvel], axis=1)

    def healthy(self, qpos: Float[np.ndarray, "n q"], qvel: Float[np.ndarray, "n v"]) -> Bool[np.ndarray, " n"]:
        """What Gymnasium's `is_healthy` returns, for many states at once."""
        z, angle = qpos[:, 1], qpos[:, 2]
        if self.name == "hopper":
            state = np.concatenate([qpos[:, 2:], qvel], axis=1)
            inside = np.all((state > -100.0) & (state < 100.0), axis=1)
            return inside & (z > 0.7) & (z < np.inf) & (angle > -0.2) & (angle < 0.2)
        if self.name == "walker2d":
            return (z > 0.8) & (z < 2.0) & (angle > -1.0) & (angle < 1.0)
        return np.ones(len(qpos), bool)


ROBOTS = {
    "hopper": Robot("hopper", 6, 3, 1e-3, 10.0, 1.0, hopper_fell, -20.272305, 3234.3),
    "halfcheetah": Robot("halfcheetah", 9, 6, 0.1, np.inf, 0.0, never, -280.178953, 12135.0),
    "walker2d": Robot("walker2d", 9, 6, 1e-3, 10.0, 1.0, walker2d_fell, 1.629008, 4592.3),
}
