"""The exact belief of the paper's appendix A: Dirichlet counts over the transition tables of a small finite world.

The smallest model that does all a `BeliefDynamics` does, with nothing learned and nothing approximated; read it first.

- A state is a vector of `states` numbers: one-hot when observed. Imagined states are distributions over states.
- An action is a vector of `actions` numbers, one-hot; weights over actions act as a mixture of them.
- The belief is the table alpha[s, a, s'] of counts. `observe` adds one (the hyper-state transition of a BAMDP).
- A hypothesis is one transition table drawn from the Dirichlet; `centre` is the posterior mean alpha / sum alpha.
- `predict` moves a whole distribution one step through that table, so k-step predictions and expected rewards are
  exact and carry no noise: std is zero. `collapse` draws one state from a distribution where a path is wanted.

    model = make_tabular(reward, data)                   # prior counts plus those of logged data
    belief = model.observe(model.start(), transition)    # reflect on a real step
    world = model.sample(belief, obs, key)               # one table it could be
    outcome = model.predict_from(world, obs, action)     # what follows in that world
"""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from refplan.data.dataset import Dataset
from refplan.dynamics.base import AbstractDynamics, AbstractTermination, NeverTerminates, Outcome
from refplan.errors import RefplanError
from refplan.types import Key, Obs, Transition

Table = Float[Array, "states actions states"]


class TabularDynamics(AbstractDynamics):
    """A finite world whose transition table is unknown and whose reward table r(s, a) is known (appendix A)."""

    reward: Float[Array, "states actions"]
    alpha: Table  # Dirichlet parameters before the episode, all positive
    termination: AbstractTermination

    @property
    def members(self) -> int:
        """One: the doubt is in the hypothesis, not in members."""
        return 1

    def best(self, count: int) -> AbstractDynamics:
        """There is only one."""
        return self

    def start(self) -> Table:
        """The prior's counts."""
        return self.alpha

    def observe(self, belief: Table, transition: Transition) -> Table:
        """alpha[s, a, s'] <- alpha[s, a, s'] + 1."""
        return belief + jnp.einsum("s,a,n->san", transition.obs, transition.action, transition.next_obs)

    def sample(self, belief: Table, obs: Obs, key: Key) -> Table:
        """T(. | s, a) ~ Dirichlet(alpha[s, a]) for every s and a."""
        return jr.dirichlet(key, belief)

    def centre(self, belief: Table, obs: Obs) -> Table:
        """The posterior mean, which is also the transition of the belief-state MDP: alpha / sum alpha."""
        return belief / jnp.sum(belief, axis=2, keepdims=True)

    def predict(
        self, hypothesis: Table, obs: Float[Array, "member obs"], action: Float[Array, "*member act"]
    ) -> Outcome:
        """The distribution over next states and the expected reward, exact under the hypothesis."""
        weight = obs[:, :, None] * jnp.broadcast_to(action, (obs.shape[0], action.shape[-1]))[:, None]
        next_obs = jnp.einsum("msa,san->mn", weight, hypothesis)
        reward = jnp.einsum("msa,sa->m", weight, self.reward)
        return Outcome(next_obs, reward, jnp.zeros_like(next_obs), jnp.zeros_like(reward))


def make_tabular(
    reward: Float[Array, "states actions"], data: Dataset | None = None, *, prior: float = 1.0
) -> TabularDynamics:
    """Every count starts at `prior` (1: all tables equally likely), then the transitions of `data` are added."""
    if prior <= 0:
        raise RefplanError(f"a Dirichlet belief needs positive counts, got prior={prior}.")
    states, actions = reward.shape
    alpha = jnp.full((states, actions, states), prior)
    model = TabularDynamics(reward=reward, alpha=alpha, termination=NeverTerminates())
    if data is None:
        return model
    if (data.obs_dim, data.action_dim) != (states, actions):
        raise RefplanError(
            f"dataset '{data.meta.name}' has {data.obs_dim} states and {data.action_dim} actions, "
            f"the reward table {states} and {actions}."
        )
    return dataclasses.replace(model, alpha=alpha + count_transitions(data))


def collapse(obs: Obs, key: Key) -> Obs:
    """One state drawn from a distribution over states, one-hot."""
    return jax.nn.one_hot(jr.categorical(key, jnp.log(obs)), obs.shape[0])


def count_transitions(data: Dataset) -> Table:
    """How often each (s, a, s') occurs in logged data whose states and actions are one-hot."""
    data = data.complete()
    for name in ("observations", "actions", "next_observations"):
        values = getattr(data, name)
        if not (np.isin(values, (0.0, 1.0)).all() and (values.sum(axis=1) == 1.0).all()):
            raise RefplanError(
                f"dataset '{data.meta.name}': {name} are not one-hot rows, so its world is not a finite one. "
                "Code each state and each action as a vector with a single 1."
            )
    counts = np.zeros((data.obs_dim, data.action_dim, data.obs_dim), np.float32)
    index = (data.observations.argmax(1), data.actions.argmax(1), data.next_observations.argmax(1))
    np.add.at(counts, index, 1.0)
    return jnp.asarray(counts)
