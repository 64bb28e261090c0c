"""Logged steps as other worlds would have answered them, so that any learner can learn what to do there."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from refplan.data.dataset import Dataset
from refplan.dynamics.worlds import WorldsDynamics
from refplan.types import Key, Transition


def with_gains(
    data: Dataset,
    worlds: WorldsDynamics,
    *,
    key: Key,
    copies: int = 1,
    weakest: float = 0.0,
    compensate: float = 0.2,
) -> Dataset:
    """The data with gains g written behind every observation: logged rows at g = 1, then `copies` of them elsewhere.

    Each copied row gets a world of its own: one or two actuators with gains from U(`weakest`, 1). In half of the
    copies the logged command is given again, in the other half it is raised by 1/g (at most 1/`compensate`), so that
    what arrives stays what was logged; next state and reward are a draw from a random elite at what arrives.
    """
    rows = data.complete()
    low, high = np.asarray(data.task.low, np.float32), np.asarray(data.task.high, np.float32)
    parts = [_labelled(rows, np.ones((len(rows), rows.action_dim), np.float32), {})]
    for each in jr.split(key, copies):
        gains, actions, after, rewards, ended = _answer(
            worlds, rows.device(), jnp.asarray(low), jnp.asarray(high), weakest, compensate, each
        )
        changed = {"actions": actions, "next_observations": after, "rewards": rewards, "terminated": ended}
        parts.append(_labelled(rows, np.asarray(gains), {name: np.asarray(x) for name, x in changed.items()}))
    names = ("observations", "actions", "rewards", "next_observations", "terminated", "truncated")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    bag = {"starts": np.zeros(1, np.int64), "sequential": False, "qpos": None, "qvel": None, "known_next": None}
    box = {"action_low": tuple(map(float, low)), "action_high": tuple(map(float, high))}
    # No simulator shows gains in its observations, so the rows belong to no environment any more.
    return dataclasses.replace(rows, **joined, **bag, meta=dataclasses.replace(rows.meta, env_id=None, **box))


def _labelled(rows: Dataset, gains: Float[np.ndarray, "rows act"], changed: dict[str, np.ndarray]) -> Dataset:
    """Gains behind observation and successor; a row's world does not change by itself."""
    after = changed.pop("next_observations", rows.next_observations)
    sides = {"observations": rows.observations, "next_observations": after}
    labelled = {name: np.concatenate([side, gains], axis=1) for name, side in sides.items()}
    return dataclasses.replace(rows, **changed, **labelled)


@eqx.filter_jit
def _answer(
    worlds: WorldsDynamics,
    rows: Transition,
    low: Float[Array, " act"],
    high: Float[Array, " act"],
    weakest: float,
    compensate: float,
    key: Key,
) -> tuple[Array, Array, Array, Array, Array]:
    """(gains, actions, next observations, rewards, ends) of one copy of every row, in blocks."""

    def one(at: tuple[Transition, Key]) -> tuple[Array, Array, Array, Array, Array]:
        row, key = at
        key_gain, key_raise, key_step = jr.split(key, 3)
        gain = draw_gains(key_gain, row.action.shape[0], weakest)
        raised = jnp.clip(row.action / jnp.maximum(gain, compensate), low, high)
        action = jnp.where(jr.bernoulli(key_raise), raised, row.action)
        hypothesis = worlds.write(worlds.read(worlds.home())._replace(gain=gain))
        step = worlds.step(hypothesis, row.obs, action, key_step)
        return gain, action, step.next_obs, step.reward, step.terminated

    return jax.lax.map(one, (rows, jr.split(key, rows.reward.shape[0])), batch_size=1000)


def draw_gains(key: Key, size: int, weakest: float) -> Float[Array, " act"]:
    """All ones but for one or two actuators, which get U(weakest, 1)."""
    key_which, key_count, key_value = jr.split(key, 3)
    order = jr.permutation(key_which, size)
    touched = order < 1 + jr.bernoulli(key_count).astype(int)
    return jnp.where(touched, jr.uniform(key_value, (size,), minval=weakest), 1.0)
