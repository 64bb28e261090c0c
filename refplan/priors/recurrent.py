"""A policy and critics that remember the episode: MAPLE's networks, and the prior they make.

Policy and critics each have a GRU over (s_t, a_{t-1}) whose state is read through a small linear layer and joins the
observation: the "context" from which they can tell which world they are in.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from refplan.agent import AbstractPrior
from refplan.gru import GRU
from refplan.nn import MLP, Linear, Normaliser, ensemble_apply, make_mlp, split_gaussian, tanh_gaussian_sample
from refplan.priors.policy import to_unit, to_world
from refplan.types import Action, Key, Obs, Scalar, Transition


class Memory(NamedTuple):
    """What is remembered before s_t is seen: both GRUs' states, and a_{t-1} in [-1, 1]; zeros at the start."""

    policy: Float[Array, "*batch memory"]
    value: Float[Array, "*batch memory"]
    action: Float[Array, "*batch act"]


class Context(eqx.Module):
    """A GRU over (s_t, a_{t-1}) and what is read from it; observations come normalised, actions in [-1, 1]."""

    gru: GRU
    embed: Linear

    def advance(
        self, memory: Float[Array, " memory"], obs: Obs, action: Action
    ) -> tuple[Float[Array, " context"], Float[Array, " memory"]]:
        """(context at s_t, memory after it)."""
        memory = self.gru(self.gru.inputs(jnp.concatenate([obs, action])), memory)
        return self.embed(memory), memory

    def run(
        self,
        memory: Float[Array, "batch memory"],
        obs: Float[Array, "batch time obs"],
        action: Float[Array, "batch time act"],
    ) -> Float[Array, "batch time context"]:
        """The contexts along sequences; `action` are those before each observation."""
        gates = self.gru.inputs(jnp.concatenate([obs, action], axis=2)).swapaxes(0, 1)

        def step(memory: Float[Array, "batch memory"], at: Float[Array, "batch gates"]) -> tuple[Array, Array]:
            memory = self.gru(at, memory)
            return memory, memory

        _, memories = jax.lax.scan(step, memory, gates)
        return self.embed(memories).swapaxes(0, 1)


def make_context(obs: int, action: int, memory: int, context: int, key: Key) -> Context:
    """A fresh context; weights uniform in ±1/sqrt(memory) (PyTorch's default for a GRU)."""
    key_gru, key_embed = jr.split(key)
    shapes = (obs + action, memory)
    flat = jr.uniform(key_gru, ((sum(shapes) + 2) * 3 * memory,), minval=-1.0, maxval=1.0) * memory**-0.5
    both = flat.reshape(-1, 3 * memory)
    inputs = Linear(both[: shapes[0]], both[-1])
    gru = GRU(inputs, Linear(both[shapes[0] : -2], both[-2]))
    return Context(gru, make_mlp((memory, context), key_embed).layers[0])


class RecurrentActorCritic(AbstractPrior):
    """Acts, samples and judges from the observation and the contexts of the episode; V(s) = min_i Q_i(s, pi(s)).

    The memory moves in `observe`, with the action that was executed, whoever chose it; `act` leaves it as it is.
    """

    policy_context: Context
    value_context: Context
    actor: MLP
    critics: MLP
    normaliser: Normaliser
    low: Action
    high: Action

    def start(self) -> Memory:
        """Zeros."""
        size = self.policy_context.gru.recurrent.weight.shape[0]
        return Memory(jnp.zeros(size), jnp.zeros(size), jnp.zeros_like(self.low))

    def observe(self, state: Memory, transition: Transition) -> Memory:
        """Both GRUs look at s_t; a_t is kept for the next step."""
        seen = self.normaliser(transition.obs)
        _, policy = self.policy_context.advance(state.policy, seen, state.action)
        _, value = self.value_context.advance(state.value, seen, state.action)
        return Memory(policy, value, to_unit(transition.action, self.low, self.high))

    def act(self, state: Memory, obs: Obs, key: Key) -> tuple[Action, Memory]:
        """The mean action."""
        return to_world(jnp.tanh(self._head(state, obs)[0]), self.low, self.high), state

    def sample(self, state: Memory, obs: Obs, key: Key) -> tuple[Action, Scalar]:
        """A random action and its log-probability."""
        unit, log_prob = tanh_gaussian_sample(*self._head(state, obs), key)
        scale = jnp.sum(jnp.log(0.5 * (self.high - self.low)))
        return to_world(unit, self.low, self.high), log_prob - scale

    def value(self, state: Memory, obs: Obs) -> Scalar:
        """The smallest critic at the policy's own action."""
        seen = self.normaliser(obs)
        context, _ = self.value_context.advance(state.value, seen, state.action)
        return jnp.min(self.judge(self.critics, context, seen, jnp.tanh(self._head(state, obs)[0])))

    def _head(self, state: Memory, obs: Obs) -> tuple[Action, Action]:
        seen = self.normaliser(obs)
        context, _ = self.policy_context.advance(state.policy, seen, state.action)
        return self.distribution(context, seen)

    def distribution(
        self, context: Float[Array, "*batch context"], seen: Float[Array, "*batch obs"]
    ) -> tuple[Float[Array, "*batch act"], Float[Array, "*batch act"]]:
        """(m, log s) of u = tanh(m + s e) at normalised observations."""
        return split_gaussian(self.actor(jnp.concatenate([seen, context], axis=-1)))

    def judge(
        self,
        critics: MLP,
        context: Float[Array, "*batch context"],
        seen: Float[Array, "*batch obs"],
        unit: Float[Array, "*batch act"],
    ) -> Float[Array, "critic *batch"]:
        """Q_i of given critics at normalised observations and actions in [-1, 1]."""
        return ensemble_apply(critics, jnp.concatenate([seen, context, unit], axis=-1))[..., 0]
