"""Last layers that go on learning: exact Bayes, the ensemble itself at first, better than it in another world."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.dynamics.around import AROUND, believe
from refplan.dynamics.around_learner import Refined
from refplan.dynamics.diagnose import diagnose
from refplan.dynamics.ensemble import Ensemble
from refplan.dynamics.refined import LayerBelief, refine, regress
from refplan.errors import RefplanError
from refplan.modules import load_module, save_module
from refplan.planners.loop import LOOP
from refplan.planners.refplan import RefPlan
from refplan.priors.mopo import MOPO
from refplan.train import fit
from tests.bent_worlds import HOME, live, logged
from tests.models import LinearPrior

SMALL = Ensemble(members=3, elites=2, hidden=(16, 16), batch_size=64, rate=3e-3, epochs=30)
WEAK = (jnp.array([0.2, 1.0]), jnp.zeros(2), jnp.array([0.1, 0.0]))


@pytest.fixture(scope="module")
def model():
    return fit(Refined(SMALL, layer_std=0.3, memory=1e6), logged(), key=jr.key(0), show=False)


@eqx.filter_jit
def errors(model, steps):
    """How far the mean of the elites is off one step ahead, before each step is learned from; and the last belief."""

    def one(belief, step):
        told = model.predict_from(model.centre(belief, step.obs), step.obs, step.action)
        return model.observe(belief, step), jnp.abs(told.next_obs.mean(axis=0) - step.next_obs)

    return jax.lax.scan(one, model.start(), steps)


def test_a_row_at_a_time_is_the_regression_of_all_rows():
    read, target = jr.normal(jr.key(0), (30, 4)), jr.normal(jr.key(1), (30, 2))
    belief = LayerBelief(jnp.zeros((4, 2)), 0.5**2 * jnp.eye(4))
    for x, y in zip(read, target, strict=True):
        belief = regress(belief, x, y, jnp.asarray(0.3))
    precision = np.asarray(read).T @ np.asarray(read) / 0.3 + np.eye(4) / 0.25
    exact = np.linalg.solve(precision, np.asarray(read).T @ np.asarray(target) / 0.3)
    np.testing.assert_allclose(belief.correction, exact, atol=1e-4)
    np.testing.assert_allclose(belief.covariance, np.linalg.inv(precision), atol=1e-5)


def test_before_anything_was_seen_it_is_the_ensemble_and_loop(model):
    obs, action = jnp.array([0.3, -0.2]), jnp.array([0.5, 0.1])
    start = model.centre(model.start(), obs)
    for mine, theirs in zip(
        model.predict_from(start, obs, action), model.base.predict_from((), obs, action), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    prior = LinearPrior(jnp.eye(2), jnp.eye(2))
    options = {"plans": 16, "horizon": 2, "sigma": 0.2, "low": -jnp.ones(2), "high": jnp.ones(2)}
    agents = RefPlan(prior, model, latents=1, **options), LOOP(prior, model.base, **options)
    actions = [agent.act(agent.start(), obs, jr.key(2))[0] for agent in agents]
    np.testing.assert_allclose(*actions, rtol=1e-5)


def test_what_a_correction_says_is_what_is_predicted(model):
    """W [phi, 1] is added to the mean of each elite, in standardised outputs, and to nothing else."""
    obs, action = jnp.array([0.3, -0.2]), jnp.array([0.5, 0.1])
    correction = 0.1 * jr.normal(jr.key(0), model.start().correction.shape)
    plain, told = (model.predict_from(w, obs, action) for w in (jnp.zeros_like(correction), correction))
    added = jnp.einsum("mf,mfo->mo", model._features(obs, action), correction) * model.base.decoder.targets.std[None]
    np.testing.assert_allclose(told.next_obs - plain.next_obs, added[:, :-1], atol=1e-5)
    np.testing.assert_allclose(told.reward - plain.reward, added[:, -1], atol=1e-5)
    np.testing.assert_array_equal(told.next_obs_std, plain.next_obs_std)


def test_another_world_is_learned_and_home_is_not_forgotten(model):
    for world, better in ((WEAK, 0.6), (HOME, 1.1)):
        steps = live(0.0, world, 200, jr.key(3))
        belief, off = errors(model, steps)
        still = dataclasses.replace(model, layer_std=jnp.asarray(1e-6))
        _, without = errors(still, steps)
        assert float(off[50:].mean()) < better * float(without[50:].mean())
        assert float(jnp.trace(belief.covariance[0])) < float(jnp.trace(model.start().covariance[0]))


def test_what_was_learned_is_doubted_again_and_a_step_that_is_not_finite_says_nothing(model):
    forgetful = dataclasses.replace(model, memory=jnp.asarray(10.0))
    steps = live(0.0, WEAK, 60, jr.key(4))
    belief, _ = errors(forgetful, steps)
    step = jax.tree.map(lambda x: x[0], steps)
    for _ in range(60):
        after = forgetful.observe(belief, step._replace(next_obs=jnp.array([jnp.nan, 0.0])))
        np.testing.assert_array_equal(after.correction, belief.correction)
        belief = after
    np.testing.assert_allclose(belief.covariance, forgetful.start().covariance, atol=1e-3)


def test_a_diagnosis_judges_the_ensemble_as_trained(model):
    options = {"key": jr.key(0), "horizon": 2, "segments": 8, "episodes": 4, "particles": 4, "states": 2, "plans": 4}
    mine, base = (diagnose(each, logged(400), **options).to_dict() for each in (model, model.base))
    assert mine == base


def test_a_prior_that_imagines_does_so_in_the_ensemble_as_trained(model):
    # The belief of every logged row would be kept, and one has as many numbers as the last layers squared.
    assert MOPO(model).world is model.base


def test_fewer_elites_understand_the_belief_of_all(model):
    obs, action = jnp.array([0.3, -0.2]), jnp.array([0.5, 0.1])
    correction = 0.1 * jr.normal(jr.key(0), model.start().correction.shape)
    first = model.best(1).predict_from(correction, obs, action)
    np.testing.assert_allclose(first.next_obs, model.predict_from(correction, obs, action).next_obs[:1], atol=1e-6)


def test_it_survives_a_file_and_is_made_around_any_ensemble(model, tmp_path):
    save_module(tmp_path / "model.safetensors", model)
    again = load_module(tmp_path / "model.safetensors")
    steps = live(0.0, WEAK, 20, jr.key(5))
    np.testing.assert_array_equal(errors(again, steps)[0].correction, errors(model, steps)[0].correction)
    assert believe("refined", model) is model
    for name, (_, kind, _) in AROUND.items():
        assert isinstance(believe(name, model.base), kind)
    with pytest.raises(RefplanError, match="ensemble"):
        refine(model)
    assert model.draws == 1
