"""Every loss against numbers worked out by hand; the arithmetic stands beside each check."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan import nn
from refplan.nn import identity_normaliser, make_ensemble, make_mlp
from refplan.priors import cql, edac, fqe, losses
from refplan.priors.actor_critic import Critics, unit_box
from refplan.priors.policy import GaussianPolicy
from refplan.types import Transition

# Compiled whole, because compiling every operation of a formula on its own takes seconds.
td_target, critic_loss, actor_loss, temperature_loss = map(
    jax.jit, (losses.td_target, losses.critic_loss, losses.actor_loss, losses.temperature_loss)
)
conservative_gap, gradient_diversity, likelihood_loss = map(
    jax.jit, (losses.conservative_gap, losses.gradient_diversity, losses.likelihood_loss)
)
expectile_loss, advantage_weight = jax.jit(losses.expectile_loss), jax.jit(losses.advantage_weight)
evaluation_loss, action_gradients = jax.jit(fqe.evaluation_loss), eqx.filter_jit(edac.action_gradients)
candidate_actions = eqx.filter_jit(cql.candidate_actions)
tanh_gaussian_log_prob, tanh_gaussian_sample = jax.jit(nn.tanh_gaussian_log_prob), jax.jit(nn.tanh_gaussian_sample)

HALF = jnp.asarray(0.5)


def array(*values) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.float32))


def test_td_targets_of_a_three_step_episode():
    reward, after = array(1, 2, 3), array(10, 20, 30)
    never, last = jnp.zeros(3, bool), jnp.asarray([False, False, True])
    # truncated after the third step: 1 + 0.5 * 10, 2 + 0.5 * 20, 3 + 0.5 * 30
    np.testing.assert_allclose(td_target(reward, never, after, HALF), [6, 12, 18])
    # terminated at the third step: its target is its reward; the flag touches no other step
    np.testing.assert_allclose(td_target(reward, last, after, HALF), [6, 12, 3])


def test_nothing_unknown_leaks_through_a_termination():
    target = td_target(array(3), jnp.asarray([True]), array(jnp.nan), HALF)
    np.testing.assert_allclose(target, [3])


def test_critic_loss_is_summed_over_critics_and_averaged_over_rows():
    q = jnp.asarray([[1.0, 2.0], [5.0, 0.0]])
    # critic 1: ((1-1)^2 + (2-4)^2) / 2 = 2; critic 2: ((5-1)^2 + (0-4)^2) / 2 = 16
    assert critic_loss(q, array(1, 4)) == pytest.approx(18)
    # each learns as if alone: the first critic's gradient is 2 (q - y) / 2 whatever the second does
    np.testing.assert_allclose(jax.grad(critic_loss)(q, array(1, 4))[0], [0, -2])


def test_evaluation_loss_gives_every_critic_its_own_target_and_weights():
    q = jnp.asarray([[1.0, 2.0], [1.0, 2.0]])
    target = jnp.asarray([[0.0, 0.0], [3.0, 2.0]])
    weight = jnp.asarray([[1.0, 2.0], [0.0, 1.0]])
    # critic 1: (1 * 1 + 2 * 4) / 2 = 4.5; critic 2: (0 * 4 + 1 * 0) / 2 = 0
    assert evaluation_loss(q, target, weight) == pytest.approx(4.5)


def test_actor_loss():
    # (0.5 * -1 - 3 + 0.5 * 2 - 5) / 2 = (-3.5 - 4) / 2
    assert actor_loss(array(-1, 2), array(3, 5), HALF) == pytest.approx(-3.75)


def test_temperature_moves_towards_the_target_entropy():
    target_entropy = -2.0
    # log pi = 3 means entropy -3, below its target: -(3 - 2) = -1 with respect to log alpha, so descent raises alpha
    assert jax.grad(temperature_loss)(jnp.zeros(()), array(3, 3), target_entropy) == pytest.approx(-1)
    # log pi = 1 means entropy -1, above its target: alpha falls
    assert jax.grad(temperature_loss)(jnp.zeros(()), array(1, 1), target_entropy) == pytest.approx(1)
    assert temperature_loss(jnp.asarray(2.0), array(3, 3), target_entropy) == pytest.approx(-2)


def test_cloning_loss_by_hand():
    action, logged = jnp.asarray([[1.0, 0.0], [0.0, 0.0]]), jnp.asarray([[0.0, 0.0], [0.0, 2.0]])
    # mean |Q| = 3, mean square (1 + 4) / 4
    assert losses.cloning_loss(action, logged, array(-2, 4)) == pytest.approx(3.75)
    # only the actions are pulled, not Q: d/da = 3 * 2 (a - a_data) / 4
    to_action, to_q = jax.grad(losses.cloning_loss, (0, 2))(action, logged, array(-2, 4))
    np.testing.assert_allclose(to_action, [[1.5, 0.0], [0.0, -3.0]])
    np.testing.assert_array_equal(to_q, 0.0)


def test_conservative_gap_by_hand():
    candidates = jnp.log(jnp.asarray([[[1.0, 3.0]], [[2.0, 2.0]]]))  # two critics, one state, two actions
    log_density = jnp.log(jnp.asarray([[0.5, 1.0]]))
    q_data = jnp.asarray([[1.0], [0.0]])
    # critic 1: log(1 / 0.5 + 3 / 1) - 1 = log 5 - 1; critic 2: log(2 / 0.5 + 2 / 1) - 0 = log 6
    np.testing.assert_allclose(conservative_gap(candidates, log_density, q_data), [np.log(5) - 1, np.log(6)], rtol=1e-6)


def test_conservative_penalty_pushes_policy_actions_down_and_data_up():
    random = np.random.default_rng(0)
    shapes = (2, 5, 6), (5, 6), (2, 5)
    candidates, log_density, q_data = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)
    total = lambda c, q: jnp.sum(conservative_gap(c, log_density, q))  # noqa: E731
    at_candidates, at_data = jax.jit(jax.grad(total, (0, 1)))(candidates, q_data)
    # descent lowers what has a positive gradient
    assert (np.asarray(at_candidates) > 0).all()
    assert (np.asarray(at_data) < 0).all()
    # per state the candidates share a weight of 1/batch, and so does the data action
    np.testing.assert_allclose(np.asarray(at_candidates).sum(axis=2), 1 / 5, rtol=1e-5)
    np.testing.assert_allclose(at_data, -1 / 5, rtol=1e-5)


def test_drawn_candidates_give_the_same_gradient_on_average():
    random = np.random.default_rng(1)
    candidates, log_density = (jnp.asarray(2 * random.normal(size=s), jnp.float32) for s in ((2, 3, 6), (3, 6)))

    @jax.jit
    def drawn_gradient(key):
        drawn, weight = losses.draw_candidates(candidates, log_density, jr.split(key, 3), 2)
        taken = lambda q: jnp.take_along_axis(q, drawn[None], axis=2)  # noqa: E731
        spread = losses.conservative_spread(candidates, log_density)
        value, pull = jax.vjp(lambda q: losses.drawn_spread(spread, taken(q), weight), candidates)
        return value, pull(jnp.ones(2))[0], weight

    values, grads, weights = jax.vmap(drawn_gradient)(jr.split(jr.key(0), 20_000))
    exact = jax.grad(lambda q: jnp.sum(losses.conservative_spread(q, log_density)))(candidates)
    np.testing.assert_allclose(jnp.mean(grads, axis=0), exact, atol=0.015)
    # what is reported is the whole log-sum-exp, whatever was drawn, and nothing counts for more than critics / drawn
    expected = losses.conservative_spread(candidates, log_density)
    np.testing.assert_allclose(values, jnp.broadcast_to(expected, values.shape), rtol=1e-5)
    assert float(weights.max()) <= 1.0 + 1e-5


def make_batch(rows: int, obs: int, act: int) -> Transition:
    random = np.random.default_rng(3)
    draw = lambda size: jnp.asarray(random.uniform(-1, 1, (rows, size)).astype(np.float32))  # noqa: E731
    return Transition(draw(obs), draw(act), jnp.zeros(rows), draw(obs), jnp.zeros(rows, bool))


def tiny_policy(obs: int, act: int) -> GaussianPolicy:
    return GaussianPolicy(make_mlp((obs, 8, 2 * act), jr.key(1)), identity_normaliser(obs), *unit_box(act))


@pytest.mark.parametrize("samples", [2, 10])
def test_log_sum_exp_runs_over_all_3n_actions_of_a_state(samples):
    batch = make_batch(4, 3, 2)
    actions, log_density = candidate_actions(tiny_policy(3, 2), batch, samples, jr.key(0))
    assert actions.shape == (4, 3 * samples, 2)
    assert log_density.shape == (4, 3 * samples)
    # constant Q = 7 and constant density 1: log(3n e^7) - 7 = log 3n; over 3 values per repeat it would be log 3
    gap = conservative_gap(jnp.full((1, 4, 3 * samples), 7.0), jnp.zeros((4, 3 * samples)), jnp.full((1, 4), 7.0))
    np.testing.assert_allclose(gap, [np.log(3 * samples)], rtol=1e-5)


def test_candidates_are_uniform_then_of_this_state_then_of_the_next():
    batch, policy, samples = make_batch(4, 3, 2), tiny_policy(3, 2), 5
    actions, log_density = candidate_actions(policy, batch, samples, jr.key(0))
    np.testing.assert_allclose(log_density[:, :samples], 2 * np.log(0.5), rtol=1e-6)
    log_prob = jax.jit(jax.vmap(jax.vmap(policy.log_prob, (None, 0))))
    np.testing.assert_allclose(log_density[:, 5:10], log_prob(batch.obs, actions[:, 5:10]), atol=1e-3)
    np.testing.assert_allclose(log_density[:, 10:], log_prob(batch.next_obs, actions[:, 10:]), atol=1e-3)
    assert not np.allclose(log_density[:, 10:], log_prob(batch.obs, actions[:, 10:]), atol=1e-3)


def test_importance_weights_make_the_penalty_an_integral():
    # sum_k exp(Q) / p(a_k) / n estimates the integral of exp(Q) da whatever p is: with Q = 0 over [-1, 1]^2 it is 4
    samples = 40_000
    _, log_density = candidate_actions(tiny_policy(3, 2), make_batch(1, 3, 2), samples, jr.key(0))
    estimates = np.exp(-np.asarray(log_density)).reshape(3, samples).mean(axis=1)
    np.testing.assert_allclose(estimates, 4.0, rtol=0.1)


def test_diversity_is_zero_for_orthogonal_gradients():
    grads = np.broadcast_to(np.diag([1.0, 5.0, 0.1])[:, None], (3, 4, 3)).astype(np.float32)
    assert gradient_diversity(jnp.asarray(grads)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("critics", [2, 3, 10])
def test_diversity_of_identical_and_opposed_gradients(critics):
    same = np.tile(np.array([3, 4], np.float32), (critics, 5, 1))
    # N (N - 1) ordered pairs of cosine 1, over N - 1: N
    assert gradient_diversity(jnp.asarray(same)) == pytest.approx(critics, rel=1e-5)
    # one of them turned round: (N-1)(N-2) pairs of 1 and 2 (N-1) of -1, over N - 1: (N - 2) - 2 = N - 4
    same[0] *= -1
    assert gradient_diversity(jnp.asarray(same)) == pytest.approx(critics - 4, rel=1e-5, abs=1e-5)


def test_fast_diversity_equals_the_double_loop():
    grads = np.random.default_rng(0).normal(size=(5, 7, 3)).astype(np.float32)
    total = 0.0
    for row in range(7):
        for i in range(5):
            for j in range(5):
                if i != j:
                    a, b = grads[i, row], grads[j, row]
                    total += a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert gradient_diversity(jnp.asarray(grads)) == pytest.approx(total / 7 / 4, rel=1e-5)


def test_diversity_is_differentiable_where_a_critic_has_no_gradient():
    grads = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float32)
    grads[0, 1] = 0.0
    value, slope = jax.jit(jax.value_and_grad(losses.gradient_diversity))(jnp.asarray(grads))
    assert np.isfinite(value)
    assert np.isfinite(np.asarray(slope)).all()


def test_action_gradients_are_those_of_each_critic_at_each_row():
    nets, batch = make_ensemble(3, (5, 8, 1), jr.key(0)), make_batch(4, 3, 2)
    critics = Critics(nets, identity_normaliser(3), *unit_box(2))
    fast = action_gradients(critics, batch.obs, batch.action)
    plain = jax.jit(jax.vmap(jax.jacobian(lambda action, obs: critics(obs, action))))(batch.action, batch.obs)
    np.testing.assert_allclose(fast, np.swapaxes(plain, 0, 1), atol=1e-6)


def test_expectile_loss():
    # u = 2 weighs 0.9, u = -1 weighs 0.1: (0.9 * 4 + 0.1 * 1) / 2
    assert expectile_loss(array(2, -1), jnp.asarray(0.9)) == pytest.approx(1.85)
    # the expectile 1/2 is half the mean square: (4 + 1) / 2 / 2
    assert expectile_loss(array(2, -1), HALF) == pytest.approx(1.25)


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.9])
def test_minimiser_of_the_expectile_loss(expectile):
    # of a fair coin's values 0 and 1 the minimiser v solves tau (1 - v) = (1 - tau) v: v = tau
    slope = jax.grad(lambda v: expectile_loss(array(0, 1) - v[None], jnp.asarray(expectile)))
    assert slope(jnp.asarray(expectile)) == pytest.approx(0, abs=1e-6)


def test_advantage_weight_and_its_cap():
    weight = advantage_weight(array(0, np.log(2), -1, 1000), jnp.asarray(2.0))
    np.testing.assert_allclose(weight, [1, 4, np.exp(-2), 100], rtol=1e-5)


def test_likelihood_loss():
    assert likelihood_loss(array(-1, -3)) == pytest.approx(2)
    assert likelihood_loss(array(-1, -3), array(2, 0)) == pytest.approx(1)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.3)])
def test_tanh_gaussian_density_integrates_to_one(mean, log_std):
    # midpoints in u = atanh(a), da = (1 - a^2) du: fine where the density piles up at the borders
    raw = np.linspace(-7.0, 7.0, 20_001)
    middle = 0.5 * (raw[1:] + raw[:-1])
    action, width = np.tanh(middle), np.diff(np.tanh(raw))
    log_prob = jax.vmap(lambda a: tanh_gaussian_log_prob(array(mean), array(log_std), a))(jnp.asarray(action[:, None]))
    assert np.sum(np.exp(np.asarray(log_prob, np.float64)) * width) == pytest.approx(1, abs=2e-3)


def test_tanh_gaussian_density_is_a_change_of_variables():
    mean, log_std = 0.3, -0.5
    for action in (-0.9, -0.2, 0.0, 0.6, 0.95):
        step = 1e-6
        slope = (np.arctanh(action + step) - np.arctanh(action - step)) / (2 * step)  # du/da by differences
        u, std = np.arctanh(action), np.exp(log_std)
        expected = np.exp(-0.5 * ((u - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi)) * slope
        found = jnp.exp(tanh_gaussian_log_prob(array(mean), array(log_std), array(action)))
        assert found == pytest.approx(expected, rel=1e-4)


def test_a_sample_comes_with_its_own_density():
    mean, log_std = array(0.3, -1.0), array(-0.5, 0.2)
    action, log_prob = tanh_gaussian_sample(mean, log_std, jr.key(0))
    assert tanh_gaussian_log_prob(mean, log_std, action) == pytest.approx(float(log_prob), abs=1e-4)
