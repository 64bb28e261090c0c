"""The whole line: stages are made once, follow their inputs, survive a kill; the run folder serves other commands."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.agent import RandomAgent
from refplan.cli import build_parser, main
from refplan.cli.run import make_plan
from refplan.collect.rollout import roll_out
from refplan.data.envs import world_version
from refplan.data.hdf5 import save_hdf5
from refplan.data.sources import load
from refplan.data.tasks import task as find_task
from refplan.errors import RefplanError
from refplan.experiments.line import evaluation_stage
from refplan.experiments.plan import Plan
from refplan.experiments.workshop import Stage, Workshop, digest_inputs
from refplan.report.summary import summarise
from refplan.store import load_run, read_results

pytest.importorskip("mujoco")
POLICIES = Path(__file__).parent / "fixtures" / "policies"
SMALL_MODEL = ["--set-model", "members=2", "--set-model", "elites=2", "--set-model", "hidden=16,16"]
SMALL_MODEL += ["--set-model", "epochs=1", "--set-planner", "plans=8"]
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


def test_a_world_that_has_changed_since_is_evaluated_anew(tmp_path, monkeypatch):
    hill = dataclasses.replace(find_task("halfcheetah-hill"), horizon=5)
    about = {"method": "random", "preset": "none", "updates": 0}
    prior = Stage("prior", "digest", tmp_path, about, RandomAgent(jnp.asarray(hill.low), jnp.asarray(hill.high)))

    def work():
        shop = Workshop(tmp_path, lambda text: None)
        return evaluation_stage(shop, hill, "prior", prior, None, Plan(episodes=1), 0, "data").folder

    first = work()
    assert work() == first
    assert world_version("halfcheetah-hill") == {"env": "refplan/HalfCheetahHill-v1"}
    assert world_version("halfcheetah") == world_version("halfcheetah-joint") == {}
    monkeypatch.setattr("refplan.experiments.line.world_version", lambda name: {"env": f"{name}-v9"})
    assert work() != first


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
    for belief in ("worlds", "refined", "refined-worlds"):  # made around it
        assert Plan(planners=("loop", "refplan"), belief=belief).models == ("ensemble",)
    assert set(Plan(planners=("loop", "refplan"), belief="belief").models) == {"ensemble", "belief"}
    assert Plan(method="mopo", planners=("prior",)).models == ("ensemble",)
    with pytest.raises(RefplanError, match="unknown planner 'lop'"):
        Plan(planners=("lop",))


@pytest.mark.parametrize(("words", "belief"), [([], "refined-worlds"), (["--model", "worlds"], "worlds")])
def test_the_model_refplan_believes_with_is_an_option(words, belief):
    args = build_parser().parse_args(["run", "data", "--out", "x", *words])
    assert make_plan(args) == Plan(belief=belief)
    if words:
        old = build_parser().parse_args(["run", "data", "--out", "x", "--belief", words[1]])
        assert make_plan(old).belief == belief


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


class Slide(gym.Env):
    """Five numbers pushed by two: the sizes and bounds of the Stable-Baselines3 file among the fixtures."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)
    action_space = gym.spaces.Box(np.float32([-2.0, -0.5]), np.float32([1.0, 0.75]))
    push = np.random.default_rng(0).normal(size=(2, 5)) / 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.normal(size=5)
        return self.at.astype(np.float32), {}

    def step(self, action):
        self.at = 0.9 * self.at + action @ self.push
        return self.at.astype(np.float32), -float(self.at @ self.at), False, False, {}


@pytest.fixture
def slide(tmp_path):
    """The environment's id, registered, and a file of logs from it."""
    gym.register("Slide-v0", Slide, max_episode_steps=12)
    task = find_task("Slide-v0")
    agent = RandomAgent(jnp.asarray(task.low), jnp.asarray(task.high))
    save_hdf5(roll_out(agent, task, 120, key=jr.key(0), name="slide", recipe="random actions"), tmp_path / "logs.hdf5")
    yield tmp_path / "logs.hdf5"
    gym.registry.pop("Slide-v0")


def test_a_policy_of_another_library_is_made_better(slide, tmp_path, capsys):
    out = tmp_path / "run"
    command = ["run", str(slide), "--policy", str(POLICIES / "sb3_sac.zip"), "--planners", "prior,loop"]
    sizes = ["--critic-steps", "5", "--episodes", "2", *SMALL_MODEL]
    assert main([*command, *sizes, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "sb3_sac.zip + loop" in said and "[6/6] evaluation-loop" in said
    rows = read_results(out / "results.csv")
    assert [(row["prior"], row["planner"]) for row in rows] == [("sb3_sac.zip", "none"), ("sb3_sac.zip", "loop")]
    assert rows[0]["returns"] != rows[1]["returns"], "planning acts otherwise"
    # the policy in the folder is the file's own, to the last bit of what the library itself answered
    record = json.loads((POLICIES / "actions.json").read_text())["sb3_sac.zip"]
    prior = load_run(out)["prior"]
    actions = [prior.act(prior.start(), jnp.asarray(obs), jr.key(0))[0] for obs in record["observations"]]
    np.testing.assert_allclose(actions, record["actions"], atol=1e-5)
    assert prior.critics is not None
    assert main([*command, *sizes, "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("there already") == 6
    # the same file where other actions are allowed
    wrong = dict(np.load(_as_npz(slide, tmp_path / "other.npz")))
    np.savez(tmp_path / "other.npz", **{**wrong, "action_low": [-1.0, -1.0], "action_high": [1.0, 1.0]})
    assert main(["run", str(tmp_path / "other.npz"), *command[2:], "--out", str(tmp_path / "x")]) == 2
    assert "acts between [-2.0, -0.5] and [1.0, 0.75], but actions of other lie between" in capsys.readouterr().err


def _as_npz(source, path):
    """The logs without their environment, actions made to fit [-1, 1]."""
    data = load(source)
    arrays = {"observations": data.observations, "actions": np.clip(data.actions, -1, 1), "rewards": data.rewards}
    np.savez(path, **arrays, terminated=data.terminated, truncated=data.truncated, name="other")
    return path


def test_an_onnx_policy_is_kept_in_the_run_folder(slide, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    from test_docs import write_onnx

    write_onnx(tmp_path / "policy.onnx", observation=5, action=2)
    command = ["run", str(slide), "--policy", str(tmp_path / "policy.onnx"), "--planners", "prior,critic"]
    assert main([*command, "--critic-steps", "5", "--episodes", "2", "--out", str(tmp_path / "run")]) == 0
    assert "policy.onnx + critic" in capsys.readouterr().out
    (tmp_path / "policy.onnx").unlink()
    prior = load_run(tmp_path / "run")["prior"]
    weight = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    obs = np.linspace(-0.3, 0.4, 5, dtype=np.float32)
    expected = np.clip(np.tanh(obs @ weight), [-2.0, -0.5], [1.0, 0.75])
    np.testing.assert_allclose(prior.act(prior.start(), jnp.asarray(obs), jr.key(0))[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prior", "iql", "--policy", "x.zip"], "give one of them"),
        (["--policy", "nothing.zip"], "no such file"),
        (["--set-prior", "hidden"], "NAME=VALUE"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, options, message):
    assert main(["run", "hopper-medium-replay-tiny", "--out", str(tmp_path), *TINY[:4], *options]) != 0
    assert message in capsys.readouterr().err  # more of them in test_errors.py


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
        planners = ["--planners", "prior,loop", "--out", str(out)]
        return [sys.executable, "-m", "refplan", "run", "hopper-medium-replay-tiny", *planners, *SMALL_MODEL, *TINY]

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
