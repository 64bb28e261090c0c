import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from small_models import SMALL_BELIEF

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Meta
from refplan.data.tasks import task
from refplan.dynamics.base import LearnedTermination, NeverTerminates, RuleTermination
from refplan.dynamics.ensemble import Ensemble
from refplan.dynamics.termination import TerminationLearner, cross_entropy, find_ends
from refplan.errors import RefplanError
from refplan.logs import read_csv
from refplan.modules import load_module, register, save_module
from refplan.train import fit

HEAD = TerminationLearner((16, 16), rate=1e-2)
BELIEF = dataclasses.replace(SMALL_BELIEF, epochs=1, decoder_epochs=20, patience=20, decoder_batch=64, termination=HEAD)
SMALL = Ensemble(members=2, elites=1, hidden=(8,), batch_size=64, epochs=30, patience=30, termination=HEAD)


def world(rows=2000, seed=0, level=1.2, noise=0.0):
    """A walk that ends above a level of s'[0]; with `noise` the end is a matter of luck near it."""
    random = np.random.default_rng(seed)
    obs = random.normal(size=(rows, 2)).astype(np.float32)
    after = obs + 0.5 * random.normal(size=(rows, 2)).astype(np.float32)
    terminated = after[:, 0] + noise * random.normal(size=rows) > level
    action = random.uniform(-1, 1, (rows, 1)).astype(np.float32)
    ends = (np.arange(rows) % 20 == 19) & ~terminated
    meta = Meta(name="ends")
    return make_dataset(obs, action, obs[:, 0], terminated, ends, next_observations=after, meta=meta)


def judged(model, data):
    rows = data.device()
    return np.asarray(jax.vmap(model.termination)(rows.obs, rows.action, rows.next_obs))


@pytest.fixture(scope="module")
def learned():
    return fit(SMALL, world(), key=jr.key(0), show=False)


def robot_data(name, rows=64):
    random, robot = np.random.default_rng(0), task(name)
    obs = random.normal(size=(rows, robot.obs_dim)).astype(np.float32)
    action = random.uniform(-1, 1, (rows, robot.action_dim)).astype(np.float32)
    last = np.arange(rows) == rows - 1
    meta = Meta(name=name, env_id=robot.env_id)
    return make_dataset(obs, action, obs[:, 0], last, ~last & False, next_observations=obs, meta=meta)


@pytest.mark.parametrize("name", ["hopper", "walker2d", "halfcheetah"])
def test_the_rule_of_the_task_is_used_and_stored(name, tmp_path):
    data = robot_data(name)
    model = fit(dataclasses.replace(SMALL, epochs=1), data, key=jr.key(0), show=False)
    assert isinstance(model.termination, RuleTermination)
    save_module(tmp_path / "model.safetensors", model)
    loaded = load_module(tmp_path / "model.safetensors")
    assert eqx.tree_equal(loaded, model)
    random = np.random.default_rng(1)
    obs = jnp.asarray(random.normal(size=(500, data.obs_dim)), jnp.float32) * 0.2
    obs = obs.at[:, 0].add(1.0)
    action = jnp.zeros((500, data.action_dim))
    expected = np.asarray(jax.vmap(data.task.termination)(obs, action, obs))
    assert np.array_equal(jax.vmap(loaded.termination)(obs, action, obs), expected)
    assert expected.any() != (name == "halfcheetah") and not expected.all()


def test_a_world_without_ends_never_ends():
    data = dataclasses.replace(world(), terminated=np.zeros(2000, bool))
    assert find_ends(data) is None
    assert isinstance(TerminationLearner().init(data, jr.key(0)).termination, NeverTerminates)
    ended = NeverTerminates()(jnp.zeros(2), jnp.zeros(1), jnp.zeros(2))
    assert ended.dtype == bool and not ended


def test_learned_ends_separate_a_simple_world(learned):
    assert isinstance(learned.termination, LearnedTermination)
    fresh = world(seed=1)
    said, truth = judged(learned, fresh), fresh.terminated
    assert (said == truth).mean() > 0.97
    assert said[truth].mean() > 0.9 and (~said[~truth]).mean() > 0.95


def test_imagined_steps_ask_the_learned_head(learned):
    high, low = jnp.array([4.0, 0.0]), jnp.array([-4.0, 0.0])
    ends = jax.vmap(lambda o: learned.step((), o, jnp.zeros(1), jr.key(0)).terminated)(jnp.stack([high, low]))
    assert ends.tolist() == [True, False]


def test_learned_head_is_stored(learned, tmp_path):
    save_module(tmp_path / "model.safetensors", learned)
    assert eqx.tree_equal(load_module(tmp_path / "model.safetensors"), learned)


@register
def above_two(obs, action, next_obs):
    return next_obs[0] > 2.0


