"""Worlds and models small enough to compute by hand: a linear-quadratic world, a hidden-parameter world, fakes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from refplan.agent import AbstractPrior
from refplan.dynamics.base import AbstractDynamics, AbstractTermination, NeverTerminates, Outcome

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
