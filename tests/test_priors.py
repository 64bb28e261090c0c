"""Probe worlds: every learner finds values known on paper and the action known to be best."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import worlds

from refplan import turns
from refplan.errors import RefplanError
from refplan.presets import with_settings
from refplan.priors.bc import BC
from refplan.priors.cql import CQL
from refplan.priors.edac import EDAC, action_gradients
from refplan.priors.iql import IQL
from refplan.priors.losses import gradient_diversity
from refplan.priors.sac import SAC
from refplan.train import fit

STEPS = 1500
TOLERANCE = 0.1
# A small fixed temperature: the entropy bonus in EDAC's and SAC's values stays below the tolerance.
_SAC = {
    "hidden": (16, 16),
    "batch_size": 64,
    "actor_rate": 3e-3,
    "critic_rate": 3e-3,
    "alpha_rate": 0.0,
    "alpha_start": 1e-3,
    "tau": 0.05,
    "normalise": True,
}
# CQL is biased by design: its values are checked with a penalty of weight 0, the penalty's effect on its own below.
LEARNERS = {
    "sac": (SAC(**_SAC), "discount"),
    "cql": (CQL(weight=0.0, samples=2, sac=SAC(**_SAC, entropy_in_backup=False)), "sac.discount"),
    "edac": (EDAC(eta=0.01, sac=SAC(**_SAC, critics=3)), "sac.discount"),
    "iql": (IQL(hidden=(16, 16), batch_size=64, rate=3e-3, tau=0.05, beta=10.0, expectile=0.9), "discount"),
}
every_learner = pytest.mark.parametrize("name", LEARNERS)


def solve(name: str, probe: worlds.Probe, **changes):
    """Train a learner of the list above on a probe world with that world's discount."""
    learner, discount = LEARNERS[name]
    learner = with_settings(learner, {discount: probe.discount, **changes})
    return fit(learner, probe.data, steps=STEPS, key=jr.key(0), every=STEPS)


@eqx.filter_jit
def values(prior, obs):
    return jax.vmap(lambda o: prior.value(prior.start(), o))(obs)


@eqx.filter_jit
def critics_at(prior, obs, action):
    return prior.critics(obs, action)


def q_values(prior, obs: float, unit: np.ndarray) -> np.ndarray:
    """Every critic's value of actions given in [-1, 1] at one observation."""
    seen = jnp.full((len(unit), 1), obs, jnp.float32)
    return np.asarray(critics_at(prior, seen, jnp.asarray(worlds.to_box(unit))))


@pytest.mark.parametrize("world", worlds.FIXED_VALUES)
@every_learner
def test_values_that_do_not_depend_on_the_policy(name, world):
    probe = worlds.FIXED_VALUES[world]()
    prior = solve(name, probe)
    found = values(prior, jnp.asarray(probe.obs, jnp.float32))
    np.testing.assert_allclose(found, probe.value, atol=TOLERANCE, rtol=0.03)
    for obs, value in zip(probe.obs[:, 0], probe.value, strict=True):
        at_actions = q_values(prior, obs, worlds.unit_actions(8, seed=1)[2:])
        np.testing.assert_allclose(at_actions, value, atol=2 * TOLERANCE, rtol=0.03)


@pytest.fixture(scope="module")
def choosers():
    """Every learner trained on the world where the action matters."""
    return {name: solve(name, worlds.choice()) for name in LEARNERS}


@every_learner
def test_the_best_action_is_found(name, choosers):
    prior = choosers[name]
    action, _ = prior.act(prior.start(), jnp.zeros(1), jr.key(0))
    box = 0.5 * (worlds.HIGH - worlds.LOW)
    np.testing.assert_allclose(action, worlds.to_box(worlds.TARGET), atol=0.2 * box.max())
    value = values(prior, jnp.zeros((1, 1)))[0]
    # IQL's value is the 0.9-expectile of what the data's uniform actions earned, not that of its policy
    expected = expectile(worlds.choice().data.rewards, 0.9) if name == "iql" else 1.0
    assert value == pytest.approx(expected, abs=2 * TOLERANCE)


