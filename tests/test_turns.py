"""Taking turns changes how much is computed at once, never what."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan import turns
from refplan.agent import act_many, start_many
from refplan.bench.planner import OBS, make_model, make_prior
from refplan.planners.refplan import RefPlan


@pytest.mark.parametrize(
    ("count", "rows", "expected"),
    [
        (10, 1, 10),
        (10, 3000, 2),
        (10, 2999, 2),
        (16, 500, 8),
        (4, 10**6, 1),
        (1, 10**6, 1),
        (6, 1000, 6),
        (9, 2000, 3),
        (7, 1000, 6),
        (241, 60, 100),
        (14, 1000, 6),
    ],  # the last three: no divisor near what fits, so a remainder is left
)
def test_a_turn_is_as_large_as_fits_and_even_where_that_costs_little(count, rows, expected):
    assert turns.at_once(count, rows) == expected


@pytest.mark.parametrize("rows", [1, 850, 3000, 10**6])  # 10, 7 and 3, 2, 1 at a time
def test_turns_give_what_all_at_once_gives(rows):
    keys, numbers = jr.split(jr.key(0), 10), jnp.arange(10.0)

    def one(key, number):
        return {"drawn": jr.normal(key, (3,)), "squared": number**2}

    expected = jax.vmap(one)(keys, numbers)
    found = turns.in_turns(one, rows, keys, numbers)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), found, expected)


def test_a_planner_decides_the_same_in_turns(monkeypatch):
    planner = RefPlan(make_prior(hidden=8), make_model(2), horizon=2, latents=4, plans=10)
    obs, keys = jr.normal(jr.key(1), (6, OBS)), jr.split(jr.key(2), 6)
    found = {}
    for most in (10**6, 40, 1):  # all at once; two worlds of one episode; one world of one episode
        monkeypatch.setattr(turns, "ROWS", most)
        assert planner.rows == {10**6: 80, 40: 40, 1: 20}[most]
        found[most] = eqx.filter_jit(lambda *args: act_many(*args)[0])(planner, start_many(planner, 6), obs, keys)
    np.testing.assert_allclose(found[40], found[10**6], atol=1e-4)
    np.testing.assert_allclose(found[1], found[10**6], atol=1e-4)


@pytest.mark.parametrize("most", [10**6, 7, 6, 1])
def test_a_sum_in_turns_has_the_value_and_the_gradient_of_the_whole(most, monkeypatch):
    monkeypatch.setattr(turns, "ROWS", most)
    heads = {"weight": jr.normal(jr.key(0), (2, 3)), "bias": jr.normal(jr.key(1), (2,))}
    items, wanted = jr.normal(jr.key(2), (13, 3)), jnp.asarray([2.0, -0.5])

    def total(heads, items):
        return jnp.sum(jnp.sin(jnp.einsum("ni,hi->hn", items, heads["weight"]) + heads["bias"][:, None]), axis=1)

    def loss(heads, sums):
        return jnp.sum(wanted * sums(heads)) + jnp.sum(heads["bias"])

    found = jax.value_and_grad(loss)(heads, lambda h: turns.sum_in_turns(total, h, 1, items))
    expected = jax.value_and_grad(loss)(heads, lambda h: total(h, items))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, expected)
