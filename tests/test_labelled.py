"""Priors that know about weak actuators: the world they learn in, the rows they learn from, how they are told."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.cli import main
from refplan.dynamics.adapted import Adapted, Conditioned
from refplan.dynamics.base import AbstractTermination, Outcome, RuleTermination
from refplan.dynamics.labelled import show_gains
from refplan.dynamics.worlds import World, WorldsDynamics
from refplan.planners.presets import make_planner
from refplan.store import load_run
from tests.models import LinearPrior, TwoMembers

B = jnp.array([[0.5, 0.0], [0.2, 0.4]])


def beyond_two(obs, action, next_obs):
    return next_obs[0] > 2.0


class Pushed(TwoMembers):
    """s' = s + B a in two members, the second of which expects a little more."""

    termination: AbstractTermination = RuleTermination(beyond_two)

    def predict(self, hypothesis, obs, action):
        after = obs + jnp.broadcast_to(action, obs.shape) @ B.T + jnp.array([[0.0], [0.1]])
        return Outcome(after, after[:, 0], jnp.full(after.shape, 0.3), jnp.full(2, 0.1))


def test_the_labelled_world_is_the_world_of_those_gains_and_keeps_them():
    model, gain = show_gains(Pushed(), 2), jnp.array([0.5, 0.0])
    around = WorldsDynamics(Pushed(), jnp.ones(2), jnp.ones(3), 2)
    obs, action = jr.normal(jr.key(0), (2, 2)), jnp.array([0.4, -0.7])
    found = model.predict((), jnp.concatenate([obs, jnp.broadcast_to(gain, (2, 2))], axis=1), action)
    expected = around.predict(around.write(World(gain, *jnp.zeros((3, 2)))), obs, action)
    np.testing.assert_allclose(found.next_obs[:, :2], expected.next_obs, atol=1e-6)
    np.testing.assert_allclose(found.reward, expected.reward, atol=1e-6)
    np.testing.assert_array_equal(found.next_obs[:, 2:], np.tile(gain, (2, 1)))
    np.testing.assert_array_equal(found.next_obs_std[:, 2:], 0.0)
    each = jax.vmap(lambda o: model.predict_from((), jnp.append(o, gain), action).next_obs)(obs)
    assert each.shape == (2, 2, 4)


def test_the_labelled_world_ends_by_its_observations_alone():
    ends = show_gains(Pushed(), 2).termination
    obs, action = jnp.zeros(4), jnp.zeros(2)
    assert bool(ends(obs, action, jnp.array([3.0, 0.0, 0.0, 0.0])))
    assert not bool(ends(obs, action, jnp.array([0.0, 0.0, 9.0, 9.0])))


def knowing():
    """a = -s[0] + g, V = -|(s, g)|^2: what was told is seen in everything it says."""
    weights = jnp.array([[1.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, -1.0]])
    return Conditioned(LinearPrior(weights, jnp.eye(4)), jnp.ones(2))


def test_a_conditioned_prior_takes_actuators_for_whole_until_told():
    prior, obs = knowing(), jnp.array([0.1, -0.2])
    whole = prior.prior.act((), jnp.append(obs, jnp.ones(2)), jr.key(0))[0]
    np.testing.assert_allclose(prior.act((), obs, jr.key(0))[0], whole)
    model = WorldsDynamics(Pushed(), jnp.ones(2), jnp.ones(3), 2)
    world = World(jnp.array([0.3, 1.6]), jnp.array([1.0, -1.0]), *jnp.zeros((2, 2)))
    told = Adapted(prior, model, jnp.full(2, -9.0), jnp.full(2, 9.0)).under(model.write(world))
    view = jnp.append(obs, jnp.array([0.3, 1.0]))  # trained with gains up to 1 only
    action, density = told.sample((), obs + world.offset, jr.key(3))
    expected = prior.prior.sample((), view, jr.key(3))
    np.testing.assert_allclose(action, expected[0], atol=1e-6)  # not raised by 1/g: the prior knows
    np.testing.assert_allclose(density, expected[1], rtol=1e-5)
    np.testing.assert_allclose(told.value((), obs + world.offset), prior.prior.value((), view), rtol=1e-5)


TINY = "hopper-medium-replay-tiny"
SMALL = ["--steps", "4", "--every", "2", "--set", "sac.hidden=8,8", "--set", "sac.batch_size=8"]
IMAGINED = ["imagined.starts=8", "imagined.length=2", "imagined.refresh=2", "imagined.retain=1"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "ensemble"
    words = ["fit", "dynamics", TINY, "--set", "members=2", "--set", "elites=2", "--set", "hidden=8,8"]
    assert main([*words, "--set", "epochs=1", "--out", str(folder)]) == 0
    return folder


def test_the_command_trains_one_that_a_planner_tells_about_gains(world, tmp_path, capsys):
    more = [word for setting in IMAGINED for word in ("--set", setting)]
    out = ["--worlds", "--model", str(world), "--out", str(tmp_path / "run")]
    assert main(["fit", "prior", TINY, "--method", "mopo", *SMALL, *more, *out]) == 0
    run = load_run(tmp_path / "run")
    prior, model = run["prior"], load_run(world)["model"]
    assert isinstance(prior, Conditioned) and run["prior_learner"]["worlds"] is True
    assert run["data"]["task"] == "hopper", "it acts in the task of the data, not of the labelled rows"
    around = WorldsDynamics(model, jnp.ones(11), jnp.ones(12), 3)
    planner = make_planner("refplan", prior, around, changes={"plans": 4})
    assert isinstance(planner.prior, Adapted) and planner.prior.prior is prior
    action, _ = eqx.filter_jit(planner.act)(planner.start(), jnp.zeros(11), jr.key(0))
    assert action.shape == (3,) and bool(jnp.isfinite(action).all())
    weak = planner.prior.under(around.write(World(jnp.zeros(3), *jnp.zeros((3, 11)))))
    assert not np.allclose(weak.act((), jnp.zeros(11), jr.key(0))[0], prior.act((), jnp.zeros(11), jr.key(0))[0])


@pytest.mark.parametrize(("method", "why"), [("bc", "no value"), ("maple", "its own idea")])
def test_methods_that_cannot_be_told_say_so(method, why, tmp_path, capsys):
    assert main(["fit", "prior", TINY, "--method", method, "--worlds", "--out", str(tmp_path / "x")]) == 2
    assert why in capsys.readouterr().err and not (tmp_path / "x").exists()
