"""MOPO (Yu et al., 2020): SAC in an imagined world whose rewards are lowered by the model's doubt."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Int

from refplan.data.dataset import Dataset
from refplan.dynamics.base import AbstractDynamics
from refplan.priors.actor_critic import ActorCritic, in_world_units
from refplan.priors.imagining import (
    AbstractImaginingLearner,
    Dream,
    Imagination,
    Logged,
    first_rows,
    mixed_rows,
    renew_rows,
)
from refplan.priors.sac import SAC, SACState
from refplan.settings import digest_of
from refplan.types import Key, Metrics, Scalar


class MOPOState(NamedTuple):
    """SAC's state and what was imagined lately."""

    sac: SACState
    dream: Dream


class MOPO(AbstractImaginingLearner):
    """SAC on r - lambda u(s, a), u = max_i |sigma_i(s, a)| or the members' disagreement (`imagined.doubt`).

    Works with any dynamics; with a belief model it is the paper's "NM (train)" (appendix B.1).
    Departures from the paper: the maximum runs over the elites, not over all members; settings are those of
    OfflineRL-Kit, but without its cosine decay of the actor's rate.
    """

    model: AbstractDynamics | None = None
    penalty: Scalar = eqx.field(converter=jnp.asarray, default=1.0)  # lambda
    imagined: Imagination = Imagination()
    sac: SAC = eqx.field(default_factory=lambda: SAC(actor_rate=1e-4, alpha_rate=1e-4))
    # Tells models of the same shape apart, so that a checkpoint is never continued in another world.
    digest: Int[Array, "4"] = eqx.field(init=False)

    def __post_init__(self):
        self.digest = digest_of(self.model)

    @property
    def discount(self) -> Scalar:
        """SAC's."""
        return self.sac.discount

    def init(self, data: Dataset, key: Key) -> MOPOState:
        """SAC's, and nothing imagined."""
        return MOPOState(self.sac.init(data, key), first_rows(self, data))

    def renew(self, state: MOPOState, logged: Logged, key: Key) -> Dream:
        """Rollouts with penalised rewards."""
        policy = in_world_units(state.sac.policy, logged.low, logged.high)
        return renew_rows(self, state.dream, policy, logged, self.penalty, key)

    def improve(self, state: MOPOState, logged: Logged, key: Key) -> tuple[MOPOState, Metrics]:
        """SAC's step on logged and imagined rows."""
        key_rows, key_step = jr.split(key)
        rows = mixed_rows(self, state.dream, logged, self.sac.batch_size, key_rows)
        sac, metrics = self.sac.step(state.sac, rows, key_step)
        return state._replace(sac=sac), metrics

    def result(self, state: MOPOState) -> ActorCritic:
        """SAC's; its values are those of penalised rewards."""
        return self.sac.result(state.sac)
