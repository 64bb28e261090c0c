"""MOPO and COMBO in worlds known on paper, what COMBO pushes and lifts, and how learning in imagination goes wrong."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import worlds
from imagined import judged, probe_model, tiny_belief, tiny_ensemble

from refplan.errors import RefplanError
from refplan.logs import read_csv
from refplan.presets import with_settings
from refplan.priors.combo import COMBO
from refplan.priors.cql import CQL, candidate_actions
from refplan.priors.imagining import Imagination, look_up
from refplan.priors.losses import conservative_gap
from refplan.priors.mopo import MOPO
from refplan.priors.sac import SAC
from refplan.train import Diverged, fit

STEPS = 1200
# As for the model-free learners: a small fixed temperature keeps the entropy bonus below the tolerance.
_SAC = {
    "hidden": (16, 16),
    "batch_size": 64,
    "actor_rate": 3e-3,
    "critic_rate": 3e-3,
    "alpha_rate": 0.0,
    "alpha_start": 1e-3,
    "tau": 0.05,
    "normalise": True,
}
_ROUNDS = {"starts": 96, "length": 3, "refresh": 100, "retain": 3}
LEARNERS = {
    "mopo": (MOPO(imagined=Imagination(**_ROUNDS, real_ratio=0.1), sac=SAC(**_SAC)), "sac.discount"),
    "combo": (
        COMBO(
            imagined=Imagination(**_ROUNDS, real_ratio=0.5),
            cql=CQL(weight=0.0, samples=2, penalty_states=4, sac=SAC(**_SAC, entropy_in_backup=False)),
        ),
        "cql.sac.discount",
    ),
}
every_learner = pytest.mark.parametrize("name", LEARNERS)


def solve(name: str, probe: worlds.Probe):
    """Train in the probe's true world, most of it imagined."""
    learner, discount = LEARNERS[name]
    learner = with_settings(dataclasses.replace(learner, model=probe_model(probe.data)), {discount: probe.discount})
    return fit(learner, probe.data, steps=STEPS, key=jr.key(0), every=STEPS)


@pytest.mark.parametrize("world", ["endless", "finite"])
@every_learner
def test_values_that_do_not_depend_on_the_policy(name, world):
    probe = worlds.FIXED_VALUES[world]()
    values, _ = judged(solve(name, probe), probe)
    for found, expected in zip(values, probe.value, strict=True):
        np.testing.assert_allclose(found.mean(), expected, atol=0.1, rtol=0.03)
        np.testing.assert_allclose(found, expected, atol=0.25, rtol=0.05)


@every_learner
def test_the_best_action_is_found_and_what_it_is_worth_before(name):
    probe = worlds.late_choice()
    values, actions = judged(solve(name, probe), probe)
    np.testing.assert_allclose(actions[1].mean(axis=0), worlds.to_box(worlds.TARGET), atol=0.3)
    assert values[1].mean() == pytest.approx(1.0, abs=0.2)
    assert values[0].mean() == pytest.approx(0.7, abs=0.2)


@pytest.fixture(scope="module")
def combo():
    """COMBO's networks and a batch of which the first half is logged."""
    learner = COMBO(
        tiny_ensemble(),
        imagined=Imagination(starts=8, length=2, real_ratio=0.5),
        cql=CQL(samples=3, sac=SAC(hidden=(8,), batch_size=8)),
    )
    data = worlds.ragged()
    rows = jax.tree.map(lambda x: x[:8], look_up(learner.model, data).rows)
    return learner, learner.cql.sac.init(data, jr.key(0)), rows


def test_a_learner_that_imagines_is_not_drawn_to_its_own_actions():
    learner = MOPO(tiny_ensemble(), sac=SAC(hidden=(8,), batch_size=8, cloning=0.4))
    with pytest.raises(RefplanError, match="MOPO cannot be drawn to logged actions"):
        learner.prepare(worlds.ragged())


@eqx.filter_jit
def gaps(learner, sac, rows, nets=None):
    return learner.gaps(sac.critics.nets if nets is None else nets, sac, rows, jr.key(3))


@eqx.filter_jit
def gaps_by_hand(sac, rows, pushed, nets):
    """LSE at the states of `pushed`, Q at the four logged rows."""
    critics = eqx.tree_at(lambda c: c.nets, sac.critics, nets)
    actions, log_density = candidate_actions(sac.policy, pushed, 3, jr.key(3))
    obs = jnp.broadcast_to(pushed.obs[:, None], (*actions.shape[:2], 3))
    return conservative_gap(critics(obs, actions), log_density, critics(rows.obs[:4], rows.action[:4]))


