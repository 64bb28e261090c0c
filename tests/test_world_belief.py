"""The belief over worlds around a learned one: exact where the answer is known, silent at home, quick to follow."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.dynamics.adapted import Adapted, Reflecting
from refplan.dynamics.around_learner import Worlds
from refplan.dynamics.base import AbstractTermination, NeverTerminates, Outcome
from refplan.dynamics.ensemble import Ensemble
from refplan.dynamics.relabel import draw_gains, with_gains
from refplan.dynamics.worlds import World, WorldsDynamics, around
from refplan.errors import RefplanError
from refplan.modules import load_module, save_module
from refplan.planners.loop import LOOP
from refplan.planners.presets import make_planner
from refplan.planners.refplan import RefPlan
from refplan.train import fit
from refplan.types import Transition
from tests.bent_worlds import HOME, STD, A, B, live, logged
from tests.models import LinearPrior, TwoMembers


class Bent(TwoMembers):
    """s' = A s + c tanh(s)^3 + B a: linear for c = 0, else only where the robot stands tells how far it is shifted."""

    curve: jax.Array = eqx.field(converter=jnp.asarray, default=0.0)
    termination: AbstractTermination = NeverTerminates()

    def predict(self, hypothesis, obs, action):
        after = obs @ A.T + self.curve * jnp.tanh(obs) ** 3 + jnp.broadcast_to(action, (2, 2)) @ B.T
        std = jnp.full((2, 2), STD)
        return Outcome(
            after, -jnp.sum(after**2, axis=1), std, jnp.full(2, 1e3)
        )  # the filter learns nothing from rewards


def worlds(curve=0.0, **settings):
    base = {"memory": 1e9, "noise": 1.0, "outlier": 1e6, "significance": 0.0, "climb_std": 1e-6, "doubt": 1.0}
    return WorldsDynamics(Bent(curve), jnp.ones(2), jnp.ones(3), 2, **{**base, **settings})


@eqx.filter_jit
def reflect(model, steps, belief=None):
    def one(belief, step):
        belief = model.observe(belief, step)
        return belief, (belief.mean, jnp.diagonal(belief.covariance))

    return jax.lax.scan(one, model.start() if belief is None else belief, steps)


def gains(model, belief):
    return model.read(belief.mean).gain


def test_the_filter_is_exact_bayes_in_a_linear_world():
    model = worlds(offset_std=1e-6, drift_std=0.3)
    steps = live(0.0, (jnp.array([0.2, 1.1]), jnp.zeros(2), jnp.array([0.1, -0.2])), 30, jr.key(0))
    belief, _ = reflect(model, steps)
    # Regression of what the home world does not explain on (a1, a2, 1, 1), with the same prior.
    obs, action, after = (np.asarray(x, np.float64) for x in (steps.obs, steps.action, steps.next_obs))
    rows, seen = [], []
    for s, a, s_next in zip(obs, action, after, strict=True):
        effect = np.asarray(B) @ np.diag(a)
        rows.append(np.hstack([effect, np.eye(2)]))
        seen.append(s_next - np.asarray(A) @ s - effect @ np.ones(2))
    design, target = np.vstack(rows), np.concatenate(seen)
    precision = design.T @ design / STD**2 + np.diag(1 / np.array([0.5, 0.5, 0.3, 0.3]) ** 2)
    exact = np.linalg.solve(precision, design.T @ target / STD**2)
    kept = np.array([0, 1, 4, 5])
    units = np.array([0.5, 0.5, 0.3, 0.3])
    np.testing.assert_allclose(np.asarray(belief.mean)[kept] * units, exact, atol=2e-3)
    covariance = np.asarray(belief.covariance)[np.ix_(kept, kept)] * np.outer(units, units)
    np.testing.assert_allclose(covariance, np.linalg.inv(precision), atol=2e-4)


