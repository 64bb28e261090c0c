"""A belief over worlds the data did not show: the learned world with other actuators, other ground, another pull.

The data come from one world, so an encoder trained on them has nothing to tell worlds apart by. Worlds that differ can
be made from the learned one, s' = f(s, a), without any further training:

    s' = f(s - o, g * a) + o + c + b,    o <- o + c

with gains g on the actuators (1: as logged, 0: broken), offsets o of the observations (another ground height or slope,
a shifted sensor), the climb c by which the offsets change every step (ground that rises under a robot that runs) and
drifts b of the change per step that leave the offsets alone (wind, a slope's pull). A world is the vector
m = (g - 1, o, b, c), each part in units of what is expected of it, so that m ~ N(0, I) before anything was seen and
m = 0 is the world of the data. What an episode says about it is a Gaussian that an extended Kalman filter keeps:
narrower with evidence, wider with time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float

from refplan.agent import AbstractPrior, prior_bound
from refplan.dynamics.base import (
    AbstractDynamics,
    AbstractLatentDynamics,
    AbstractMarkovDynamics,
    AbstractTermination,
    Outcome,
)
from refplan.dynamics.ensemble import EnsembleDynamics
from refplan.errors import RefplanError
from refplan.types import Action, Flag, Key, Obs, Scalar, Transition


class World(NamedTuple):
    """One hypothesis in natural units."""

    gain: Float[Array, " act"]
    offset: Obs
    drift: Obs
    climb: Obs


class WorldBelief(NamedTuple):
    """m ~ N(mean, covariance)."""

    mean: Float[Array, " latent"]
    covariance: Float[Array, "latent latent"]


def predict_in(
    world: World,
    home: Callable[[Array, Array], Outcome],
    obs: Float[Array, "member obs"],
    action: Float[Array, "*member act"],
) -> Outcome:
    """s' = f(s - o, g * a) + o + c + b, with f what is expected at home."""
    gain = world.gain.reshape((1,) * (action.ndim - 1) + world.gain.shape)
    outcome = home(obs - world.offset[None], action * gain)
    return outcome._replace(next_obs=outcome.next_obs + (world.offset + world.drift + world.climb)[None])


class AbstractWorlds(eqx.Module):
    """What is expected of other worlds before any of them is met: the settings of the belief.

    `gain_std`, `offset_std` (in standard deviations of the logged observations), `drift_std` and `climb_std` (in those
    of their change per step) say how different worlds are expected to be. What was learned is doubted again over
    `memory` steps, up to what was expected before, so that the belief can follow a world that changes. A step that no
    believed world explains counts less (`outlier`: from how many standard deviations on); `noise` is the factor on the
    ensemble's own variance. Every part of m is taken as it is at home until it is `significance` standard deviations
    away from there: some fifty parts are asked a thousand times per episode, and at two standard deviations some of
    them are away from home by chance at any time. Draws have `doubt` times the posterior's width around its mean (1:
    the posterior itself): a prior is told a world anew in every step, and one that jumps about makes it stumble.
    """

    gain_std: Scalar = eqx.field(converter=jnp.asarray, default=0.5, kw_only=True)
    offset_std: Scalar = eqx.field(converter=jnp.asarray, default=0.3, kw_only=True)
    drift_std: Scalar = eqx.field(converter=jnp.asarray, default=0.1, kw_only=True)
    climb_std: Scalar = eqx.field(converter=jnp.asarray, default=0.03, kw_only=True)
    memory: Scalar = eqx.field(converter=jnp.asarray, default=200.0, kw_only=True)
    noise: Scalar = eqx.field(converter=jnp.asarray, default=2.0, kw_only=True)
    outlier: Scalar = eqx.field(converter=jnp.asarray, default=3.0, kw_only=True)
    significance: Scalar = eqx.field(converter=jnp.asarray, default=4.0, kw_only=True)
    doubt: Scalar = eqx.field(converter=jnp.asarray, default=0.0, kw_only=True)


