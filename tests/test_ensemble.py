import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Meta
from refplan.dynamics import MODELS, find_model
from refplan.dynamics.base import NeverTerminates
from refplan.dynamics.ensemble import Ensemble, weight_decay
from refplan.dynamics.members import Snapshot
from refplan.errors import RefplanError
from refplan.logs import read_csv
from refplan.modules import load_module, save_module
from refplan.train import fit

# s' = s + A s + B a + noise, r = C s + D a + noise
A = np.array([[-0.1, 0.3], [0.2, -0.2]], np.float32)
B = np.array([[0.5, -0.2]], np.float32)
C, D = np.array([1.0, -2.0], np.float32), 0.7
NOISE, REWARD_NOISE = np.array([0.1, 0.4], np.float32), 0.6

SMALL = Ensemble(members=3, elites=2, hidden=(16, 16), batch_size=64, rate=3e-3, epochs=40)
TRACES: list[int] = []


def linear_world(rows=2000, seed=0):
    random = np.random.default_rng(seed)
    obs = random.normal(size=(rows, 2)).astype(np.float32) * np.array([1.0, 3.0], np.float32) + 1.0
    action = random.uniform(-1, 1, (rows, 1)).astype(np.float32)
    change = obs @ A.T + action @ B
    reward = obs @ C + D * action[:, 0]
    return make_dataset(
        obs,
        action,
        reward + REWARD_NOISE * random.normal(size=rows),
        np.zeros(rows, bool),
        np.arange(rows) % 50 == 49,
        next_observations=obs + change + NOISE * random.normal(size=(rows, 2)),
        meta=Meta(name="linear"),
    )


@pytest.fixture(scope="session")
def data():
    return linear_world()


@pytest.fixture(scope="session", params=[False, True], ids=["raw", "normalised"])
def model(request, data):
    # Trained on after the mean has settled: the variance follows it late.
    learner = dataclasses.replace(SMALL, normalise_targets=request.param, min_improvement=0.0, patience=40)
    return fit(learner, data, key=jr.key(0), show=False)


@pytest.fixture(scope="session")
def fresh(data):
    """(learner, state, source, held), before any update."""
    train, held = SMALL.hold_out(data, jr.key(1))
    return SMALL, SMALL.init(train, jr.key(0)), SMALL.prepare(train), SMALL.prepare(held)


def same(a, b) -> bool:
    return bool(eqx.tree_equal(a, b))


def test_registry_finds_it_and_names_what_it_does_not_know():
    assert find_model("ensemble") is Ensemble
    assert set(MODELS) == {"ensemble", "belief", "worlds", "refined", "refined-worlds"}
    with pytest.raises(RefplanError, match="Did you mean 'ensemble'"):
        find_model("ensembel")


def test_learns_a_linear_gaussian_world(model):
    random = np.random.default_rng(1)
    obs = jnp.asarray(random.normal(size=(200, 2)) * np.array([1.0, 3.0]) + 1.0, jnp.float32)
    action = jnp.asarray(random.uniform(-1, 1, (200, 1)), jnp.float32)
    out = jax.vmap(lambda o, a: model.predict_from(model.start(), o, a))(obs, action)
    expected = obs + obs @ A.T + action @ B
    wrong = np.sqrt(np.mean((np.asarray(out.next_obs) - np.asarray(expected)[:, None]) ** 2, axis=(0, 1)))
    assert np.all(wrong < 0.6 * NOISE + 0.02)
    wrong = np.asarray(out.reward) - np.asarray(obs @ C + D * action[:, 0])[:, None]
    assert np.sqrt(np.mean(wrong**2)) < 0.6 * REWARD_NOISE
    np.testing.assert_allclose(np.median(out.next_obs_std, axis=(0, 1)), NOISE, rtol=0.25)
    np.testing.assert_allclose(np.median(out.reward_std), REWARD_NOISE, rtol=0.25)


def test_result_holds_all_members_best_first_and_speaks_for_the_elites(model):
    assert model.members == 2 and model.held_mse.shape == (3,)
    assert bool(jnp.all(jnp.diff(model.held_mse) >= 0))
    assert model.predict_from((), jnp.zeros(2), jnp.zeros(1)).next_obs.shape == (2, 2)
    assert isinstance(model.termination, NeverTerminates)


def test_belief_and_hypothesis_are_empty(model):
    belief = model.start()
    assert jax.tree.leaves(belief) == []
    assert model.sample(belief, jnp.zeros(2), jr.key(0)) == model.centre(belief, jnp.zeros(2)) == ()


