"""GaussianPolicy: densities integrate to one, samples agree with them, actions stay in bounds."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.errors import RefplanError
from refplan.modules import load_module, save_module
from refplan.nn import Normaliser, make_mlp
from refplan.priors.policy import BUNDLED, GaussianPolicy, from_bundled, load_npz_policy, make_policy
from refplan.types import Transition

HEADS = ("tanh_gaussian", "gaussian", "gaussian_tanh_mean", "deterministic")
LOW, HIGH = np.array([-1.0, 0.0], np.float32), np.array([3.0, 0.5], np.float32)


def policy_with(head, low=LOW, high=HIGH, noise=0.2, scale=1.0):
    outputs = len(low) * (1 if head == "deterministic" else 2)
    net = make_mlp((3, 8, outputs), jr.key(3), jnp.tanh)
    layers = [(np.asarray(layer.weight) * scale, np.asarray(layer.bias)) for layer in net.layers]
    scaler = Normaliser(jnp.array([0.5, 0.0, -1.0]), jnp.array([1.0, 2.0, 0.5]))
    return make_policy(layers, low, high, head=head, activation=jnp.tanh, normaliser=scaler, noise=noise)


OBS = jnp.array([0.3, -0.2, 0.8])


@pytest.mark.parametrize("head", HEADS)
def test_density_of_the_worlds_action_integrates_to_one(head):
    policy = policy_with(head, low=np.array([-1.0]), high=np.array([3.0]), scale=0.3)
    if head != "tanh_gaussian":  # a clipped normal's density is that of the whole normal: integrate far outside too
        grid = jnp.linspace(-41.0, 43.0, 400_001)
    else:
        grid = jnp.linspace(-1.0 + 1e-5, 3.0 - 1e-5, 400_001)
    density = jnp.exp(jax.vmap(lambda a: policy.log_prob(OBS, a[None]))(grid))
    assert abs(float(jnp.trapezoid(density, grid)) - 1.0) < 2e-3


@pytest.mark.parametrize("head", HEADS)
def test_sampled_log_probability_is_that_of_the_sampled_action(head):
    policy = policy_with(head)
    actions, log_probs = jax.vmap(lambda k: policy.sample((), OBS, k))(jr.split(jr.key(0), 200))
    again = jax.vmap(lambda a: policy.log_prob(OBS, a))(actions)
    actions = np.asarray(actions)
    inside = np.all((actions > LOW + 0.01) & (actions < HIGH - 0.01), axis=1)  # atanh is ill-conditioned at the border
    assert inside.sum() > 50
    np.testing.assert_allclose(log_probs[inside], again[inside], atol=2e-3)


def test_tanh_gaussian_histogram_agrees_with_the_density():
    policy = policy_with("tanh_gaussian", low=np.array([-1.0]), high=np.array([3.0]), scale=0.3)
    actions, _ = jax.vmap(lambda k: policy.sample((), OBS, k))(jr.split(jr.key(0), 20_000))
    counts, edges = np.histogram(np.asarray(actions[:, 0]), bins=20, range=(-1.0, 3.0), density=True)
    middles = jnp.asarray((edges[1:] + edges[:-1]) / 2)[1:-1, None]
    density = jnp.exp(jax.vmap(lambda a: policy.log_prob(OBS, a))(middles))
    np.testing.assert_allclose(counts[1:-1], density, atol=0.03)


@pytest.mark.parametrize("head", HEADS)
def test_actions_are_finite_and_in_bounds_even_for_absurd_observations(head):
    policy = policy_with(head, scale=50.0, noise=3.0)
    for obs in (OBS, OBS * 1e6, jnp.full(3, jnp.nan), jnp.full(3, jnp.inf)):
        action, _ = policy.act(policy.start(), obs, jr.key(0))
        sample, _ = policy.sample((), obs, jr.key(1))
        for each in (action, sample):
            assert bool(jnp.all((each >= LOW) & (each <= HIGH)))
    nothing, _ = policy.act((), jnp.full(3, jnp.nan), jr.key(0))
    np.testing.assert_allclose(nothing, (LOW + HIGH) / 2)


@pytest.mark.parametrize("head", HEADS)
def test_act_is_the_centre_of_the_samples(head):
    policy = policy_with(head, scale=0.2, noise=0.05)
    if head != "deterministic":  # a narrow distribution, so that clipping and tanh do not shift the median
        policy = eqx.tree_at(lambda p: p.net.layers[-1].bias, policy, jnp.array([0.1, -0.2, -3.0, -3.0]))
    action, state = policy.act((), OBS, jr.key(0))
    step = Transition(OBS, action, jnp.array(0.0), OBS, jnp.array(False))
    assert policy.observe(state, step) == ()
    draws, _ = jax.vmap(lambda k: policy.sample((), OBS, k))(jr.split(jr.key(1), 4000))
    np.testing.assert_allclose(np.median(draws, axis=0), action, atol=0.01)


def test_deterministic_without_noise_has_one_action_of_log_probability_zero():
    policy = policy_with("deterministic", noise=0.0)
    sample, log_prob = policy.sample((), OBS, jr.key(0))
    np.testing.assert_array_equal(sample, policy.act((), OBS, jr.key(1))[0])
    assert float(log_prob) == 0.0


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_gradients_are_finite_and_touch_only_the_network(head, noise):
    policy = policy_with(head, noise=noise)

    def loss(p):
        action, log_prob = p.sample((), OBS, jr.key(0))
        return jnp.sum(action) + log_prob + p.log_prob(OBS, jnp.array([0.4, 0.2]))

    gradient = eqx.filter_grad(loss)(policy)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradient))
    assert float(jnp.abs(gradient.net.layers[0].weight).max()) > 0.0
    frozen = (gradient.normaliser, gradient.low, gradient.high, gradient.noise)
    assert all(float(jnp.abs(leaf).max()) == 0.0 for leaf in jax.tree.leaves(frozen))


def test_log_std_is_clipped():
    policy = policy_with("tanh_gaussian")
    policy = eqx.tree_at(lambda p: p.net.layers[-1].bias, policy, jnp.array([0.0, 0.0, 90.0, -90.0]))
    np.testing.assert_allclose(policy.distribution(OBS)[1], [2.0, -20.0])


def test_save_and_load(tmp_path):
    policy = policy_with("gaussian_tanh_mean")
    save_module(tmp_path / "p.safetensors", policy)
    again = load_module(tmp_path / "p.safetensors")
    assert jax.tree.structure(again) == jax.tree.structure(policy)
    np.testing.assert_array_equal(again.act((), OBS, jr.key(0))[0], policy.act((), OBS, jr.key(0))[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": "softmax"}, "unknown policy head 'softmax'"),
        ({"low": [-1.0, -1.0, -1.0]}, "2 actions"),
        ({"high": [0.0, -2.0]}, "low < high"),
        ({"high": [np.inf, 1.0]}, "finite"),
        ({"normaliser": Normaliser(jnp.zeros(4), jnp.ones(4))}, "reads 3 numbers, the observation scaler has 4"),
        ({"layers": []}, "at least one layer"),
        ({"layers": [(np.ones((3, 4)), np.ones(4)), (np.ones((5, 4)), np.ones(4))]}, "layer 1.*after a layer with 4"),
        ({"layers": [(np.full((3, 4), np.nan), np.ones(4))]}, "NaN"),
        ({"layers": [(np.ones((3, 5)), np.ones(5))]}, "5 outputs"),
    ],
)
def test_impossible_policies_are_refused(change, message):
    arguments = {"layers": [(np.ones((3, 4)), np.ones(4))], "low": [-1.0, -1.0], "high": [1.0, 1.0], **change}
    with pytest.raises(RefplanError, match=message):
        make_policy(arguments.pop("layers"), arguments.pop("low"), arguments.pop("high"), **arguments)


def npz_arrays(hidden=(4, 5), obs=3, actions=2):
    rng = np.random.default_rng(0)
    sizes = (obs, *hidden)
    arrays = {}
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        arrays |= {f"l{number}_w": rng.normal(size=(inputs, outputs)), f"l{number}_b": rng.normal(size=outputs)}
    for name in ("mu", "ls"):
        arrays |= {f"{name}_w": rng.normal(size=(sizes[-1], actions)), f"{name}_b": rng.normal(size=actions)}
    return {name: value.astype(np.float32) for name, value in arrays.items()}


@pytest.mark.parametrize("hidden", [(4,), (4, 5), (4, 5, 6)])
def test_npz_layout(tmp_path, hidden):
    arrays = npz_arrays(hidden)
    np.savez(tmp_path / "p.npz", **arrays)
    policy = load_npz_policy(tmp_path / "p.npz")
    obs = np.array([0.1, -0.5, 0.9], np.float32)
    h = obs
    for number in range(len(hidden)):
        h = np.maximum(h @ arrays[f"l{number}_w"] + arrays[f"l{number}_b"], 0.0)
    np.testing.assert_allclose(
        policy.act((), jnp.asarray(obs), jr.key(0))[0], np.tanh(h @ arrays["mu_w"] + arrays["mu_b"]), atol=1e-6
    )
    log_std = policy.distribution(jnp.asarray(obs))[1]
    np.testing.assert_allclose(log_std, np.clip(h @ arrays["ls_w"] + arrays["ls_b"], -20.0, 2.0), atol=1e-5)


def test_npz_that_is_no_policy(tmp_path):
    with pytest.raises(RefplanError, match="no such file"):
        load_npz_policy(tmp_path / "missing.npz")
    arrays = npz_arrays()
    cases = {
        "missing or extra: l1_b": {n: v for n, v in arrays.items() if n != "l1_b"},
        "missing or extra: q_w": {**arrays, "q_w": np.ones(2)},
        "layer 1 .* does not fit": {**arrays, "l1_w": np.ones((7, 5), np.float32)},
        "mean and log-std do not fit": {**arrays, "ls_w": np.ones((7, 5), np.float32)},
        "plain arrays": {**arrays, "l0_w": np.array([{"a": 1}], dtype=object)},
    }
    for message, content in cases.items():
        np.savez(tmp_path / "p.npz", **content)
        with pytest.raises(RefplanError, match=message):
            load_npz_policy(tmp_path / "p.npz")
    whole = (tmp_path / "p.npz").read_bytes()
    for damaged in (whole[:100], b"", b"hello"):
        (tmp_path / "p.npz").write_bytes(damaged)
        with pytest.raises(RefplanError, match="not a readable"):
            load_npz_policy(tmp_path / "p.npz")


@pytest.mark.parametrize(("robot", "obs", "actions"), [("hopper", 11, 3), ("halfcheetah", 17, 6), ("walker2d", 17, 6)])
def test_bundled_policies(robot, obs, actions):
    policy = from_bundled(robot)
    assert isinstance(policy, GaussianPolicy)
    action, _ = policy.act((), jnp.zeros(obs), jr.key(0))
    assert action.shape == (actions,)
    np.testing.assert_array_equal(action, from_bundled(f"{robot}-medium").act((), jnp.zeros(obs), jr.key(0))[0])


def test_unknown_bundled_policy():
    assert BUNDLED.is_dir()
    with pytest.raises(RefplanError, match=r"unknown bundled policy 'hoper'.*Did you mean 'hopper-medium'"):
        from_bundled("hoper")
