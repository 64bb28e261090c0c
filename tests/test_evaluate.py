import dataclasses

import gymnasium as gym
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.agent import AbstractAgent, RandomAgent
from refplan.data.check import check_dataset
from refplan.data.dataset import Meta
from refplan.data.starts import Starts
from refplan.data.tasks import task
from refplan.errors import RefplanError
from refplan.evaluation import evaluate

TRACES = []


def short(name: str, horizon: int):
    return dataclasses.replace(task(name), horizon=horizon)


def uniform(world) -> RandomAgent:
    return RandomAgent(jnp.asarray(world.low), jnp.asarray(world.high))


class Echo(AbstractAgent):
    """Answers with what it saw last: shows whether state and transitions really go round."""

    size: int

    def start(self):
        return jnp.zeros(()), jnp.asarray(0)

    def observe(self, state, transition):
        return transition.reward, state[1] + 1

    def act(self, state, obs, key):
        TRACES.append(1)
        return jnp.full(self.size, jnp.tanh(state[0]) * 0.5 + 0.1 * jnp.sin(state[1].astype(float))), state


class Constant(AbstractAgent):
    value: float
    size: int = 3

    def start(self):
        return ()

    def observe(self, state, transition):
        return state

    def act(self, state, obs, key):
        return jnp.full(self.size, self.value), state


def test_returns_and_flags_are_those_of_plain_gymnasium():
    world = short("hopper", 60)
    result = evaluate(uniform(world), world, 6, key=jr.key(0), trace=True)
    assert result.lengths.min() < 60, "some random hoppers fall"
    for episode, seed in enumerate(result.seeds):
        env = gym.make("Hopper-v5")
        obs, _ = env.reset(seed=seed)
        total = 0.0
        for time in range(result.lengths[episode]):
            assert np.array_equal(result.trace.observations[time, episode], obs.astype(np.float32))
            obs, reward, terminated, _, _ = env.step(result.trace.actions[time, episode])
            total += reward
        assert terminated == bool(result.trace.terminated[result.lengths[episode] - 1, episode])
        assert result.returns[episode] == pytest.approx(total, rel=1e-12)
        env.close()


def test_same_key_same_episodes_for_every_agent_and_any_number_of_them():
    world = short("halfcheetah", 5)
    a = evaluate(uniform(world), world, 3, key=jr.key(1), trace=True)
    b = evaluate(Constant(0.3, 6), world, 5, key=jr.key(1), trace=True)
    assert a.seeds == b.seeds[:3]
    assert np.array_equal(a.trace.observations[0], b.trace.observations[0, :3])
    again = evaluate(uniform(world), world, 5, key=jr.key(1))
    assert np.array_equal(a.returns, again.returns[:3]), "an episode does not depend on its neighbours"
    assert not np.array_equal(a.returns, evaluate(uniform(world), world, 3, key=jr.key(2)).returns)


def test_batched_and_plain_stepping_agree():
    world = short("walker2d", 40)
    results = [evaluate(uniform(world), world, 3, key=jr.key(0), batched=b) for b in (True, False)]
    assert np.array_equal(results[0].returns, results[1].returns)
    assert np.array_equal(results[0].lengths, results[1].lengths)


def test_state_and_transitions_reach_the_agent():
    world = short("Pendulum-v1", 12)
    result = evaluate(Echo(1), world, 2, key=jr.key(0), trace=True)
    rewards = result.trace.rewards
    before = np.concatenate([np.zeros((1, 2)), rewards[:-1]])
    expected = np.tanh(before) * 0.5 + 0.1 * np.sin(np.arange(12.0))[:, None]
    assert np.allclose(result.trace.actions[..., 0], expected, atol=1e-6)


def test_act_is_compiled_once():
    world = short("Pendulum-v1", 15)
    evaluate(Echo(1), world, 2, key=jr.key(0))
    before = len(TRACES)
    evaluate(Echo(1), world, 2, key=jr.key(5))
    assert len(TRACES) == before


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.5])
def test_bad_actions_are_named(value):
    world = short("hopper", 5)
    with pytest.raises(RefplanError, match="step 0 of episode 0"):
        evaluate(Constant(value), world, 2, key=jr.key(0))


def test_a_trace_is_a_clean_dataset():
    world = short("hopper", 30)
    result = evaluate(uniform(world), world, 4, key=jr.key(3), trace=True)
    data = result.trace.dataset(Meta(name="traced", env_id="Hopper-v5"))
    assert check_dataset(data).ok, check_dataset(data).text()
    assert len(data) == result.lengths.sum()
    assert data.episodes == 4
    assert np.allclose(data.returns, result.returns, rtol=1e-5)
    assert data.qpos.shape == (len(data), 6)
    assert (data.terminated | data.truncated).sum() == 4


def test_given_starts_are_taken():
    world = short("halfcheetah", 3)
    qpos, qvel = np.zeros((2, 9)), np.full((2, 9), 0.5)
    qpos[:, 1] = [0.3, 0.4]
    result = evaluate(uniform(world), world, 2, key=jr.key(0), starts=Starts(qpos, qvel, np.arange(2)), trace=True)
    assert np.allclose(result.trace.observations[0, :, 0], [0.3, 0.4])
    with pytest.raises(RefplanError, match="2 start states for 3 episodes"):
        evaluate(uniform(world), world, 3, key=jr.key(0), starts=Starts(qpos, qvel, np.arange(2)))


def test_numbers_for_people_and_machines():
    world = short("halfcheetah", 4)
    result = evaluate(uniform(world), world, 3, key=jr.key(0))
    plain = result.to_dict()
    assert plain["score"]["value"] == pytest.approx(world.score(result.returns).mean())
    assert plain["return"]["low"] <= plain["return"]["value"] <= plain["return"]["high"]
    assert result.ms_per_action > 0
    assert "halfcheetah" in str(result)
    with pytest.raises(RefplanError, match="at least 1"):
        evaluate(uniform(world), world, 0, key=jr.key(0))


def test_video_is_written(tmp_path):
    world = short("halfcheetah", 6)
    evaluate(uniform(world), world, 1, key=jr.key(0), video=tmp_path / "run.mp4")
    assert b"ftyp" in (tmp_path / "run.mp4").read_bytes()[:16]
    with pytest.raises(RefplanError, match="mp4"):
        evaluate(uniform(world), world, 1, key=jr.key(0), video=tmp_path / "run.xyz")
