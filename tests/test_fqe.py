"""Fitted Q evaluation against worlds whose values are known for the policy that is judged."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import worlds
from worlds import HIGH, LOW, choice_reward, to_box

from refplan.agent import AbstractPolicy
from refplan.errors import RefplanError
from refplan.priors.actor_critic import ActorCritic
from refplan.priors.external import from_callable
from refplan.priors.fqe import FQE, value_estimate
from refplan.priors.policy import GaussianPolicy, make_policy
from refplan.train import fit

STEPS = 1500
SETTINGS = {"hidden": (16, 16), "batch_size": 64, "rate": 3e-3, "tau": 0.05}
STD = 0.3
MEANS = np.array([[-0.5, 0.5], [0.1, -0.1]], np.float32)  # the policies' actions at obs -1 and 1, in [-1, 1]


def linear_policy(std: float) -> GaussianPolicy:
    """u = MEANS[0] at obs -1 and MEANS[1] at obs 1, with normal noise of `std`, or none."""
    bias, slope = MEANS.mean(axis=0), (MEANS[1] - MEANS[0]) / 2
    if std == 0:
        layers = [(np.arctanh(MEANS[1])[None] / 2 - np.arctanh(MEANS[0])[None] / 2, np.arctanh(MEANS).mean(axis=0))]
        return make_policy(layers, LOW, HIGH, head="deterministic")
    weight = np.concatenate([slope, np.zeros(2)])[None].astype(np.float32)
    return make_policy(
        [(weight, np.concatenate([bias, np.full(2, np.log(std))]).astype(np.float32))], LOW, HIGH, head="gaussian"
    )


def train(policy, probe: worlds.Probe, steps: int = STEPS, folder=None, **settings) -> ActorCritic:
    learner = FQE(policy, discount=probe.discount, **{**SETTINGS, **settings})
    return fit(learner, probe.data, steps=steps, key=jr.key(0), every=500, folder=folder)


@pytest.fixture(scope="module")
def certain():
    return linear_policy(0.0)


@pytest.mark.parametrize("world", worlds.FIXED_VALUES)
def test_values_that_do_not_depend_on_the_policy(world, certain):
    probe = worlds.FIXED_VALUES[world]()
    prior = train(certain, probe)
    value = jax.jit(jax.vmap(lambda obs: prior.value((), obs)))(jnp.asarray(probe.obs, jnp.float32))
    np.testing.assert_allclose(value, probe.value, atol=0.1, rtol=0.03)
    estimate = value_estimate(prior, probe.data, key=jr.key(1))
    first = probe.value if world == "seen" else probe.value[:1]  # every row of `seen` is a first state
    assert estimate.value == pytest.approx(first.mean(), abs=0.1, rel=0.03)


def check_late_choice(prior: ActorCritic, spread: float, estimate_value: float) -> None:
    """Whatever is done first, the policy's second action earns its reward after one discount."""
    earned = choice_reward(MEANS[1]) - 2 * spread**2  # E |m + s e - t|^2 = |m - t|^2 + 2 s^2
    q = prior.critics(jnp.full((4, 1), -1.0), jnp.asarray(to_box(worlds.unit_actions(6, seed=1)[2:])))
    np.testing.assert_allclose(q, 0.7 * earned, atol=0.15)
    assert estimate_value == pytest.approx(0.7 * earned, abs=0.06)
    # acting at s' by what is right for s would have earned this, which is far enough to tell
    assert abs(0.7 * (choice_reward(MEANS[0]) - earned)) > 0.3


@pytest.mark.parametrize("kind", ["deterministic", "callback"])
def test_a_deterministic_policy(kind, certain):
    calls = []

    def act(obs: np.ndarray) -> np.ndarray:
        calls.append(len(obs))
        return to_box(np.where(obs < 0, MEANS[0], MEANS[1]))

    probe = worlds.late_choice()
    prior = train(certain if kind == "deterministic" else from_callable(act, LOW, HIGH), probe)
    # asked for a first look and for all rows, never inside the training loop
    assert len(calls) == (0 if kind == "deterministic" else 2)
    check_late_choice(prior, 0.0, value_estimate(prior, probe.data, key=jr.key(1)).value)


