"""What learners that train in an imagined world share: when they imagine, what they keep, how they go wrong."""

from abc import abstractmethod
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from refplan.agent import AbstractPolicy
from refplan.data.dataset import Dataset
from refplan.data.lanes import Layout, pack_episodes
from refplan.data.sampling import sample_transitions
from refplan.dynamics.base import AbstractDynamics, Belief
from refplan.errors import RefplanError, unknown_name
from refplan.learner import AbstractWatchedLearner
from refplan.logs import Row
from refplan.priors.actor_critic import prepare_rows
from refplan.priors.imagine import DOUBTS, Bounds, Ring, Rollouts, Start, draw, imagine, make_ring, put, states_along
from refplan.priors.policy import to_unit
from refplan.settings import settings_of
from refplan.types import Action, Key, Metrics, Scalar, State, Transition

FAR = 10.0  # Q this many times beyond what rewards can add up to has diverged
S = TypeVar("S", bound=Any)  # a state with a field `dream`


class Logged(NamedTuple):
    """The data rollouts start from: rows with actions in [-1, 1], and where each stands in its episode."""

    rows: Transition
    belief: Belief  # the model's, before each row; empty for a model without memory
    last: Int[Array, " rows"]  # the last row of each row's episode
    layout: Layout | None  # of the episodes; None for rows that are a bag
    low: Action
    high: Action


def look_up(model: AbstractDynamics, data: Dataset) -> Logged:
    """The data with the model's belief at every row."""
    _check_fits(model, data)
    layout, last = None, np.arange(len(data))
    if data.sequential:
        layout, last = pack_episodes(data.starts, data.lengths), np.repeat(data.ends - 1, data.lengths)
    elif jax.tree.leaves(model.start()):
        raise RefplanError(
            f"dataset '{data.meta.name}' was split by transition, so its rows are no longer episodes; "
            f"{type(model).__name__} remembers episodes and needs a split by='episode'."
        )
    belief = () if layout is None else eqx.filter_jit(states_along)(model, data.device(), layout)
    bounds = jnp.asarray(data.task.low), jnp.asarray(data.task.high)
    return Logged(prepare_rows(data), belief, jnp.asarray(last, int), layout, *bounds)


def _check_fits(model: AbstractDynamics, data: Dataset) -> None:
    obs, action = jnp.asarray(data.observations[0]), jnp.asarray(data.actions[0])

    def predict(obs: Array, action: Array) -> Any:
        return model.predict_from(model.sample(model.start(), obs, jr.key(0)), obs, action)

    try:
        found = eqx.filter_eval_shape(predict, obs, action).next_obs.shape[-1]
    except (TypeError, ValueError) as error:
        found = str(error).splitlines()[0]
    if found != data.obs_dim:
        raise RefplanError(
            f"the model does not fit dataset '{data.meta.name}' with observations of size {data.obs_dim} and actions "
            f"of size {data.action_dim} ({found}). Train one on this data: refplan fit dynamics."
        )