@pytest.mark.parametrize("rho", ["mix", "model"])
def test_combo_s_gap_and_its_gradient_by_hand(rho, combo):
    learner, sac, rows = combo
    learner = dataclasses.replace(learner, rho=rho)
    pushed = rows if rho == "mix" else jax.tree.map(lambda x: x[4:], rows)
    by_hand = lambda nets: gaps_by_hand(sac, rows, pushed, nets)  # noqa: E731
    np.testing.assert_allclose(gaps(learner, sac, rows), by_hand(sac.critics.nets), rtol=1e-5)
    # nothing is held back from the gradient, neither the push nor the lift
    one = eqx.filter_jit(eqx.filter_grad(lambda nets: jnp.sum(gaps(learner, sac, rows, nets))))(sac.critics.nets)
    other = eqx.filter_jit(eqx.filter_grad(lambda nets: jnp.sum(by_hand(nets))))(sac.critics.nets)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_combo_lifts_logged_actions_only(combo):
    learner, sac, rows = combo
    other = rows.action.at[4:].set(-rows.action[4:])
    np.testing.assert_allclose(gaps(learner, sac, rows), gaps(learner, sac, rows._replace(action=other)), rtol=1e-6)
    other = rows.action.at[:4].set(-rows.action[:4])
    change = sac.critics(rows.obs[:4], other[:4]) - sac.critics(rows.obs[:4], rows.action[:4])
    found = gaps(learner, sac, rows._replace(action=other)) - gaps(learner, sac, rows)
    np.testing.assert_allclose(found, -change.mean(axis=1), atol=1e-5)


def test_with_rho_model_logged_states_are_not_pushed(combo):
    learner, sac, rows = combo
    learner = dataclasses.replace(learner, rho="model")
    # other logged successors change where the policy goes from there, which only a push at these states would notice
    other = rows._replace(next_obs=rows.next_obs.at[:4].add(5.0))
    np.testing.assert_allclose(gaps(learner, sac, rows), gaps(learner, sac, other), rtol=1e-6)
    mixed = dataclasses.replace(learner, rho="mix")
    assert not np.allclose(gaps(mixed, sac, rows), gaps(mixed, sac, other), rtol=1e-4)


def test_a_step_on_combo_s_penalty_lowers_imagined_choices_against_logged_ones(combo):
    learner, sac, rows = combo
    learner = dataclasses.replace(learner, rho="model")
    grads = eqx.filter_jit(eqx.filter_grad(lambda nets: jnp.sum(gaps(learner, sac, rows, nets))))(sac.critics.nets)
    moved = jax.tree.map(lambda x, g: x - 1e-2 * g, sac.critics.nets, grads)
    after = eqx.tree_at(lambda c: c.nets, sac.critics, moved)
    imagined = jax.tree.map(lambda x: x[4:], rows)
    actions, _ = candidate_actions(sac.policy, imagined, 3, jr.key(3))
    obs = jnp.broadcast_to(imagined.obs[:, None], (*actions.shape[:2], 3))
    pushed = jnp.mean(after(obs, actions) - sac.critics(obs, actions), axis=(1, 2))
    lifted = jnp.mean(after(rows.obs[:4], rows.action[:4]) - sac.critics(rows.obs[:4], rows.action[:4]), axis=1)
    assert (pushed < lifted - 1e-3).all()


def test_learning_in_a_belief_model():
    rows = []
    rounds = Imagination(starts=16, length=3, refresh=2, retain=2, real_ratio=0.25)
    learner = MOPO(tiny_belief(), imagined=rounds, sac=SAC(hidden=(8,), batch_size=16))
    fit(learner, worlds.ragged(), steps=4, every=2, key=jr.key(0), logs=[lambda _, row: rows.append(row)])
    assert rows[0]["imagined_steps"] != rows[1]["imagined_steps"]
    assert all(1.0 <= row["imagined_steps"] <= 3.0 and row["uncertainty"] > 0 for row in rows)


def test_values_that_run_away_are_reported_with_their_reasons(tmp_path):
    probe = worlds.endless()
    exact = probe_model(probe.data)
    wrong = eqx.tree_at(lambda m: m.reward, exact, 1000.0 * exact.reward)
    learner = with_settings(dataclasses.replace(LEARNERS["mopo"][0], model=wrong), {"sac.discount": 0.8})
    with pytest.raises(Diverged, match=r"MOPO diverged before update \d+: Q is .*imagined reward 1e\+03") as error:
        fit(learner, probe.data, steps=4000, key=jr.key(0), every=STEPS // 4, folder=tmp_path)
    assert "add up to at most 5.0" in str(error.value)
    last = read_csv(tmp_path / "metrics.csv")[-1]
    assert float(last["q"]) > 10 * float(last["q_bound"]), "the row that shows it is in the log"


def test_another_model_is_not_continued_with(tmp_path):
    probe = worlds.endless()
    learner, exact = LEARNERS["mopo"][0], probe_model(probe.data)
    fit(dataclasses.replace(learner, model=exact), probe.data, steps=2, every=STEPS, key=jr.key(0), folder=tmp_path)
    other = eqx.tree_at(lambda m: m.reward, exact, 2.0 * exact.reward)
    with pytest.raises(RefplanError, match="digest"):
        fit(dataclasses.replace(learner, model=other), probe.data, steps=4, every=STEPS, key=jr.key(0), folder=tmp_path)
