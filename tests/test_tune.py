"""Choosing settings: the search finds what is best, goes on where it stopped, and can do without the real world."""

import json

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from models import GAMMA, LinearModel, LinearPrior, riccati
from toy import toy_data

from refplan.cli import main
from refplan.errors import RefplanError
from refplan.experiments.imagined import Judge, Range, held_out_starts, imagined_returns, logged_range
from refplan.experiments.tune import GRID, Space, finished_trials, free_settings, open_study, tune
from refplan.planners.loop import LOOP
from refplan.planners.presets import planner_defaults

pytest.importorskip("optuna")
P, K = riccati()
SPACE = Space(("kappa", "penalty"))


def hill(settings):
    """Best at kappa 5, penalty 0.1."""
    return -abs(np.log(settings["kappa"] / 5.0)) - settings["penalty"], {"episodes": 2.0, "steps": 10.0, "seconds": 0.0}


def search(path, trials, method="bayes", objective=hill, space=SPACE, about=""):
    return tune(objective, space, method=method, trials=trials, storage=path, about=about, say=lambda text: None)


def test_the_grid_tries_every_point_of_the_paper_once(tmp_path):
    trials = search(tmp_path / "j", 1000, "grid")
    tried = {(t.settings["kappa"], t.settings["penalty"]) for t in trials}
    assert len(trials) == len(tried) == len(GRID["kappa"]) * len(GRID["penalty"])
    best = max(trials, key=lambda t: t.value)
    assert best.settings == {"kappa": 5.0, "penalty": 0.1}
    assert np.prod([len(values) for values in GRID.values()]) == 240


def test_bayes_finds_the_hill_and_counts_what_it_spent(tmp_path):
    trials = search(tmp_path / "j", 25)
    best = max(trials, key=lambda t: t.value)
    assert 2.0 < best.settings["kappa"] < 12.0 and best.settings["penalty"] < 0.3
    assert sum(t.spent["episodes"] for t in trials) == 50


def test_a_search_goes_on_where_it_stopped(tmp_path):
    calls = []

    def counted(settings):
        calls.append(settings)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return hill(settings)

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "j", 6, objective=counted)
    assert len(finished_trials(open_study(tmp_path / "j", SPACE, "bayes", 0))) == 3
    assert len(search(tmp_path / "j", 6, objective=counted)) == 6
    assert len(calls) == 7, "three were known, one was lost half-way"
    assert len(search(tmp_path / "j", 6, objective=counted)) == 6
    assert len(calls) == 7


def test_answers_to_another_question_do_not_count(tmp_path):
    assert len(search(tmp_path / "j", 2, about="three episodes")) == 2
    assert len(search(tmp_path / "j", 1, about="ten episodes")) == 1


def test_mistakes(tmp_path):
    with pytest.raises(RefplanError, match="bayes"):
        search(tmp_path / "j", 2, method="bays")
    with pytest.raises(RefplanError, match="at least 1"):
        search(tmp_path / "j", 0)
    with pytest.raises(RefplanError, match="the objective is nan"):
        search(tmp_path / "k", 2, objective=lambda s: (np.nan, {}))


def test_offline_the_planner_with_the_better_settings_is_ranked_first():
    judge = Judge(LinearModel(), LinearPrior(K, P), jnp.asarray(GAMMA))
    box = {"low": jnp.asarray([-8.0]), "high": jnp.asarray([8.0])}
    starts = jnp.asarray(np.random.default_rng(0).normal(size=(16, 2)), jnp.float32)

    def value(kappa):
        agent = LOOP(LinearPrior(0.3 * K, P, spread=2.0), LinearModel(), plans=40, discount=GAMMA, kappa=kappa, **box)
        return float(imagined_returns(agent, judge, starts, 10, jr.key(0)).mean())

    best = -float(np.mean(np.einsum("ni,ij,nj->n", starts, P, starts)))
    found = [value(kappa) for kappa in (0.0, 0.1, 10.0)]
    assert found[0] < found[1] < found[2] < best + 1e-3
    optimal = imagined_returns(LinearPrior(K, P), judge, starts, 10, jr.key(0))
    assert float(optimal.mean()) == pytest.approx(best, rel=1e-3), "the optimum is known exactly"


