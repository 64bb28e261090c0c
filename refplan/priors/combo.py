"""COMBO (Yu et al., 2021): CQL on logged and imagined rows, pushed down where imagined, lifted at logged actions."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int

from refplan.data.dataset import Dataset
from refplan.dynamics.base import AbstractDynamics
from refplan.errors import RefplanError, unknown_name
from refplan.nn import MLP
from refplan.priors.actor_critic import ActorCritic, in_world_units
from refplan.priors.cql import CQL, CQLState
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
from refplan.types import Key, Metrics, Scalar, Transition

RHO = ("mix", "model")


def _cql() -> CQL:
    sac = SAC(hidden=(256, 256, 256), actor_rate=1e-4, alpha_rate=1e-4, entropy_in_backup=False)
    return CQL(weight=0.5, sac=sac)


class COMBOState(NamedTuple):
    """CQL's state and what was imagined lately."""

    cql: CQLState
    dream: Dream


class COMBO(AbstractImaginingLearner):
    """L_i += w (mean_{s ~ rho} LSE_i(s) - mean Q_i(s, a) over logged rows), TD on all rows, rewards as imagined.

    rho is the whole batch ("mix") or its imagined part ("model"). No code of the authors exists; settings are those of
    OfflineRL-Kit, but with the log-sum-exp over all 3n actions of a state as in CQL (theirs runs over 3).
    Departures from the paper: none known. With a belief model it is RefPlan's "NM (train)" (appendix B.1).
    """

    model: AbstractDynamics | None = None
    rho: str = eqx.field(static=True, default="mix")
    imagined: Imagination = Imagination(real_ratio=0.5)
    cql: CQL = eqx.field(default_factory=_cql)
    # Tells models of the same shape apart, so that a checkpoint is never continued in another world.
    digest: Int[Array, "4"] = eqx.field(init=False)

    def __post_init__(self):
        self.digest = digest_of(self.model)

    def __check_init__(self):
        if self.rho not in RHO:
            raise unknown_name("rho of COMBO", self.rho, RHO)
        if self.imagined.real_rows(self.cql.sac.batch_size) < 1:
            raise RefplanError(
                f"COMBO lifts Q at logged actions and needs some in each batch; imagined.real_ratio="
                f"{self.imagined.real_ratio} of {self.cql.sac.batch_size} rows are none."
            )

    @property
    def discount(self) -> Scalar:
        """CQL's."""
        return self.cql.sac.discount

    def init(self, data: Dataset, key: Key) -> COMBOState:
        """CQL's, and nothing imagined."""
        return COMBOState(self.cql.init(data, key), first_rows(self, data))

    def renew(self, state: COMBOState, logged: Logged, key: Key) -> Dream:
        """Rollouts with the rewards the model gives."""
        policy = in_world_units(state.cql.sac.policy, logged.low, logged.high)
        return renew_rows(self, state.dream, policy, logged, 0.0, key)

    def improve(self, state: COMBOState, logged: Logged, key: Key) -> tuple[COMBOState, Metrics]:
        """CQL's step on logged and imagined rows, with COMBO's gaps."""
        key_rows, key_step = jr.split(key)
        rows = mixed_rows(self, state.dream, logged, self.cql.sac.batch_size, key_rows)
        cql, metrics = self.cql.step(state.cql, rows, key_step, self.gaps)
        return state._replace(cql=cql), metrics

    def gaps(self, nets: MLP, sac: SACState, batch: Transition, key: Key) -> Float[Array, " critic"]:
        """LSE at the states of rho minus Q at the logged rows, which stand first in the batch."""
        real = self.imagined.real_rows(batch.reward.shape[0])
        pushed = batch if self.rho == "mix" else jax.tree.map(lambda x: x[real:], batch)
        rows = pushed.reward.shape[0]
        # Evenly over the batch, so that a part of it holds logged and imagined states as the whole does.
        some = jnp.linspace(0, rows - 1, min(self.cql.penalty_states or rows, rows)).astype(int)
        pushed = jax.tree.map(lambda x: x[some], pushed)
        return self.cql.gaps_between(nets, sac, pushed, jax.tree.map(lambda x: x[:real], batch), key)

    def result(self, state: COMBOState) -> ActorCritic:
        """CQL's."""
        return self.cql.result(state.cql)
