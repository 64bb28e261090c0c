"""Any prior, told which world it is in; and such a prior acting by itself, without a planner."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from refplan.agent import AbstractAgent, AbstractPrior, prior_bound
from refplan.dynamics.worlds import World, WorldBelief, WorldsDynamics
from refplan.types import Action, Key, Obs, Scalar, State, Transition


class Conditioned(AbstractPrior):
    """pi(a | s, g), V(s, g): a prior that was trained with the actuators' gains g behind its observations.

    Alone it takes all actuators for whole, g = 1, and is a prior like any other.
    """

    prior: AbstractPrior
    gain: Float[Array, " act"] = eqx.field(converter=jnp.asarray)

    @property
    def low(self) -> Action:
        """The prior's bound."""
        return prior_bound(self.prior, "low")

    @property
    def high(self) -> Action:
        """The prior's bound."""
        return prior_bound(self.prior, "high")

    def start(self) -> State:
        """The prior's."""
        return self.prior.start()

    def observe(self, state: State, transition: Transition) -> State:
        """The prior's, with the gains on view."""
        seen = transition._replace(obs=self._view(transition.obs), next_obs=self._view(transition.next_obs))
        return self.prior.observe(state, seen)

    def act(self, state: State, obs: Obs, key: Key) -> tuple[Action, State]:
        """The prior's, with the gains on view."""
        return self.prior.act(state, self._view(obs), key)

    def sample(self, state: State, obs: Obs, key: Key) -> tuple[Action, Scalar]:
        """The prior's, with the gains on view."""
        return self.prior.sample(state, self._view(obs), key)

    def value(self, state: State, obs: Obs) -> Scalar:
        """The prior's, with the gains on view."""
        return self.prior.value(state, self._view(obs))

    def _view(self, obs: Obs) -> Float[Array, " both"]:
        return jnp.concatenate([obs, self.gain])


class Adapted(AbstractPrior):
    """pi(a | s, m) = pi(g a | s - o) and V(s, m) = V(s - o) in a world m = (g, o, b) of `dynamics/worlds.py`.

    In a world whose ground lies higher, the prior sees the robot as it would stand at home; an actuator at half its
    strength gets twice the command, as far as the bounds allow (never more than 1 / `weakest` times).

    A `Conditioned` prior knows itself what to do about gains: pi(a | s - o, g), V(s - o, g).
    """

    prior: AbstractPrior
    worlds: WorldsDynamics
    low: Action = eqx.field(converter=jnp.asarray)
    high: Action = eqx.field(converter=jnp.asarray)
    weakest: Scalar = eqx.field(converter=jnp.asarray, default=0.2)
    latent: Float[Array, " latent"] | None = None  # None: home

    def under(self, hypothesis: Any) -> "Adapted":
        """The prior in the world m; a hypothesis that says more than m has it as its `latent`."""
        return dataclasses.replace(self, latent=getattr(hypothesis, "latent", hypothesis))

    def start(self) -> State:
        """The prior's."""
        return self.prior.start()

    def observe(self, state: State, transition: Transition) -> State:
        """The prior reflects on the step as it would have been at home."""
        prior, world = self._told()
        step = transition._replace(
            obs=transition.obs - world.offset,
            action=transition.action * world.gain,
            next_obs=transition.next_obs - world.offset,
        )
        return prior.observe(state, step)

    def act(self, state: State, obs: Obs, key: Key) -> tuple[Action, State]:
        """The prior's action at home, as this world needs it."""
        prior, world = self._told()
        action, state = prior.act(state, obs - world.offset, key)
        return self._command(world, action), state

    def sample(self, state: State, obs: Obs, key: Key) -> tuple[Action, Scalar]:
        """A sampled action at home, as this world needs it; its density is that of the action at home."""
        prior, world = self._told()
        action, density = prior.sample(state, obs - world.offset, key)
        return self._command(world, action), density

    def value(self, state: State, obs: Obs) -> Scalar:
        """The prior's value of the state as it looks at home."""
        prior, world = self._told()
        return prior.value(state, obs - world.offset)

    @property
    def world(self) -> World:
        """Where the prior believes to be, in natural units."""
        return self.worlds.read(self.worlds.home() if self.latent is None else self.latent)

    def _told(self) -> tuple[AbstractPrior, World]:
        """The prior, and the world as it is left for the prior to be told about."""
        world = self.world
        if not isinstance(self.prior, Conditioned):
            return self.prior, world
        knowing = dataclasses.replace(self.prior, gain=jnp.minimum(world.gain, 1.0))
        return knowing, world._replace(gain=jnp.ones_like(world.gain))

    def _command(self, world: World, action: Action) -> Action:
        return jnp.clip(action / jnp.maximum(world.gain, self.weakest), self.low, self.high)


class ReflectingState(NamedTuple):
    """The prior's own state, and what the episode says about the world."""

    prior: State
    belief: WorldBelief


class Reflecting(AbstractAgent):
    """A prior that finds out which world it is in and acts accordingly, without planning: the cheapest belief."""

    prior: Adapted

    def start(self) -> ReflectingState:
        """Nothing seen yet."""
        return ReflectingState(self.prior.start(), self.prior.worlds.start())

    def observe(self, state: ReflectingState, transition: Transition) -> ReflectingState:
        """Prior and belief both reflect on the step."""
        prior = self._here(state, transition.obs).observe(state.prior, transition)
        return ReflectingState(prior, self.prior.worlds.observe(state.belief, transition))

    def act(self, state: ReflectingState, obs: Obs, key: Key) -> tuple[Action, ReflectingState]:
        """The prior's action in the world at the belief's centre."""
        action, prior = self._here(state, obs).act(state.prior, obs, key)
        return action, state._replace(prior=prior)

    def _here(self, state: ReflectingState, obs: Obs) -> Adapted:
        return self.prior.under(self.prior.worlds.centre(state.belief, obs))
