"""Worlds whose last layers go on learning: first which world this is, then what no such world explains.

`worlds.py` finds worlds of its own form only; `refined.py` needs no form, but knows nothing of the prior and is slow
where a change has a name. Here one step is read twice. The filter over m = (gains, offsets, drifts, climbs) sees it
beside the ensemble as trained, so that nothing learned in the episode can hide a change from it. What the world at the
centre of that belief leaves unexplained, the last layers learn:

    s' = f_W(s - o, g * a) + o + c + b,    m | history by the filter,    W | history, m by Bayesian regression

They learn and speak only while an actuator is known to have changed. At home the ensemble was trained on far more than
one episode, and what the layers make of that episode is mostly its noise; ground that lies elsewhere is home seen from
elsewhere. But a robot with another strength gets itself to where the data never was.
"""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from refplan.agent import AbstractPrior
from refplan.dynamics.base import AbstractDynamics, AbstractTermination, Outcome
from refplan.dynamics.ensemble import EnsembleDynamics
from refplan.dynamics.refined import Correction, LayerBelief, RefinedDynamics, refine
from refplan.dynamics.worlds import AbstractWorlds, WorldBelief, WorldsDynamics, around, predict_in
from refplan.types import Flag, Key, Obs, Scalar, Transition


class RefinedWorld(NamedTuple):
    """One hypothesis: which world, and how far its last layers are from the trained ones."""

    latent: Float[Array, " latent"]
    correction: Correction


class RefinedWorldBelief(NamedTuple):
    """What is believed about the world, and about what it leaves unexplained."""

    world: WorldBelief
    layers: LayerBelief


class AbstractRefinedWorlds(AbstractWorlds):
    """What is expected of worlds (see `AbstractWorlds`) and of last layers (see `AbstractRefining`)."""

    layer_std: Scalar = eqx.field(converter=jnp.asarray, default=0.03, kw_only=True)
    layer_memory: Scalar = eqx.field(converter=jnp.asarray, default=500.0, kw_only=True)
    layer_noise: Scalar = eqx.field(converter=jnp.asarray, default=1.0, kw_only=True)


class RefinedWorldsDynamics(AbstractDynamics, AbstractRefinedWorlds):
    """A belief over the worlds around an ensemble, and over the last layers of that ensemble."""

    base: EnsembleDynamics

    @property
    def worlds(self) -> WorldsDynamics:
        """The worlds, as if nothing had been learned in the episode."""
        return around(
            self.base, **{field.name: getattr(self, field.name) for field in dataclasses.fields(AbstractWorlds)}
        )

    @property
    def layers(self) -> RefinedDynamics:
        """The ensemble at home, learning on."""
        return refine(self.base, layer_std=self.layer_std, memory=self.layer_memory, noise=self.layer_noise)

    @property
    def termination(self) -> AbstractTermination:  # ty: ignore[incompatible-property-override], Equinox allows it
        """The ensemble's."""
        return self.base.termination

    @property
    def members(self) -> int:
        """The elites."""
        return self.base.members

    @property
    def draws(self) -> int:
        """One: all draws are the same."""
        return 1

    def adapt(self, prior: AbstractPrior) -> AbstractPrior:
        """The prior, told which world it is in."""
        return self.worlds.adapt(prior)

    def as_trained(self) -> AbstractDynamics:
        """The ensemble: a belief is a matrix of 201 x 201 per elite."""
        return self.base

    def best(self, count: int) -> AbstractDynamics:
        """The first `count` elites; a belief of all of them serves."""
        fewer: Any = self.base.best(count)
        return dataclasses.replace(self, base=fewer)

    def start(self) -> RefinedWorldBelief:
        """Home, as trained."""
        return RefinedWorldBelief(self.worlds.start(), self.layers.start())

    def observe(self, belief: RefinedWorldBelief, transition: Transition) -> RefinedWorldBelief:
        """The filter's step beside the ensemble as trained; then the layers', on what it would have been at home."""
        world_belief = self.worlds.observe(belief.world, transition)
        world = self.worlds.read(self.worlds.centre(world_belief, transition.next_obs))
        at_home = transition._replace(
            obs=transition.obs - world.offset,
            action=transition.action * world.gain,
            next_obs=transition.next_obs - world.offset - world.drift - world.climb,
        )
        learned, learns = self.layers.observe(belief.layers, at_home), self.learns(world_belief)
        layers = jax.tree.map(lambda new, old: jnp.where(learns, new, old), learned, belief.layers)
        return RefinedWorldBelief(world_belief, layers)

    def believed(self, belief: RefinedWorldBelief, obs: Obs) -> tuple[Float[Array, " latent"], Float[Array, " latent"]]:
        """The world's part: layers are too many to look at."""
        return self.worlds.believed(belief.world, obs)

    def learns(self, belief: WorldBelief) -> Flag:
        """Whether an actuator is known to have changed."""
        return self.worlds.changed(belief)[: self.worlds.action_size].any()

    def away(self, belief: RefinedWorldBelief) -> Flag:
        """Whether the filter knows of any change."""
        return self.worlds.away(belief.world)

    def sample(self, belief: RefinedWorldBelief, obs: Obs, key: Key) -> RefinedWorld:
        """A world of the filter's, with the layers at their posterior's mean."""
        return RefinedWorld(self.worlds.sample(belief.world, obs, key), self._spoken(belief))

    def centre(self, belief: RefinedWorldBelief, obs: Obs) -> RefinedWorld:
        """The centre of both; with actuators as they were, the ensemble as trained."""
        return RefinedWorld(self.worlds.centre(belief.world, obs), self._spoken(belief))

    def predict(
        self, hypothesis: RefinedWorld, obs: Float[Array, "member obs"], action: Float[Array, "*member act"]
    ) -> Outcome:
        """What each elite expects in the world m with its last layer corrected."""

        def home(obs: Float[Array, "member obs"], action: Float[Array, "*member act"]) -> Outcome:
            return self.layers.predict(hypothesis.correction, obs, action)

        return predict_in(self.worlds.read(hypothesis.latent), home, obs, action)

    def _spoken(self, belief: RefinedWorldBelief) -> Correction:
        return jnp.where(self.learns(belief.world), belief.layers.correction, 0.0)


def refine_worlds(model: Any, **settings: Any) -> RefinedWorldsDynamics:
    """The worlds around a trained ensemble, whose last layers go on learning."""
    around(model)  # says what is wrong with any other model
    return RefinedWorldsDynamics(model, **settings)
