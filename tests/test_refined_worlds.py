"""Worlds whose last layers learn on: the filter's world, the regression's rest, and neither in the other's way."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.dynamics.adapted import Adapted
from refplan.dynamics.around import believe, expectations
from refplan.dynamics.around_learner import RefinedWorlds
from refplan.dynamics.ensemble import Ensemble
from refplan.errors import RefplanError
from refplan.modules import load_module, save_module
from refplan.planners.loop import LOOP
from refplan.planners.presets import make_planner
from refplan.planners.refplan import RefPlan
from refplan.train import fit
from tests.bent_worlds import HOME, live, logged
from tests.models import LinearPrior

SMALL = Ensemble(members=3, elites=2, hidden=(16, 16), batch_size=64, rate=3e-3, epochs=30)
OPTIONS = {"layer_std": 0.3, "layer_memory": 1e6, "memory": 1e6, "climb_std": 1e-6}
OBS, ACTION = jnp.array([0.3, -0.2]), jnp.array([0.5, 0.1])
BROKEN = (jnp.array([0.0, 1.0]), jnp.zeros(2), jnp.zeros(2))
TINY = {name: jnp.asarray(1e-6) for name in ("gain_std", "offset_std", "drift_std", "climb_std")}


@pytest.fixture(scope="module")
def model():
    return fit(RefinedWorlds(SMALL, **OPTIONS), logged(), key=jr.key(0), show=False)


@eqx.filter_jit
def errors(model, steps):
    """How far the elites' mean is off one step ahead, before each step is learned from; and the last belief."""

    def one(belief, step):
        told = model.predict_from(model.centre(belief, step.obs), step.obs, step.action)
        return model.observe(belief, step), jnp.abs(told.next_obs.mean(axis=0) - step.next_obs)

    return jax.lax.scan(one, model.start(), steps)


def layers_alone(model):
    """Worlds that hardly differ from home, and an alarm for actuators that always rings."""
    return dataclasses.replace(model, **TINY, significance=jnp.asarray(0.0))


