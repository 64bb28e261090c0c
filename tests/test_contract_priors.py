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
from refplan.files import load_module, save_module
from refplan.priors import PRIORS, find_prior
from refplan.priors.presets import with_settings
from refplan.train import fit

DATA = ragged()
STEPS = 6
every_prior = pytest.mark.parametrize("name", ALL_PRIORS)


def train(name: str, seed: int = 0, steps: int = STEPS, folder=None):
    return fit(ALL_PRIORS[name], DATA, steps=steps, key=jr.key(seed), every=3, folder=folder)


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
    start = fit(with_settings(ALL_PRIORS[name], {}), DATA, steps=1, key=jr.key(0))
    moved = [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(trained(name)), strict=True)
        if np.ndim(a) > 1
    ]
    assert all(moved)


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
    learner, keys = ALL_PRIORS[name], jr.split(jr.key(0), 2)
    rows = learner.prepare(DATA)

    def run(key):
        key_init, key_batch, key_update = jr.split(key, 3)
        state = learner.init(DATA, key_init)
        state, _ = learner.update(state, learner.batch(rows, state, key_batch), key_update)
        return learner.result(state)

    together = eqx.filter_jit(eqx.filter_vmap(run))(keys)
    one = eqx.filter_jit(run)
    for number in range(2):
        alone = jax.tree.map(lambda x: x[number] if eqx.is_array(x) else x, together)  # noqa: B023
        assert close(alone, one(keys[number]), 1e-5)


@every_prior
def test_a_sweep_over_numbers_compiles_once(name):
    base, traces = ALL_PRIORS[name], []
    rows, key = base.prepare(DATA), jr.key(0)

    @eqx.filter_jit
    def step(learner, state):
        traces.append(learner)  # Python runs only while tracing
        return learner.update(state, learner.batch(rows, state, key), key)[0]

    state = eqx.filter_jit(base.init)(DATA, key)
    results = [step(base, state)]
    for setting, value in SWEPT[name].items():
        results.append(step(with_settings(base, {setting: value}), state))
    assert len(traces) == 1
    # the numbers are read inside the compiled step: each rate, weight or discount changes what is learned
    same = [s for s, r in zip(SWEPT[name], results[1:], strict=True) if eqx.tree_equal(r, results[0])]
    assert same == [s for s in SWEPT[name] if s in ("gap", "sac.alpha_start")]