def expectile(values: np.ndarray, level: float) -> float:
    """The v at which level * mean (x - v)+ = (1 - level) * mean (v - x)+, by bisection."""
    low, high = values.min(), values.max()
    for _ in range(60):
        middle = 0.5 * (low + high)
        above, below = np.maximum(values - middle, 0).mean(), np.maximum(middle - values, 0).mean()
        low, high = (middle, high) if level * above > (1 - level) * below else (low, middle)
    return float(low)


@every_learner
def test_critics_know_what_every_action_earns(name, choosers):
    unit = worlds.unit_actions(50, seed=2)
    error = q_values(choosers[name], 0.0, unit) - worlds.choice_reward(unit)
    assert np.sqrt((error**2).mean()) < 2 * TOLERANCE


def narrow_world() -> worlds.Probe:
    """One step, reward 1, but all actions (the corners apart) near (0.5, 0.5)."""
    unit = worlds.unit_actions()
    unit[2:] = 0.5 + 0.1 * unit[2:]
    data = worlds.logged(0.0, 1.0, 0.0, length=1, terminates=True, unit=unit, name="narrow")
    return worlds.Probe(data, 0.9, np.zeros((1, 1)), np.ones(1))


def test_a_larger_conservative_weight_lowers_values_of_unseen_actions():
    seen, unseen = np.full((1, 2), 0.5, np.float32), worlds.unit_actions(200, seed=5)
    unseen = unseen[np.abs(unseen - 0.5).max(axis=1) > 0.4]
    at_data, elsewhere = [], []
    for weight in (0.0, 0.001, 0.03):
        prior = solve("cql", narrow_world(), weight=weight)
        at_data.append(q_values(prior, 0.0, seen).mean())
        elsewhere.append(q_values(prior, 0.0, unseen).mean())
    assert elsewhere[0] > elsewhere[1] + 0.5 > elsewhere[2] + 5
    np.testing.assert_allclose(at_data, 1.0, atol=TOLERANCE)
    # without the penalty any action is as good as another; with it the policy stays where the data is
    action, _ = prior.act(prior.start(), jnp.zeros(1), jr.key(0))
    np.testing.assert_allclose(action, worlds.to_box(np.array([0.5, 0.5])), atol=0.5)


@pytest.mark.parametrize(("drawn", "likeness"), [(0, 0.9999), (2, 0.7)])
def test_the_penalty_in_turns_or_of_drawn_actions_is_that_of_the_whole(drawn, likeness, monkeypatch):
    data = worlds.ragged()
    whole = CQL(samples=2, sac=SAC(hidden=(8,), batch_size=8))
    sac, rows = whole.init(data, jr.key(0)).sac, jax.tree.map(lambda x: x[:8], whole.prepare(data))

    def penalty(learner):
        loss = lambda nets: jnp.sum(learner.conservative_gaps(nets, sac, rows, jr.key(1)))  # noqa: E731
        value, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(sac.critics.nets)
        return float(value), jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(grads)])

    expected, exact = penalty(whole)
    monkeypatch.setattr(turns, "ROWS", 36)  # three states of twelve rows, and two left over
    value, found = penalty(dataclasses.replace(whole, drawn=drawn))
    assert value == pytest.approx(expected, rel=1e-5)
    assert jnp.vdot(found, exact) > likeness * jnp.linalg.norm(found) * jnp.linalg.norm(exact)


def test_an_annealed_policy_slows_down_along_a_cosine_and_its_values_do_not():
    data = worlds.ragged()

    def moves(anneal):
        learner = IQL(hidden=(8,), batch_size=8, anneal=anneal)
        state, rows = learner.init(data, jr.key(0)), learner.prepare(data)
        update, far = eqx.filter_jit(learner.update), []
        for number in range(5):
            new, _ = update(state, learner.batch(rows, state, jr.key(number)), jr.key(0))
            steps = jax.tree.map(
                lambda a, b: jnp.abs(a - b).max(), (new.policy.net, new.value), (state.policy.net, state.value)
            )
            far.append([max(float(x) for x in jax.tree.leaves(eqx.filter(s, eqx.is_array))) for s in steps])
            state = new
        return np.array(far)

    constant, slower = moves(0.0), moves(4.0)
    # Adam's first step is the rate itself; after t of 4 updates the policy's is 0.5 (1 + cos(pi t / 4)) of its own
    assert slower[0] == pytest.approx(constant[0], rel=1e-4)
    assert slower[2, 0] < 0.8 * constant[2, 0]
    assert slower[4, 0] == 0.0
    assert constant[4, 0] > 0.0
    np.testing.assert_allclose(slower[:, 1], constant[:, 1], rtol=1e-4)


