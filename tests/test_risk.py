import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from refplan.risk import conditional_value_at_risk, mean_minus_std, mean_minus_variance, worst

RETURNS = arrays(np.float32, (3, 5), elements=st.floats(-100, 100, width=32))


@given(RETURNS, st.floats(0.05, 1.0))
@settings(max_examples=20, deadline=None)
def test_order_of_risks(x, share):
    x = jnp.asarray(x)
    low, middle, mean = worst(x, 1), conditional_value_at_risk(x, jnp.asarray(share), 1), jnp.mean(x, 1)
    assert (low <= middle + 1e-3).all()
    assert (middle <= mean + 1e-3).all()
    assert np.allclose(conditional_value_at_risk(x, jnp.asarray(1.0), 1), mean, atol=1e-3)
    assert np.allclose(conditional_value_at_risk(x, jnp.asarray(0.2), 1), low, atol=1e-3)


def test_by_hand():
    x = jnp.asarray([[1.0, 3.0, 5.0, 7.0]])
    assert mean_minus_std(x, jnp.asarray(2.0), 1)[0] == pytest.approx(4 - 2 * np.sqrt(5))
    assert mean_minus_variance(x, jnp.asarray(0.5), 1)[0] == pytest.approx(4 - 2.5)
    assert conditional_value_at_risk(x, jnp.asarray(0.375), 1)[0] == pytest.approx((1 + 0.5 * 3) / 1.5)
    assert mean_minus_std(x, jnp.asarray(0.0), 1)[0] == 4.0
