"""The whole line: stages are made once, follow their inputs, survive a kill; the run folder serves other commands."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from refplan.cli import main
from refplan.errors import RefplanError
from refplan.experiments.line import Plan
from refplan.experiments.workshop import Workshop, digest_inputs
from refplan.report.summary import summarise
from refplan.store import load_run, read_results

pytest.importorskip("mujoco")
TINY = ["--steps", "20", "--episodes", "1", "--set-prior", "hidden=8,8", "--set-prior", "batch_size=16"]


def test_a_stage_is_made_once_and_again_when_an_input_changes(tmp_path):
    made, said = [], []

    def make(folder):
        made.append(folder)
        return {"value": len(made)}

    def work(**inputs):
        return Workshop(tmp_path, said.append).document("count", inputs, make)

    assert work(a=1).made == {"value": 1}
    assert work(a=1).made == {"value": 1}
    assert work(a=2).made == {"value": 2}
    assert work(a=1).made == {"value": 1}, "going back finds the old stage"
    assert len(made) == 2
    assert said[1].endswith("there already")


def test_an_unfinished_stage_is_continued_in_its_own_folder(tmp_path):
    def stumble(folder):
        (folder / "half").write_text("done")
        raise KeyboardInterrupt

    shop = Workshop(tmp_path, lambda text: None)
    with pytest.raises(KeyboardInterrupt):
        shop.document("x", {}, stumble)
    stage = shop.document("x", {}, lambda folder: {"half": (folder / "half").read_text()})
    assert stage.made == {"half": "done"}


def test_a_damaged_stage_says_what_to_do(tmp_path):
    shop = Workshop(tmp_path, lambda text: None)
    stage = shop.document("x", {}, lambda folder: {})
    (stage.folder / "product.json").write_text("{")
    with pytest.raises(RefplanError, match="Remove its folder"):
        shop.document("x", {}, lambda folder: {})


def test_inputs_are_told_apart():
    assert digest_inputs({"a": 1}) != digest_inputs({"a": 1.5})
    assert digest_inputs({"a": 1, "b": 2}) == digest_inputs({"b": 2, "a": 1})


def test_which_models_a_plan_needs():
    assert Plan(planners=("prior", "critic")).models == ()
    assert Plan(planners=("prior", "loop")).models == ("ensemble",)
    assert set(Plan(planners=("loop", "refplan")).models) == {"ensemble", "belief"}
    assert Plan(method="mopo", planners=("prior",)).models == ("ensemble",)
    with pytest.raises(RefplanError, match="unknown planner 'lop'"):
        Plan(planners=("lop",))


def test_the_command_makes_a_run_folder_and_repeats_nothing(tmp_path, capsys):
    command = ["run", "hopper-medium-replay-tiny", "--planners", "prior,critic", "--out", str(tmp_path), *TINY]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "iql + critic" in first and "report.html" in first
    rows = read_results(tmp_path / "results.csv")
    assert [row["planner"] for row in rows] == ["none", "critic"]
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert set(load_run(tmp_path)) >= {"prior", "prior_learner", "data", "provenance"}
    assert (tmp_path / "prior" / "metrics.csv").exists()
    assert main(command) == 0
    again = capsys.readouterr().out
    assert again.count("there already") == 4
    assert read_results(tmp_path / "results.csv") == rows
    assert main([*command, "--seeds", "2", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert sorted({row["seed"] for row in both}) == [0, 1]


def test_a_foreign_policy_gets_a_critic_and_is_planned_with(tmp_path, capsys):
    from pathlib import Path

    policy = next((Path(__file__).parent / "fixtures" / "policies").glob("*hopper*.zip"), None)
    if policy is None:
        from refplan.files import save_module
        from refplan.priors.policy import from_bundled

        policy = tmp_path / "policy.safetensors"
        save_module(policy, from_bundled("hopper"))
    command = ["run", "hopper-medium-replay-tiny", "--policy", str(policy), "--planners", "prior,critic"]
    assert main([*command, "--critic-steps", "10", "--episodes", "1", "--out", str(tmp_path / "run")]) == 0
    assert "+ critic" in capsys.readouterr().out
    assert load_run(tmp_path / "run")["prior"].critics is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prior", "iql", "--policy", "x.zip"], "give one of them"),
        (["--planners", "prior,lop"], "unknown planner 'lop'"),
        (["--seeds", "0"], "must be at least 1"),
        (["--policy", "nothing.zip"], "no such file"),
        (["--prior", "cqll"], "cqll"),
        (["--set-prior", "hidden"], "NAME=VALUE"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, options, message):
    assert main(["run", "hopper-medium-replay-tiny", "--out", str(tmp_path), *TINY[:4], *options]) != 0
    assert message in capsys.readouterr().err


def test_the_summary_pools_seeds():
    rows = [
        {"planner": "none", "prior": "iql", "returns": "[1000.0, 1200.0]", "score": 30.0, "ms_per_action": 0.1,
         "seed": seed, "world": "hopper"}
        for seed in (0, 1)
    ]  # fmt: skip
    line = summarise(rows)[0]
    assert line[0] == "iql" and line[1].startswith("1100 [") and line[-2:] == ["4", "2"]
    assert float(line[2].split()[0]) == pytest.approx(100 * (1100 + 20.272305) / (3234.3 + 20.272305), abs=0.1)


@pytest.mark.slow
def test_killed_anywhere_it_ends_with_the_same_numbers(tmp_path):
    def command(out):
        small = ["--set-model", "members=2", "--set-model", "elites=2", "--set-model", "hidden=16,16"]
        small += ["--set-model", "epochs=1", "--set-planner", "plans=8"]
        planners = ["--planners", "prior,loop", "--out", str(out)]
        return [sys.executable, "-m", "refplan", "run", "hopper-medium-replay-tiny", *planners, *small, *TINY]

    whole = tmp_path / "whole"
    subprocess.run(command(whole), check=True, capture_output=True)
    broken = tmp_path / "broken"
    for seconds in (6, 12, 20):
        process = subprocess.Popen(command(broken), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command(broken), check=True, capture_output=True)
    ours, theirs = (read_results(folder / "results.csv") for folder in (broken, whole))
    assert [row["returns"] for row in ours] == [row["returns"] for row in theirs]
    assert np.array_equal(*(load_run(f)["prior"].policy.net.layers[0].weight for f in (broken, whole)))
