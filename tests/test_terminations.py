"""Termination rules against the real MuJoCo environments, on ordinary, extreme and broken states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refplan.data.physics import ROBOTS
from refplan.data.tasks import task

NAMES = ["hopper", "walker2d", "halfcheetah", "hopper-d4rl", "walker2d-d4rl"]
BOUNDS = {"hopper": ([0.7], [-0.2, 0.2]), "walker2d": ([0.8, 2.0], [-1.0, 1.0]), "halfcheetah": ([0.0], [0.0])}


def ordinary_states(robot, rng, count):
    """Around the healthy region, inside and outside."""
    qpos = rng.uniform(-1.5, 1.5, (count, robot.positions))
    qpos[:, 1] = rng.uniform(0.5, 2.3, count)
    qpos[:, 2] *= rng.choice([0.05, 0.3, 1.0], count)
    return qpos, rng.uniform(-9, 9, (count, robot.positions))


def extreme_states(robot, rng, count):
    """A healthy state with one entry far out, on a bound, or not a number."""
    odd = [-1e9, -150.0, -100.0, -99.9, 99.9, 100.0, 150.0, np.inf, -np.inf, np.nan]
    zs, angles = BOUNDS[robot.name]
    neighbours = [np.nextafter(np.float32(v), np.float32(d)) for v in (*zs, *angles) for d in (-1e9, 1e9)]
    # float32(0.8) lies above 0.8: healthy for MuJoCo's doubles, on the bound for a model's floats.
    zs = [z for z in zs if z != 0.8]
    values = np.array([*odd, *zs, *angles, *neighbours], np.float64)
    qpos = np.zeros((count, robot.positions))
    qpos[:, 1] = 1.25
    column = rng.integers(1, robot.positions, count)
    qpos[np.arange(count), column] = rng.choice(values, count)
    return qpos, rng.uniform(-9, 9, (count, robot.positions))


def states_of(robot):
    rng = np.random.default_rng(0)
    parts = [ordinary_states(robot, rng, 2000), extreme_states(robot, rng, 2000)]
    # What float32 can hold, so that a bound is met exactly on both sides.
    return tuple(np.concatenate(x).astype(np.float32).astype(np.float64) for x in zip(*parts, strict=True))


def put(world, qpos, qvel):
    """Into the state without mj_forward, which would repair NaN."""
    world.data.qpos[:], world.data.qvel[:] = qpos, qvel


@pytest.mark.parametrize("name", NAMES)
def test_rule_agrees_with_the_environment(name):
    found, robot = task(name), ROBOTS[name.split("-")[0]]
    world = found.make().unwrapped
    qpos, qvel = states_of(robot)
    healthy, observations = [], []
    for position, velocity in zip(qpos, qvel, strict=True):
        put(world, position, velocity)
        healthy.append(getattr(world, "is_healthy", True))
        observations.append(world._get_obs())
    healthy, obs = np.array(healthy), np.array(observations)
    rule = jax.vmap(found.termination)
    actions = jnp.zeros((len(obs), found.action_dim))
    ended = np.asarray(rule(jnp.asarray(obs, jnp.float32), actions, jnp.asarray(obs, jnp.float32)))
    np.testing.assert_array_equal(ended, ~healthy)
    np.testing.assert_array_equal(robot.healthy(qpos, qvel), healthy)
    np.testing.assert_array_equal(robot.observe(qpos, qvel), obs)
    if robot.name != "halfcheetah":
        assert 0.1 < healthy.mean() < 0.9  # the states do test both answers


def test_negative_values_end_hopper():
    """The common copies of this rule test only the upper bound."""
    healthy = jnp.array([1.25] + [0.0] * 10)
    ends = ROBOTS["hopper"].termination
    assert not ends(healthy, jnp.zeros(3), healthy)
    for value in (-150.0, 150.0, np.nan, np.inf):
        assert ends(healthy, jnp.zeros(3), healthy.at[3].set(value))


def test_hidden_velocities_are_known_to_the_simulator():
    """Hopper ends at |velocity| >= 100, which its clipped observation cannot show."""
    robot = ROBOTS["hopper"]
    qpos, qvel = np.array([[0.0, 1.25, 0, 0, 0, 0]]), np.array([[0.0, 0, 0, 0, 0, -101.0]])
    assert not robot.healthy(qpos, qvel)[0]
    assert robot.observe(qpos, qvel)[0, -1] == -10.0
