"""A value net instead of critics: it says what they say, and the policy stays the same."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from toy import toy_data

from refplan.dynamics.diagnose_measure import spearman
from refplan.errors import RefplanError
from refplan.priors.cql import CQL
from refplan.priors.distil import Distil
from refplan.priors.sac import SAC
from refplan.train import fit


def test_the_net_ranks_states_as_the_critics_do_and_acts_the_same():
    data = toy_data()
    small = SAC(hidden=(8, 8), batch_size=16, entropy_in_backup=False)
    prior = fit(CQL(samples=2, penalty_states=8, sac=small), data, steps=20, key=jr.key(0))
    fast = fit(Distil(prior, hidden=(32, 32), batch_size=64), data, steps=1500, key=jr.key(1))
    obs = jnp.asarray(data.observations)
    ours, theirs = (np.asarray(jax.vmap(lambda o, p=p: p.value((), o))(obs)) for p in (fast, prior))
    assert spearman(ours, theirs) > 0.97
    assert np.abs(ours - theirs).mean() < 0.25 * theirs.std()
    assert np.array_equal(fast.act((), obs[0], jr.key(0))[0], prior.act((), obs[0], jr.key(0))[0])
    with pytest.raises(RefplanError, match="only a policy with critics"):
        Distil(fast)