class WorldsDynamics(AbstractLatentDynamics, AbstractWorlds):
    """The worlds around a learned one, and the belief which of them this is."""

    base: AbstractMarkovDynamics
    obs_std: Float[Array, " obs"]
    change_std: Float[Array, " outputs"]  # of [s' - s, r]
    action_size: int = eqx.field(static=True)

    @property
    def termination(self) -> AbstractTermination:  # ty: ignore[incompatible-property-override], Equinox allows it
        """The learned world's: where it ends is a matter of the task."""
        return self.base.termination

    @property
    def members(self) -> int:
        """The elites."""
        return self.base.members

    def adapt(self, prior: AbstractPrior) -> AbstractPrior:
        """The prior, told which world it is in."""
        from refplan.dynamics.adapted import Adapted

        if isinstance(prior, Adapted):
            return prior
        return Adapted(prior, self, prior_bound(prior, "low"), prior_bound(prior, "high"))

    @property
    def draws(self) -> int:
        """One: what is not known to have changed is the same in every draw."""
        return 1

    def best(self, count: int) -> AbstractDynamics:
        """The first `count` elites."""
        fewer: Any = self.base.best(count)
        return dataclasses.replace(self, base=fewer)

    def home(self) -> Float[Array, " latent"]:
        """The world of the data: m = 0."""
        return jnp.zeros(self.action_size + 3 * self.obs_std.shape[0])

    def start(self) -> WorldBelief:
        """N(0, I)."""
        return WorldBelief(self.home(), jnp.eye(self.home().shape[0]))

    def read(self, hypothesis: Float[Array, " latent"]) -> World:
        """A latent vector in natural units; gains are kept in [0, 2].

        Their derivative is that of the free gain: an actuator that is off lies on the border, and a filter that sees no
        slope there would learn nothing more about it and forget what it knew.
        """
        obs, act = self.obs_std.shape[0], self.action_size
        gain, offset, drift, climb = jnp.split(hypothesis, (act, act + obs, act + 2 * obs))
        free = 1.0 + self.gain_std * gain
        return World(
            free + jax.lax.stop_gradient(jnp.clip(free, 0.0, 2.0) - free),
            self.offset_std * offset * self.obs_std,
            self.drift_std * drift * self.change_std[:-1],
            self.climb_std * climb * self.change_std[:-1],
        )

    def write(self, world: World) -> Float[Array, " latent"]:
        """The latent vector of a world; the inverse of `read`."""
        gain = (world.gain - 1.0) / self.gain_std
        offset = world.offset / (self.offset_std * self.obs_std)
        drift = world.drift / (self.drift_std * self.change_std[:-1])
        return jnp.concatenate([gain, offset, drift, world.climb / (self.climb_std * self.change_std[:-1])])

    def predict(
        self, hypothesis: Float[Array, " latent"], obs: Float[Array, "member obs"], action: Float[Array, "*member act"]
    ) -> Outcome:
        """What each elite expects in the world m."""
        return predict_in(self.read(hypothesis), lambda at, arrives: self.base.predict((), at, arrives), obs, action)

    def expected(
        self, hypothesis: Float[Array, " latent"], obs: Obs, action: Action
    ) -> tuple[Float[Array, " outputs"], Float[Array, " outputs"]]:
        """(mean, variance) of (s' - s, r) over all elites, in standard deviations of the logged ones."""
        outcome = self.predict_from(hypothesis, obs, action)
        scale = self.change_std[None]
        mean = jnp.concatenate([outcome.next_obs - obs[None], outcome.reward[:, None]], axis=1) / scale
        std = jnp.concatenate([outcome.next_obs_std, outcome.reward_std[:, None]], axis=1) / scale
        return jnp.mean(mean, axis=0), jnp.mean(std**2, axis=0) + jnp.var(mean, axis=0)

    def observe(self, belief: WorldBelief, transition: Transition) -> WorldBelief:
        """One step of the extended Kalman filter; a step that is not finite says nothing."""
        seen = jnp.append(transition.next_obs - transition.obs, transition.reward) / self.change_std
        slope, mean, variance = self.linearised(belief.mean, transition.obs, transition.action)
        updated = kalman_update(belief, seen - mean, slope, self.noise * variance, self.outlier)
        good = jnp.isfinite(updated.mean).all() & jnp.isfinite(updated.covariance).all()
        kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), updated, belief)
        return self.move_on(kept._replace(mean=self.within(kept.mean)))

    def within(self, mean: Float[Array, " latent"]) -> Float[Array, " latent"]:
        """The nearest world whose gains lie in [0, 2]: what is beyond the border would have to be unlearned again."""
        most = jnp.full(mean.shape, jnp.inf).at[: self.action_size].set(1.0 / self.gain_std)
        return jnp.clip(mean, -most, most)

    def linearised(
        self, hypothesis: Float[Array, " latent"], obs: Obs, action: Action
    ) -> tuple[Float[Array, "outputs latent"], Float[Array, " outputs"], Float[Array, " outputs"]]:
        """H, and (mean, variance) as of `expected`; what is only added to s' needs no derivative of the ensemble."""
        inside, added = jnp.split(hypothesis, [self.action_size + obs.shape[0]])

        def mean_of(inside: Float[Array, " inside"]) -> tuple[Array, tuple[Array, Array]]:
            mean, variance = self.expected(jnp.concatenate([inside, added]), obs, action)
            return mean, (mean, variance)

        slope, (mean, variance) = jax.jacfwd(mean_of, has_aux=True)(inside)
        one_each = jnp.eye(mean.shape[0], obs.shape[0])
        return jnp.concatenate([slope, self.drift_std * one_each, self.climb_std * one_each], axis=1), mean, variance

    def move_on(self, belief: WorldBelief) -> WorldBelief:
        """To the next step: o <- o + c, that is m <- F m; then doubt grows, C <- rho^2 F C F^T + (1 - rho^2) I."""
        obs, act = self.obs_std.shape[0], self.action_size
        offsets = act + jnp.arange(obs)
        per_step = self.climb_std * self.change_std[:-1] / (self.offset_std * self.obs_std)
        rest = jnp.eye(belief.mean.shape[0])
        move = rest.at[offsets, offsets + 2 * obs].set(per_step)
        rho = 1.0 - 1.0 / self.memory
        return WorldBelief(move @ belief.mean, rho**2 * move @ belief.covariance @ move.T + (1.0 - rho**2) * rest)

    def posterior(self, belief: WorldBelief, obs: Obs) -> tuple[Float[Array, " latent"], Float[Array, " latent"]]:
        """(mean, log-variance) of every part of m."""
        return belief.mean, jnp.log(jnp.maximum(jnp.diagonal(belief.covariance), 1e-12))

    def sample(self, belief: WorldBelief, obs: Obs, key: Key) -> Float[Array, " latent"]:
        """m^j ~ N(mean, doubt^2 covariance) in what has changed, home in the rest."""

        def draw() -> Float[Array, " latent"]:
            # Symmetric root: the covariance may be singular to rounding, which a Cholesky factor does not survive.
            values, vectors = jnp.linalg.eigh(belief.covariance)
            width = self.doubt * jnp.sqrt(jnp.maximum(values, 0.0))
            return belief.mean + vectors @ (width * jr.normal(key, belief.mean.shape))

        drawn = jax.lax.cond(self.doubt > 0, draw, lambda: belief.mean)
        return jnp.where(self.changed(belief), drawn, 0.0)

    def centre(self, belief: WorldBelief, obs: Obs) -> Float[Array, " latent"]:
        """The mean of what has changed, home for the rest."""
        return jnp.where(self.changed(belief), belief.mean, 0.0)

    def away(self, belief: WorldBelief) -> Flag:
        """Whether any part of m has changed."""
        return self.changed(belief).any()

    def changed(self, belief: WorldBelief) -> Bool[Array, " latent"]:
        """Which parts of m are `significance` standard deviations away from home."""
        return belief.mean**2 > self.significance**2 * jnp.diagonal(belief.covariance)