class Imagination(eqx.Module):
    """How much is imagined: `starts` rollouts of `length` steps every `refresh` updates, kept for `retain` rounds."""

    starts: int = eqx.field(static=True, default=50_000)
    length: int = eqx.field(static=True, default=5)
    refresh: int = eqx.field(static=True, default=1000)
    retain: int = eqx.field(static=True, default=5)
    real_ratio: float = eqx.field(static=True, default=0.05)  # part of each batch that is logged data
    doubt: str = eqx.field(static=True, default="aleatoric")  # which uncertainty; one of DOUBTS
    one_member: bool = eqx.field(static=True, default=False)  # one elite for a whole rollout
    block: int = eqx.field(static=True, default=1000)  # rollouts made side by side: bounds the memory

    def __check_init__(self):
        if self.doubt not in DOUBTS:
            raise unknown_name("uncertainty", self.doubt, DOUBTS)
        counts = {name: getattr(self, name) for name in ("starts", "length", "refresh", "retain", "block")}
        wrong = [name for name, count in counts.items() if count < 1]
        if wrong or not 0.0 <= self.real_ratio < 1.0:
            raise RefplanError(
                f"starts, length, refresh, retain and block must be at least 1 and real_ratio lie in [0, 1); got "
                f"{', '.join(f'{name}={count}' for name, count in counts.items())}, real_ratio={self.real_ratio}."
            )

    def real_rows(self, batch: int) -> int:
        """How many of a batch are logged data."""
        return int(self.real_ratio * batch)

    def choose(self, logged: Logged, key: Key) -> Int[Array, " starts"]:
        """Logged rows to start from, uniformly with replacement."""
        return jr.randint(key, (self.starts,), 0, logged.rows.reward.shape[0])

    def roll(
        self,
        model: AbstractDynamics,
        policy: AbstractPolicy,
        logged: Logged,
        row: Int[Array, " starts"],
        memory: State,
        key: Key,
        bounds: Bounds | None = None,
    ) -> Rollouts:
        """Rollouts from the given rows, the policy with a memory for each of them; actions in [-1, 1]."""
        belief = jax.tree.map(lambda x: x[row], logged.belief)
        starts = Start(logged.rows.obs[row], belief, memory)

        def one(at: tuple[Start, Key]) -> Rollouts:
            options: Any = {"length": self.length, "one_member": self.one_member, "bounds": bounds}
            return imagine(model, policy, *at, doubt=DOUBTS[self.doubt], **options)

        keys = jr.split(key, self.starts)
        rollouts = jax.lax.map(one, (starts, keys), batch_size=min(self.block, self.starts))
        unit = jax.vmap(jax.vmap(to_unit, (0, None, None)), (0, None, None))
        actions = jnp.clip(unit(rollouts.steps.action, logged.low, logged.high), -1.0, 1.0)
        return rollouts._replace(steps=rollouts.steps._replace(action=actions))


class Dream(NamedTuple):
    """What was imagined lately, and how it went in the last round."""

    ring: Ring
    age: Int[Array, ""]  # updates so far
    largest: Scalar  # |reward| in the logged data
    reward: Scalar  # mean imagined reward, without penalty
    penalty: Scalar  # mean of what was taken from it
    uncertainty: Scalar
    steps: Scalar  # mean length of a rollout

    def metrics(self) -> Metrics:
        """How the last round went."""
        return {"imagined_reward": self.reward, "uncertainty": self.uncertainty, "imagined_steps": self.steps}


def first_dream(example: Any, places: int, data: Dataset) -> Dream:
    """Nothing imagined yet."""
    zeros = (jnp.zeros(()) for _ in range(4))
    largest = jnp.asarray(np.abs(data.rewards).max(), jnp.float32)
    return Dream(make_ring(example, places), jnp.zeros((), int), largest, *zeros)


def remember(
    dream: Dream, items: Any, keep: Bool[Array, " new"], rollouts: Rollouts, penalty: Float[Array, "starts time"]
) -> Dream:
    """Put a round's items into the ring and note how the round went; only valid steps count."""
    count = jnp.sum(rollouts.valid)
    means = (
        jnp.sum(jnp.where(rollouts.valid, x, 0.0)) / count
        for x in (rollouts.steps.reward, penalty, rollouts.uncertainty)
    )
    return Dream(put(dream.ring, items, keep), dream.age, dream.largest, *means, count / rollouts.valid.shape[0])


