"""EDAC (An et al., 2021): SAC with many critics, whose action gradients are kept apart."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from refplan.data.dataset import Dataset
from refplan.errors import RefplanError
from refplan.learner import AbstractLearner
from refplan.nn import MLP
from refplan.priors.actor_critic import ActorCritic, Critics
from refplan.priors.losses import gradient_diversity
from refplan.priors.sac import SAC, SACState
from refplan.types import Key, Metrics, Scalar, Transition


class EDAC(AbstractLearner):
    """sum_i mean (Q_i - y)^2 + eta ES, y with the minimum over all N critics and the entropy term.

    Departures from the paper: weights start uniform in ±1/sqrt(inputs) in every layer (EDAC: hidden biases 0.1, last
    layer ±0.003), and the policy's mean is not clipped before tanh (EDAC: ±9).
    """

    eta: Scalar = eqx.field(converter=jnp.asarray, default=1.0)
    sac: SAC = eqx.field(default_factory=lambda: SAC(hidden=(256, 256, 256), critics=10))

    def __check_init__(self):
        if self.sac.critics < 2:
            raise RefplanError(f"EDAC compares critics with each other and needs at least 2, got {self.sac.critics}.")

    def prepare(self, data: Dataset) -> Transition:
        """SAC's."""
        return self.sac.prepare(data)

    def init(self, data: Dataset, key: Key) -> SACState:
        """SAC's, with as many critics as `sac.critics`."""
        return self.sac.init(data, key)

    def batch(self, source: Transition, state: SACState, key: Key) -> Transition:
        """SAC's."""
        return self.sac.batch(source, state, key)

    def update(self, state: SACState, batch: Transition, key: Key) -> tuple[SACState, Metrics]:
        """SAC's step with the diversity term."""
        return self.sac.step(state, batch, key, self._penalty)

    def _penalty(self, nets: MLP, state: SACState, batch: Transition, key: Key) -> tuple[Scalar, Metrics]:
        critics = eqx.tree_at(lambda c: c.nets, state.critics, nets)
        similarity = gradient_diversity(action_gradients(critics, batch.obs, batch.action))
        return self.eta * similarity, {"similarity": similarity}

    def result(self, state: SACState) -> ActorCritic:
        """SAC's."""
        return self.sac.result(state)


def action_gradients(
    critics: Critics, obs: Float[Array, "batch obs"], action: Float[Array, "batch act"]
) -> Float[Array, "critic batch act"]:
    """grad_a Q_i(s, a) of every critic at every row: one backward pass, since rows and critics do not mix."""
    count = critics.nets.layers[0].bias.shape[0]
    copies = jnp.broadcast_to(action[None], (count, *action.shape))

    def total(copies: Float[Array, "critic batch act"]) -> Scalar:
        inputs = jnp.concatenate([jnp.broadcast_to(seen[None], (count, *seen.shape)), copies], axis=2)
        return jnp.sum(eqx.filter_vmap(lambda net, x: net(x))(critics.nets, inputs))

    seen = critics.normaliser(obs)
    return jax.grad(total)(copies)