def test_where_the_robot_stands_tells_how_far_the_world_is_shifted():
    model = worlds(curve=0.8, drift_std=1e-6, gain_std=1e-6, offset_std=1.0)
    belief, (_, variances) = reflect(
        model, live(0.8, (jnp.ones(2), jnp.array([0.7, -0.5]), jnp.zeros(2)), 300, jr.key(1))
    )
    np.testing.assert_allclose(model.read(belief.mean).offset, [0.7, -0.5], atol=0.1)
    assert variances[-1, 2] < variances[0, 2] < 1.0  # narrower with every step


def test_a_failure_is_followed_within_twenty_steps_and_forgotten_without_evidence():
    model = worlds(memory=100.0, offset_std=0.1, drift_std=0.05, outlier=3.0, significance=2.0)
    whole = live(0.0, HOME, 100, jr.key(2))
    broken = live(0.0, (jnp.array([0.0, 1.0]), jnp.zeros(2), jnp.zeros(2)), 20, jr.key(3))
    belief, _ = reflect(model, whole)
    assert abs(float(gains(model, belief)[0]) - 1.0) < 0.15
    belief, _ = reflect(model, broken, belief)
    assert float(model.read(model.centre(belief, jnp.zeros(2))).gain[0]) < 0.2
    # A robot that gives no commands learns nothing about its actuators: back to the doubt it started with, and home.
    resting = live(0.0, HOME, 1000, jr.key(4), scale=0.0)
    model = dataclasses.replace(model, significance=jnp.asarray(4.0))
    belief, _ = reflect(model, resting, belief)
    np.testing.assert_allclose(model.read(model.centre(belief, jnp.zeros(2))).gain[0], 1.0, atol=1e-6)
    np.testing.assert_allclose(belief.covariance[0, 0], 1.0, rtol=0.05)


def test_an_actuator_that_is_off_stays_known_to_be_off_and_its_repair_is_noticed():
    """Gain 0 is the border of what is believed: without a slope there, the filter would forget it in thirty steps."""
    model = worlds(memory=200.0, offset_std=0.1, drift_std=0.05, outlier=3.0, significance=4.0, doubt=0.0)
    broken = live(0.0, (jnp.array([0.0, 1.0]), jnp.zeros(2), jnp.zeros(2)), 400, jr.key(9))
    belief, (means, _) = reflect(model, broken)
    assert float(model.read(model.centre(belief, jnp.zeros(2))).gain[0]) < 0.1
    assert float(means[:, 0].min()) >= -2.0 - 1e-5  # the border: (0 - 1) / gain_std
    belief, _ = reflect(model, live(0.0, HOME, 20, jr.key(10)), belief)
    np.testing.assert_allclose(gains(model, belief), [1.0, 1.0], atol=0.2)


def test_ground_that_rises_is_followed_without_lagging_behind():
    """A shift that grows every step: with `climb` the belief is where the ground is, without it stays below."""
    rise, settings = 0.02, {"gain_std": 1e-6, "drift_std": 1e-6, "offset_std": 0.5, "memory": 5000.0}
    steps = live(0.8, (jnp.ones(2), jnp.zeros(2), jnp.zeros(2)), 150, jr.key(8), climb=(rise, 0.0))
    behind = {}
    for climb_std in (1e-6, 0.05):
        model = worlds(curve=0.8, climb_std=climb_std, **settings)
        belief, _ = reflect(model, steps)
        behind[climb_std] = 150 * rise - float(model.read(belief.mean).offset[0])
    assert abs(behind[0.05]) < 0.1 < behind[1e-6]
    np.testing.assert_allclose(model.read(belief.mean).climb, [rise, 0.0], atol=0.01)


def test_the_slope_is_that_of_what_is_expected():
    model = worlds(curve=0.8, drift_std=0.3, climb_std=0.2)
    m, obs, action = 0.3 * jr.normal(jr.key(0), (8,)), jnp.array([0.4, -0.3]), jnp.array([0.2, 0.9])
    slope, mean, variance = model.linearised(m, obs, action)
    np.testing.assert_allclose(slope, jax.jacfwd(lambda m: model.expected(m, obs, action)[0])(m), atol=1e-6)
    np.testing.assert_array_equal(mean, model.expected(m, obs, action)[0])
    np.testing.assert_array_equal(variance, model.expected(m, obs, action)[1])