def test_imagined_steps_follow_the_predicted_gaussians(model):
    obs, action = jnp.array([0.5, -1.0]), jnp.array([0.2])
    out = model.predict_from((), obs, action)
    steps = jax.vmap(lambda k: model.step((), obs, action, k))(jr.split(jr.key(0), 20_000))
    # Of a mixture: the mean of means, and the mean variance plus the variance of means.
    for drawn, mean, std in (
        (steps.next_obs, out.next_obs, out.next_obs_std),
        (steps.reward[:, None], out.reward[:, None], out.reward_std[:, None]),
    ):
        spread = jnp.sqrt(jnp.mean(std**2, axis=0) + jnp.var(mean, axis=0))
        np.testing.assert_allclose(drawn.mean(axis=0), mean.mean(axis=0), atol=0.03 * float(spread.max()))
        np.testing.assert_allclose(drawn.std(axis=0), spread, rtol=0.03)
    one = jax.vmap(lambda k: model.step_member((), obs, action, jnp.asarray(1), k))(jr.split(jr.key(1), 20_000))
    np.testing.assert_allclose(one.next_obs.std(axis=0), out.next_obs_std[1], rtol=0.03)
    assert not bool(jnp.any(steps.terminated))


def test_same_key_same_weights(data):
    learner = dataclasses.replace(SMALL, epochs=2)
    first = fit(learner, data, key=jr.key(0), show=False)
    assert same(first, fit(learner, data, key=jr.key(0), show=False))
    assert not same(first, fit(learner, data, key=jr.key(1), show=False))


def test_saved_and_loaded_it_predicts_the_same(model, tmp_path):
    save_module(tmp_path / "model.safetensors", model)
    assert same(load_module(tmp_path / "model.safetensors"), model)


def test_stop_and_resume_equals_no_stop_and_early_stopping_survives(data, tmp_path):
    learner = dataclasses.replace(SMALL, patience=2, min_improvement=0.3, epochs=100)
    every, _ = learner.schedule(data)
    fit(learner, data, key=jr.key(0), steps=5 * every, folder=tmp_path / "a", show=False)
    resumed = fit(learner, data, key=jr.key(0), folder=tmp_path / "a", show=False)
    assert same(resumed, fit(learner, data, key=jr.key(0), folder=tmp_path / "b", show=False))
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()
    since = [float(row["since_improved"]) for row in read_csv(tmp_path / "b" / "metrics.csv")]
    assert 6 < len(since) < 100
    assert since[-1] == 3 and max(since[:-1]) <= 2  # stops when strictly more than `patience`


def test_nothing_is_traced_again_between_epochs(data):
    class Counting(Ensemble):
        def update(self, state, batch, key):
            TRACES.append(1)
            return super().update(state, batch, key)

    learner = Counting(members=2, elites=1, hidden=(8,), batch_size=64, epochs=1)
    fit(learner, data, key=jr.key(0), show=False)
    before = len(TRACES)
    fit(dataclasses.replace(learner, epochs=4), data, key=jr.key(0), steps=100, show=False)
    more = len(TRACES) - before
    assert more <= before  # `epochs` is static, so at most one compilation more, not one per epoch
    fit(
        dataclasses.replace(learner, epochs=4, rate=5e-3, bounds_weight=0.1, min_improvement=0.5),
        data,
        key=jr.key(1),
        show=False,
    )
    assert len(TRACES) == before + more


def test_bootstrap_lists_are_drawn_with_replacement_and_differ(fresh):
    learner, state, source, held = fresh
    rows = source.rows.reward.shape[0]
    assert state.order.shape == (3, rows)
    unique = [len(np.unique(each)) / rows for each in np.asarray(state.order)]
    np.testing.assert_allclose(unique, 1 - np.exp(-1), atol=0.04)
    assert not np.array_equal(np.sort(state.order[0]), np.sort(state.order[1]))
    after, _ = learner.review(state, source, held, jr.key(5))
    assert np.array_equal(np.sort(after.order, axis=1), np.sort(state.order, axis=1))
    moved = np.asarray(after.order) != np.asarray(state.order)
    assert moved.mean() > 0.99


def test_an_epoch_goes_once_through_every_list(fresh, data):
    learner, state, source, _ = fresh
    every, most = learner.schedule(data)
    assert (every, most) == (25, 25 * 40)
    rows = source.rows.reward.shape[0]
    numbered = source._replace(rows=source.rows._replace(reward=jnp.arange(rows, dtype=jnp.float32)))
    seen = []
    for number in range(every):
        at = state._replace(position=jnp.asarray(number * learner.batch_size))
        seen.append(np.asarray(learner.batch(numbered, at, jr.key(0)).rows.reward, int))
    seen = np.concatenate(seen, axis=1)[:, :rows]
    assert np.array_equal(seen, state.order)


def test_held_out_rows_are_few_and_apart(data):
    train, held = SMALL.hold_out(data, jr.key(0))
    assert (len(train), len(held)) == (1600, 400)
    together = np.concatenate([train.rewards, held.rewards])
    assert np.array_equal(np.sort(together), np.sort(data.rewards))
    few, most = dataclasses.replace(SMALL, held_most=100).hold_out(data, jr.key(0))
    assert (len(few), len(most)) == (1900, 100)


