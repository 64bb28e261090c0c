"""A judge is found out by the world: right values rank plans as they earn, wrong ones do not."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from models import GAMMA, LinearModel, LinearPrior, matrices, riccati

from refplan.bench.planner import make_decoder
from refplan.cli import main
from refplan.dynamics.base import NeverTerminates
from refplan.dynamics.ensemble import EnsembleDynamics
from refplan.experiments.judge import Judgement, judge_plans, true_returns, visited
from refplan.planners.loop import LOOP
from refplan.store import save

P, K = riccati()
STATES = jnp.asarray([[1.0, -0.5], [0.4, 0.8], [-1.2, 0.3]])
BOX = {"low": jnp.asarray([-8.0]), "high": jnp.asarray([8.0])}


WORLD = LinearModel()  # of one member: the true world


def judged(value, gains=K) -> Judgement:
    planner = LOOP(LinearPrior(gains, value), WORLD, plans=30, horizon=1, discount=GAMMA, effective=0.1, **BOX)
    return judge_plans(planner, WORLD, STATES, key=jr.key(0), steps=60, discount=GAMMA)


def test_exact_values_rank_plans_as_they_earn_and_inverted_ones_the_other_way_round():
    right, wrong = judged(P), judged(-2.0 * P)
    assert right.rank.min() > 0.99
    assert wrong.rank.max() < 0.9
    assert np.allclose(right.scored, right.earned, rtol=0.05)
    assert judged(P, 0.3 * K).gain.mean() > 1e-4 > right.gain.mean(), "only a bad prior gains from a good judge"
    assert wrong.gain.mean() < -1e-3, "an optimal prior loses by a bad one"
    assert "1: always" in right.text() and right.summary()["states"] == 3


def test_returns_by_a_plain_loop():
    A, B, Q, R = matrices()
    plans = jnp.asarray([[[0.5], [-0.2]], [[1.0], [0.0]], [[0.0], [0.3]]])
    got, seen, alive = true_returns(LinearPrior(K, P), WORLD, STATES, plans, jnp.asarray(GAMMA), 5)
    for number in range(3):
        s, total = np.asarray(STATES[number], np.float64), 0.0
        for h in range(5):
            a = np.asarray(plans[number, h], np.float64) if h < 2 else -np.asarray(K, np.float64) @ s
            assert np.allclose(seen[h, number], s, atol=1e-4)
            total += GAMMA**h * -(s @ Q @ s + a @ R @ a)
            s = A @ s + B @ a
        assert np.allclose(got[number], total, rtol=1e-4)
    assert alive.all()


def test_visited_states_are_those_of_the_prior():
    found = visited(LinearPrior(K, P), WORLD, STATES, steps=4, every=2)
    A, B, _, _ = matrices()
    step = A - B @ np.asarray(K)
    assert found.shape == (6, 2)
    assert np.allclose(found[:3], STATES)
    assert np.allclose(found[3:], [step @ step @ np.asarray(s) for s in STATES], atol=1e-4)


def test_plans_that_are_all_alike_have_no_rank():
    summary = Judgement(np.asarray([np.nan, 0.5]), np.zeros(2), np.zeros(2), np.zeros(2)).summary()
    assert summary["rank"] == pytest.approx(0.5)


def test_mistakes_are_found_before_anything_is_judged(tmp_path, capsys):
    model = EnsembleDynamics(decoder=make_decoder(2, latent=0), held_mse=jnp.zeros(2), termination=NeverTerminates())
    save(tmp_path, model=model, data={"source": "hopper-medium-replay-tiny", "task": "hopper"})
    for options, words in (
        (["--preset", "careful"], "name one with --planner"),
        (["--planner", "loop"], "needs a prior to plan with"),
    ):
        assert main(["diagnose", str(tmp_path), *options]) == 2
        assert words in capsys.readouterr().err