def around(model: Any, **settings: Any) -> WorldsDynamics:
    """The worlds around a trained ensemble, counted in the units it was trained in."""
    if not isinstance(model, EnsembleDynamics):
        raise RefplanError(
            f"worlds are made around an ensemble, got {type(model).__name__}. Train one: refplan fit dynamics DATA "
            "--model ensemble, or --model worlds for both in one."
        )
    inputs, targets = model.decoder.inputs, model.decoder.targets
    size = targets.std.shape[0] - 1
    return WorldsDynamics(model, inputs.std[:size], targets.std, inputs.std.shape[0] - size, **settings)


def kalman_update(
    belief: WorldBelief,
    surprise: Float[Array, " outputs"],
    slope: Float[Array, "outputs latent"],
    variance: Float[Array, " outputs"],
    outlier: Scalar,
) -> WorldBelief:
    """C <- C - K S K^T, mean <- mean + K surprise, K = C H^T S^-1, S = H C H^T + R.

    An entry of R grows where its surprise is more than `outlier` standard deviations: contacts make errors that no
    Gaussian foresees, and one of them must not decide which world this is.
    """
    spread = slope @ belief.covariance @ slope.T
    expected = jnp.diagonal(spread) + variance
    excess = jnp.maximum(surprise**2 / (outlier**2 * expected), 1.0)
    total = spread + jnp.diag(variance * excess + (excess - 1.0) * jnp.diagonal(spread))
    gain = jnp.linalg.solve(total, slope @ belief.covariance).T
    mean = belief.mean + gain @ surprise
    covariance = belief.covariance - gain @ total @ gain.T
    return WorldBelief(mean, 0.5 * (covariance + covariance.T))
