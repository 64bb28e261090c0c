"""Any prior, told which world it is in; and such a prior acting by itself, without a planner."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from refplan.agent import AbstractAgent, AbstractPrior
from refplan.dynamics.worlds import World, WorldBelief, WorldsDynamics
from refplan.types import Action, Key, Obs, Scalar, State, Transition


class Adapted(AbstractPrior):
    """pi(a | s, m) = pi(g a | s - o) and V(s, m) = V(s - o) in a world m = (g, o, b) of `dynamics/worlds.py`.

    In a world whose ground lies higher, the prior sees the robot as it would stand at home; an actuator at half its
    strength gets twice the command, as far as the bounds allow (never more than 1 / `weakest` times).

    A prior that was trained with the gains behind its observations (`conditioned`, see `dynamics/relabel.py`) knows
    itself what to do about them: pi(a | s - o, g), V(s - o, g).
    """

    prior: AbstractPrior
    worlds: WorldsDynamics
    low: Action = eqx.field(converter=jnp.asarray)
    high: Action = eqx.field(converter=jnp.asarray)
    weakest: Scalar = eqx.field(converter=jnp.asarray, default=0.2)
    conditioned: bool = eqx.field(static=True, default=False)
    latent: Float[Array, " latent"] | None = None  # None: home

    def under(self, hypothesis: Float[Array, " latent"]) -> "Adapted":
        """The prior in the world m."""
        return dataclasses.replace(self, latent=hypothesis)

    def start(self) -> State:
        """The prior's."""
        return self.prior.start()

    def observe(self, state: State, transition: Transition) -> State:
        """The prior reflects on the step as it would have been at home."""
        world = self.world
        step = transition._replace(
            obs=self._view(world, transition.obs),
            action=transition.action if self.conditioned else transition.action * world.gain,
            next_obs=self._view(world, transition.next_obs),
        )
        return self.prior.observe(state, step)

    def act(self, state: State, obs: Obs, key: Key) -> tuple[Action, State]:
        """The prior's action at home, as this world needs it."""
        world = self.world
        action, state = self.prior.act(state, self._view(world, obs), key)
        return self._command(world, action), state

    def sample(self, state: State, obs: Obs, key: Key) -> tuple[Action, Scalar]:
        """A sampled action at home, as this world needs it; its density is that of the action at home."""
        world = self.world
        action, density = self.prior.sample(state, self._view(world, obs), key)
        return self._command(world, action), density

    def value(self, state: State, obs: Obs) -> Scalar:
        """The prior's value of the state as it looks at home."""
        return self.prior.value(state, self._view(self.world, obs))

    @property
    def world(self) -> World:
        """Where the prior believes to be, in natural units."""
        return self.worlds.read(self.worlds.home() if self.latent is None else self.latent)

    def _view(self, world: World, obs: Obs) -> Obs:
        """What the prior sees."""
        seen = obs - world.offset
        return jnp.concatenate([seen, world.gain]) if self.conditioned else seen

    def _command(self, world: World, action: Action) -> Action:
        if self.conditioned:
            return action
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
