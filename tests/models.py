"""Worlds and models small enough to compute by hand: a linear-quadratic world, a hidden-parameter world, fakes."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from refplan.agent import AbstractPrior
from refplan.dynamics.base import (
    AbstractDynamics,
    AbstractMarkovDynamics,
    AbstractTermination,
    NeverTerminates,
    Outcome,
)
from refplan.types import Transition

A = np.array([[1.0, 0.1], [0.0, 1.0]], np.float32)
B = np.array([[0.0], [0.1]], np.float32)
Q = np.diag([1.0, 0.1]).astype(np.float32)
R = np.array([[0.01]], np.float32)
GAMMA = 0.95


def riccati(gamma: float = GAMMA, rounds: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """(P, K) of the discounted linear-quadratic problem: V(s) = -s'Ps, a = -Ks."""
    P = Q.copy()
    for _ in range(rounds):
        K = gamma * np.linalg.solve(R + gamma * B.T @ P @ B, B.T @ P @ A)
        P = Q + gamma * A.T @ P @ (A - B @ K)
    return P, K


class TwoMembers(AbstractMarkovDynamics):
    """A world without memory that two members speak for; subclasses predict."""

    @property
    def members(self):
        return 2

    def best(self, count):
        return self


class LinearModel(AbstractDynamics):
    """s' = A s + (1 + gain_e) theta B a + noise, r = -(s'Qs + a'Ra); the hypothesis is theta.

    With `spread` 0 and one member it is the true world; `gains` make members differ.
    """

    gains: jax.Array = eqx.field(converter=jnp.asarray, default=(0.0,))
    noise: jax.Array = eqx.field(converter=jnp.asarray, default=0.0)
    mean: jax.Array = eqx.field(converter=jnp.asarray, default=1.0)
    spread: jax.Array = eqx.field(converter=jnp.asarray, default=0.0)
    shift: jax.Array = eqx.field(converter=jnp.asarray, default=0.0)  # added to every reward
    termination: AbstractTermination = NeverTerminates()

    @property
    def members(self):
        return self.gains.shape[0]

    def best(self, count):
        return dataclasses.replace(self, gains=self.gains[:count])

    def start(self):
        return ()

    def observe(self, belief, transition):
        return belief

    def sample(self, belief, obs, key):
        return self.mean + self.spread * jr.normal(key, ())

    def centre(self, belief, obs):
        return self.mean

    def predict(self, hypothesis, obs, action):
        action = jnp.broadcast_to(action, (self.members, action.shape[-1]))
        push = ((1.0 + self.gains) * hypothesis)[:, None] * (action @ jnp.asarray(B).T)
        after = obs @ jnp.asarray(A).T + push
        cost = jnp.sum((obs @ jnp.asarray(Q)) * obs, 1) + jnp.sum((action @ jnp.asarray(R)) * action, 1)
        noise = jnp.broadcast_to(self.noise, after.shape)
        return Outcome(after, self.shift - cost, noise, noise[:, 0])


class LinearPrior(AbstractPrior):
    """a = -K s + spread * noise; V(s) = -s'Ps."""

    K: jax.Array = eqx.field(converter=jnp.asarray)
    P: jax.Array = eqx.field(converter=jnp.asarray)
    spread: jax.Array = eqx.field(converter=jnp.asarray, default=0.5)
    offset: jax.Array = eqx.field(converter=jnp.asarray, default=0.0)

    def start(self):
        return ()

    def observe(self, state, transition):
        return state

    def act(self, state, obs, key):
        return -self.K @ obs, state

    def sample(self, state, obs, key):
        return -self.K @ obs + self.spread * jr.normal(key, (self.K.shape[0],)), jnp.zeros(())

    def value(self, state, obs):
        return self.offset - obs @ self.P @ obs


def true_cost(act, start, steps: int = 60, gamma: float = GAMMA, theta: float = 1.0) -> float:
    """Discounted return of a policy `act(obs, t)` in the true world."""
    s, total = np.asarray(start, np.float64), 0.0
    for t in range(steps):
        a = np.asarray(act(s, t), np.float64)
        total += gamma**t * -(s @ Q @ s + a @ R @ a)
        s = A @ s + theta * (B @ a)
    return total


def matrices():
    return A, B, Q, R


class HiddenGain(AbstractDynamics):
    """s' = s + theta a + noise, r = -s^2 - 0.01 a^2, theta ~ N(1, spread^2) drawn once per episode and never shown.

    The belief is the exact posterior of theta (a Gaussian with mean and precision), the hypothesis a theta. Drawn
    values are kept where the prior's own policy is stable, or single episodes would decide every comparison.
    """

    spread: jax.Array = eqx.field(converter=jnp.asarray, default=0.5)
    noise: float = eqx.field(static=True, default=0.2)
    termination: AbstractTermination = NeverTerminates()

    @property
    def members(self):
        return 1

    def best(self, count):
        return self

    def start(self):
        return jnp.ones(()), 1.0 / (self.spread**2 + 1e-6)

    def observe(self, belief, transition):
        mean, precision = belief
        action = transition.action[0]
        more = precision + action**2 / self.noise**2
        seen = action * (transition.next_obs[0] - transition.obs[0]) / self.noise**2
        return (precision * mean + seen) / more, more

    def sample(self, belief, obs, key):
        return belief[0] + jr.normal(key, ()) / jnp.sqrt(belief[1])

    def centre(self, belief, obs):
        return belief[0]

    def predict(self, hypothesis, obs, action):
        action = jnp.broadcast_to(action, (1, 1))
        after = obs + hypothesis * action
        reward = -(after[:, 0] ** 2) - 0.01 * action[:, 0] ** 2
        return Outcome(after, reward, jnp.full_like(after, self.noise), jnp.zeros(1))

    def episode(self, agent, key, steps):
        """The return of an agent in one drawn world."""
        key_theta, key_steps = jr.split(key)
        theta = jnp.clip(1.0 + self.spread * jr.normal(key_theta, ()), 0.1, 1.9)

        def step(carry, key):
            state, obs = carry
            key_act, key_noise = jr.split(key)
            action, state = agent.act(state, obs, key_act)
            after = obs + theta * action + self.noise * jr.normal(key_noise, (1,))
            reward = -(after[0] ** 2) - 0.01 * action[0] ** 2
            state = agent.observe(state, Transition(obs, action, reward, after, jnp.zeros((), bool)))
            return (state, after), reward

        _, rewards = jax.lax.scan(step, (agent.start(), jnp.full(1, 3.0)), jr.split(key_steps, steps))
        return jnp.sum(rewards)


class Unsure(AbstractDynamics):
    """A model that never learns which world it is in: the Markov model of the average world."""

    world: HiddenGain
    termination: AbstractTermination = NeverTerminates()

    @property
    def members(self):
        return 1

    def best(self, count):
        return self

    def start(self):
        return ()

    def observe(self, belief, transition):
        return belief

    def sample(self, belief, obs, key):
        return jnp.ones(())

    def centre(self, belief, obs):
        return jnp.ones(())

    def predict(self, hypothesis, obs, action):
        return self.world.predict(hypothesis, obs, action)


class ScalarPrior(AbstractPrior):
    """a = -s + noise: best where theta = 1; V is what is left to pay when standing still next to 0."""

    def start(self):
        return ()

    def observe(self, state, transition):
        return state

    def act(self, state, obs, key):
        return -obs, state

    def sample(self, state, obs, key):
        return -obs + 0.7 * jr.normal(key, (1,)), jnp.zeros(())

    def value(self, state, obs):
        return jnp.zeros(())
