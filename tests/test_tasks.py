"""Tasks: what they claim without a simulator must be what the simulator says."""

import subprocess
import sys

import gymnasium as gym
import jax.numpy as jnp
import numpy as np
import pytest

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Meta
from refplan.data.tasks import TASKS, task, task_for
from refplan.errors import MissingExtraError, RefplanError

ROBOT_NAMES = [f"{robot}{flavour}" for robot in ("hopper", "halfcheetah", "walker2d") for flavour in ("", "-d4rl")]
WORLD_NAMES = [f"halfcheetah-{world}" for world in ("joint", "hill", "gentle", "steep", "field")]


def logged(obs_dim, action_dim, scale=0.5, **meta):
    rng = np.random.default_rng(0)
    rows = 20
    flags = np.zeros(rows, bool)
    return make_dataset(
        rng.normal(size=(rows, obs_dim)),
        rng.uniform(-scale, scale, size=(rows, action_dim)),
        np.zeros(rows),
        flags,
        flags,
        next_observations=rng.normal(size=(rows, obs_dim)),
        meta=Meta(**meta),
    )


def test_the_registry_lists_robots_in_both_flavours_and_the_five_worlds():
    assert set(TASKS) == {*ROBOT_NAMES, *WORLD_NAMES}


@pytest.mark.parametrize("name", [*ROBOT_NAMES, *WORLD_NAMES])
def test_constants_agree_with_the_environment(name):
    found = task(name)
    env = found.make()
    assert env.observation_space.shape == (found.obs_dim,)
    assert env.action_space.shape == (found.action_dim,)
    np.testing.assert_array_equal(env.action_space.low, found.low)
    np.testing.assert_array_equal(env.action_space.high, found.high)
    assert env.spec is not None and env.spec.max_episode_steps == found.horizon == 1000
    assert task(found.env_id).name == name  # the Gymnasium id means the same task
    obs, _ = env.reset(seed=0)
    obs = jnp.asarray(obs, jnp.float32)
    assert not found.termination(obs, jnp.zeros(found.action_dim), obs)
    env.close()


def test_scores_are_d4rls():
    hopper = task("hopper")
    np.testing.assert_allclose(hopper.score([-20.272305, 3234.3]), [0.0, 100.0], atol=1e-12)
    np.testing.assert_allclose(task("halfcheetah-hill").score(12135.0), 100.0)
    assert "no published" in task("halfcheetah-hill").references.source
    assert task("Pendulum-v1").score(3.0) is None


def test_any_gymnasium_id_with_box_spaces():
    pendulum = task("Pendulum-v1")
    assert (pendulum.obs_dim, pendulum.action_dim, pendulum.horizon) == (3, 1, 200)
    np.testing.assert_array_equal(pendulum.high, [2.0])
    assert pendulum.termination is None
    weak = task("Pendulum-v1", g=2.0)
    assert weak.make().unwrapped.g == 2.0


class Endless(gym.Env):
    """No time limit; actions as asked for."""

    def __init__(self, bound=1.0):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
        self.action_space = gym.spaces.Box(-bound, bound, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.fixture
def endless():
    gym.register("RefplanTest/Endless-v0", entry_point=Endless)
    yield "RefplanTest/Endless-v0"
    del gym.registry["RefplanTest/Endless-v0"]


def test_an_environment_without_time_limit_gets_the_usual_horizon(endless):
    env = task(endless).make()
    env.reset(seed=0)
    truncated = [env.step(np.zeros(1, np.float32))[3] for _ in range(1000)]
    assert truncated.index(True) == 999


def test_unbounded_actions_are_refused(endless):
    with pytest.raises(RefplanError, match="unbounded"):
        task(endless, bound=np.inf)


def test_errors_name_what_to_do():
    with pytest.raises(RefplanError, match="Did you mean 'halfcheetah'"):
        task("halfcheeta")
    with pytest.raises(RefplanError, match="Did you mean 'Pendulum-v1'"):
        task("Pendulm-v1")
    with pytest.raises(RefplanError, match="Discrete"):
        task("CartPole-v1")
    with pytest.raises(RefplanError, match="observation space is Discrete"):
        task("FrozenLake-v1")
    with pytest.raises(RefplanError, match="takes no settings"):
        task("hopper", healthy_reward=2.0)
    with pytest.raises(RefplanError, match="unknown heights 'papier'"):
        task("halfcheetah-hill", heights="papier").make()
    with pytest.raises(RefplanError, match="cannot be made"):
        task("halfcheetah-hill", colour="green").make()


def test_no_mujoco_is_an_error_with_the_extra_to_install(monkeypatch):
    for module in [name for name in sys.modules if name.split(".")[0] == "mujoco" or "gymnasium.envs.mujoco" in name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "refplan.data.worlds", raising=False)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    for name in ("hopper", "halfcheetah", "walker2d-d4rl", "halfcheetah-hill"):
        with pytest.raises(MissingExtraError, match=r"refplan\[mujoco\]"):
            task(name).make()


def test_our_tasks_need_neither_gymnasium_nor_mujoco_to_be_described():
    code = (
        "import sys; from refplan.data.tasks import TASKS, task; [task(n) for n in TASKS]; "
        "print([m for m in ('gymnasium', 'mujoco') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_making_environments_prints_nothing_and_leaves_no_log_file(tmp_path):
    code = "from refplan.data.tasks import TASKS, task; [task(n).make().reset(seed=0) for n in TASKS]"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert result.stdout + result.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_finds_its_task():
    assert task_for(logged(11, 3, env_id="Hopper-v5")).name == "hopper"
    assert task_for(logged(11, 3, env_id="Hopper-v5", flavour="d4rl")).name == "hopper-d4rl"
    assert task_for(logged(17, 6, env_id="Walker2d-v2", flavour="d4rl")).name == "walker2d-d4rl"
    assert task_for(logged(17, 6, env_id="refplan/HalfCheetahHill-v1", flavour="d4rl")).name == "halfcheetah-hill"
    assert task_for(logged(3, 1, env_id="Pendulum-v1")).name == "Pendulum-v1"
    assert logged(11, 3, env_id="Hopper-v5").task.name == "hopper"


def test_references_of_the_data_win():
    found = task_for(logged(11, 3, env_id="Hopper-v5", ref_min=0.0, ref_max=10.0, ref_source="mine"))
    assert (found.references.low, found.references.high, found.references.source) == (0.0, 10.0, "mine")
    assert found.score(5.0) == 50.0


def test_data_without_environment():
    found = task_for(logged(4, 2))
    assert found.env_id is None and found.termination is None and found.horizon == 20
    np.testing.assert_array_equal(found.low, [-1.0, -1.0])
    wide = logged(4, 2, scale=3.0)
    np.testing.assert_array_equal(task_for(wide).high, wide.actions.max(axis=0))
    with pytest.raises(RefplanError, match="nothing can be simulated"):
        found.make()


def test_data_that_does_not_fit_its_environment():
    with pytest.raises(RefplanError, match="does not match the data"):
        task_for(logged(4, 2, env_id="Hopper-v5"))
    with pytest.raises(RefplanError, match="unknown flavour"):
        task_for(logged(11, 3, env_id="Hopper-v5", flavour="d4r"))
