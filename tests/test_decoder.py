import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.dynamics.decoder import (
    Decoder,
    apply_members,
    bounds_penalty,
    make_gaussian_nets,
    negative_log_likelihood,
    soft_bounds,
    take_members,
)
from refplan.nn import Normaliser

LOW, HIGH = jnp.array([-10.0, -4.0]), jnp.array([0.5, 3.0])
MEMBERS, OBS, ACT = 3, 2, 1


def make(**changes):
    settings = {"members": MEMBERS, "inputs": OBS + ACT, "latent": 0, "outputs": OBS + 1, "hidden": (8, 8)} | changes
    return make_gaussian_nets(**settings, key=jr.key(0))


@pytest.mark.parametrize(("raw", "bound"), [(1e4, HIGH), (-1e4, LOW)])
def test_bounds_are_reached_at_infinity(raw, bound):
    # The upper bound itself passes the lower one's softplus, which lifts it by log(1 + exp(low - high)).
    lift = jnp.log1p(jnp.exp(LOW - HIGH)) if raw > 0 else 0.0
    np.testing.assert_allclose(soft_bounds(jnp.full(2, raw), LOW, HIGH), bound + lift, atol=1e-5)


def test_inside_the_bounds_little_changes_and_nothing_leaves_them():
    raw = jnp.linspace(-30.0, 30.0, 601)[:, None] * jnp.ones((1, 2))
    out = soft_bounds(raw, LOW, HIGH)
    assert bool(jnp.all((out >= LOW[None]) & (out <= HIGH[None] + 1e-3)))
    assert bool(jnp.all(jnp.diff(out, axis=0) >= 0))
    np.testing.assert_allclose(soft_bounds(jnp.array([-5.0, -0.5]), LOW, HIGH), [-5.0, -0.5], atol=0.05)


@pytest.mark.parametrize("raw", [-14.0, -5.0, 0.0, 4.0])
def test_gradients_pass_the_bounds_and_reach_them(raw):
    grads = jax.grad(lambda r, low, high: soft_bounds(r, low, high)[0], argnums=(0, 1, 2))(
        jnp.full(2, raw), jnp.full(2, -10.0), jnp.full(2, 0.5)
    )
    assert all(0.0 < float(g[0]) <= 1.0 for g in grads)
    assert sum(float(g[0]) for g in grads) == pytest.approx(1.0, abs=1e-5)  # shifting all three shifts the result


def test_likelihood_by_hand():
    mean, log_var = jnp.array([1.0, -1.0]), jnp.log(jnp.array([4.0, 0.25]))
    found = negative_log_likelihood(mean, log_var, jnp.array([3.0, -0.5]))
    by_hand = 0.5 * ((4.0 / 4.0 + np.log(4.0)) + (0.25 / 0.25 + np.log(0.25)))
    assert float(found) == pytest.approx(by_hand, abs=1e-6)


def test_likelihood_is_least_at_the_true_spread():
    errors = jnp.asarray(np.random.default_rng(0).normal(size=(4000, 1)) * 0.3, jnp.float32)
    at = lambda v: jnp.mean(negative_log_likelihood(jnp.zeros_like(errors), jnp.full_like(errors, v), errors))  # noqa: E731
    spread = jnp.linspace(-4.0, 0.0, 401)
    best = spread[jnp.argmin(jax.vmap(at)(spread))]
    assert float(jnp.exp(0.5 * best)) == pytest.approx(0.3, rel=0.03)


def test_bounds_penalty_by_hand():
    nets = eqx.tree_at(lambda n: (n.max_log_var, n.min_log_var), make(outputs=2), (HIGH, LOW))
    assert float(bounds_penalty(nets)) == pytest.approx(0.01 * (3.5 + 14.0))
    grads = eqx.filter_grad(bounds_penalty)(nets)
    assert bool(jnp.all(grads.max_log_var > 0)) and bool(jnp.all(grads.min_log_var < 0))  # descent brings them together