class AbstractImaginingLearner(AbstractWatchedLearner):
    """A learner that rolls its policy out in a model every so many updates, and learns from what it imagined."""

    model: eqx.AbstractVar[AbstractDynamics | None]
    imagined: eqx.AbstractVar[Imagination]

    @property
    @abstractmethod
    def discount(self) -> Scalar:
        """gamma."""

    @abstractmethod
    def renew(self, state: Any, logged: Logged, key: Key) -> Dream:
        """A new round of rollouts."""

    @abstractmethod
    def improve(self, state: S, logged: Logged, key: Key) -> tuple[S, Metrics]:
        """One update from logged and imagined experience."""

    @property
    def world(self) -> AbstractDynamics:
        """The model as it was trained, or an error that says how to get one."""
        if self.model is None:
            name = type(self).__name__
            raise RefplanError(
                f"{name} learns in an imagined world and needs a model of it: {name}(fit(Ensemble(), data, key=...)), "
                "or --model RUN on the command line."
            )
        return self.model.as_trained()

    def prepare(self, data: Dataset) -> Logged:
        """All rows with the model's beliefs."""
        if any(name.endswith("cloning") and value != 0 for name, value in settings_of(self).items()):
            raise RefplanError(
                f"{type(self).__name__} cannot be drawn to logged actions (cloning): most of its actions are imagined, "
                "its own of a moment ago. Leave cloning at 0, or use CQL or EDAC."
            )
        return look_up(self.world, data)

    def batch(self, source: Logged, state: Any, key: Key) -> Logged:
        """Everything: what an update draws depends on what it may have to imagine first."""
        return source

    def update(self, state: S, batch: Logged, key: Key) -> tuple[S, Metrics]:
        """A new round of rollouts if it is time, then one update."""
        key_renew, key_improve = jr.split(key)
        due = state.dream.age % self.imagined.refresh == 0
        dream = jax.lax.cond(due, lambda _: self.renew(state, batch, key_renew), lambda old: old, state.dream)
        state, metrics = self.improve(state._replace(dream=dream), batch, key_improve)
        # The largest |Q| that rewards such as these, and an entropy bonus, can add up to.
        bonus = jnp.minimum(metrics["alpha"], 1.0) * np.log(2.0) * batch.low.size
        bound = (dream.largest + jnp.abs(dream.penalty) + bonus) * horizon(self.discount)
        metrics |= {**dream.metrics(), "q_bound": bound}
        return state._replace(dream=dream._replace(age=dream.age + 1)), metrics

    def trouble(self, row: Row) -> str:
        """Whether Q has left what rewards can add up to."""
        if abs(row["q"]) <= FAR * row["q_bound"]:
            return ""
        return (
            f"Q is {row['q']:.3g} on average, but rewards as in this data add up to at most {row['q_bound']:.3g} "
            f"(imagined reward {row['imagined_reward']:.3g}, uncertainty {row['uncertainty']:.3g} per step). The "
            "critics feed on errors of the imagined world: try a larger penalty, shorter rollouts "
            "(imagined.length), or a better model (refplan diagnose)."
        )


def horizon(discount: Scalar) -> Scalar:
    """1 / (1 - gamma): how many rewards add up; a discount of 1 is taken for 0.999 here."""
    return 1.0 / jnp.maximum(1.0 - discount, 1e-3)


def first_rows(learner: AbstractImaginingLearner, data: Dataset) -> Dream:
    """An empty ring for single steps."""
    obs, act = jnp.zeros(data.obs_dim), jnp.zeros(data.action_dim)
    example = Transition(obs, act, jnp.zeros(()), obs, jnp.zeros((), bool))
    settings = learner.imagined
    return first_dream(example, settings.retain * settings.starts * settings.length, data)


def renew_rows(
    learner: AbstractImaginingLearner,
    dream: Dream,
    policy: AbstractPolicy,
    logged: Logged,
    weight: Scalar | float,
    key: Key,
) -> Dream:
    """A round of a memoryless policy, every valid step on its own, with r - weight * uncertainty for a reward."""
    key_row, key_roll = jr.split(key)
    row = learner.imagined.choose(logged, key_row)
    rollouts = learner.imagined.roll(learner.world, policy, logged, row, (), key_roll)
    penalty = weight * rollouts.uncertainty
    steps = rollouts.steps._replace(reward=rollouts.steps.reward - penalty)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
    return remember(dream, flat, rollouts.valid.reshape(-1), rollouts, penalty)


def mixed_rows(learner: AbstractImaginingLearner, dream: Dream, logged: Logged, batch: int, key: Key) -> Transition:
    """Logged rows first, imagined ones after them, in the proportion `real_ratio`."""
    key_real, key_imagined = jr.split(key)
    count = learner.imagined.real_rows(batch)
    real = sample_transitions(logged.rows, key_real, count)
    imagined = draw(dream.ring, key_imagined, batch - count)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), real, imagined)
