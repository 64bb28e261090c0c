"""The encoder: its recurrence, its bookkeeping over lanes and episodes, and the terms of the bound."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.data.lanes import pack_episodes
from refplan.dynamics.decoder import apply_members, make_gaussian_nets, negative_log_likelihood
from refplan.dynamics.elbo import belief_kl, choose_steps, free_kl, one_step_earlier, reconstruction, spaced_past
from refplan.dynamics.encoder import empty_belief, encode_lanes, gaussian_kl, make_encoder
from refplan.nn import Normaliser
from refplan.types import Transition

OBS, ACT, LANES, TIME = 3, 2, 4, 20


@pytest.fixture(scope="module")
def encoder():
    return make_encoder(OBS, ACT, jr.key(0), embed=(4, 3, 2), memory=8, latent=2)


@pytest.fixture(scope="module")
def scale():
    return Normaliser(jnp.linspace(-1.0, 1.0, OBS + ACT + 1), jnp.linspace(0.5, 2.0, OBS + ACT + 1))


@pytest.fixture(scope="module")
def steps():
    keys = jr.split(jr.key(1), 4)
    obs, action = jr.normal(keys[0], (LANES, TIME, OBS)), jr.normal(keys[1], (LANES, TIME, ACT))
    reward, end = jr.normal(keys[2], (LANES, TIME)), jnp.zeros((LANES, TIME), bool)
    return Transition(obs, action, reward, obs + 1.0, end)


encode = eqx.filter_jit(encode_lanes)


def cut(steps, columns):
    return jax.tree.map(lambda x: x[:, columns], steps)


def test_the_recurrence_is_the_usual_gru(encoder):
    cell = eqx.nn.GRUCell(5, 8, key=jr.key(0))
    gru = encoder.gru
    zeros = jnp.zeros(24)
    weights = (jr.normal(jr.key(1), (5, 24)), gru.recurrent.weight, jr.normal(jr.key(2), (24,)))
    gru = eqx.tree_at(lambda g: (g.inputs.weight, g.recurrent.weight, g.inputs.bias), gru, weights)
    gru = eqx.tree_at(lambda g: g.recurrent.bias, gru, zeros.at[16:].set(0.3))
    values = (weights[0].T, weights[1].T, weights[2], jnp.full(8, 0.3))
    cell = eqx.tree_at(lambda c: (c.weight_ih, c.weight_hh, c.bias, c.bias_n), cell, values)
    x, memory = jr.normal(jr.key(3), (5,)), jr.normal(jr.key(4), (8,))
    np.testing.assert_allclose(gru(gru.inputs(x), memory), cell(x, memory), rtol=1e-5, atol=1e-6)


def test_recurrent_matrices_are_orthogonal_and_biases_zero(encoder):
    weight = encoder.gru.recurrent.weight
    np.testing.assert_allclose(weight @ weight.T, np.eye(8), atol=1e-5)
    assert not encoder.gru.recurrent.bias.any() and not encoder.gru.inputs.bias.any()
    assert (encoder.memory_size, encoder.latent_size) == (8, 2)


def test_the_written_out_gradient_is_that_of_the_recurrence(encoder):
    gru = jax.tree.map(lambda x: x + 0.1 * jr.normal(jr.key(5), x.shape), encoder.gru)  # no bias stays zero
    x, memory = jr.normal(jr.key(6), (TIME, LANES, 9)), jr.normal(jr.key(7), (LANES, 8))
    first = jnp.zeros((TIME, LANES), bool).at[0, 1].set(True).at[7, 2].set(True).at[TIME - 1, 3].set(True)
    weight = jr.normal(jr.key(8), (TIME, LANES, 8))

    def by_hand(gru, x, memory):
        total = 0.0
        for t in range(TIME):
            memory = gru(gru.inputs(x[t]), jnp.where(first[t][:, None], 0.0, memory))
            total = total + jnp.sum(weight[t] * memory)
        return total

    def written_out(gru, x, memory):
        return jnp.sum(weight * gru.run(x, memory, first))

    expected, found = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(gru, x, memory) for f in (by_hand, written_out))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert jnp.abs(found[1][2]).max() > 0.01 and not found[1][2][1].any()  # lane 1 begins anew at once


def test_the_posterior_one_step_earlier_is_that_of_the_memory_before(encoder, scale, steps):
    start = empty_belief(encoder, ACT, (LANES,))._replace(memory=jr.normal(jr.key(9), (LANES, 8)))
    before, after, _ = encode(encoder, scale, start, steps, jnp.zeros((LANES, TIME), bool))
    found = one_step_earlier(encoder.posterior(after), encoder.posterior(start.memory))
    for value, expected in zip(found, encoder.posterior(before), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_carried_state_equals_one_long_pass(encoder, scale, steps):
    first = jnp.zeros((LANES, TIME), bool).at[:, 0].set(True).at[1, 7].set(True).at[2, 10].set(True)
    start = empty_belief(encoder, ACT, (LANES,))
    before, after, end = encode(encoder, scale, start, steps, first)
    belief, parts = start, []
    for at in range(0, TIME, 5):
        columns = slice(at, at + 5)
        *memories, belief = encode(encoder, scale, belief, cut(steps, columns), first[:, columns])
        parts.append(memories)
    np.testing.assert_allclose(jnp.concatenate([p[0] for p in parts], 1), before, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jnp.concatenate([p[1] for p in parts], 1), after, rtol=1e-5, atol=1e-6)
    for one, other in zip(belief, end, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(before[:, 1:], after[:, :-1])


def test_an_episode_begins_anew_whatever_came_before(encoder, scale, steps):
    first = jnp.zeros((LANES, TIME), bool).at[:, 0].set(True).at[:, 5].set(True)
    start = empty_belief(encoder, ACT, (LANES,))
    _, together, _ = encode(encoder, scale, start, steps, first)
    _, alone, _ = encode(encoder, scale, start, cut(steps, slice(5, None)), first[:, 5:])
    np.testing.assert_allclose(together[:, 5:], alone, rtol=1e-5, atol=1e-6)
    used = jax.tree.map(lambda x: x + 1.0, start)
    np.testing.assert_array_equal(encode(encoder, scale, used, steps, first)[1], together)
    went_on = encode(encoder, scale, start, steps, first.at[:, 5].set(False))[1]
    assert jnp.abs(went_on[:, 5] - together[:, 5]).max(axis=1).min() > 1e-3


def test_kl_of_equal_gaussians_is_zero_and_agrees_with_monte_carlo():
    mean, log_var = jnp.asarray([0.3, -1.0]), jnp.asarray([-0.5, 0.7])
    np.testing.assert_array_equal(gaussian_kl(mean, log_var, mean, log_var), np.zeros(2))
    other_mean, other_log_var = jnp.asarray([0.0, 0.5]), jnp.asarray([0.4, -0.2])
    draw = mean[None] + jnp.exp(0.5 * log_var)[None] * jr.normal(jr.key(0), (400_000, 2))

    def log_density(x, mean, log_var):
        return jax.scipy.stats.norm.logpdf(x, mean[None], jnp.exp(0.5 * log_var)[None])

    drawn = jnp.mean(log_density(draw, mean, log_var) - log_density(draw, other_mean, other_log_var), axis=0)
    np.testing.assert_allclose(gaussian_kl(mean, log_var, other_mean, other_log_var), drawn, atol=0.01)


def test_kl_on_the_first_step_is_to_the_standard_normal():
    now = jnp.full((2, 1, 3), 0.5), jnp.full((2, 1, 3), -1.0)
    earlier = jnp.full((2, 1, 3), 0.4), jnp.full((2, 1, 3), -0.5)
    first = jnp.asarray([[True], [False]])
    kl = belief_kl(now, earlier, first, "previous")
    by_hand = 0.5 * np.asarray([1.0 - 1 + np.exp(-1.0) + 0.25, 0.5 - 1 + np.exp(-0.5) + 0.01 * np.exp(0.5)])
    np.testing.assert_allclose(kl[:, 0, 0], by_hand, rtol=1e-5)
    standard = belief_kl(now, earlier, first, "standard")
    np.testing.assert_allclose(standard[:, 0, 0], by_hand[[0, 0]], rtol=1e-5)


def test_stop_gradient_and_free_bits_do_what_they_say():
    now = jnp.full((1, 3), 0.5), jnp.zeros((1, 3))
    first = jnp.zeros(1, bool)

    def cost(earlier, stop):
        return jnp.sum(belief_kl(now, (earlier, jnp.zeros((1, 3))), first, "previous", stop))

    assert jnp.abs(jax.grad(cost)(jnp.zeros((1, 3)), False)).min() > 0
    assert not jax.grad(cost)(jnp.zeros((1, 3)), True).any()
    kl = jnp.asarray([[[0.1, 0.5], [0.3, 0.7]]])
    np.testing.assert_allclose(free_kl(kl, jnp.asarray(0.0)), 0.8)
    np.testing.assert_allclose(free_kl(kl, jnp.asarray(0.4)), 0.4 + 0.6)


def test_chosen_steps_are_past_steps_of_the_same_episode_each_once():
    first = jnp.zeros((3, 12), bool).at[0, 5].set(True).at[1, 0].set(True).at[1, 11].set(True)
    t, h, valid = jax.jit(choose_steps, static_argnums=(2, 3))(first, jr.key(0), 6, 4)
    assert (t.shape, h.shape) == ((3, 6), (3, 6, 4))
    np.testing.assert_array_equal(h[..., 0], t)
    begin = np.maximum.accumulate(np.where(first, np.arange(12), 0), axis=1)
    for lane in range(3):
        assert len(set(np.asarray(t[lane]).tolist())) == 6
        for number, at in enumerate(np.asarray(t[lane])):
            picked = np.asarray(h[lane, number])[np.asarray(valid[lane, number])]
            assert len(set(picked.tolist())) == len(picked) == min(4, at - begin[lane, at] + 1)
            assert picked.min() >= begin[lane, at] and picked.max() == at


def test_spaced_past_stays_inside_the_episode_and_the_window():
    h, valid = spaced_past(jnp.asarray([30, 12, 10]), jnp.asarray([0, 10, 10]), 4, 20)
    assert h[0].tolist() == [30, 25, 20, 15] and valid[0].all()
    assert h[1, :3].tolist() == [12, 11, 10] and valid[1].tolist() == [True, True, True, False]
    assert valid[2].tolist() == [True, False, False, False]


@pytest.mark.parametrize("inject", [False, True])
def test_a_row_dealt_to_one_member_gets_that_members_likelihood(inject):
    nets = make_gaussian_nets(3, 4, 2, 2, (6, 6), jr.key(0), residual=True, inject=inject)
    keys = jr.split(jr.key(1), 3)
    x, latent, target = jr.normal(keys[0], (10, 4)), jr.normal(keys[1], (10, 2)), jr.normal(keys[2], (10, 2))
    mean, log_var = apply_members(nets, jnp.broadcast_to(x, (3, 10, 4)), latent)
    each = negative_log_likelihood(mean, log_var, jnp.broadcast_to(target, mean.shape))
    np.testing.assert_allclose(reconstruction(nets, x, latent, target), each.mean(0), rtol=1e-5)
    dealt = jax.jit(lambda k: reconstruction(nets, x, latent, target, k))
    drawn = jnp.stack([dealt(key) for key in jr.split(jr.key(2), 60)])
    gap = jnp.abs(drawn[:, None] - each[None]).min(axis=1)
    assert gap.max() < 1e-4
    nearest = jnp.abs(drawn[:, None] - each[None]).argmin(axis=1)
    share = np.bincount(np.asarray(nearest).ravel(), minlength=3) / nearest.size
    np.testing.assert_allclose(share, 1 / 3, atol=0.05)


def test_packing_holds_every_row_once_and_wastes_little():
    lengths = np.asarray([3, 120, 40, 77, 1, 60, 59])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    layout = pack_episodes(starts, lengths)
    rows = np.sort(np.asarray(layout.row)[np.asarray(layout.valid)])
    np.testing.assert_array_equal(rows, np.arange(lengths.sum()))
    begins = np.asarray(layout.row)[np.asarray(layout.first & layout.valid)]
    np.testing.assert_array_equal(np.sort(begins), starts)
    assert layout.row.size < 1.7 * lengths.sum()
    assert pack_episodes(starts, lengths, most_lanes=1).row.shape == (1, 400)
