"""What it means to act: `start`, `observe`, `act`.

Priors, planners and imported policies are all agents. An agent is an immutable pytree; what it remembers of an episode
is a separate `state` that goes in and comes out. Everything is written for one episode; callers `vmap`.
"""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from refplan.errors import RefplanError
from refplan.turns import in_turns
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

    @property
    def rows(self) -> int:
        """How many rows of a network one decision computes side by side."""
        return 1


class AbstractPolicy(AbstractAgent):
    """An agent that can also be sampled."""

    @abstractmethod
    def sample(self, state: State, obs: Obs, key: Key) -> tuple[Action, Scalar]:
        """A random action of the policy and its log-probability."""


class AbstractPrior(AbstractPolicy):
    """A policy whose proposals a planner can weigh: it also knows what a state is worth."""

    @abstractmethod
    def value(self, state: State, obs: Obs) -> Scalar:
        """The expected discounted return from `obs` on when the policy acts."""

    def under(self, hypothesis: Any) -> "AbstractPrior":
        """The prior as it is in one possible world of a model; most priors know only the world of their data."""
        return self


def prior_bound(prior: Any, name: str) -> Action:
    """The action bound a prior was trained in."""
    bound = getattr(prior, name, None)
    bound = getattr(getattr(prior, "policy", None), name, None) if bound is None else bound
    if bound is None:
        raise RefplanError(
            f"the prior ({type(prior).__name__}) does not say its action bounds; give the planner low=... and high=..."
        )
    return jnp.asarray(bound, jnp.float32)


class RandomAgent(AbstractAgent):
    """Uniformly random actions: the floor of every table."""

    low: Action = eqx.field(converter=jnp.asarray)
    high: Action = eqx.field(converter=jnp.asarray)

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
    """A policy that executes its sampled actions instead of its own choice."""

    policy: AbstractPolicy

    def start(self) -> State:
        """The policy's start."""
        return self.policy.start()

    def observe(self, state: State, transition: Transition) -> State:
        """The policy's reflection."""
        return self.policy.observe(state, transition)

    def act(self, state: State, obs: Obs, key: Key) -> tuple[Action, State]:
        """One sampled action; the policy's own `act` only advances the state."""
        key_sample, key_act = jr.split(key)
        action, _ = self.policy.sample(state, obs, key_sample)
        _, state = self.policy.act(state, obs, key_act)
        return action, state

    @property
    def rows(self) -> int:
        """The policy's."""
        return self.policy.rows


def act_many(agent: AbstractAgent, state: State, obs: Any, keys: Any) -> tuple[Any, State]:
    """One decision in every episode side by side; planners take turns (see `turns.py`)."""
    return in_turns(agent.act, agent.rows, state, obs, keys)


def start_many(agent: AbstractAgent, episodes: int) -> State:
    """The start states of `episodes` episodes side by side."""
    state = agent.start()
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (episodes, *jnp.shape(leaf))), state)
