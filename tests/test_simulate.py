"""Simulators against Gymnasium's own environments, bit for bit."""

import numpy as np
import pytest

from refplan.data import simulate
from refplan.data.simulate import BatchSimulator, LoopSimulator, make_simulator
from refplan.data.tasks import TASKS, task
from refplan.errors import RefplanError

SEEDS = [3, 11, 42]


def random_actions(found, steps, dtype=np.float32):
    rng = np.random.default_rng(0)
    return rng.uniform(found.low, found.high, (steps, len(SEEDS), found.action_dim)).astype(dtype)


def gymnasium_episode(found, seed, actions):
    env = found.make()
    rows = [(env.reset(seed=seed)[0], 0.0, False, False)]
    for action in actions:
        rows.append(env.step(action)[:4])
        if rows[-1][2] or rows[-1][3]:
            break
    return rows


@pytest.mark.parametrize(("name", "batched"), [*((n, b) for n in TASKS for b in (True, False)), ("Pendulum-v1", False)])
def test_equal_to_gymnasium(name, batched):
    found = task(name)
    actions = random_actions(found, 60)
    simulator = make_simulator(found, len(SEEDS), batched=batched)
    for _ in range(2):  # a second reset must leave nothing of the first
        steps = [(simulator.reset(SEEDS), np.zeros(3), np.zeros(3, bool), np.zeros(3, bool))]
        steps += [simulator.step(a) for a in actions]
    for i, seed in enumerate(SEEDS):
        rows = gymnasium_episode(found, seed, actions[:, i])
        for (obs, reward, terminated, truncated), step in zip(rows, steps, strict=False):
            np.testing.assert_array_equal(step[0][i], obs)
            assert (step[1][i], step[2][i], step[3][i]) == (reward, terminated, truncated)
        for step in steps[len(rows) :]:  # an ended episode stands still
            np.testing.assert_array_equal(step[0][i], rows[-1][0])
            assert step[1][i] == 0.0 and step[2][i]
        if "walker2d" in name or "hopper" in name:
            assert len(rows) < 60
    simulator.close()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["hopper", "halfcheetah-joint"])
def test_reward_in_the_precision_of_the_actions(name, dtype):
    found = task(name)
    actions = random_actions(found, 5, dtype)
    results = []
    for batched in (True, False):
        simulator = make_simulator(found, len(SEEDS), batched=batched)
        simulator.reset(SEEDS)
        results.append([simulator.step(a)[1] for a in actions])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", ["hopper", "walker2d-d4rl", "halfcheetah-joint", "halfcheetah-field"])
def test_given_states(name):
    """Both simulators go on alike from given states, and report them."""
    found = task(name)
    rng = np.random.default_rng(1)
    actions = random_actions(found, 20)
    outcomes = []
    for batched in (True, False):
        simulator = make_simulator(found, len(SEEDS), batched=batched)
        simulator.reset(SEEDS)
        qpos, qvel = simulator.states()
        if batched:
            qpos[:, 1] += rng.uniform(0.0, 0.1, len(SEEDS))
            qvel += rng.normal(size=qvel.shape)
            given = qpos, qvel
        obs = simulator.set_states(*given)
        np.testing.assert_array_equal(simulator.states()[0], given[0])
        np.testing.assert_array_equal(simulator.states()[1], given[1])
        outcomes.append([obs, *(part for a in actions for part in simulator.step(a))])
    for batch, loop in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(batch, loop)


@pytest.mark.parametrize("batched", [True, False])
def test_masked_episodes_stand_still(batched):
    found = task("halfcheetah")
    simulator = make_simulator(found, 3, batched=batched)
    before = simulator.reset(SEEDS)
    after, rewards, terminated, truncated = simulator.step(random_actions(found, 1)[0], np.array([True, False, True]))
    np.testing.assert_array_equal(after[1], before[1])
    assert rewards[1] == 0 and not terminated.any() and not truncated.any()
    assert not np.array_equal(after[0], before[0])


@pytest.mark.parametrize("batched", [True, False])
def test_horizon(batched):
    import dataclasses

    simulator = make_simulator(dataclasses.replace(task("halfcheetah"), horizon=4), 2, batched=batched)
    simulator.reset([0, 1])
    flags = [simulator.step(np.zeros((2, 6), np.float32))[3].tolist() for _ in range(6)]
    assert flags == [[False] * 2] * 3 + [[True] * 2] * 3


@pytest.mark.parametrize("fail_at", [0, 7])
def test_gains_and_failure_in_the_batch(fail_at):
    found = task("halfcheetah-joint", gains=(1.0, 0.3, 1.0, 0.0, 1.0, 1.0), fail_at=fail_at)
    actions = random_actions(found, 15)
    outcomes = []
    for batched in (True, False):
        simulator = make_simulator(found, len(SEEDS), batched=batched)
        simulator.reset(SEEDS)
        outcomes.append([part for a in actions for part in simulator.step(a)[:2]])
    for batch, loop in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(batch, loop)


def test_results_belong_to_the_caller():
    simulator = make_simulator(task("halfcheetah"), 1)
    first = simulator.reset([0])
    kept = first.copy()
    simulator.step(np.ones((1, 6), np.float32))
    np.testing.assert_array_equal(first, kept)
    first[:] = 0.0
    assert not np.array_equal(simulator.step(np.ones((1, 6), np.float32))[0], first)


def test_choice_of_simulator(monkeypatch):
    assert isinstance(make_simulator(task("hopper"), 1), BatchSimulator)
    assert isinstance(make_simulator(task("Pendulum-v1"), 1), LoopSimulator)
    assert make_simulator(task("Pendulum-v1"), 1).states() is None
    with pytest.raises(RefplanError, match="cannot be batched"):
        make_simulator(task("Pendulum-v1"), 1, batched=True)
    monkeypatch.setattr(simulate, "can_batch", lambda task: False)
    assert isinstance(make_simulator(task("hopper"), 1), LoopSimulator)


def test_errors():
    simulator = make_simulator(task("hopper"), 2)
    with pytest.raises(RefplanError, match="has not been reset"):
        simulator.step(np.zeros((2, 3), np.float32))
    with pytest.raises(RefplanError, match="1 seeds for 2 episodes"):
        simulator.reset([1])
    pendulum = make_simulator(task("Pendulum-v1"), 1)
    pendulum.reset([0])
    with pytest.raises(RefplanError, match="not a MuJoCo environment"):
        pendulum.set_states(np.zeros((1, 1)), np.zeros((1, 1)))
    with pytest.raises(RefplanError, match="at least one episode"):
        make_simulator(task("hopper"), 0)