def test_doubt_is_the_width_of_draws():
    model = worlds()
    belief, _ = reflect(model, live(0.0, (jnp.array([0.3, 1.0]), jnp.zeros(2), jnp.zeros(2)), 50, jr.key(5)))
    certain = dataclasses.replace(model, doubt=jnp.asarray(0.0))
    key, obs = jr.key(1), jnp.zeros(2)
    np.testing.assert_array_equal(certain.sample(belief, obs, key), certain.centre(belief, obs))
    half = dataclasses.replace(model, doubt=jnp.asarray(0.5)).sample(belief, obs, key)
    np.testing.assert_allclose(half - belief.mean, 0.5 * (model.sample(belief, obs, key) - belief.mean), atol=1e-6)


def test_what_is_not_significant_is_home():
    model = worlds(significance=3.0, memory=200.0)
    belief, _ = reflect(model, live(0.0, (jnp.array([0.3, 1.0]), jnp.zeros(2), jnp.zeros(2)), 200, jr.key(5)))
    centre, home = model.centre(belief, jnp.zeros(2)), model.home()
    assert bool(model.changed(belief)[0]) and float(model.read(centre).gain[0]) < 0.5
    drawn = jax.vmap(lambda k: model.sample(belief, jnp.zeros(2), k))(jr.split(jr.key(0), 200))
    still = ~np.asarray(model.changed(belief))
    assert still.sum() >= 3
    np.testing.assert_array_equal(np.asarray(drawn)[:, still], 0.0)
    np.testing.assert_allclose(drawn[:, 0].std(), jnp.sqrt(belief.covariance[0, 0]), rtol=0.2)
    np.testing.assert_array_equal(model.centre(model.start(), jnp.zeros(2)), home)


def test_one_wild_step_does_not_decide_and_one_that_is_not_finite_says_nothing():
    model = worlds(outlier=3.0, memory=200.0)
    belief, _ = reflect(model, live(0.0, HOME, 50, jr.key(6)))
    step = Transition(jnp.zeros(2), jnp.ones(2), jnp.zeros(()), jnp.array([5.0, -5.0]), jnp.zeros((), bool))
    hit = model.observe(belief, step)
    robust = float(jnp.abs(hit.mean - belief.mean).max())
    loose = dataclasses.replace(model, outlier=1e6).observe(belief, step)
    assert robust < 0.3 * float(jnp.abs(loose.mean - belief.mean).max())
    for bad in (jnp.nan, jnp.inf):
        after = model.observe(belief, step._replace(next_obs=jnp.array([bad, 0.0])))
        assert bool(jnp.isfinite(after.mean).all() & jnp.isfinite(after.covariance).all())
        np.testing.assert_allclose(after.mean, model.move_on(belief).mean)


def test_home_is_the_base_model_and_a_world_does_what_it_says():
    model = worlds(curve=0.5)
    obs, action = jr.normal(jr.key(0), (2, 2)), jnp.array([0.4, -0.7])
    np.testing.assert_array_equal(
        model.predict(model.home(), obs, action).next_obs, model.base.predict((), obs, action).next_obs
    )
    gain, offset, drift = jnp.array([0.5, 0.0]), jnp.array([1.0, 2.0]), jnp.array([0.1, -0.1])
    climb = jnp.array([0.2, 0.3])
    model = dataclasses.replace(model, climb_std=jnp.asarray(0.1))
    told = model.predict(model.write(World(gain, offset, drift, climb)), obs, action)
    base = model.base.predict((), obs - offset[None], gain * action).next_obs
    np.testing.assert_allclose(told.next_obs, base + (offset + drift + climb)[None], atol=1e-6)


