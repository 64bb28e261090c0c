"""MBOP's prior: n-step returns by hand, and what it learns in a world small enough to know."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.data.assemble import make_dataset
from refplan.errors import RefplanError
from refplan.priors.mbop import MBOP, n_step_returns
from refplan.train import fit


def episodes():
    """Rewards 1..5 in an episode that is cut, 10, 20 in one that ends."""
    rewards = np.array([1, 2, 3, 4, 5, 10, 20], np.float32)
    obs = np.arange(7, dtype=np.float32)[:, None]
    flags = np.zeros(7, bool)
    cut, ended = flags.copy(), flags.copy()
    cut[4], ended[6] = True, True
    actions = np.tile([[0.5]], (7, 1)).astype(np.float32)
    return make_dataset(
        observations=obs, actions=actions, rewards=rewards, next_observations=obs + 1, terminated=ended, truncated=cut
    )


def test_returns_of_the_next_steps_by_hand():
    earned, known = n_step_returns(episodes(), 3)
    assert earned[:3].tolist() == [6, 9, 12]
    assert earned[5:].tolist() == [30, 20], "an end of the world leaves nothing to earn"
    assert known.tolist() == [True, True, True, False, False, True, True]


def test_it_clones_actions_and_learns_returns():
    data = episodes()
    prior = fit(MBOP(steps=3, members=3, hidden=(16,), batch_size=32, rate=1e-2), data, steps=800, key=jr.key(0))
    for row, expected in ((0, 6.0), (2, 12.0), (5, 30.0)):
        obs = jnp.asarray(data.observations[row])
        assert float(prior.value((), obs)) == pytest.approx(expected, abs=1.5)
        assert float(prior.act((), obs, jr.key(0))[0][0]) == pytest.approx(0.5, abs=0.05)
    samples = {round(float(prior.sample((), jnp.zeros(1), jr.key(i))[0][0]), 6) for i in range(20)}
    assert 1 < len(samples) <= 3, "a sample is one member's action"


def test_data_it_cannot_use_is_refused():
    with pytest.raises(RefplanError, match="no 9 consecutive steps"):
        fit(MBOP(steps=9), episodes().subsample(5, key=jr.key(0)), steps=1, key=jr.key(0))
    bag, _ = episodes().split(0.5, key=jr.key(0), by="transition")
    with pytest.raises(RefplanError, match="whole episodes"):
        n_step_returns(bag, 3)