def test_diversity_keeps_the_critics_apart():
    data = worlds.choice().data
    rows = SAC().prepare(data)
    similarity = []
    for eta in (0.0, 10.0):
        prior = solve("edac", worlds.choice(), eta=eta)
        similarity.append(gradient_diversity(action_gradients(prior.critics, rows.obs, rows.action)))
    assert similarity[1] < similarity[0] - 0.2


def test_edac_needs_two_critics():
    with pytest.raises(RefplanError, match="at least 2"):
        EDAC(sac=SAC(critics=1))


@pytest.mark.parametrize(("gap", "direction"), [(-100.0, 1), (100.0, -1)])
def test_the_lagrange_multiplier_grows_while_the_gap_is_too_large(gap, direction):
    learner = CQL(lagrange=True, gap=gap, samples=2, sac=SAC(hidden=(8,), batch_size=8))
    rows = []
    fit(learner, worlds.choice().data, steps=6, key=jr.key(0), every=2, logs=[lambda _, row: rows.append(row)])
    multipliers = [row["multiplier"] for row in rows]
    assert np.sign(np.diff(multipliers)).tolist() == [direction, direction]


def test_cloning_draws_the_policy_to_the_logged_actions(choosers):
    def distance(prior) -> float:
        action, _ = prior.act(prior.start(), jnp.zeros(1), jr.key(0))
        return float(np.abs(action - worlds.choice().data.actions.mean(axis=0)).max())

    assert distance(solve("sac", worlds.choice(), cloning=100.0)) < 0.3 * distance(choosers["sac"])


def test_the_temperature_lowers_entropy_to_its_target():
    # a uniform policy on [-1, 1]^2 has entropy 2 log 2 = 1.4, the target is -2: alpha must fall
    rows = []
    learner = with_settings(LEARNERS["sac"][0], {"alpha_rate": 1e-2, "alpha_start": 1.0})
    fit(learner, worlds.choice().data, steps=STEPS, key=jr.key(0), every=300, logs=[lambda _, row: rows.append(row)])
    assert rows[0]["entropy"] > 0
    assert rows[-1]["alpha"] < 0.1
    assert rows[-1]["entropy"] == pytest.approx(-2, abs=0.3)


def test_behaviour_cloning_finds_the_most_likely_gaussian():
    # u = tanh(0.8 s + 0.4 e) at s = -1 and 1, the second action with the opposite mean
    random = np.random.default_rng(0)
    obs = np.where(np.arange(worlds.ROWS) % 2, 1.0, -1.0)
    unit = np.tanh(0.8 * obs[:, None] * np.array([1, -1]) + 0.4 * random.normal(size=(worlds.ROWS, 2)))
    data = worlds.logged(obs, 0.0, 0.0, length=1, terminates=True, name="cloned")
    # actions in [-1, 1], so that this is the box: rows at its corners would be outliers at atanh(1)
    data = dataclasses.replace(data, actions=unit.astype(np.float32))
    policy = fit(BC(hidden=(16,), batch_size=240, rate=1e-2), data, steps=600, key=jr.key(0), every=600)
    # before the tanh the likelihood is that of a normal, so its maximum is the mean and spread of atanh(u) of each side
    raw = np.arctanh(unit)
    for side in (-1.0, 1.0):
        mean, log_std = policy.distribution(jnp.full(1, side))
        np.testing.assert_allclose(mean, raw[obs == side].mean(axis=0), atol=0.1)
        np.testing.assert_allclose(np.exp(log_std), raw[obs == side].std(axis=0), rtol=0.1)
    drawn = jax.jit(jax.vmap(lambda key: policy.sample((), jnp.ones(1), key)[0]))(jr.split(jr.key(1), 2000))
    raw_drawn = np.arctanh(np.asarray(drawn))
    np.testing.assert_allclose(raw_drawn.mean(axis=0), raw[obs == 1].mean(axis=0), atol=0.15)
    np.testing.assert_allclose(raw_drawn.std(axis=0), raw[obs == 1].std(axis=0), rtol=0.15)