def test_an_adapted_prior_meets_what_it_knows():
    model, prior = worlds(), LinearPrior(jnp.array([[0.5, 0.1], [0.0, 0.3]]), jnp.eye(2))
    adapted = Adapted(prior, model, -jnp.ones(2), jnp.ones(2))
    obs = jnp.array([0.4, -0.2])
    at_home, _ = prior.act(prior.start(), obs, jr.key(0))
    np.testing.assert_allclose(adapted.act(adapted.start(), obs, jr.key(0))[0], at_home, atol=1e-6)
    offset = jnp.array([1.0, -1.0])
    moved = adapted.under(model.write(World(jnp.array([0.5, 1.0]), offset, jnp.zeros(2), jnp.zeros(2))))
    action, _ = moved.act(moved.start(), obs + offset, jr.key(0))
    np.testing.assert_allclose(action, at_home / jnp.array([0.5, 1.0]), atol=1e-6)
    np.testing.assert_allclose(moved.value((), obs + offset), prior.value((), obs), atol=1e-6)
    broken = adapted.under(model.write(World(jnp.array([0.0, 1.0]), *jnp.zeros((3, 2)))))
    command, _ = broken.act((), jnp.array([1.0, 1.0]), jr.key(0))
    assert bool((jnp.abs(command) <= 1.0).all())


