"""The exact Dirichlet belief of appendix A, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Meta
from refplan.dynamics.tabular import TabularDynamics, collapse, count_transitions, make_tabular
from refplan.errors import RefplanError
from refplan.modules import load_module, save_module
from refplan.types import Transition

REWARD = jnp.asarray([[0.0, 1.0], [2.0, 0.0], [0.5, 0.5]])  # three states, two actions


def one_hot(number: int, size: int):
    return jax.nn.one_hot(number, size)


def step(state: int, action: int, after: int) -> Transition:
    reward = REWARD[state, action]
    return Transition(one_hot(state, 3), one_hot(action, 2), reward, one_hot(after, 3), jnp.zeros((), bool))


def logged(states, actions, coded=None):
    coded = np.eye(3, dtype=np.float32)[states] if coded is None else coded
    rows = len(actions)
    ends = np.arange(rows) == rows - 1
    return make_dataset(
        coded[:-1],
        np.eye(2, dtype=np.float32)[actions],
        np.zeros(rows, np.float32),
        np.zeros(rows, bool),
        ends,
        next_observations=coded[1:],
        meta=Meta(name="tiny"),
    )


def test_observing_adds_one_count_and_nothing_else():
    model = make_tabular(REWARD)
    belief = model.observe(model.start(), step(0, 1, 2))
    change = np.asarray(belief - model.start())
    assert change[0, 1, 2] == 1.0 and change.sum() == 1.0


def test_the_posterior_mean_by_hand():
    model = make_tabular(REWARD, prior=0.5)
    belief = model.start()
    for after in (2, 2, 1):
        belief = model.observe(belief, step(0, 1, after))
    table = model.centre(belief, one_hot(0, 3))
    np.testing.assert_allclose(table[0, 1], np.asarray([0.5, 1.5, 2.5]) / 4.5, rtol=1e-6)
    np.testing.assert_allclose(table[1], np.full((2, 3), 1 / 3), rtol=1e-6)


def test_sampled_tables_average_to_the_posterior_mean_with_the_dirichlet_variance():
    model = make_tabular(REWARD)
    belief = model.observe(model.start(), step(0, 1, 2))
    tables = jax.vmap(lambda key: model.sample(belief, one_hot(0, 3), key))(jr.split(jr.key(0), 20_000))
    np.testing.assert_allclose(tables.sum(3), 1.0, rtol=1e-5)
    mean = np.asarray(model.centre(belief, one_hot(0, 3)))
    np.testing.assert_allclose(tables.mean(0), mean, atol=0.01)
    total = np.asarray(belief.sum(2, keepdims=True))
    np.testing.assert_allclose(tables.var(0), mean * (1 - mean) / (total + 1), atol=0.003)


def test_prediction_moves_distributions_and_mixes_rewards_exactly():
    model = make_tabular(REWARD)
    table = jr.dirichlet(jr.key(0), jnp.ones((3, 2, 3)))
    obs, action = jnp.asarray([0.2, 0.3, 0.5]), one_hot(1, 2)
    outcome = model.predict_from(table, obs, action)
    np.testing.assert_allclose(outcome.next_obs[0], np.asarray(obs) @ np.asarray(table[:, 1]), rtol=1e-5)
    np.testing.assert_allclose(outcome.reward[0], 0.2 * 1.0 + 0.5 * 0.5, rtol=1e-6)
    prediction = model.step(table, obs, action, jr.key(1))
    np.testing.assert_allclose(prediction.next_obs, outcome.next_obs[0], rtol=1e-6)
    assert not prediction.terminated
    own = model.predict(table, obs[None], action[None])
    np.testing.assert_allclose(own.next_obs, outcome.next_obs, rtol=1e-6)


def test_imagined_returns_agree_with_the_solved_bellman_equation():
    model = make_tabular(REWARD)
    table, discount = jr.dirichlet(jr.key(3), jnp.ones((3, 2, 3))), 0.8
    policy = np.asarray([1, 0, 1])
    moves, rewards = np.asarray(table)[np.arange(3), policy], np.asarray(REWARD)[np.arange(3), policy]
    value = np.linalg.solve(np.eye(3) - discount * moves, rewards)
    chosen = jax.nn.one_hot(policy, 2)

    def imagined(obs):
        def step(carry, number):
            obs, total = carry
            # A distribution over states acts in each of them by itself; the model is linear, so mixing is exact.
            each = jax.vmap(lambda s, a: model.predict_from(table, s, a))(jnp.diag(obs), chosen)
            return (each.next_obs.sum((0, 1)), total + discount**number * each.reward.sum()), None

        return jax.lax.scan(step, (obs, 0.0), jnp.arange(80))[0][1]

    np.testing.assert_allclose(jax.vmap(imagined)(jnp.eye(3)), value, rtol=1e-4)


def test_evidence_narrows_the_belief_about_the_true_world():
    model = make_tabular(REWARD)
    truth = jr.dirichlet(jr.key(4), jnp.ones((3, 2, 3)))

    def live(carry, key):
        obs, belief = carry
        key_action, key_next = jr.split(key)
        action = one_hot(jr.randint(key_action, (), 0, 2), 2)
        after = collapse(model.predict_from(truth, obs, action).next_obs[0], key_next)
        belief = model.observe(belief, Transition(obs, action, jnp.zeros(()), after, jnp.zeros((), bool)))
        return (after, belief), jnp.abs(model.centre(belief, obs) - truth).max()

    (_, belief), error = jax.lax.scan(live, (one_hot(0, 3), model.start()), jr.split(jr.key(5), 3000))
    assert belief.sum() == 18 + 3000
    assert error[-1] < 0.06 < error[0]


def test_counts_come_from_logged_data_and_bad_data_is_refused(tmp_path):
    data = logged([0, 2, 2, 1], [1, 0, 0])
    counts = np.asarray(count_transitions(data))
    assert counts[0, 1, 2] == counts[2, 0, 2] == counts[2, 0, 1] == 1.0 and counts.sum() == 3
    model = make_tabular(REWARD, data)
    np.testing.assert_array_equal(model.start(), counts + 1.0)
    save_module(tmp_path / "model.safetensors", model)
    loaded = load_module(tmp_path / "model.safetensors")
    assert isinstance(loaded, TabularDynamics)
    np.testing.assert_array_equal(loaded.alpha, model.alpha)
    with pytest.raises(RefplanError, match="not one-hot"):
        count_transitions(logged(None, [1, 0, 0], coded=np.ones((4, 3), np.float32)))
    with pytest.raises(RefplanError, match="3 states"):
        make_tabular(jnp.zeros((2, 2)), data)
    with pytest.raises(RefplanError, match="positive"):
        make_tabular(REWARD, prior=0.0)