def test_a_rule_of_the_user_is_stored_by_name(learned, tmp_path):
    ruled = dataclasses.replace(learned, termination=RuleTermination(above_two))
    save_module(tmp_path / "model.safetensors", ruled)
    loaded = load_module(tmp_path / "model.safetensors")
    assert eqx.tree_equal(loaded, ruled) and loaded.termination.rule is above_two
    fresh = world(seed=1)
    np.testing.assert_array_equal(judged(loaded, fresh), fresh.next_observations[:, 0] > 2.0)
    unknown = dataclasses.replace(learned, termination=RuleTermination(judged))
    with pytest.raises(RefplanError, match=r"judged' at 'termination\.rule'.*refplan\.register"):
        save_module(tmp_path / "other.safetensors", unknown)


def test_a_belief_model_learns_ends_and_keeps_the_classifier_that_judges_held_out_episodes_best(tmp_path):
    data = world(noise=0.5)  # ends partly luck, so that a classifier can be learned by heart
    model = fit(BELIEF, data, key=jr.key(0), folder=tmp_path, show=False)
    assert isinstance(model.termination, LearnedTermination)
    rows = read_csv(tmp_path / "beliefdecoder" / "metrics.csv")
    assert {"termination_loss", "held_termination_loss"} <= set(rows[0])
    losses = [float(row["held_termination_loss"]) for row in rows]
    assert min(losses) < losses[-1]  # the newest is not the best, so keeping it would be noticed
    _, held = BELIEF.hold_out(data, jr.split(jr.key(0), 3)[1])
    assert float(cross_entropy(model.termination, held.device())) == pytest.approx(min(losses), rel=1e-4)
    certain = world(seed=1)
    assert (judged(model, certain) == certain.terminated).mean() > 0.95
    high, low = jnp.array([4.0, 0.0]), jnp.array([-4.0, 0.0])
    step = jax.vmap(lambda obs: model.step(jnp.zeros(2), obs, jnp.zeros(1), jr.key(0)).terminated)
    assert step(jnp.stack([high, low])).tolist() == [True, False]
    save_module(tmp_path / "model.safetensors", model)
    assert eqx.tree_equal(load_module(tmp_path / "model.safetensors"), model)


def test_stop_and_resume_equals_no_stop(tmp_path):
    learner = dataclasses.replace(SMALL, epochs=4)
    every, _ = learner.schedule(world())
    fit(learner, world(), key=jr.key(0), steps=2 * every, folder=tmp_path, show=False)
    resumed = fit(learner, world(), key=jr.key(0), folder=tmp_path, show=False)
    assert eqx.tree_equal(resumed, fit(learner, world(), key=jr.key(0), show=False))


def test_probabilities_hold_for_the_data_although_batches_are_balanced():
    """Near the edge ends are a matter of luck: the mean probability must be the share of ends, not one half."""
    model = fit(SMALL, world(level=2.5, noise=1.0), key=jr.key(0), show=False)
    fresh = world(rows=4000, seed=1, level=2.5, noise=1.0)
    assert 0.03 < fresh.terminated.mean() < 0.07
    rows = fresh.device()
    logit = jax.vmap(model.termination.logit)(rows.obs, rows.action, rows.next_obs)
    assert float(jnp.mean(jax.nn.sigmoid(logit))) == pytest.approx(fresh.terminated.mean(), abs=0.025)


def test_the_classifier_that_judges_held_out_rows_best_is_kept():
    data, held = world(), world(seed=1).device()
    good = HEAD.init(data, jr.key(0))
    rows, ends = data.device(), find_ends(data)
    assert eqx.tree_equal(HEAD.result(good).mean, good.best.mean)  # never reviewed: the newest
    step = eqx.filter_jit(lambda state, key: HEAD.update(state, HEAD.batch(rows, ends, key))[0])
    for number in range(100):
        good = step(good, jr.key(number))
    reviewed, _ = HEAD.review(good, held)
    assert eqx.tree_equal(HEAD.result(reviewed), HEAD.result(good))
    wrong = eqx.tree_at(lambda h: h.net.layers[-1].weight, good.termination, -good.termination.net.layers[-1].weight)
    later, metrics = HEAD.review(reviewed._replace(termination=wrong), held)
    assert float(metrics["held_termination_loss"]) > float(later.best_loss) == float(reviewed.best_loss)
    assert eqx.tree_equal(HEAD.result(later), HEAD.result(good))
    calm = held._replace(terminated=jnp.zeros_like(held.terminated))  # nothing to judge ends by
    newest, _ = HEAD.review(reviewed._replace(termination=wrong), calm)
    assert not eqx.tree_equal(HEAD.result(newest), HEAD.result(good))


def test_batches_hold_as_many_ends_as_other_steps():
    data, learner = world(level=2.5), TerminationLearner(batch_size=64)
    batch = learner.batch(data.device(), find_ends(data), jr.key(0))
    assert int(batch.terminated.sum()) == 32 and batch.reward.shape == (64,)


def test_ends_that_cannot_be_learned_are_said_aloud():
    data = world()
    blind = dataclasses.replace(data, known_next=~data.terminated)
    with pytest.warns(RuntimeWarning, match="never end an imagined episode"):
        state = TerminationLearner().init(blind, jr.key(0))
    assert isinstance(state.termination, NeverTerminates)
