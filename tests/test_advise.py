"""Advice before planning: the model is asked whether a planner would do harm, and a good prior is left alone."""

import contextlib
import io
import json
import re
import shutil

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from models import GAMMA, LinearModel, LinearPrior, riccati

from refplan.cli import main
from refplan.data.assemble import make_dataset
from refplan.errors import RefplanError
from refplan.experiments.advise import Advice, advise
from refplan.planners.loop import LOOP
from refplan.planners.presets import planner_settings
from refplan.store import read_results, read_tables, save

SMALL_MODEL = ["--set-model", "members=2", "--set-model", "elites=2", "--set-model", "hidden=16,16"]
SMALL_MODEL += ["--set-model", "epochs=1", "--set-planner", "plans=8"]
TINY = ["--steps", "20", "--episodes", "1", "--set-prior", "hidden=8,8", "--set-prior", "batch_size=16"]

P, K = riccati()


def logged():
    """Rows wide enough that nothing imagined leaves their range."""
    random = np.random.default_rng(0)
    obs = random.normal(size=(200, 2)).astype(np.float32)
    obs[1:3] = [[-9, -9], [9, 9]]  # no episode starts there
    rewards = np.linspace(-900, 0, 200)
    return make_dataset(
        obs,
        np.zeros((200, 1), np.float32),
        rewards,
        np.zeros(200, bool),
        np.arange(200) % 5 == 4,
        next_observations=obs,
    )


def ask(prior, agents, **options):
    said: list[str] = []
    options = {"key": jr.key(0), "episodes": 12, "steps": 30, "presets": tuple(agents), "say": said.append} | options
    return advise(prior, agents.__getitem__, LinearModel(), logged(), **options), said


def test_what_earns_less_than_the_prior_in_the_model_is_not_advised():
    """The Riccati controller is the best there is in this world: nothing planned on it by a bad critic gains."""
    best = LinearPrior(K, P)
    advice, said = ask(best, {"careful": LinearPrior(0.5 * K, P), "default": best})
    assert advice.gain("default") == (0.0, 0.0), "the same agent meets the same episodes"
    assert advice.gain("careful")[0] < 0.0 and advice.choice == "away"
    assert len(said) == 3 and "12 imagined episodes" in said[0]


def test_a_weak_prior_is_planned_on():
    weak = LinearPrior(0.3 * K, P, spread=2.0)
    box = {"low": [-8.0], "high": [8.0]}
    advice, _ = ask(weak, {"careful": LOOP(weak, LinearModel(), plans=40, discount=GAMMA, kappa=10.0, **box)})
    mean, error = advice.gain("careful")
    assert mean > 2 * error > 0.0 and advice.choice == "careful"


def test_only_a_loss_beyond_its_error_speaks_against_planning():
    alone = np.zeros(4)
    unsure, sure = np.array([8.0, -9.0, 8.0, -9.0]), np.array([0.2, 0.3, 0.2, 0.3])
    assert Advice(alone, {"careful": unsure}).choice == "careful"
    assert Advice(alone, {"careful": -sure}).choice == "away"
    assert Advice(alone, {"careful": sure}).gain("careful") == pytest.approx((0.25, np.std(sure, ddof=1) / 2))


def test_gains_farther_from_the_prior_change_nothing():
    """A model flatters a planner the more, the farther it goes from the data."""
    alone, gain = np.zeros(4), np.array([0.2, 0.3, 0.2, 0.3])
    assert Advice(alone, {"careful": gain, "default": 9 * gain}).choice == "careful"
    assert Advice(alone, {"careful": -gain, "default": 9 * gain}).choice == "away"


def test_bad_questions_are_refused():
    prior = LinearPrior(K, P)
    with pytest.raises(RefplanError, match="at least 2 episodes"):
        ask(prior, {}, episodes=1)
    with pytest.raises(RefplanError, match="default earns nan in the model"):
        ask(prior, {"default": LinearPrior(jnp.nan * K, P)})


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A run whose model was asked before anything was planned: (folder, command, what was said)."""
    pytest.importorskip("mujoco")
    folder, said = tmp_path_factory.mktemp("asked") / "x", io.StringIO()
    command = ["run", "hopper-medium-replay-tiny", "--out", str(folder), "--planners", "prior,loop"]
    with contextlib.redirect_stdout(said):
        assert main([*command, *TINY, *SMALL_MODEL, "--planner-preset", "advised"]) == 0
    return folder, [*command, *TINY, *SMALL_MODEL], said.getvalue()


def test_a_run_does_what_its_model_advises(asked, capsys):
    folder, command, said = asked
    choice = read_tables(folder)["advice"]["choice"]
    assert f"advised: {choice}" in said and "[7/7]" in said, "every stage is counted"
    alone, planned = read_results(folder / "results.csv")
    assert json.loads(planned["settings"])["advised"] == choice and "advised" not in json.loads(alone["settings"])
    width = planner_settings("careful")["width"] if choice == "careful" else 1.0
    assert json.loads(planned["settings"])["width"] == pytest.approx(width)
    assert main([*command, "--planner-preset", "advised", "--json"]) == 0
    again = capsys.readouterr()
    assert again.err.count("there already") == 7, "neither the model nor the task is asked twice"
    assert json.loads(again.out)[1]["return"] == pytest.approx(float(planned["return"]))
    by_name = [*command, "--out", str(folder), "--planner-preset", choice]
    assert main(by_name) == 0
    assert "evaluation-loop: there already" in capsys.readouterr().out, "advised or named, it is the same evaluation"


def test_a_kept_advice_can_be_followed_later(asked, tmp_path, capsys):
    folder, _, _ = asked
    shutil.copytree(folder, tmp_path / "x")
    save(tmp_path / "x", advice={"choice": "away"})
    alone = ["evaluate", str(tmp_path / "x"), "--episodes", "2", "--json"]
    advised = [*alone, "--planner", "loop", "--preset", "advised"]
    assert main(alone) == main(advised) == 0
    first, second = (json.loads(text)[0] for text in re.split(r"(?<=\n\])\n", capsys.readouterr().out.strip()))
    assert first["return"] == pytest.approx(second["return"]), "it said that the prior should act by itself"
    save(tmp_path / "x", without=("advice",))
    assert main(advised) == 2
    assert "ask 'refplan advise RUN'" in capsys.readouterr().err


def test_the_command_says_which_preset_to_use(asked, tmp_path, capsys):
    folder, _, _ = asked
    assert main(["advise", str(folder), "--episodes", "2", "--steps", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["presets"]) == {"careful"} and found["choice"] in ("away", "careful")
    assert main(["advise", str(folder), "--episodes", "1", "--steps", "3"]) == 2
    assert "at least 2 episodes" in capsys.readouterr().err
    assert main(["advise", str(tmp_path)]) == 2
    assert "refplan: error" in capsys.readouterr().err
