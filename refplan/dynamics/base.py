"""What a model of the world is: `start`, `observe`, `sample`, `predict`.

A model carries a belief about which world it is in. `observe` reflects on one real step, `sample` draws a hypothesis
(one possible world), and the predictions of all its members are made under that hypothesis. Everything is written for
one example; callers `vmap`.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int

from refplan.agent import AbstractPrior
from refplan.nn import MLP
from refplan.types import Action, Flag, Key, Obs, Scalar, Transition

Belief = Any  # what a model remembers of an episode: any pytree
Hypothesis = Any  # one possible world: a latent vector, or nothing


class Outcome(NamedTuple):
    """Every member's Gaussian over what comes next."""

    next_obs: Float[Array, "member obs"]
    reward: Float[Array, " member"]
    next_obs_std: Float[Array, "member obs"]
    reward_std: Float[Array, " member"]


class Prediction(NamedTuple):
    """One imagined step."""

    next_obs: Obs
    reward: Scalar
    terminated: Flag


class AbstractTermination(eqx.Module):
    """Says whether a step ended the world."""

    @abstractmethod
    def __call__(self, obs: Obs, action: Action, next_obs: Obs) -> Flag:
        """Whether the world ends at `next_obs`."""


class NeverTerminates(AbstractTermination):
    """A world without ends."""

    def __call__(self, obs: Obs, action: Action, next_obs: Obs) -> Flag:
        """Never."""
        return jnp.zeros((), bool)


class RuleTermination(AbstractTermination):
    """A rule the task gives."""

    rule: Callable[[Obs, Action, Obs], Flag] = eqx.field(static=True)

    def __call__(self, obs: Obs, action: Action, next_obs: Obs) -> Flag:
        """The task's rule."""
        return self.rule(obs, action, next_obs)


class LearnedTermination(AbstractTermination):
    """A classifier on (s, a, s'), for tasks without a rule; inputs are standardised by its own statistics."""

    net: MLP
    mean: Float[Array, " inputs"]
    std: Float[Array, " inputs"]

    def logit(self, obs: Obs, action: Action, next_obs: Obs) -> Scalar:
        """Log-odds of an end."""
        return self.net((jnp.concatenate([obs, action, next_obs]) - self.mean) / self.std)[0]

    def __call__(self, obs: Obs, action: Action, next_obs: Obs) -> Flag:
        """Whether an end is more likely than not."""
        return self.logit(obs, action, next_obs) > 0.0


class AbstractDynamics(eqx.Module):
    """A world we are unsure about."""

    termination: eqx.AbstractVar[AbstractTermination]

    @property
    @abstractmethod
    def members(self) -> int:
        """How many members `predict` speaks for (the elites)."""

    @abstractmethod
    def best(self, count: int) -> "AbstractDynamics":
        """The same model, told by its `count` best members only (by all it has, if they are fewer)."""

    @abstractmethod
    def start(self) -> Belief:
        """The belief before anything of an episode was seen."""

    @abstractmethod
    def observe(self, belief: Belief, transition: Transition) -> Belief:
        """Reflect on one real step."""

    @abstractmethod
    def sample(self, belief: Belief, obs: Obs, key: Key) -> Hypothesis:
        """One possible world, drawn from the belief when the agent stands at `obs`."""

    @abstractmethod
    def centre(self, belief: Belief, obs: Obs) -> Hypothesis:
        """The world at the centre of the belief (mu_t in the paper)."""

    @abstractmethod
    def predict(
        self, hypothesis: Hypothesis, obs: Float[Array, "member obs"], action: Float[Array, "*member act"]
    ) -> Outcome:
        """What each member expects from a state of its own, under one action for all or one each."""

    def adapt(self, prior: AbstractPrior) -> AbstractPrior:
        """The prior as a planner should use it with this model; a model that knows other worlds tells it about them."""
        return prior

    def away(self, belief: Belief) -> Flag:
        """Whether this is known to be another world than that of the data."""
        return jnp.zeros((), bool)

    def believed(self, belief: Belief, obs: Obs) -> tuple[Float[Array, " latent"], Float[Array, " latent"]]:
        """(mean, standard deviation) of a Gaussian belief when the agent stands at `obs`; empty where there is none."""
        return jnp.zeros(0), jnp.zeros(0)

    def as_trained(self) -> "AbstractDynamics":
        """What is asked about every logged row, by a diagnosis or a prior that imagines.

        The model, or what it is made around if its belief is too large to keep per row.
        """
        return self

    @property
    def draws(self) -> int:
        """How many hypotheses a planner should draw unless told otherwise."""
        return 4

    def predict_from(self, hypothesis: Hypothesis, obs: Obs, action: Action) -> Outcome:
        """What each member expects from the same state."""
        return self.predict(hypothesis, jnp.broadcast_to(obs, (self.members, *obs.shape)), action)

    def step(self, hypothesis: Hypothesis, obs: Obs, action: Action, key: Key) -> Prediction:
        """One imagined step: a member drawn at random, then a draw from its Gaussian."""
        key_member, key_noise = jr.split(key)
        member = jr.randint(key_member, (), 0, self.members)
        return self.step_member(hypothesis, obs, action, member, key_noise)

    def step_member(
        self, hypothesis: Hypothesis, obs: Obs, action: Action, member: Int[Array, ""], key: Key
    ) -> Prediction:
        """One imagined step of a given member."""
        outcome = jax.tree.map(lambda x: x[member], self.predict_from(hypothesis, obs, action))
        noise = jr.normal(key, (obs.shape[0] + 1,))
        next_obs = outcome.next_obs + outcome.next_obs_std * noise[:-1]
        reward = outcome.reward + outcome.reward_std * noise[-1]
        return Prediction(next_obs, reward, self.termination(obs, action, next_obs))


class AbstractMarkovDynamics(AbstractDynamics):
    """A model that learns nothing from an episode: there is one world, and its belief and hypothesis are empty."""

    def start(self) -> tuple[()]:
        """Nothing to remember."""
        return ()

    def observe(self, belief: tuple[()], transition: Transition) -> tuple[()]:
        """Nothing to learn from one step."""
        return ()

    def sample(self, belief: tuple[()], obs: Obs, key: Key) -> tuple[()]:
        """There is one world."""
        return ()

    def centre(self, belief: tuple[()], obs: Obs) -> tuple[()]:
        """There is one world."""
        return ()


class AbstractLatentDynamics(AbstractDynamics):
    """A model whose hypotheses are latent vectors m, believed to follow N(mu, exp(log_var))."""

    @abstractmethod
    def posterior(self, belief: Belief, obs: Obs) -> tuple[Float[Array, " latent"], Float[Array, " latent"]]:
        """(mu, log-variance) of m when the agent stands at `obs`; `predict` takes any such m as its hypothesis."""

    def believed(self, belief: Belief, obs: Obs) -> tuple[Float[Array, " latent"], Float[Array, " latent"]]:
        """The posterior's."""
        mean, log_var = self.posterior(belief, obs)
        return mean, jnp.exp(0.5 * log_var)
