"""D4RL's physics against Gymnasium's own old environments; the RQ4 worlds against their definition."""

import gymnasium as gym
import mujoco
import numpy as np
import pytest

from refplan.data.tasks import task
from refplan.data.worlds import draw_slopes, ramps, without_total_mass_warning
from refplan.errors import RefplanError

WORLDS = ["joint", "hill", "gentle", "steep", "field"]
PITCH = 100 / 499


def cheetah(world, **kwargs):
    return task(f"halfcheetah-{world}", **kwargs).make()


def run(env, seed, actions):
    """(observations, rewards, terminated) until the actions or the episode end."""
    obs, _ = env.reset(seed=seed)
    observations, rewards, terminated = [obs], [], []
    for action in actions:
        obs, reward, ended, _, _ = env.step(action)
        observations.append(obs)
        rewards.append(reward)
        terminated.append(ended)
        if ended:
            break
    return np.array(observations), np.array(rewards), np.array(terminated)


@pytest.mark.filterwarnings(
    "ignore:.*is out of date.*:DeprecationWarning"
)  # -v4 is what D4RL's physics are tested against
@pytest.mark.parametrize("robot", ["Hopper", "HalfCheetah", "Walker2d"])
def test_d4rl_physics_are_those_of_the_old_environments(robot):
    with without_total_mass_warning():
        old = gym.make(f"{robot}-v4", disable_env_checker=True)
    if robot == "Hopper":
        old.unwrapped.model.geom_margin[:] *= 0.5
    new = task(f"{robot.lower()}-d4rl").make()
    current = task(robot.lower()).make()
    ended = 0
    for seed in range(5):
        actions = np.random.default_rng(seed).uniform(-1, 1, (150, *new.action_space.shape)).astype(np.float32)
        for got, expected in zip(run(new, seed, actions), run(old, seed, actions), strict=True):
            np.testing.assert_array_equal(got, expected)
        ended += run(new, seed, actions)[2][-1]
    if robot != "HalfCheetah":
        assert ended  # the bonus on the terminating step was compared, too
        assert not np.array_equal(run(new, 0, actions)[0], run(current, 0, actions)[0])


def test_hopper_margins_follow_the_mujoco_version(monkeypatch):
    expected = task("hopper").make().unwrapped.model.geom_margin
    for version, factor in (("4.0.0", 0.5), ("3.5.0", 0.5), ("3.4.0", 1.0), ("2.3.7", 1.0)):
        monkeypatch.setattr(mujoco, "__version__", version)
        np.testing.assert_array_equal(task("hopper-d4rl").make().unwrapped.model.geom_margin, factor * expected)


