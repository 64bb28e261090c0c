"""The learned world with its gains on view, so that a policy can learn inside it what to do about weak actuators."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from refplan.agent import AbstractPrior
from refplan.data.dataset import Dataset
from refplan.dynamics.adapted import Conditioned
from refplan.dynamics.base import AbstractDynamics, AbstractMarkovDynamics, AbstractTermination, Outcome
from refplan.dynamics.relabel import with_gains
from refplan.dynamics.worlds import around
from refplan.types import Action, Flag, Obs


class LabelledTermination(AbstractTermination):
    """The learned world's ends, which do not look at the gains."""

    base: AbstractTermination
    size: int = eqx.field(static=True)

    def __call__(self, obs: Obs, action: Action, next_obs: Obs) -> Flag:
        """Whether the world ends, by the observations alone."""
        return self.base(obs[: self.size], action, next_obs[: self.size])


class LabelledDynamics(AbstractMarkovDynamics):
    """(s, g) -> (s', g) with s' = f(s, g * a): many worlds as one, each telling its gains behind the observation.

    A learner that imagines in it, from rows labelled in the same way (`relabel.with_gains`), learns pi(a | s, g) and
    V(s, g) without knowing that there are worlds.
    """

    base: AbstractMarkovDynamics
    termination: AbstractTermination
    size: int = eqx.field(static=True)  # of an observation without its gains

    @property
    def members(self) -> int:
        """The elites."""
        return self.base.members

    def best(self, count: int) -> AbstractDynamics:
        """The first `count` elites."""
        fewer: Any = self.base.best(count)
        return dataclasses.replace(self, base=fewer)

    def predict(
        self, hypothesis: tuple[()], obs: Float[Array, "member obs"], action: Float[Array, "*member act"]
    ) -> Outcome:
        """What each elite expects where g * a arrives; gains stay as they are, for certain."""
        seen, gain = obs[:, : self.size], obs[:, self.size :]
        outcome = self.base.predict(hypothesis, seen, jnp.broadcast_to(action, gain.shape) * gain)
        return outcome._replace(
            next_obs=jnp.concatenate([outcome.next_obs, gain], axis=1),
            next_obs_std=jnp.concatenate([outcome.next_obs_std, jnp.zeros_like(gain)], axis=1),
        )


class Labelled(NamedTuple):
    """Rows with gains behind their observations, the world that answers such rows, and what to call the result."""

    data: Dataset
    model: LabelledDynamics

    def wrap(self, prior: AbstractPrior) -> Conditioned:
        """A prior trained on `data`, as one of the task's own observations."""
        return Conditioned(prior, jnp.ones(self.data.action_dim))


def in_worlds(data: Dataset, model: Any, *, seed: int = 0, **options: Any) -> Labelled:
    """The data and the learned world of it, each with the gains on view; options are those of `with_gains`."""
    rows = with_gains(data, around(model), key=jr.fold_in(jr.key(seed), 3), **options)
    return Labelled(rows, show_gains(model, data.obs_dim))


def show_gains(model: AbstractMarkovDynamics, size: int) -> LabelledDynamics:
    """A learned world with its gains on view; `size` is that of its observations."""
    return LabelledDynamics(base=model, termination=LabelledTermination(model.termination, size), size=size)
