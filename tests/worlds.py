"""Probe worlds whose values are known on paper (after rejax's and cleanrl's probe environments), as logged data.

All share their shapes (one observation, two actions, 240 rows), so a learner compiles once for all of them, and an
action box that is neither symmetric nor of unit size, so that a forgotten change of units shows.
"""

from typing import NamedTuple

import numpy as np

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Dataset, Meta

ROWS = 240
LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([1.0, 3.0], np.float32)
TARGET = np.array([0.4, -0.3], np.float32)  # the best action of `choice`, in units of half the action range


class Probe(NamedTuple):
    """A logged world, and the value of some of its observations."""

    data: Dataset
    discount: float
    obs: np.ndarray
    value: np.ndarray


def to_box(unit: np.ndarray) -> np.ndarray:
    """From [-1, 1] to the action box."""
    return (0.5 * (LOW + HIGH) + 0.5 * (HIGH - LOW) * unit).astype(np.float32)


def unit_actions(rows: int = ROWS, seed: int = 0) -> np.ndarray:
    """Uniform actions in [-1, 1]; the first two rows are the corners, so that the data shows the whole box."""
    actions = np.random.default_rng(seed).uniform(-1, 1, (rows, 2)).astype(np.float32)
    actions[0], actions[1] = -1.0, 1.0
    return actions


def choice_reward(unit: np.ndarray) -> np.ndarray:
    """1 - |u - target|^2: best, and worth 1, at the target."""
    return 1.0 - np.sum((unit - TARGET) ** 2, axis=-1)


def logged(obs, rewards, after, *, length: int, terminates: bool, unit: np.ndarray | None = None, name: str) -> Dataset:
    """Episodes of `length` steps that end by termination, or by truncation."""
    ends = np.arange(ROWS) % length == length - 1
    unit = unit_actions() if unit is None else unit
    column = lambda x: np.broadcast_to(np.asarray(x, np.float32), (ROWS,))[:, None]  # noqa: E731
    return make_dataset(
        column(obs),
        to_box(unit),
        np.broadcast_to(np.asarray(rewards, np.float32), (ROWS,)),
        ends & terminates,
        ends & (not terminates),
        next_observations=column(after),
        meta=Meta(name=name),
    )


def constant() -> Probe:
    """One step, reward 1."""
    data = logged(0.0, 1.0, 0.0, length=1, terminates=True, name="constant")
    return Probe(data, 0.9, np.array([[0.0]]), np.array([1.0]))


def seen() -> Probe:
    """One step, the reward is what was seen."""
    obs = np.where(np.arange(ROWS) % 2, 1.0, -1.0)
    data = logged(obs, obs, 0.0, length=1, terminates=True, name="seen")
    return Probe(data, 0.9, np.array([[-1.0], [1.0]]), np.array([-1.0, 1.0]))


def delayed() -> Probe:
    """Two steps, reward 1 at the second: the first is worth the discount."""
    second = np.arange(ROWS) % 2
    data = logged(2.0 * second - 1, second, np.where(second, 3.0, 1.0), length=2, terminates=True, name="delayed")
    return Probe(data, 0.7, np.array([[-1.0], [1.0]]), np.array([0.7, 1.0]))


def endless() -> Probe:
    """Reward 1 for ever, cut by the clock every 5 steps: 1 / (1 - 0.8) = 5; a cut taken for an end gives below 3."""
    data = logged(0.0, 1.0, 0.0, length=5, terminates=False, name="endless")
    return Probe(data, 0.8, np.array([[0.0]]), np.array([5.0]))


def finite() -> Probe:
    """Reward 1 for 4 steps, then the end: 1 + g + g^2 + g^3 from the start, down to 1 at the last step."""
    step = np.arange(ROWS) % 4
    data = logged(step, 1.0, step + 1.0, length=4, terminates=True, name="finite")
    g = 0.6
    values = np.array([1 + g + g**2 + g**3, 1 + g + g**2, 1 + g, 1.0])
    return Probe(data, g, np.arange(4.0)[:, None], values)


def choice() -> Probe:
    """One step, the reward depends on the action; the best one is worth 1."""
    unit = unit_actions()
    data = logged(0.0, choice_reward(unit), 0.0, length=1, terminates=True, unit=unit, name="choice")
    return Probe(data, 0.9, np.array([[0.0]]), np.array([1.0]))


def late_choice() -> Probe:
    """Two steps; the second one's action earns `choice_reward`, the first one's nothing. Values hold for the best."""
    unit, second = unit_actions(), np.arange(ROWS) % 2
    rewards = np.where(second, choice_reward(unit), 0.0)
    after = np.where(second, 3.0, 1.0)
    data = logged(2.0 * second - 1, rewards, after, length=2, terminates=True, unit=unit, name="late choice")
    return Probe(data, 0.7, np.array([[-1.0], [1.0]]), np.array([0.7, 1.0]))


# Worlds whose value does not depend on the policy.
FIXED_VALUES = {"constant": constant, "seen": seen, "delayed": delayed, "endless": endless, "finite": finite}


def ragged(seed: int = 0, obs: int = 3, rows: int = 60) -> Dataset:
    """A small dataset of random numbers with terminated and truncated episodes of several lengths."""
    random = np.random.default_rng(seed)
    observations = random.normal(size=(rows, obs)).astype(np.float32)
    ends = np.zeros(rows, bool)
    ends[[6, 13, 29, 40, rows - 1]] = True
    falls = ends & (np.arange(rows) % 2 == 0)
    return make_dataset(
        observations,
        to_box(unit_actions(rows, seed)),
        observations.sum(axis=1),
        falls,
        ends & ~falls,
        next_observations=observations + 0.1 * random.normal(size=(rows, obs)),
        meta=Meta(name="ragged"),
    )
