"""What it means to act: `start`, `observe`, `act`.

Priors, planners and imported policies are all agents. An agent is an immutable pytree; what it remembers of an episode
is a separate `state` that goes in and comes out. Everything is written for one episode; callers `vmap`.
"""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.random as jr

from refplan.types import Action, Key, Obs, Scalar, State, Transition


class AbstractAgent(eqx.Module):
    """Anything that acts in an episode."""

    @abstractmethod
    def start(self) -> State:
        """The state before anything of an episode was seen."""

    @abstractmethod
    def observe(self, state: State, transition: Transition) -> State:
        """Reflect on one real step."""

    @abstractmethod
    def act(self, state: State, obs: Obs, key: Key) -> tuple[Action, State]:
        """The action to execute at `obs`, inside the action bounds, and the new state."""


class AbstractPrior(AbstractAgent):
    """An agent whose proposals a planner can weigh: it also samples, and it knows what a state is worth."""

    @abstractmethod
    def sample(self, state: State, obs: Obs, key: Key) -> tuple[Action, Scalar]:
        """A random action of the policy and its log-probability."""

    @abstractmethod
    def value(self, state: State, obs: Obs) -> Scalar:
        """The expected discounted return from `obs` on when the policy acts."""


class RandomAgent(AbstractAgent):
    """Uniformly random actions: the floor of every table."""

    low: Action
    high: Action

    def start(self) -> State:
        """Nothing to remember."""
        return ()

    def observe(self, state: State, transition: Transition) -> State:
        """Nothing to learn."""
        return state

    def act(self, state: State, obs: Obs, key: Key) -> tuple[Action, State]:
        """A uniform draw from the action box."""
        return jr.uniform(key, self.low.shape, self.low.dtype, self.low, self.high), state


class Sampled(AbstractAgent):
    """A prior that executes its sampled actions instead of its own choice."""

    prior: AbstractPrior

    def start(self) -> State:
        """The prior's start."""
        return self.prior.start()

    def observe(self, state: State, transition: Transition) -> State:
        """The prior's reflection."""
        return self.prior.observe(state, transition)

    def act(self, state: State, obs: Obs, key: Key) -> tuple[Action, State]:
        """One sampled action; the prior's own `act` only advances the state."""
        key_sample, key_act = jr.split(key)
        action, _ = self.prior.sample(state, obs, key_sample)
        _, state = self.prior.act(state, obs, key_act)
        return action, state


def start_many(agent: AbstractAgent, episodes: int) -> State:
    """The start states of `episodes` episodes side by side."""
    state = agent.start()
    return jax.tree.map(lambda leaf: jax.numpy.broadcast_to(leaf, (episodes, *jax.numpy.shape(leaf))), state)
