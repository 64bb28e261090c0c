"""CQL (Kumar et al., 2020): SAC whose critics are pushed down where the policy goes and up at the data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float

from refplan.data.dataset import Dataset
from refplan.learner import AbstractLearner
from refplan.nn import MLP, tanh_gaussian_sample
from refplan.priors.actor_critic import ActorCritic, Critics
from refplan.priors.losses import conservative_spread, draw_candidates, drawn_spread
from refplan.priors.policy import GaussianPolicy
from refplan.priors.sac import SAC, SACState
from refplan.turns import sum_in_turns
from refplan.types import Key, Keys, Metrics, Scalar, Transition


class CQLState(NamedTuple):
    """SAC's state and, for the Lagrange form, the multiplier."""

    sac: SACState
    log_multiplier: Scalar
    multiplier_optimiser: optax.OptState


# (nets being trained, state, batch, key) -> LSE minus Q at the data, per critic
Gaps = Callable[[MLP, SACState, Transition, Key], Float[Array, " critic"]]


class CQL(AbstractLearner):
    """CQL(H) with importance weights: L_i += w (mean_s LSE_i(s) - mean Q_i(s, a_data)), summed over critics.

    LSE_i(s) runs over 3n actions at the same s: n uniform, n ~ pi(.|s), n ~ pi(.|s') -- each Q minus its log-density.
    Departures from the paper: none known; RefPlan does not state its CQL's numbers, so those of its author's earlier
    code are used (w 10, n 10, 3x256, rates 1e-4 and 3e-4, no entropy in the backup).
    """

    weight: Scalar = eqx.field(converter=jnp.asarray, default=10.0)
    samples: int = eqx.field(static=True, default=10)  # n: actions per set and state
    # Actions per state whose Q is pushed down, drawn by their share in the LSE: the same gradient on average, with a
    # backward pass over fewer rows; 0: all of them.
    drawn: int = eqx.field(static=True, default=0)
    penalty_states: int = eqx.field(static=True, default=0)  # states of the batch that are penalised; 0: all of them
    lagrange: bool = eqx.field(static=True, default=False)
    gap: Scalar = eqx.field(converter=jnp.asarray, default=5.0)  # tau of the Lagrange form
    sac: SAC = eqx.field(
        default_factory=lambda: SAC(hidden=(256, 256, 256), actor_rate=1e-4, alpha_rate=1e-4, entropy_in_backup=False)
    )

    def prepare(self, data: Dataset) -> Transition:
        """SAC's."""
        return self.sac.prepare(data)

    def init(self, data: Dataset, key: Key) -> CQLState:
        """SAC's and a multiplier of one."""
        zero = jnp.zeros(())
        return CQLState(self.sac.init(data, key), zero, optax.adam(self.sac.critic_rate).init(zero))

    def batch(self, source: Transition, state: CQLState, key: Key) -> Transition:
        """SAC's."""
        return self.sac.batch(source, state.sac, key)

    def update(self, state: CQLState, batch: Transition, key: Key) -> tuple[CQLState, Metrics]:
        """SAC's step with the penalty."""
        return self.step(state, batch, key, self.conservative_gaps)

    def step(self, state: CQLState, batch: Transition, key: Key, gaps: Gaps) -> tuple[CQLState, Metrics]:
        """The update with given gaps to close; the multiplier, if any, then climbs on what the penalty was."""
        multiplier = jnp.clip(jnp.exp(state.log_multiplier), 0.0, 1e6) if self.lagrange else jnp.ones(())

        def penalty(nets: MLP, sac: SACState, batch: Transition, key: Key) -> tuple[Scalar, Metrics]:
            each = gaps(nets, sac, batch, key)
            excess = jnp.sum(self.weight * each - (self.gap if self.lagrange else 0.0))
            return multiplier * excess, {"gap": jnp.mean(each), "excess": excess}

        sac, metrics = self.sac.step(state.sac, batch, key, penalty)
        excess = metrics.pop("excess")
        if not self.lagrange:
            return state._replace(sac=sac), metrics
        # d/d log_multiplier of -multiplier * excess: the multiplier grows while the gap is above its bound.
        grad = -multiplier * excess
        change, optimiser = optax.adam(self.sac.critic_rate).update(grad, state.multiplier_optimiser)
        metrics["multiplier"] = multiplier
        log_multiplier: Any = optax.apply_updates(state.log_multiplier, change)
        return CQLState(sac, log_multiplier, optimiser), metrics

    def conservative_gaps(self, nets: MLP, sac: SACState, batch: Transition, key: Key) -> Float[Array, " critic"]:
        """The gaps on the batch, or on its first `penalty_states` rows."""
        count = self.penalty_states or batch.reward.shape[0]
        batch = jax.tree.map(lambda x: x[:count], batch)
        return self.gaps_between(nets, sac, batch, batch, key)

    def gaps_between(
        self, nets: MLP, sac: SACState, pushed: Transition, lifted: Transition, key: Key
    ) -> Float[Array, " critic"]:
        """LSE over policy and uniform actions at the states of `pushed`, minus Q at the rows of `lifted`."""
        actions, log_density = candidate_actions(sac.policy, pushed, self.samples, key)
        arrays, rest = eqx.partition(nets, eqx.is_array)

        def spread(arrays: MLP, *states: Any) -> Float[Array, " critic"]:
            return self.spread(eqx.tree_at(lambda c: c.nets, sac.critics, eqx.combine(arrays, rest)), *states)

        keys = jr.split(jr.fold_in(key, 3), len(actions))  # 0 to 2 are the keys of the candidates
        rows = actions.shape[1] * self.sac.critics
        total = sum_in_turns(spread, arrays, rows, pushed.obs, actions, log_density, keys)
        critics = eqx.tree_at(lambda c: c.nets, sac.critics, nets)
        return total / len(actions) - jnp.mean(critics(lifted.obs, lifted.action), axis=1)

    def spread(
        self,
        critics: Critics,
        obs: Float[Array, "batch obs"],
        actions: Float[Array, "batch candidate act"],
        log_density: Float[Array, "batch candidate"],
        keys: Keys,
    ) -> Float[Array, " critic"]:
        """The sum of the states' LSE; its gradient through all candidates or, if asked, through a few drawn ones."""

        def values(actions: Float[Array, "batch some act"]) -> Float[Array, "critic batch some"]:
            return critics(jnp.broadcast_to(obs[:, None], (*actions.shape[:2], obs.shape[1])), actions)

        if not self.drawn:
            return conservative_spread(values(actions), log_density)
        q = jax.lax.stop_gradient(values(actions))
        drawn, weight = draw_candidates(q, log_density, keys, self.drawn)
        picked = jnp.take_along_axis(actions, drawn[..., None], axis=1)
        return drawn_spread(conservative_spread(q, log_density), values(picked), weight)

    def result(self, state: CQLState) -> ActorCritic:
        """SAC's."""
        return self.sac.result(state.sac)


def candidate_actions(
    policy: GaussianPolicy, batch: Transition, samples: int, key: Key
) -> tuple[Float[Array, "batch candidate act"], Float[Array, "batch candidate"]]:
    """Per state: `samples` uniform actions, as many from pi(.|s), as many from pi(.|s'); log-densities beside."""
    key_uniform, key_here, key_next = jr.split(key, 3)
    rows, size = batch.action.shape
    uniform = jr.uniform(key_uniform, (rows, samples, size), minval=-1.0, maxval=1.0)

    def draw(obs: Float[Array, "batch obs"], key: Key) -> tuple[Array, Array]:
        mean, log_std = jax.vmap(policy.distribution)(obs)
        repeat = lambda x: jnp.broadcast_to(x[:, None], (rows, samples, size))  # noqa: E731
        return tanh_gaussian_sample(repeat(mean), repeat(log_std), key)

    (here, here_log), (after, after_log) = draw(batch.obs, key_here), draw(batch.next_obs, key_next)
    flat = jnp.full((rows, samples), size * jnp.log(0.5))
    actions = jnp.concatenate([uniform, here, after], axis=1)
    return jax.lax.stop_gradient((actions, jnp.concatenate([flat, here_log, after_log], axis=1)))