def test_a_stochastic_policy():
    probe = worlds.late_choice()
    policy = linear_policy(STD)
    prior = train(policy, probe)
    check_late_choice(prior, STD, value_estimate(prior, probe.data, key=jr.key(1)).value)
    own = train(policy, probe, own_action=True)
    check_late_choice(own, 0.0, value_estimate(own, probe.data, key=jr.key(1), own_action=True).value)


def test_samples_per_row(certain):
    data = worlds.late_choice().data
    assert FQE(certain).prepare(data).next_action.shape == (worlds.ROWS, 1, 2)
    assert FQE(linear_policy(STD)).prepare(data).next_action.shape == (worlds.ROWS, 4, 2)
    drawn = FQE(linear_policy(STD), samples=50).prepare(data).next_action
    assert drawn.shape == (worlds.ROWS, 50, 2)
    # in [-1, 1], of the next observation: rows of first steps lead to obs 1, the others to 3 (where the mean is a line)
    np.testing.assert_allclose(drawn[::2].mean(axis=(0, 1)), MEANS[1], atol=0.01)
    np.testing.assert_allclose(np.asarray(drawn[::2]).std(axis=(0, 1)), STD, rtol=0.05)


def test_every_critic_sees_its_own_resample_of_the_episodes(certain):
    data = worlds.ragged(obs=1)
    weight = np.asarray(FQE(certain, critics=5).prepare(data).weight)
    assert weight.shape == (len(data), 5)
    for start, end in zip(data.starts, data.ends, strict=True):
        assert (weight[start:end] == weight[start]).all()
    # as many episodes are drawn as there are, with replacement, differently for each critic
    assert (weight[data.starts].sum(axis=0) == data.episodes).all()
    assert len({tuple(column) for column in weight.T}) > 1
    assert (np.asarray(FQE(certain, bootstrap=False).prepare(data).weight) == 1).all()


def test_the_spread_shows_what_the_data_does_not(certain):
    # rewards of +1 and -1 by chance, one per episode: 240 tosses say little, so the critics must not agree exactly
    tosses = np.random.default_rng(0).choice([-1.0, 1.0], worlds.ROWS)
    data = worlds.logged(0.0, tosses, 0.0, length=1, terminates=True, name="tosses")
    probe = worlds.Probe(data, 0.9, np.zeros((1, 1)), np.array([tosses.mean()]))
    estimate = value_estimate(train(certain, probe), data, key=jr.key(1))
    sure = value_estimate(train(certain, worlds.constant()), worlds.constant().data, key=jr.key(1))
    assert estimate.low <= estimate.value <= estimate.high
    assert estimate.value == pytest.approx(np.mean(estimate.per_critic))
    assert len(estimate.per_critic) == 4
    assert estimate.high - estimate.low > 5 * (sure.high - sure.low)


def test_a_checkpoint_is_not_continued_with_another_policy(certain, tmp_path):
    probe = worlds.constant()
    train(certain, probe, steps=2, folder=tmp_path)
    other = eqx.tree_at(lambda p: p.net.layers[0].bias, certain, certain.net.layers[0].bias + 0.1)
    with pytest.raises(RefplanError, match="digest"):
        train(other, probe, steps=4, folder=tmp_path)


class Counting(AbstractPolicy):
    """A policy that remembers how many steps it has seen."""

    def start(self):
        return jnp.zeros(())

    def observe(self, state, transition):
        return state + 1

    def act(self, state, obs, key):
        return jnp.zeros(2), state

    def sample(self, state, obs, key):
        return jnp.zeros(2), jnp.zeros(())


def test_policies_that_cannot_be_judged_are_refused(certain):
    with pytest.raises(RefplanError, match="Counting: it remembers"):
        FQE(Counting())
    with pytest.raises(RefplanError, match="observations of size 3"):
        FQE(certain).prepare(worlds.ragged())
    one_action = make_policy([(np.zeros((1, 1)), np.zeros(1))], -1, 1, head="deterministic")
    with pytest.raises(RefplanError, match=r"shape \(1,\)"):
        FQE(one_action).prepare(worlds.constant().data)
    bag, _ = worlds.constant().data.split(0.9, key=jr.key(0), by="transition")
    with pytest.raises(RefplanError, match="split by transition"):
        value_estimate(train(certain, worlds.constant()), bag, key=jr.key(0))
