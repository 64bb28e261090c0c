"""What every prior learner promises, over the whole registry."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from cases import ALL_PRIORS, SWEPT
from worlds import HIGH, LOW, ragged

from refplan.agent import AbstractPolicy, AbstractPrior
from refplan.learner import AbstractLearner
from refplan.modules import load_module, save_module
from refplan.presets import with_settings
from refplan.priors import PRIORS, find_prior
from refplan.train import fit

DATA = ragged()
STEPS = 6
TRACES = []
every_prior = pytest.mark.parametrize("name", ALL_PRIORS)


class Counted(AbstractLearner):
    """A learner that notes how often its update is traced, that is, compiled."""

    inner: AbstractLearner

    def prepare(self, data):
        return self.inner.prepare(data)

    def init(self, data, key):
        return self.inner.init(data, key)

    def batch(self, source, state, key):
        return self.inner.batch(source, state, key)

    def update(self, state, batch, key):
        TRACES.append(type(self.inner))  # Python runs only while tracing
        return self.inner.update(state, batch, key)

    def result(self, state):
        return self.inner.result(state)


def train(name: str, seed: int = 0, steps: int = STEPS, folder=None, **settings):
    # Every test trains through the same compiled program; compiling is most of what these tests do.
    learner = Counted(with_settings(ALL_PRIORS[name], settings))
    return fit(learner, DATA, steps=steps, key=jr.key(seed), every=3, folder=folder)


@pytest.fixture(scope="module")
def trained():
    """One trained agent per learner, made when first asked for."""
    made = {}

    def get(name: str):
        if name not in made:
            made[name] = train(name)
        return made[name]

    return get


@eqx.filter_jit
def behave(agent, obs):
    """Own actions, sampled ones with their log-probabilities, and values if there are any."""

    def one(obs, key):
        state = agent.start()
        action, _ = agent.act(state, obs, key)
        sampled, log_prob = agent.sample(state, obs, key)
        value = agent.value(state, obs) if isinstance(agent, AbstractPrior) else jnp.zeros(())
        return action, sampled, log_prob, value

    return jax.vmap(one)(obs, jr.split(jr.key(5), len(obs)))


def close(a, b, tolerance: float) -> bool:
    pairs = zip(jax.tree.leaves(eqx.filter(a, eqx.is_array)), jax.tree.leaves(eqx.filter(b, eqx.is_array)), strict=True)
    return all(np.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in pairs)


def test_cases_hold_every_registered_prior():
    assert set(ALL_PRIORS) == set(PRIORS) == set(SWEPT)
    assert all(isinstance(ALL_PRIORS[name], find_prior(name)) for name in PRIORS)


@every_prior
def test_same_key_same_weights(name, trained):
    assert eqx.tree_equal(trained(name), train(name))
    assert not eqx.tree_equal(trained(name), train(name, seed=1))


@every_prior
def test_training_moves_every_network(name, trained):
    pairs = zip(jax.tree.leaves(train(name, steps=1)), jax.tree.leaves(trained(name)), strict=True)
    assert all(not np.array_equal(a, b) for a, b in pairs if np.ndim(a) > 1)


@every_prior
def test_agent_keeps_to_the_bounds_of_the_world(name, trained):
    agent = trained(name)
    assert isinstance(agent, AbstractPolicy)
    assert isinstance(agent, AbstractPrior) == (name != "bc")
    obs = jnp.asarray(np.random.default_rng(1).normal(size=(64, 3)) * 10, jnp.float32)
    action, sampled, log_prob, value = (np.asarray(x) for x in behave(agent, obs))
    for each in (action, sampled):
        assert ((each >= LOW) & (each <= HIGH)).all()
    assert np.isfinite(log_prob).all()
    assert np.isfinite(value).all()
    # the second action's box is [0, 3]: an agent that stayed in [-1, 1] would never go above 1
    assert sampled[:, 1].max() > 1.0


@every_prior
def test_saved_and_loaded_agent_behaves_the_same(name, trained, tmp_path):
    agent = trained(name)
    save_module(tmp_path / "agent.safetensors", agent)
    loaded = load_module(tmp_path / "agent.safetensors")
    assert type(loaded) is type(agent)
    obs = jnp.asarray(DATA.observations[:64])
    assert eqx.tree_equal(behave(agent, obs), behave(loaded, obs))


@every_prior
def test_stopping_and_resuming_equals_not_stopping(name, trained, tmp_path):
    train(name, steps=3, folder=tmp_path)
    assert eqx.tree_equal(train(name, folder=tmp_path), trained(name))


@every_prior
def test_many_seeds_at_once_equal_one_by_one(name):
    learner, keys = ALL_PRIORS[name], jr.split(jr.key(3), 2)
    rows, init = learner.prepare(DATA), eqx.filter_jit(learner.init)
    states = [eqx.filter(init(DATA, key), eqx.is_array) for key in keys]
    static = eqx.filter(init(DATA, keys[0]), eqx.is_array, inverse=True)

    def update(dynamic, key):
        key_batch, key_update = jr.split(key)
        state = eqx.combine(dynamic, static)
        state, _ = learner.update(state, learner.batch(rows, state, key_batch), key_update)
        return eqx.filter(state, eqx.is_array)

    together = jax.jit(jax.vmap(update))(jax.tree.map(lambda *x: jnp.stack(x), *states), keys)
    one = jax.jit(update)
    for number in range(2):
        alone = one(states[number], keys[number])
        assert close(jax.tree.map(lambda x: x[number], together), alone, 1e-5)  # noqa: B023
        assert not close(alone, states[number], 1e-5)


@every_prior
def test_a_sweep_over_numbers_compiles_once(name, trained):
    first = train(name, steps=3)
    before = len(TRACES)
    unchanged = [
        setting
        for setting, value in SWEPT[name].items()
        if eqx.tree_equal(train(name, steps=3, **{setting: value}), first)
    ]
    assert len(TRACES) == before
    # and the numbers are not baked in: each changes what is learned, but for one the plain form of CQL does not use
    assert unchanged == [setting for setting in SWEPT[name] if setting == "gap"]
