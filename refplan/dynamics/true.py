"""The true world behind the contract of a model: the upper bound of what any model of it could be worth."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from refplan.data.tasks import Task
from refplan.data.true_world import TrueWorld
from refplan.dynamics.base import (
    AbstractDynamics,
    AbstractMarkovDynamics,
    AbstractTermination,
    NeverTerminates,
    Outcome,
    RuleTermination,
)


class TrueDynamics(AbstractMarkovDynamics):
    """MuJoCo itself, stepped from the observation by a host callback: one member, no doubt, no noise.

    A planner with this model shows what planning would gain if the model were perfect; the rest is the model's fault,
    or the prior's and its critic's. Not for use outside simulation, of course.
    """

    world: TrueWorld = eqx.field(static=True)
    termination: AbstractTermination

    @property
    def members(self) -> int:
        """The truth is one."""
        return 1

    def best(self, count: int) -> AbstractDynamics:
        """There is only one."""
        return self

    def predict(
        self, hypothesis: tuple[()], obs: Float[Array, "member obs"], action: Float[Array, "*member act"]
    ) -> Outcome:
        """What MuJoCo does next."""
        action = jnp.broadcast_to(action, (1, action.shape[-1]))
        shapes = jax.ShapeDtypeStruct(obs.shape, jnp.float32), jax.ShapeDtypeStruct((1,), jnp.float32)
        after, reward = jax.pure_callback(self._host, shapes, obs, action, vmap_method="broadcast_all")
        return Outcome(after, reward, jnp.zeros_like(after), jnp.zeros_like(reward))

    def _host(self, obs: Any, action: Any) -> tuple[np.ndarray, np.ndarray]:
        obs, action = np.asarray(obs), np.asarray(action)
        batch = obs.shape[:-1]
        made = self.world.step(obs.reshape(-1, obs.shape[-1]), action.reshape(-1, action.shape[-1]))
        return made[0].reshape(*batch, -1), made[1].reshape(batch)


def make_true_dynamics(task: Task) -> TrueDynamics:
    """The true world of a task refplan can simulate."""
    rule = task.termination
    ending = NeverTerminates() if rule is None else RuleTermination(rule)
    return TrueDynamics(world=TrueWorld(task), termination=ending)
