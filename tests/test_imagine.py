"""Imagined rollouts by hand: they stop where the world ends, doubt what they should, begin where the data stands."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from imagined import CountingModel, EndsAbove, tiny_belief, tiny_ensemble
from worlds import ragged

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Meta
from refplan.dynamics.base import NeverTerminates, Outcome
from refplan.dynamics.encoding import encode_rows, place_episodes
from refplan.errors import RefplanError
from refplan.nn import identity_normaliser, make_mlp
from refplan.priors.imagine import Start, aleatoric, disagreement, draw, imagine, make_ring, put, states_along
from refplan.priors.imagining import Imagination, look_up
from refplan.priors.mopo import MOPO
from refplan.priors.policy import GaussianPolicy
from refplan.priors.sac import SAC
from refplan.types import Transition


def counting_data(rows: int = 24):
    """Observations 0 .. 3 again and again, each row an episode of its own."""
    obs = (np.arange(rows) % 4).astype(np.float32)[:, None]
    unit = np.random.default_rng(0).uniform(-1, 1, (rows, 1)).astype(np.float32)
    unit[:2, 0] = -1.0, 1.0
    flags = np.zeros(rows, bool), np.ones(rows, bool)
    return make_dataset(obs, 3.0 * unit, obs[:, 0], *flags, next_observations=obs + 1, meta=Meta(name="counting"))


def policy(obs: int = 1, act: int = 1) -> GaussianPolicy:
    net = make_mlp((obs, 4, 2 * act), jr.key(0))
    return GaussianPolicy(net, identity_normaliser(obs), -3.0 * jnp.ones(act), 3.0 * jnp.ones(act))


def learner(model, **changes) -> MOPO:
    rounds = Imagination(**{"starts": 20, "length": 6, "retain": 2, "real_ratio": 0.25, **changes})
    return MOPO(model, penalty=2.0, imagined=rounds, sac=SAC(hidden=(4,), batch_size=32))


@eqx.filter_jit
def one_round(learner, data_state, logged, key):
    return learner.renew(data_state, logged, key)


@pytest.fixture(scope="module")
def counting():
    """One round in the counting world, whose two members doubt it differently."""
    stds = ((0.03, 0.04), (0.0, 0.01))  # norms 0.05 and 0.01
    mopo, data = learner(CountingModel(stds=stds)), counting_data()
    state = mopo.init(data, jr.key(0))
    logged = mopo.prepare(data)
    return mopo, state, logged, one_round(mopo, state, logged, jr.key(1))


def test_a_rollout_stands_still_where_its_world_has_ended():
    rollout = eqx.filter_jit(imagine)(
        CountingModel(), policy(), Start(jnp.ones(1), (), ()), jr.key(0), length=6, doubt=aleatoric
    )
    # from 1: 2, 3, and 4, which is above 3.5; the step that ends the world is the last that counts
    assert rollout.valid.tolist() == [True] * 3 + [False] * 3
    assert rollout.steps.next_obs[:3, 0].tolist() == [2.0, 3.0, 4.0]
    assert rollout.steps.terminated[:3].tolist() == [False, False, True]
    assert (rollout.steps.obs[3:] == 3.0).all(), "nothing continues from beyond the end"


def test_the_buffer_holds_nothing_from_beyond_an_end(counting):
    _, _, _, dream = counting
    size = int(dream.ring.size)
    rows = jax.tree.map(lambda x: np.asarray(x[:size]), dream.ring.items)
    # starts at 0, 1, 2, 3 take 4, 3, 2, 1 steps to the end; noise (std 0.03 at most) does not change that
    assert (rows.obs[:, 0] < 3.5).all()
    assert ((rows.next_obs[:, 0] > 3.5) == rows.terminated).all()
    assert int(rows.terminated.sum()) == 20, "every rollout reached its end once"
    assert float(dream.steps) == pytest.approx(size / 20)
    used = draw(dream.ring, jr.key(0), 500)
    assert (np.asarray(used.obs) < 3.5).all() and (np.asarray(used.next_obs) > 0.5).all()


def test_penalised_reward_by_hand(counting):
    _, _, _, dream = counting
    size = int(dream.ring.size)
    rows = jax.tree.map(lambda x: np.asarray(x[:size]), dream.ring.items)
    # r = s + noise, u = max(0.05, 0.01), lambda = 2
    assert np.allclose(rows.reward - rows.obs[:, 0], -0.1, atol=0.2)
    assert np.isclose((rows.reward - rows.obs[:, 0]).mean(), -0.1, atol=0.02)
    assert float(dream.uncertainty) == pytest.approx(0.05)
    assert float(dream.penalty) == pytest.approx(0.1)
    assert float(dream.reward) == pytest.approx(rows.reward.mean() + 0.1, abs=1e-5)
    assert (np.abs(rows.action) <= 1.0).all() and np.abs(rows.action).max() > 0.3


def test_both_uncertainties_by_hand():
    outcome = Outcome(
        jnp.asarray([[0.0, 0.0], [6.0, 0.0], [0.0, 3.0]]),
        jnp.zeros(3),
        jnp.asarray([[1.0, 2.0], [0.0, 0.0], [0.1, 0.1]]),
        jnp.asarray([2.0, 2.5, 0.0]),
    )
    assert float(aleatoric(outcome)) == 3.0  # sqrt(1 + 4 + 4) against 2.5 and 0.14
    # the mean is (2, 1): distances sqrt 5, sqrt 17, sqrt 8; the reward has no say
    assert float(disagreement(outcome)) == pytest.approx(17**0.5)


@pytest.mark.parametrize(("doubt", "expected"), [("aleatoric", 0.0), ("disagreement", 0.5)])
def test_the_chosen_uncertainty_is_used(doubt, expected):
    # members differ by 1, so each is 0.5 from their mean; they claim no noise
    mopo, data = learner(CountingModel(apart=1.0), doubt=doubt, length=2), counting_data()
    dream = one_round(mopo, mopo.init(data, jr.key(0)), mopo.prepare(data), jr.key(1))
    assert float(dream.uncertainty) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("one_member", [True, False])
def test_one_member_for_a_rollout_or_one_per_step(one_member):
    model = CountingModel(apart=1.0, termination=NeverTerminates())
    keys = jr.split(jr.key(0), 40)
    roll = eqx.filter_jit(
        eqx.filter_vmap(
            lambda key: imagine(
                model,
                policy(),
                Start(jnp.zeros(1), (), ()),
                key,
                length=6,
                doubt=aleatoric,
                one_member=one_member,
                bounds=(jnp.zeros(1), jnp.full(1, 9.0)),
            )
        )
    )
    steps = roll(keys).steps
    moved = np.asarray(steps.next_obs - steps.obs)[:, :4, 0]  # at most 8 after 4 steps: not clipped yet
    assert set(np.unique(moved)) == {1.0, 2.0}
    assert (moved == moved[:, :1]).all() == one_member
    assert float(steps.next_obs.max()) == 9.0, "the next state is clipped to its bounds"


def test_a_ring_keeps_the_newest_and_skips_what_is_not_kept():
    ring = make_ring(jnp.zeros(()), 5)
    step = jax.jit(put)
    ring = step(ring, jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([True, False, True]))
    assert (int(ring.size), int(ring.place)) == (2, 2)
    assert ring.items[:2].tolist() == [1.0, 3.0]
    assert set(draw(ring, jr.key(0), 50).tolist()) == {1.0, 3.0}
    ring = step(ring, jnp.asarray([4.0, 5.0, 6.0]), jnp.ones(3, bool))
    ring = step(ring, jnp.asarray([7.0, 8.0, 9.0]), jnp.asarray([True, True, False]))
    assert (int(ring.size), int(ring.place)) == (5, 2)
    assert sorted(ring.items.tolist()) == [4.0, 5.0, 6.0, 7.0, 8.0]


def test_beliefs_at_logged_rows_are_those_of_the_model_s_own_encoding():
    model, data = tiny_belief(), ragged()
    logged = look_up(model, data)
    mean, log_var = jax.vmap(model.posterior)(logged.belief, logged.rows.obs)
    expected = encode_rows(model.encoder, model.scale, place_episodes(data))
    assert np.allclose(mean, expected[0], atol=1e-5) and np.allclose(log_var, expected[1], atol=1e-5)
    fresh = jax.tree.map(lambda x: x[data.starts], logged.belief)
    assert all(float(jnp.abs(x).max()) == 0.0 for x in fresh), "every episode begins with nothing believed"


def test_a_belief_follows_the_imagined_steps():
    model = eqx.tree_at(lambda m: m.termination, tiny_belief(), EndsAbove(1e6))
    seen = []

    class Watched(type(model)):
        def observe(self, belief, transition):
            after = super().observe(belief, transition)
            seen.append((belief, transition, after))
            return after

    fields = {name: getattr(model, name) for name in ("encoder", "scale", "decoder", "termination")}
    start = Start(jnp.ones(3), model.start(), ())
    with jax.disable_jit():
        rollout = imagine(Watched(**fields), policy(3, 2), start, jr.key(0), length=3, doubt=aleatoric)
    assert [np.allclose(t.obs, o) for (_, t, _), o in zip(seen, rollout.steps.obs, strict=True)] == [True] * 3
    assert np.allclose(seen[1][0].memory, seen[0][2].memory) and np.allclose(seen[2][0].memory, seen[1][2].memory)
    assert not np.allclose(seen[1][0].memory, seen[0][0].memory)


def test_states_along_begin_anew_with_every_episode():
    class Sum(CountingModel):
        def start(self):
            return jnp.zeros(())

        def observe(self, belief, transition):
            return belief + transition.reward

    rewards = np.arange(1.0, 8.0, dtype=np.float32)
    ends = np.array([0, 0, 1, 0, 0, 0, 1], bool)
    column = rewards[:, None]
    actions = np.linspace(-1, 1, 7, dtype=np.float32)[:, None]
    data = make_dataset(column, actions, rewards, np.zeros(7, bool), ends, next_observations=column, meta=Meta("sum"))
    logged = look_up(Sum(), data)
    assert logged.belief.tolist() == [0, 1, 3, 0, 4, 9, 15]
    assert logged.last.tolist() == [2, 2, 2, 6, 6, 6, 6]
    assert states_along(CountingModel(), data.device(), logged.layout) == ()


def test_mistakes_are_named():
    data = ragged()
    with pytest.raises(RefplanError, match=r"MOPO learns in an imagined world and needs a model.*--model RUN"):
        MOPO().prepare(data)
    with pytest.raises(RefplanError, match="does not fit dataset 'ragged' with observations of size 3"):
        look_up(tiny_ensemble(5, 2), data)
    bag, _ = data.split(0.9, key=jr.key(0), by="transition")
    assert look_up(tiny_ensemble(), bag).layout is None
    with pytest.raises(RefplanError, match="BeliefDynamics remembers episodes and needs a split by='episode'"):
        look_up(tiny_belief(), bag)
    with pytest.raises(RefplanError, match=r"unknown uncertainty 'aleatori'\. Did you mean 'aleatoric'"):
        Imagination(doubt="aleatori")
    with pytest.raises(RefplanError, match="length=0"):
        Imagination(length=0)
    with pytest.raises(RefplanError, match=r"real_ratio=1\.0"):
        Imagination(real_ratio=1.0)


def test_a_row_is_a_transition_like_any_other(counting):
    _, _, logged, dream = counting
    kinds = [jax.tree.map(lambda x: (x.dtype, x.shape[1:]), rows) for rows in (logged.rows, dream.ring.items)]
    assert isinstance(dream.ring.items, Transition)
    assert kinds[0] == kinds[1]