def test_nothing_is_earned_after_the_model_says_it_ended():
    from test_planners import Wall

    judge = Judge(LinearModel(termination=Wall()), LinearPrior(K, P), jnp.asarray(1.0))
    start = jnp.asarray([[0.95, 1.0]])  # the first step crosses the wall at x = 1
    still = LinearPrior(0.0 * K, P)
    assert float(imagined_returns(still, judge, start, 5, jr.key(0))[0]) == pytest.approx(-(0.95**2 + 0.1), rel=1e-5)


def test_a_judge_does_not_imagine_what_was_never_logged():
    data = toy_data()
    known = logged_range(data)
    np.testing.assert_array_equal(known.obs_high, data.observations.max(axis=0))
    np.testing.assert_array_equal(known.reward_low, data.rewards.min())
    box = Range(jnp.full(2, -1.0), jnp.ones(2), jnp.asarray(-0.5), jnp.asarray(0.0))
    still, start = LinearPrior(0.0 * K, 0.0 * P), jnp.asarray([[0.9, 1.0]])
    free, kept = (
        float(imagined_returns(still, Judge(LinearModel(), still, jnp.asarray(1.0), r), start, 40, jr.key(0))[0])
        for r in (None, box)
    )
    assert free < -200.0, "it drifts away, and so does what it pays"
    assert kept == pytest.approx(-0.5 * 40, rel=1e-5), "never worse than the worst that was logged"


def test_starts_come_from_the_data():
    data = toy_data()
    starts = held_out_starts(data, 5, key=jr.key(0))
    assert all((data.observations == start).all(1).any() for start in starts)
    with pytest.raises(RefplanError, match="at least one start"):
        held_out_starts(data, 0, key=jr.key(0))


def test_the_command_explains_what_is_missing(tmp_path, capsys):
    assert main(["tune", str(tmp_path / "none")]) != 0
    assert "no such run folder" in capsys.readouterr().err


def test_what_is_fixed_is_not_searched_and_a_share_of_plans_leaves_no_kappa_to_find():
    assert free_settings(planner_defaults("loop"), ["sigma"]) == ("horizon", "kappa", "penalty")
    assert free_settings(planner_defaults("refplan"), {"effective": "0.1"}) == (
        "horizon",
        "sigma",
        "latents",
        "penalty",
    )


@pytest.mark.slow
def test_the_command_tunes_offline_and_compares_with_the_task(tmp_path, capsys):
    pytest.importorskip("mujoco")
    small = ["--steps", "50", "--set-prior", "hidden=8,8", "--set-model", "members=2", "--set-model", "elites=2"]
    small += ["--set-model", "hidden=16,16", "--set-model", "epochs=1", "--set-model", "decoder_epochs=1"]
    run = ["run", "hopper-medium-replay-tiny", "--planners", "loop,refplan", "--belief", "belief", "--episodes", "1"]
    run += ["--out", str(tmp_path)]
    assert main([*run, *small, "--set-planner", "plans=5"]) == 0
    capsys.readouterr()
    tuning = ["tune", str(tmp_path), "--planner", "loop", "--trials", "3", "--critic-steps", "20", "--starts", "4"]
    tuning += ["--length", "3", "--agree", "2", "--episodes", "1", "--fix", "plans=5", "--json"]
    assert main(tuning) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["trials"]) == 3 and found["spent"]["episodes"] == 0
    agreement = found["agreement"]
    assert len({pair["online"] for pair in agreement["pairs"]}) <= agreement["settings"] == 2
    found = agreement["rank_correlation"]  # of two settings; None where both earned the same
    assert found is None or abs(found) == pytest.approx(1.0)
