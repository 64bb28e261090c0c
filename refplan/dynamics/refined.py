"""An ensemble whose last layers go on learning while it is in use: exact Bayes where a network is linear.

A member's mean is linear in what its last layer reads, mu(s, a) = W [phi(s, a), 1]. So what an episode says about W has
a posterior in closed form, whatever the world does that the data did not show: no hypothesis about the kind of change
is needed, and nothing is trained. In units of standardised outputs, with the offline W as the prior's mean:

    W ~ N(W_0, P_0 = layer_std^2 I),   y = W [phi, 1] + noise,   noise variance r = noise (aleatoric + between members)
    k = P phi / (phi' P phi + r),   W <- W + k (y - W phi)',   P <- P - k phi' P
    next step   P <- rho P + (1 - rho) P_0,   rho = 1 - 1/memory
"""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from refplan.dynamics.base import AbstractDynamics, AbstractTermination, Outcome
from refplan.dynamics.ensemble import EnsembleDynamics
from refplan.errors import RefplanError
from refplan.types import Action, Key, Obs, Scalar, Transition

Correction = Float[Array, "elite features outputs"]  # of last layers; the last feature is the constant


class LayerBelief(NamedTuple):
    """W - W_0 ~ N(correction, covariance) for every output of every elite."""

    correction: Correction
    covariance: Float[Array, "elite features features"]


class AbstractRefining(eqx.Module):
    """How freely last layers may move: the settings of the belief.

    `layer_std` is what is expected of a weight's change, in standardised outputs per unit of what the layer reads; what
    was learned is doubted again over `memory` steps; `noise` is the factor on the ensemble's own variance.
    """

    layer_std: Scalar = eqx.field(converter=jnp.asarray, default=0.03, kw_only=True)
    memory: Scalar = eqx.field(converter=jnp.asarray, default=500.0, kw_only=True)
    noise: Scalar = eqx.field(converter=jnp.asarray, default=1.0, kw_only=True)


class RefinedDynamics(AbstractDynamics, AbstractRefining):
    """A trained ensemble and what the episode has taught its last layers; a hypothesis is a correction of them.

    A draw is the posterior's mean: the elites' spread is the doubt plans are judged with, as without refinement.
    """

    base: EnsembleDynamics

    @property
    def termination(self) -> AbstractTermination:  # ty: ignore[incompatible-property-override], Equinox allows it
        """The ensemble's."""
        return self.base.termination

    @property
    def members(self) -> int:
        """The elites."""
        return self.base.members

    def as_trained(self) -> AbstractDynamics:
        """The ensemble: a belief is a matrix of 201 x 201 per elite."""
        return self.base

    @property
    def draws(self) -> int:
        """One: all draws are the same."""
        return 1

    def best(self, count: int) -> AbstractDynamics:
        """The first `count` elites; a belief of all of them serves."""
        fewer: Any = self.base.best(count)
        return dataclasses.replace(self, base=fewer)

    def start(self) -> LayerBelief:
        """As trained."""
        last = self.base.decoder.nets.layers[-1].weight
        features, outputs = last.shape[1] + 1, last.shape[2] // 2
        first = jnp.broadcast_to(self._prior(features), (self.members, features, features))
        return LayerBelief(jnp.zeros((self.members, features, outputs)), first)

    def observe(self, belief: LayerBelief, transition: Transition) -> LayerBelief:
        """One step of Bayesian regression per elite; a step that is not finite says nothing."""
        decoder = self.base.decoder
        read = self._features(transition.obs, transition.action)
        outcome = self.base.predict_from((), transition.obs, transition.action)
        changes = jnp.concatenate([outcome.next_obs - transition.obs[None], outcome.reward[:, None]], axis=1)
        mean = decoder.targets(changes)
        std = jnp.concatenate([outcome.next_obs_std, outcome.reward_std[:, None]], axis=1) / decoder.targets.std[None]
        seen = decoder.targets(jnp.append(transition.next_obs - transition.obs, transition.reward))
        variance = self.noise * jnp.mean(jnp.mean(std**2, axis=0) + jnp.var(mean, axis=0))
        learned = jax.vmap(regress, (0, 0, 0, None))(belief, read, seen[None] - mean, variance)
        good = jnp.isfinite(learned.correction).all() & jnp.isfinite(learned.covariance).all()
        learned = jax.tree.map(lambda new, old: jnp.where(good, new, old), learned, belief)
        rho = 1.0 - 1.0 / self.memory
        doubted = rho * learned.covariance + (1.0 - rho) * self._prior(read.shape[1])[None]
        return learned._replace(covariance=doubted)

    def sample(self, belief: LayerBelief, obs: Obs, key: Key) -> Correction:
        """The posterior's mean."""
        return belief.correction

    def centre(self, belief: LayerBelief, obs: Obs) -> Correction:
        """The posterior's mean."""
        return belief.correction

    def predict(
        self, hypothesis: Correction, obs: Float[Array, "member obs"], action: Float[Array, "*member act"]
    ) -> Outcome:
        """What each elite expects with its last layer corrected: no more arithmetic than without."""
        last, mine = self.base.decoder.nets.layers[-1], hypothesis[: self.members]
        outputs = mine.shape[2]
        weight = last.weight.at[: self.members, :, :outputs].add(mine[:, :-1])
        bias = last.bias.at[: self.members, :outputs].add(mine[:, -1])
        where = lambda base: (base.decoder.nets.layers[-1].weight, base.decoder.nets.layers[-1].bias)  # noqa: E731
        return eqx.tree_at(where, self.base, (weight, bias)).predict((), obs, action)

    def _features(self, obs: Obs, action: Action) -> Float[Array, "member features"]:
        decoder = self.base.decoder
        x = decoder.inputs(jnp.concatenate([obs, action]))
        nets = decoder.elite_nets()
        read = jax.vmap(lambda layers: eqx.tree_at(lambda n: n.layers, nets, layers).hidden(x))(nets.layers)
        return jnp.concatenate([read, jnp.ones((self.members, 1))], axis=1)

    def _prior(self, features: int) -> Float[Array, "features features"]:
        return self.layer_std**2 * jnp.eye(features)


def regress(
    belief: LayerBelief, read: Float[Array, " features"], target: Float[Array, " outputs"], variance: Scalar
) -> LayerBelief:
    """One row of Bayesian linear regression, of one elite; the width is the same for all outputs."""
    spread = belief.covariance @ read
    gain = spread / (read @ spread + variance)
    correction = belief.correction + jnp.outer(gain, target - read @ belief.correction)
    covariance = belief.covariance - jnp.outer(gain, spread)
    return LayerBelief(correction, 0.5 * (covariance + covariance.T))


def refine(model: Any, **settings: Any) -> RefinedDynamics:
    """A trained ensemble whose last layers go on learning."""
    if not isinstance(model, EnsembleDynamics):
        raise RefplanError(
            f"last layers of an ensemble go on learning, got {type(model).__name__}. Train one: refplan fit dynamics "
            "DATA --model ensemble, or --model refined for both in one."
        )
    return RefinedDynamics(model, **settings)