def test_a_member_that_gets_worse_goes_back_to_its_best(fresh):
    learner, state, source, held = fresh
    good = state.nets.layers[-1].weight

    def reviewed(state, shift):
        """One review with nonsense added to the last layer of some members."""
        weight = good + jnp.asarray(shift)[:, None, None]
        state = state._replace(nets=eqx.tree_at(lambda n: n.layers[-1].weight, state.nets, weight))
        return learner.review(state, source, held, jr.key(0))

    first, metrics = reviewed(state, [0.0, 5.0, 0.0])
    assert float(metrics["since_improved"]) == 0
    second, metrics = reviewed(first, [5.0, 0.0, 0.0])  # the first member gets worse, the second better
    before, after = np.asarray(first.best.mse), np.asarray(second.best.mse)
    assert after[0] == before[0] and after[1] < before[1] and after[2] == before[2]
    assert same(second.best.weights[0][-1].weight, good)
    assert float(metrics["since_improved"]) == 0
    third, metrics = reviewed(second, [5.0, 5.0, 5.0])
    assert float(metrics["since_improved"]) == 1 and same(third.best, second.best)
    restored = learner.result(third).decoder.nets.layers[-1].weight
    assert same(restored, good[jnp.argsort(third.best.mse)])


def test_an_improvement_below_one_percent_does_not_count(fresh):
    learner, state, source, held = fresh
    judged, _ = learner.review(state, source, held, jr.key(0))
    for factor, counts in ((1.005, False), (1.02, True)):
        earlier = judged._replace(best=judged.best._replace(mse=judged.best.mse * factor))
        again, _ = learner.review(earlier, source, held, jr.key(0))
        assert (int(again.since) == 0) is counts


def test_elites_are_the_best(fresh):
    learner, state, _, _ = fresh
    model = learner.result(state._replace(best=Snapshot(state.best.weights, jnp.array([3.0, 1.0, 2.0]))))
    assert model.held_mse.tolist() == [1.0, 2.0, 3.0]
    weight = model.decoder.elite_nets().layers[0].weight
    assert same(weight, state.nets.layers[0].weight[jnp.array([1, 2])])


def test_the_order_of_members_in_training_changes_nothing(fresh):
    learner, state, source, held = fresh
    state, _ = learner.review(state, source, held, jr.key(0))
    order = jnp.array([2, 0, 1])
    nets = eqx.tree_at(lambda n: n.layers, state.nets, jax.tree.map(lambda x: x[order], state.nets.layers))
    permuted = learner.init(data=linear_world(), key=jr.key(0))._replace(
        nets=nets, inputs=state.inputs, targets=state.targets, best=Snapshot((nets.layers, ()), state.best.mse[order])
    )
    again, _ = learner.review(permuted, source, held, jr.key(0))
    obs, action = jnp.array([0.3, 1.0]), jnp.array([-0.4])
    expected = learner.result(state).predict_from((), obs, action)
    assert same(learner.result(permuted).predict_from((), obs, action), expected)
    assert same(learner.result(again).predict_from((), obs, action), expected)


def test_weight_decay_by_hand_and_stretched():
    learner = Ensemble(members=2, elites=1, hidden=(3,))
    state = learner.init(linear_world(100), jr.key(0))
    squares = [float(jnp.sum(layer.weight**2)) for layer in state.nets.layers]
    assert float(weight_decay(state.nets, learner.decay)) == pytest.approx(
        0.5 * (2.5e-5 * squares[0] + 1e-4 * squares[1]), rel=1e-5
    )
    five = Ensemble(members=2, elites=1, hidden=(3, 3, 3, 3)).init(linear_world(100), jr.key(0)).nets
    expected = sum(
        0.5 * w * float(jnp.sum(layer.weight**2)) for w, layer in zip(learner.decay.tolist(), five.layers, strict=True)
    )
    assert float(weight_decay(five, learner.decay)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("normalise", [False, True])
def test_constant_columns_give_no_nan(normalise):
    data = linear_world()
    flat = dataclasses.replace(
        data,
        observations=data.observations * np.array([1.0, 0.0], np.float32),
        next_observations=data.next_observations * np.array([1.0, 0.0], np.float32),
        actions=np.ones_like(data.actions),
        rewards=np.full_like(data.rewards, 2.0),
    )
    model = fit(dataclasses.replace(SMALL, epochs=3, normalise_targets=normalise), flat, key=jr.key(0), show=False)
    out = model.predict_from((), jnp.array([0.5, 0.0]), jnp.ones(1))
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves((model, out)))


def test_rows_without_a_known_successor_are_left_out(data):
    known = np.ones(len(data), bool)
    known[data.ends - 1] = False
    gaps = dataclasses.replace(data, known_next=known)
    assert SMALL.prepare(gaps).rows.reward.shape == (len(data) - data.episodes,)
    assert SMALL.init(gaps, jr.key(0)).order.shape == (3, len(data) - data.episodes)
    assert np.isfinite(fit(dataclasses.replace(SMALL, epochs=1), gaps, key=jr.key(0), show=False).held_mse).all()


@pytest.mark.parametrize("wrong", [{"elites": 0}, {"elites": 8}, {"held_fraction": 0.0}, {"held_most": 0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(RefplanError, match=next(iter(wrong))):
        Ensemble(**wrong)