@pytest.mark.parametrize("world", WORLDS)
def test_same_seed_same_episode_whatever_came_before(world):
    env, other = cheetah(world), cheetah(world)
    actions = np.random.default_rng(0).uniform(-1, 1, (30, 6)).astype(np.float32)
    run(env, 1, actions)
    for got, expected in zip(run(env, 7, actions), run(other, 7, actions), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("world", WORLDS)
def test_starts_as_the_flat_cheetah_but_for_the_ground(world):
    flat, _ = task("halfcheetah").make().reset(seed=5)
    env = cheetah(world)
    obs, _ = env.reset(seed=5)
    np.testing.assert_array_equal(obs[1:], flat[1:])
    ground = 0.0 if world == "joint" else env.unwrapped.elevation(np.linspace(-0.8, 1.0, 100)).max()
    np.testing.assert_allclose(obs[0] - flat[0], ground, atol=1e-12)


@pytest.mark.parametrize(
    ("world", "heights", "top", "grade"),
    [
        ("hill", "paper", 0.2, 0.067),
        ("hill", "original", 0.6, 0.20),
        ("gentle", "paper", 0.2, 0.011),
        ("gentle", "original", 1.0, 0.055),
        ("steep", "paper", 0.5, 0.028),
        ("steep", "original", 4.0, 0.22),
        ("hill", "flat", 0.0, 0.0),
        ("gentle", "flat", 0.0, 0.0),
    ],
)
def test_heights_and_grades(world, heights, top, grade):
    """The numbers of the table of definitions."""
    land = cheetah(world, heights=heights).unwrapped
    x = np.arange(-40.0, 49.0, 0.05)
    assert land.elevation(x).max() == pytest.approx(top, rel=0.02)
    assert np.diff(land.elevation(x)).max() / 0.05 == pytest.approx(grade, rel=0.03)
    end = 0.0 if world == "hill" else top
    np.testing.assert_allclose(land.elevation(np.array([-10.0, -0.2, 18.3, 45.0])), [0, 0, end, end], atol=1e-9)


def test_hill_goes_up_three_metres_and_down_three():
    land = cheetah("hill").unwrapped
    top = -50 + 264 * PITCH
    np.testing.assert_allclose(land.elevation(np.array([-0.11, top, 6.0])), [0.0, 0.2, 0.0], atol=1e-9)


def height_under(env, x):
    """Where a ray from above meets the ground: what MuJoCo itself thinks the terrain is."""
    world = env.unwrapped
    mujoco.mj_forward(world.model, world.data)
    geom = np.zeros(1, np.int32)
    only_static = np.ones(6, np.uint8)
    torso = world.model.body("torso").id
    world.data.qpos[0] = -40.0  # out of the ray's way
    mujoco.mj_forward(world.model, world.data)
    start, down = np.array([x, 0.0, 10.0]), np.array([0.0, 0.0, -1.0])
    distance = mujoco.mj_ray(world.model, world.data, start, down, only_static, 1, torso, geom, None)
    return None if distance < 0 else 10.0 - distance


@pytest.mark.parametrize("world", ["hill", "gentle", "steep", "field"])
def test_mujoco_sees_the_profile(world):
    env = cheetah(world)
    env.reset(seed=2)
    for x in (-3.0, 0.5, 2.0, 4.4, 9.0, 15.0, 30.0):
        assert height_under(env, x) == pytest.approx(env.unwrapped.elevation(np.array([x]))[0], abs=1e-5)


def test_the_plateau_continues_and_the_edge_does_not():
    plateau, edge = cheetah("steep"), cheetah("steep", terrain_end="edge")
    plateau.reset(seed=0)
    edge.reset(seed=0)
    assert height_under(edge, 49.0) == pytest.approx(0.5, abs=1e-5)
    assert height_under(edge, 51.0) is None
    assert height_under(plateau, 900.0) == pytest.approx(0.5, abs=1e-5)
    assert height_under(plateau, -200.0) == pytest.approx(0.0, abs=1e-5)
    for x in np.linspace(-2.0, 20.0, 23):  # the first metres are the same ground
        assert height_under(edge, x) == pytest.approx(height_under(plateau, x), abs=1e-5)


@pytest.mark.parametrize("world", ["hill", "field"])
def test_the_ground_has_seams_only_where_it_may_bend(world):
    """The same ground, bends and all, from a tenth of the nodes."""
    plateau, edge = cheetah(world).unwrapped, cheetah(world, terrain_end="edge").unwrapped
    for env in (plateau, edge):
        env.reset(seed=3)
    np.testing.assert_array_equal(plateau.profile, edge.profile)
    size, (spacing,) = plateau.model.hfield_size[0], plateau.model.hfield_ncol - 1
    assert 2.0 < 2 * size[0] / spacing < 3.1
    kinks = np.flatnonzero(np.abs(np.diff(plateau.profile, 2)) > 1e-9) + 1
    assert len(kinks) >= 3
    left = plateau.model.geom("floor").pos[0] - size[0]
    columns = (-50 + kinks * PITCH - left) / (2 * size[0] / spacing)
    np.testing.assert_allclose(columns, np.round(columns), atol=1e-6)


def test_a_cheetah_rests_on_flat_ground_as_on_the_plane():
    """Far from the ramps the field must feel like HalfCheetah's floor."""
    heights = []
    for env in (task("halfcheetah").make(), cheetah("steep"), cheetah("field", heights="flat")):
        env.reset(seed=0)
        world = env.unwrapped
        world.set_state(np.array([-20.0, *np.zeros(8)]), np.zeros(9))
        for _ in range(60):
            obs = env.step(np.zeros(6, np.float32))[0]
        heights.append(obs[0])
    np.testing.assert_allclose(heights[1:], heights[0], atol=2e-3)


def test_torso_z_is_literal():
    usual, literal = cheetah("hill"), cheetah("hill", torso_z=1.0)
    obs, _ = literal.reset(seed=0)
    assert abs(obs[0]) <= 0.1  # start noise only
    world = literal.unwrapped
    np.testing.assert_allclose(world.data.body("torso").xpos[2], 1.0 + obs[0])
    assert usual.unwrapped.model.body("torso").pos[2] == 0.7


def test_field_is_drawn_anew_and_within_its_ranges():
    env = cheetah("field")
    profiles = []
    for seed in range(40):
        env.reset(seed=seed)
        profiles.append(env.unwrapped.profile.copy())
    tops = np.array([p.max() for p in profiles])
    assert len({p.tobytes() for p in profiles}) == 40
    assert tops.min() >= 0.05 and tops.max() <= 0.4 and tops.max() - tops.min() > 0.2
    assert all(p.min() == 0 for p in profiles)
    assert 0.05 < np.mean([p[0] > 1e-9 for p in profiles]) < 0.6  # the start is sometimes elevated
    env.reset()
    assert not np.array_equal(env.unwrapped.profile, profiles[-1])


def test_field_start_is_elevated_as_often_as_measured():
    rng = np.random.default_rng(0)
    columns = (255, 265, 275, 285, 295, 305)
    starts = np.array([ramps(columns, 10, draw_slopes(rng, 6))[0] for _ in range(4000)])
    assert np.mean(starts > 1e-9) == pytest.approx(0.26, abs=0.03)
    assert starts[starts > 1e-9].mean() == pytest.approx(0.29, abs=0.03)


def test_one_joint_of_one_to_five_is_disabled():
    env = cheetah("joint")
    gains = np.array([env.reset(seed=seed)[1]["gains"] for seed in range(60)])
    assert (gains.sum(axis=1) == 5).all() and (gains[:, 0] == 1).all()
    assert (gains[:, 1:].min(axis=0) == 0).all()


def test_the_disabled_joint_neither_moves_nor_costs():
    env, whole = cheetah("joint", gains=(1.0, 1.0, 0.0, 1.0, 1.0, 1.0)), task("halfcheetah").make()
    actions = np.random.default_rng(0).uniform(-1, 1, (40, 6)).astype(np.float32)
    masked = actions * np.float32([1, 1, 0, 1, 1, 1])
    for got, expected in zip(run(env, 3, actions), run(whole, 3, masked), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_failure_in_mid_episode():
    env, whole = cheetah("joint", gains=(0.5,) * 6, fail_at=10), task("halfcheetah").make()
    actions = np.random.default_rng(0).uniform(-1, 1, (25, 6)).astype(np.float32)
    weaker = np.concatenate([actions[:10], actions[10:] * np.float32(0.5)])
    for _ in range(2):  # the clock starts again at a reset
        np.testing.assert_array_equal(run(env, 3, actions)[0], run(whole, 3, weaker)[0])


def test_wrong_settings():
    with pytest.raises(RefplanError, match="6 actuators, got 2"):
        cheetah("joint", gains=(1.0, 0.0))
    with pytest.raises(RefplanError, match="unknown terrain_end"):
        cheetah("hill", terrain_end="cliff")


def test_ids_work_with_plain_gymnasium():
    env = gym.make("refplan.data.worlds:refplan/HalfCheetahField-v1")
    assert env.spec.max_episode_steps == 1000
    env.reset(seed=0)