def test_weights_begin_as_in_mopo():
    nets = make(members=4, hidden=(100, 100))
    weight = nets.layers[1].weight
    # A normal cut at two deviations has 0.88 of the deviation it was cut from.
    assert float(jnp.std(weight)) == pytest.approx(0.8796 / (2.0 * 10.0), rel=0.02)
    assert float(jnp.max(jnp.abs(weight))) <= 2.0 / (2.0 * 10.0)
    assert all(not jnp.any(layer.bias) for layer in nets.layers)
    assert not jnp.array_equal(weight[0], weight[1])


@pytest.mark.parametrize("latent", [0, 2])
@pytest.mark.parametrize("inject", [False, True])
def test_members_at_once_equal_members_one_by_one(latent, inject):
    nets = make(latent=latent, inject=inject, residual=True)
    x = jr.normal(jr.key(1), (MEMBERS, 5, OBS + ACT))
    m = jr.normal(jr.key(2), (5, latent)) if latent else None
    mean, log_var = apply_members(nets, x, m)
    for number in range(MEMBERS):
        one_mean, one_log_var = jax.tree.map(
            lambda a: a[0], apply_members(take_members(nets, slice(number, number + 1)), x[number : number + 1], m)
        )
        np.testing.assert_allclose(mean[number], one_mean, atol=1e-6)
        np.testing.assert_allclose(log_var[number], one_log_var, atol=1e-6)
    assert not np.allclose(mean[0], mean[1])


def test_a_latent_and_its_injection_matter():
    x = jnp.ones((MEMBERS, OBS + ACT))
    for inject in (False, True):
        nets = make(latent=2, inject=inject)
        assert len(nets.inject) == (1 if inject else 0)
        one, other = (apply_members(nets, x, m)[0] for m in (jnp.zeros(2), jnp.ones(2)))
        assert not np.allclose(one, other)
    quiet = eqx.tree_at(lambda n: n.inject, nets, jax.tree.map(jnp.zeros_like, nets.inject))
    assert not np.allclose(apply_members(quiet, x, jnp.ones(2))[0], other)


def test_residual_adds_a_layers_input():
    nets = make()
    skip = eqx.tree_at(lambda n: n.layers[1], make(residual=True), jax.tree.map(jnp.zeros_like, nets.layers[1]))
    shallow = eqx.tree_at(lambda n: n.layers, nets, (nets.layers[0], nets.layers[2]))
    x = jr.normal(jr.key(1), (MEMBERS, OBS + ACT))
    for found, expected in zip(apply_members(skip, x), apply_members(shallow, x), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)  # swish(0) = 0: only the skip is left


def decoder(elites=2) -> Decoder:
    inputs = Normaliser(jnp.array([1.0, 2.0, 0.5]), jnp.array([2.0, 0.5, 3.0]))
    targets = Normaliser(jnp.array([0.1, -0.2, 5.0]), jnp.array([0.01, 4.0, 2.0]))
    return Decoder(make(), inputs, targets, elites)


def test_decoder_speaks_in_world_units():
    made = decoder()
    obs, action = jr.normal(jr.key(3), (2, OBS)), jnp.array([0.3])
    out = made.predict(None, obs, action)
    for number in range(2):
        x = (jnp.concatenate([obs[number], action]) - made.inputs.mean) / made.inputs.std
        each = take_members(made.nets, slice(number, number + 1))
        mean, log_var = (a[0] for a in apply_members(each, x[None]))
        change = mean * made.targets.std + made.targets.mean
        std = jnp.sqrt(jnp.exp(log_var)) * made.targets.std
        np.testing.assert_allclose(out.next_obs[number], obs[number] + change[:-1], rtol=1e-5)
        np.testing.assert_allclose(out.reward[number], change[-1], rtol=1e-5)
        np.testing.assert_allclose(out.next_obs_std[number], std[:-1], rtol=1e-5)
        np.testing.assert_allclose(out.reward_std[number], std[-1], rtol=1e-5)


def test_decoder_under_vmap_equals_a_loop():
    made = decoder()
    obs, action = jr.normal(jr.key(3), (4, 2, OBS)), jr.normal(jr.key(4), (4, ACT))
    many = jax.vmap(lambda o, a: made.predict(None, o, a))(obs, action)
    for row in range(4):
        one = made.predict(None, obs[row], action[row])
        jax.tree.map(lambda a, b, row=row: np.testing.assert_allclose(a[row], b, atol=1e-5), many, one)
