"""MAPLE: its memory is worth something, is moved by what was executed, and survives saving and planning."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import worlds
from imagined import HintModel, hint_data, judged, probe_model, tiny_ensemble

from refplan.modules import load_leaves, load_module, save_leaves, save_module
from refplan.planners.loop import LOOP
from refplan.priors.imagining import Imagination, look_up
from refplan.priors.maple import MAPLE, Sequence, follow, standing
from refplan.priors.sac import SAC
from refplan.train import fit
from refplan.types import Transition

# A small fixed temperature keeps the entropy bonus below the tolerance.
_SAC = {
    "hidden": (16, 16),
    "batch_size": 32,
    "actor_rate": 3e-3,
    "critic_rate": 3e-3,
    "alpha_rate": 0.0,
    "alpha_start": 1e-3,
    "discount": 0.7,
    "tau": 0.05,
}
LENGTH = 5


@pytest.fixture(scope="module")
def adapted():
    """MAPLE in two worlds that are told apart by one hint."""
    learner = MAPLE(
        HintModel(),
        memory=16,
        context=4,
        imagined=Imagination(starts=128, length=LENGTH, refresh=50, retain=2, real_ratio=0.05, one_member=True),
        sac=SAC(**_SAC),
    )
    return fit(learner, hint_data(), steps=1500, key=jr.key(0), every=1500)


@eqx.filter_jit
def episode(agent, sign, forgetful: bool):
    """What the agent earns in one of the two worlds, and what it remembers at the end."""

    def step(carry, time):
        state, obs = carry
        action, state = agent.act(agent.start() if forgetful else state, obs, jr.key(0))
        after = jnp.stack([jnp.zeros(()), obs[0] * sign])
        state = agent.observe(state, Transition(obs, action, sign * action[0], after, jnp.zeros((), bool)))
        return (state, after), sign * action[0]

    (state, _), rewards = jax.lax.scan(step, (agent.start(), jnp.asarray([1.0, 0.0])), jnp.arange(LENGTH))
    return jnp.sum(rewards), state


def test_maple_adapts_where_no_memoryless_policy_can(adapted):
    # Without memory the worlds differ at one step only (the hint): over both, no policy can earn more than 1 of 5.
    remembers = np.mean([float(episode(adapted, jnp.asarray(sign), False)[0]) for sign in (1.0, -1.0)])
    forgets = np.mean([float(episode(adapted, jnp.asarray(sign), True)[0]) for sign in (1.0, -1.0)])
    assert remembers > 3.0, "4 are possible: all but the first step"
    assert forgets <= 1.0 + 1e-5


def test_maple_s_memory_survives_saving(adapted, tmp_path):
    save_module(tmp_path / "agent.safetensors", adapted)
    loaded = load_module(tmp_path / "agent.safetensors")
    sign = jnp.asarray(-1.0)
    assert eqx.tree_equal(episode(adapted, sign, False), episode(loaded, sign, False))
    # a state made by one is continued by the other
    state = episode(adapted, sign, False)[1]
    save_leaves(tmp_path / "state.safetensors", state)
    again, _ = load_leaves(tmp_path / "state.safetensors", loaded.start())
    obs = jnp.zeros(2)
    assert eqx.tree_equal(adapted.act(state, obs, jr.key(0)), loaded.act(again, obs, jr.key(0)))
    assert float(adapted.act(state, obs, jr.key(0))[0][0]) < -0.5, "it remembers the second world"


def test_maple_remembers_the_action_that_was_executed(adapted):
    obs, after = jnp.asarray([1.0, 0.0]), jnp.asarray([0.0, 1.0])
    step = Transition(obs, jnp.ones(1), jnp.ones(()), after, jnp.zeros((), bool))
    _, unchanged = adapted.act(adapted.start(), obs, jr.key(0))
    assert eqx.tree_equal(unchanged, adapted.start())
    one, other = (adapted.observe(adapted.start(), step._replace(action=jnp.full(1, a))) for a in (0.7, -0.7))
    assert float(one.action[0]) == pytest.approx(0.7) and float(other.action[0]) == pytest.approx(-0.7)
    next_one, next_other = (adapted.observe(state, step._replace(obs=after)) for state in (one, other))
    assert not np.allclose(next_one.policy, next_other.policy, atol=1e-4)


def test_a_planner_rolls_maple_s_memory_along(adapted):
    planner = LOOP(adapted, HintModel(), low=-jnp.ones(1), high=jnp.ones(1), horizon=3, plans=12)
    state, think = planner.start(), eqx.filter_jit(planner.plan)
    obs, hint = jnp.asarray([1.0, 0.0]), jnp.asarray([0.0, -1.0])
    for at, after in ((obs, hint), (hint, jnp.zeros(2))):
        plan, state = think(state, at, jr.key(0))
        action = plan.action
        state = planner.observe(state, Transition(at, action, -action[0], after, jnp.zeros((), bool)))
    assert np.isfinite(float(action[0])) and abs(float(action[0])) <= 1.0
    alone = adapted.start()
    for at in (obs, hint):
        alone = adapted.observe(alone, Transition(at, jnp.zeros(1), jnp.zeros(()), at, jnp.zeros((), bool)))
    assert jax.tree.map(jnp.shape, state.prior) == jax.tree.map(jnp.shape, alone)
    # the proposals of the imagined future come from a policy that knows the second world
    plan, _ = think(state, jnp.zeros(2), jr.key(1))
    assert float(plan.proposals.mean()) < -0.5


def test_training_sees_the_contexts_the_agent_will_have(adapted):
    random = np.random.default_rng(0)
    obs = jnp.asarray(random.normal(size=(1, 5, 2)), jnp.float32)
    action = jnp.asarray(random.uniform(-1, 1, (1, 4, 1)), jnp.float32)
    flags = jnp.zeros((1, 4), bool)
    start = jax.tree.map(lambda x: x[None], adapted.start())
    steps = Transition(obs[:, :-1], action, jnp.zeros((1, 4)), obs[:, 1:], flags)
    batch = Sequence(steps, ~flags, start, jnp.zeros(1, int))
    contexts = adapted.policy_context.run(start.policy, *standing(adapted, batch))
    state = adapted.start()
    for time in range(5):
        seen = adapted.normaliser(obs[0, time])
        expected, _ = adapted.policy_context.advance(state.policy, seen, state.action)
        np.testing.assert_allclose(contexts[0, time], expected, atol=1e-5)
        if time < 4:
            state = adapted.observe(state, jax.tree.map(lambda x: x[0, time], steps))  # noqa: B023


def test_logged_sequences_stop_with_their_episode():
    data = worlds.ragged()
    logged = look_up(tiny_ensemble(), data)
    flags = jnp.zeros((3, 4), bool)
    nothing = Transition(jnp.zeros((3, 4, 3)), jnp.zeros((3, 4, 2)), jnp.zeros((3, 4)), jnp.zeros((3, 4, 3)), flags)
    # episodes end at rows 6, 13 and 29
    found = follow(Sequence(nothing, flags, (), jnp.asarray([5, 13, 7])), logged)
    assert found.valid.tolist() == [[True, True, False, False], [True, False, False, False], [True] * 4]
    np.testing.assert_array_equal(found.steps.obs[0, :2], data.observations[5:7])
    np.testing.assert_array_equal(found.steps.obs[2], data.observations[7:11])
    assert found.steps.terminated[0].tolist()[1] == bool(data.terminated[6])


def test_values_and_the_best_action_of_a_probe_world():
    probe = worlds.late_choice()
    learner = MAPLE(
        probe_model(probe.data),
        memory=8,
        context=4,
        imagined=Imagination(starts=96, length=3, refresh=100, retain=3, real_ratio=0.1, one_member=True),
        sac=SAC(**_SAC, normalise=True),
    )
    prior = fit(learner, probe.data, steps=1200, key=jr.key(0), every=1200)
    values, actions = judged(prior, probe)
    np.testing.assert_allclose(actions[1].mean(axis=0), worlds.to_box(worlds.TARGET), atol=0.3)
    assert values[1].mean() == pytest.approx(1.0, abs=0.2)
    assert values[0].mean() == pytest.approx(0.7, abs=0.2)


def test_imagined_rewards_and_values_have_limits():
    data = worlds.ragged()
    learner = MAPLE(penalty=0.5, penalty_most=4.0, sac=SAC(discount=0.9))
    obs, reward, value = learner.limits(data)
    assert np.asarray(obs).tolist() == [[-100.0] * 3, [100.0] * 3]
    expected = data.rewards.min() - 2.0, data.rewards.max()
    np.testing.assert_allclose(reward, expected, rtol=1e-6)
    np.testing.assert_allclose(value, [10 * expected[0], 10 * expected[1]], rtol=1e-5)
    # where every reward is negative, ending at once is the best there is
    worse = MAPLE(penalty=0.0, sac=SAC(discount=0.9)).limits(
        dataclasses.replace(data, rewards=-1.0 - np.abs(data.rewards))
    )
    np.testing.assert_allclose(worse.value[1], worse.reward[1], rtol=1e-6)
