"""Start states from other data."""

import jax.random as jr
import numpy as np
import pytest

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Meta
from refplan.data.simulate import make_simulator
from refplan.data.starts import draw_starts
from refplan.data.tasks import task
from refplan.errors import RefplanError


def logged_episodes(name, seeds=range(4), states=True, steps=60, env_id=None):
    """Random actions in the real environment, every state recorded, ends included."""
    found = task(name)
    env = found.make()
    rng = np.random.default_rng(0)
    rows = []
    for seed in seeds:
        obs, _ = env.reset(seed=seed)
        for _ in range(steps):
            qpos, qvel = env.unwrapped.data.qpos.copy(), env.unwrapped.data.qvel.copy()
            action = rng.uniform(-1, 1, found.action_dim).astype(np.float32)
            next_obs, reward, terminated, _, _ = env.step(action)
            rows.append((obs, action, reward, terminated, next_obs, qpos, qvel))
            obs = next_obs
            if terminated:
                break
    obs, action, reward, terminated, next_obs, qpos, qvel = (np.array(column) for column in zip(*rows, strict=True))
    truncated = np.zeros(len(rows), bool)
    kept = {"qpos": qpos, "qvel": qvel} if states else {}
    meta = Meta(name="logged", env_id=env_id or found.env_id)
    return make_dataset(obs, action, reward, terminated, truncated, next_observations=next_obs, meta=meta, **kept)


@pytest.mark.parametrize("name", ["hopper", "halfcheetah", "walker2d"])
@pytest.mark.parametrize("states", [True, False])
def test_episodes_begin_at_the_drawn_rows(name, states):
    data = logged_episodes(name, states=states)
    starts = draw_starts(data, task(name), 5, key=jr.key(0))
    assert len(set(starts.rows.tolist())) == 5
    simulator = make_simulator(task(name), 5)
    simulator.reset(range(5))
    obs = simulator.set_states(starts.qpos, starts.qvel)
    np.testing.assert_allclose(obs, data.observations[starts.rows], rtol=0, atol=1e-6)
    assert (starts.qpos[:, 0] == 0).all() != states
    # From a true state, the logged action leads to the logged successor.
    after = simulator.step(data.actions[starts.rows])[0]
    if states:
        np.testing.assert_allclose(after, data.next_observations[starts.rows], atol=1e-3)


def test_same_key_same_rows():
    data = logged_episodes("halfcheetah")
    rows = [draw_starts(data, task("halfcheetah"), 6, key=jr.key(k)).rows for k in (1, 1, 2)]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_unhealthy_rows_are_never_drawn():
    data = logged_episodes("hopper", states=False)
    fallen = np.arange(len(data)) % 3 != 0
    data.observations[fallen, 0] = 0.3
    rows = draw_starts(data, task("hopper"), 200, key=jr.key(0)).rows  # more than there are: rows repeat
    assert not fallen[rows].any()
    data.observations[:, 1] = np.nan
    with pytest.raises(RefplanError, match="every row is already unhealthy"):
        draw_starts(data, task("hopper"), 1, key=jr.key(0))


def test_velocities_too_fast_to_live_are_seen_in_the_simulator_state():
    data = logged_episodes("hopper")
    data.qvel[1:] = 150.0
    np.testing.assert_array_equal(draw_starts(data, task("hopper"), 3, key=jr.key(0)).rows, 0)


def test_both_flavours_and_the_disabled_joint_take_the_same_robot():
    data = logged_episodes("halfcheetah")
    for name in ("halfcheetah-d4rl", "halfcheetah-joint"):
        draw_starts(data, task(name), 2, key=jr.key(0))
    with pytest.raises(RefplanError, match="inside its terrain"):
        draw_starts(data, task("halfcheetah-hill"), 2, key=jr.key(0))


def test_another_robot_is_refused():
    cheetah = logged_episodes("halfcheetah")
    with pytest.raises(RefplanError, match="not of the robot of task 'walker2d'"):  # although the sizes agree
        draw_starts(cheetah, task("walker2d"), 2, key=jr.key(0))
    with pytest.raises(RefplanError, match="not of the robot of task 'hopper'"):
        draw_starts(cheetah.replace_meta(env_id=None), task("hopper"), 2, key=jr.key(0))
    assert (
        len(draw_starts(cheetah.replace_meta(env_id="HalfCheetah-v2"), task("halfcheetah"), 2, key=jr.key(0)).rows) == 2
    )


def test_other_environments_need_logged_states():
    swimmer = logged_episodes("Swimmer-v5")
    starts = draw_starts(swimmer, task("Swimmer-v5"), 2, key=jr.key(0))
    np.testing.assert_array_equal(starts.qpos, swimmer.qpos[starts.rows])
    with pytest.raises(RefplanError, match="cannot be rebuilt"):
        draw_starts(logged_episodes("Swimmer-v5", states=False), task("Swimmer-v5"), 2, key=jr.key(0))