def test_before_anything_was_seen_it_is_the_ensemble_and_loop(model):
    start = model.centre(model.start(), OBS)
    for mine, theirs in zip(
        model.predict_from(start, OBS, ACTION), model.base.predict_from((), OBS, ACTION), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    prior = LinearPrior(jnp.eye(2), jnp.eye(2))
    options = {"plans": 16, "horizon": 2, "sigma": 0.2, "low": -jnp.ones(2), "high": jnp.ones(2)}
    agents = RefPlan(prior, model, latents=1, **options), LOOP(prior, model.base, **options)
    np.testing.assert_allclose(*(agent.act(agent.start(), OBS, jr.key(2))[0] for agent in agents), rtol=1e-5)


def test_each_half_is_itself_when_the_other_is_held(model):
    """Without free layers it is `worlds`, without free worlds it is `refined`."""
    steps = live(0.0, BROKEN, 40, jr.key(1))
    worlds, refined = (believe(name, model.base) for name in ("worlds", "refined"))
    stiff = dataclasses.replace(model, layer_std=jnp.asarray(1e-9))
    mine, off = errors(stiff, steps)
    theirs, same = errors(dataclasses.replace(worlds, **expectations(model.worlds, "worlds")), steps)
    np.testing.assert_allclose(mine.world.mean, theirs.mean, atol=1e-5)
    np.testing.assert_allclose(off, same, atol=1e-4)
    mine, off = errors(layers_alone(model), steps)
    settings = {"layer_std": model.layer_std, "memory": model.layer_memory, "noise": model.layer_noise}
    theirs, same = errors(dataclasses.replace(refined, **settings), steps)
    np.testing.assert_allclose(mine.layers.correction, theirs.correction, atol=1e-5)
    np.testing.assert_allclose(off, same, atol=1e-4)


def test_what_is_learned_in_the_episode_hides_no_change_from_the_filter(model):
    steps = live(0.0, BROKEN, 60, jr.key(2))
    belief, _ = errors(model, steps)
    held, _ = errors(dataclasses.replace(model, layer_std=jnp.asarray(1e-9)), steps)
    np.testing.assert_allclose(belief.world.mean, held.world.mean, atol=1e-5)
    assert float(model.worlds.read(model.centre(belief, OBS).latent).gain[0]) < 0.2


def test_layers_learn_what_no_world_explains(model):
    """Ground that bends where the logged one was straight is no gain, offset or drift."""
    steps = live(0.6, BROKEN, 300, jr.key(3), scale=2.0)
    _, off = errors(model, steps)
    _, worlds_alone = errors(dataclasses.replace(model, layer_std=jnp.asarray(1e-9)), steps)
    _, unnamed = errors(layers_alone(model), steps)
    assert float(off[100:].mean()) < 0.9 * float(worlds_alone[100:].mean())
    assert float(off[5:40].mean()) < float(unnamed[5:40].mean())


def test_layers_are_silent_until_an_actuator_changed(model):
    """At home and where only something pulls, nothing is lost; with a broken actuator, what was learned is told."""
    # The little net is a little wrong at home, and a memory without end finds that out.
    model = dataclasses.replace(model, significance=jnp.asarray(10.0))
    at_home, off = errors(model, live(0.0, HOME, 100, jr.key(6)))
    still, same = errors(dataclasses.replace(model, layer_std=jnp.asarray(1e-9)), live(0.0, HOME, 100, jr.key(6)))
    assert not model.away(at_home) and not np.any(model.centre(at_home, OBS).correction)
    np.testing.assert_allclose(off, same, atol=1e-6)
    np.testing.assert_array_equal(at_home.world.mean, still.world.mean)
    pulled, _ = errors(model, live(0.0, (jnp.ones(2), jnp.zeros(2), jnp.array([0.3, 0.0])), 100, jr.key(6)))
    assert model.away(pulled) and not model.learns(pulled.world) and not np.any(model.centre(pulled, OBS).correction)
    broken, _ = errors(model, live(0.0, BROKEN, 100, jr.key(6)))
    assert model.away(broken) and model.learns(broken.world)
    np.testing.assert_array_equal(model.centre(broken, OBS).correction, broken.layers.correction)
    assert np.any(broken.layers.correction)


def test_the_prior_is_told_the_world_and_nothing_of_the_layers(model):
    prior = LinearPrior(jnp.eye(2), jnp.eye(2))
    low, high = -jnp.ones(2), jnp.ones(2)
    planner = make_planner("refplan", Adapted(prior, model.worlds, low, high), model, changes={"plans": "8"})
    belief, _ = errors(model, live(0.0, (jnp.array([0.5, 1.0]), jnp.zeros(2), jnp.zeros(2)), 200, jr.key(4)))
    told = planner.prior.under(model.centre(belief, OBS))
    np.testing.assert_allclose(told.world.gain, [0.5, 1.0], atol=0.1)
    plan, _ = planner.plan(planner.start()._replace(belief=belief), OBS, jr.key(0))
    assert np.isfinite(plan.action).all()
    np.testing.assert_array_equal(plan.belief_mean, belief.world.mean)
    np.testing.assert_allclose(plan.belief_std, np.sqrt(np.diagonal(belief.world.covariance)), rtol=1e-5)


def test_it_survives_a_file_and_needs_an_ensemble(model, tmp_path):
    save_module(tmp_path / "model.safetensors", model)
    again = load_module(tmp_path / "model.safetensors")
    steps = live(0.0, BROKEN, 20, jr.key(5))
    for mine, theirs in zip(jax.tree.leaves(errors(again, steps)), jax.tree.leaves(errors(model, steps)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert believe("refined-worlds", model) is model and model.as_trained() is model.base and model.draws == 1
    with pytest.raises(RefplanError, match="ensemble"):
        believe("refined-worlds", believe("refined", model.base))