def steer(agent, world, steps=60):
    """Mean squared distance from the origin in a linear world, and the last state of the agent."""
    gain, offset, drift = (jnp.asarray(x) for x in world)

    @eqx.filter_jit
    def run(agent):
        def step(carry, key):
            obs, state = carry
            action, state = agent.act(state, obs, key)
            after = A @ (obs - offset) + B @ (gain * action) + offset + drift
            step = Transition(obs, action, jnp.zeros(()), after, jnp.zeros((), bool))
            return (after, agent.observe(state, step)), jnp.sum((after - offset) ** 2)

        start = (jnp.array([2.0, -2.0]) + offset, agent.start())
        return jax.lax.scan(step, start, jr.split(jr.key(1), steps))

    (_, state), cost = run(agent)
    return float(cost[steps // 2 :].mean()), state


def test_a_belief_makes_the_prior_and_the_planner_better_in_a_shifted_world_and_costs_nothing_at_home():
    model = worlds(memory=200.0, gain_std=1e-6, offset_std=1.0, drift_std=1e-6, significance=2.0)
    prior = LinearPrior(jnp.eye(2), jnp.eye(2))
    adapted = Adapted(prior, model, -jnp.ones(2), jnp.ones(2))
    shifted = (jnp.ones(2), jnp.array([0.6, -0.6]), jnp.zeros(2))
    blind, _ = steer(prior, shifted)
    told, state = steer(Reflecting(adapted), shifted)
    assert told < 0.2 * blind
    np.testing.assert_allclose(model.read(state.belief.mean).offset, [0.6, -0.6], atol=0.1)
    options = {"plans": 32, "horizon": 2, "sigma": 0.2, "low": -jnp.ones(2), "high": jnp.ones(2)}
    loop = LOOP(prior, model.base, **options)
    planner = RefPlan(adapted, model, latents=1, **options)
    assert steer(planner, shifted)[0] < 0.5 * steer(loop, shifted)[0]
    np.testing.assert_allclose(steer(planner, HOME)[0], steer(loop, HOME)[0], atol=0.02)


def test_with_a_constant_latent_refplan_is_loop_whatever_it_has_seen():
    model = worlds(memory=200.0, significance=1e9)
    prior = LinearPrior(jnp.eye(2), jnp.eye(2))
    options = {"plans": 32, "horizon": 2, "sigma": 0.2, "low": -9 * jnp.ones(2), "high": 9 * jnp.ones(2)}
    loop = LOOP(prior, model.base, **options)
    planner = RefPlan(Adapted(prior, model, options["low"], options["high"]), model, latents=1, **options)
    shifted = live(0.0, (jnp.array([0.2, 1.0]), jnp.array([0.6, -0.6]), jnp.zeros(2)), 20, jr.key(1))
    state = jax.lax.scan(lambda state, step: (planner.observe(state, step), None), planner.start(), shifted)[0]
    assert jnp.abs(state.belief.mean).max() > 0.3, "it has seen something"
    obs, key = jnp.array([0.5, -1.0]), jr.key(2)
    np.testing.assert_allclose(planner.act(state, obs, key)[0], loop.act(loop.start(), obs, key)[0], rtol=1e-5)


SMALL = Ensemble(members=2, elites=2, hidden=(16, 16), batch_size=64, rate=3e-3, epochs=30)


@pytest.fixture(scope="module")
def data():
    return logged()


@pytest.fixture(scope="module")
def trained(data):
    return fit(Worlds(SMALL, memory=150.0), data, key=jr.key(0), show=False)


def test_the_learner_gives_worlds_around_the_ensemble_and_they_survive_a_file(trained, data, tmp_path):
    assert isinstance(trained, WorldsDynamics)
    assert float(trained.memory) == 150.0
    alone = fit(SMALL, data, key=jr.key(0), show=False)
    for mine, theirs in zip(jax.tree.leaves(trained.base), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    save_module(tmp_path / "model.safetensors", trained)
    again = load_module(tmp_path / "model.safetensors")
    steps = live(0.0, (jnp.array([0.2, 1.0]), jnp.zeros(2), jnp.zeros(2)), 40, jr.key(7))
    np.testing.assert_array_equal(reflect(trained, steps)[0].mean, reflect(again, steps)[0].mean)
    assert float(gains(trained, reflect(trained, steps)[0])[0]) < 0.5
    with pytest.raises(RefplanError, match="ensemble"):
        around(worlds())


def test_make_planner_tells_the_prior_about_the_worlds_unless_asked_not_to(trained):
    prior = Adapted(LinearPrior(jnp.eye(2), jnp.eye(2)), trained, -jnp.ones(2), jnp.ones(2))
    planner = make_planner("refplan", prior, trained, changes={"plans": 8})
    assert planner.prior is prior
    bounded = BoundedPrior(jnp.eye(2), jnp.eye(2))
    assert isinstance(make_planner("refplan", bounded, trained).prior, Adapted)
    assert make_planner("refplan", bounded, trained, adapt=False).prior is bounded
    assert make_planner("loop", bounded, trained.base).prior is bounded


class BoundedPrior(LinearPrior):
    """With bounds of its own."""

    low: jax.Array = eqx.field(converter=jnp.asarray, default=(-1.0, -1.0))
    high: jax.Array = eqx.field(converter=jnp.asarray, default=(1.0, 1.0))


def test_relabelled_rows_are_what_the_other_world_would_answer(data):
    model = worlds()
    both = with_gains(data, model, key=jr.key(0), copies=1)
    rows = len(data)
    assert both.obs_dim == 4 and len(both) == 2 * rows
    np.testing.assert_array_equal(both.observations[:rows, 2:], 1.0)
    np.testing.assert_array_equal(both.next_observations[:rows, :2], data.next_observations)
    factors = both.observations[rows:, 2:]
    np.testing.assert_array_equal(factors, both.next_observations[rows:, 2:])
    assert 0.0 <= factors.min() < 0.1 and ((factors < 1).sum(axis=1) >= 1).all()
    expected = data.observations @ np.asarray(A).T + (factors * both.actions[rows:]) @ np.asarray(B).T
    error = both.next_observations[rows:, :2] - expected
    np.testing.assert_allclose(error.std(), STD, rtol=0.1)
    arriving = np.abs(factors * both.actions[rows:] - data.actions).max(axis=1) < 1e-5
    assert 0.1 < arriving.mean() < 0.5  # half are raised so that the same arrives, as far as bounds allow
    drawn = jax.vmap(lambda k: draw_gains(k, 6, 0.2))(jr.split(jr.key(1), 500))
    touched = np.asarray((drawn < 1.0).sum(axis=1))
    assert set(touched) == {1, 2} and float(drawn.min()) >= 0.2
