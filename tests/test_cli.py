"""The command line as a person meets it: answers, exit codes, errors that can be acted on."""

import json
import subprocess
import sys
import tomllib

import numpy as np
import pytest

from refplan.cli import build_parser, main
from refplan.data.sources import load
from refplan.logs import read_csv
from refplan.store import read_results

TINY = "hopper-medium-replay-tiny"


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "refplan", *args], capture_output=True, text=True)


def ask(capsys, *args: str) -> tuple[int, str, str]:
    try:
        code = main(args)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    return code, said.out, said.err


def commands() -> list[list[str]]:
    """Every command and subcommand there is."""
    found = []
    for action in build_parser()._subparsers._group_actions:
        for name, parser in action.choices.items():
            below = parser._subparsers._group_actions if parser._subparsers else []
            found += [[name, sub] for group in below for sub in group.choices] or [[name]]
    return found


@pytest.mark.parametrize("words", [[], *commands()], ids=" ".join)
def test_every_command_has_help(words, capsys):
    code, out, err = ask(capsys, *words, "--help")
    assert code == 0
    assert "usage: refplan" in out
    assert not err


def test_help_imports_nothing_heavy():
    code = "import sys; from refplan.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    heavy = "print([m for m in ('jax', 'numpy', 'rich', 'gymnasium', 'mujoco', 'h5py') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code + heavy], capture_output=True, text=True, check=True).stdout
    assert out.strip().endswith("[]")


def test_version_names_what_matters_for_reproduction():
    done = run("--version")
    assert done.returncode == 0
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"refplan", "python", "jax", "mujoco", "gymnasium"} <= names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evalute"], "Did you mean evaluate"),
        (["data", "chekc", "x"], "Did you mean check"),
        (["evaluate", "random", "--task", "halfcheeta"], "Did you mean 'halfcheetah'"),
        (["evaluate", "random", "--episodess", "2"], "Did you mean --episodes"),
        (["evaluate", "halfcheetah-mediun", "--task", "halfcheetah"], "halfcheetah-medium"),
        (["evaluate", "random"], "--task"),
        (["evaluate", "hopper-medium", "--task", "walker2d"], "17-dimensional"),
        (["data", "check", "nowhere.hdf5"], "nowhere.hdf5"),
        (["data", "info", "hoper-medium-v2"], "hopper-medium-v2"),
        (["fit", "prior", TINY, "--method", "cqll", "--out", "x"], "Did you mean 'cql'"),
        (["fit", "prior", TINY, "--preset", "gpu", "--out", "x"], "cpu"),
        (["fit", "prior", TINY, "--set", "rate", "--out", "x"], "NAME=VALUE"),
        (["fit", "prior", TINY, "--method", "iql", "--set", "expectil=0.9", "--out", "x"], "expectile"),
        (["fit", "prior", TINY, "--method", "mopo", "--model", "nowhere", "--out", "x"], "nowhere"),
        (["fit", "prior", TINY, "--method", "iql", "--model", "nowhere", "--out", "x"], "learns without a model"),
        (["plot", "nothing"], "metrics.csv"),
        (["data", "collect", "hopper", "--policy", "random", "--kind", "medium", "--out", "x.hdf5"], "--policy sac"),
        (["data", "collect", "hopper", "--policy", "random", "--out", "x.txt"], ".hdf5"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_mistakes_get_an_answer_and_exit_code_2(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = ask(capsys, *words)
    assert code == 2
    assert err.startswith("refplan: error: ")
    assert said in err
    assert "Traceback" not in err
    left = {path.name for path in tmp_path.iterdir()} - {"cache"}  # the user's cache of compiled programs
    assert left in (set(), {"x"}), "a mistake leaves nothing behind"


def test_a_broken_file_is_exit_code_1_with_everything_in_one_report(capsys, tmp_path):
    path = tmp_path / "broken.npz"
    observations = np.zeros((10, 3), np.float32)
    observations[4, 1] = np.nan
    flags = np.zeros(10, bool)
    flags[-1] = True
    arrays = {"observations": observations, "actions": np.full((10, 1), 2.0), "rewards": np.full(10, np.inf)}
    np.savez(path, **arrays, terminals=flags, timeouts=flags)
    code, out, _ = ask(capsys, "data", "check", str(path), "--json")
    assert code == 1
    codes = {one["code"] for one in json.loads(out)["errors"]}
    assert len(codes) >= 2, codes
    assert ask(capsys, "data", "check", TINY)[0] == 0


def test_lists_are_json_too(capsys):
    names = {one["name"] for one in json.loads(ask(capsys, "data", "list", "--json")[1])}
    assert {TINY, "halfcheetah-medium-replay-mini", "hopper-medium-v2"} <= names
    worlds = {one["name"] for one in json.loads(ask(capsys, "worlds", "--json")[1])}
    assert {"hopper", "hopper-d4rl", "halfcheetah-field"} <= worlds
    assert json.loads(ask(capsys, "data", "info", TINY, "--json")[1])["env_id"] == "Hopper-v5"


def test_evaluate_appends_rows_with_their_command(capsys, tmp_path):
    out = tmp_path / "rows.csv"
    words = ["evaluate", "random", "--task", "hopper,walker2d", "--episodes", "2", "--out", str(out), "--json"]
    code, said, _ = ask(capsys, *words)
    assert code == 0
    assert [one["task"] for one in json.loads(said)] == ["hopper", "walker2d"]
    rows = read_results(out)
    assert [row["world"] for row in rows] == ["hopper", "walker2d"]
    assert float(rows[0]["return"]) == json.loads(said)[0]["return"]["value"]
    code, said, _ = ask(capsys, "evaluate", "hopper-medium", "--sampled", "--episodes", "1")
    assert code == 0
    assert "hopper-medium" in said


def test_policy_files_are_evaluated_with_or_without_bounds_of_their_own(capsys):
    from refplan.data.sources import bundled_policies

    words = ["--task", "hopper", "--episodes", "1", "--json"]
    returns = []
    for agent in ("hopper-medium", str(bundled_policies()["hopper-medium"])):
        code, said, err = ask(capsys, "evaluate", agent, *words)
        assert code == 0, err
        returns.append(json.loads(said)[0]["return"]["value"])
    assert returns[0] == returns[1]


def test_fit_resume_plot_and_evaluate(capsys, tmp_path):
    folder = tmp_path / "run"
    words = ["fit", "prior", TINY, "--method", "bc", "--set", "hidden=8,8", "--every", "10", "--out", str(folder)]
    assert ask(capsys, *words, "--steps", "20", "--json")[0] == 0
    metrics = folder / "prior" / "metrics.csv"
    first = metrics.read_bytes()
    code, out, _ = ask(capsys, *words, "--steps", "40", "--json")
    assert code == 0
    assert json.loads(out)["updates"] == 40
    assert metrics.read_bytes().startswith(first)
    assert [row["step"] for row in read_csv(metrics)] == ["10", "20", "30", "40"]
    about = tomllib.loads((folder / "run.toml").read_text())
    assert about["prior_learner"]["hidden"] == [8, 8]
    assert about["data"]["task"] == "hopper"
    assert about["provenance"]["wall_s"] > 0
    code, out, _ = ask(capsys, "plot", str(folder))
    assert code == 0
    assert (folder / "metrics.png").read_bytes().startswith(b"\x89PNG")
    rows = tmp_path / "rows.csv"
    code, out, _ = ask(capsys, "evaluate", str(folder), "--episodes", "1", "--json", "--out", str(rows))
    assert code == 0
    (row,) = read_results(rows)
    assert (row["dataset"], row["prior"]) == (TINY, "bc")
    assert json.loads(row["settings"]) == {"preset": "cpu", "run": "run", "updates": 40}
    assert json.loads(out)[0]["task"] == "hopper"
    code, _, err = ask(capsys, *words, "--steps", "40", "--seed", "1")
    assert code == 2
    assert "other settings" in err


def test_learners_in_imagination_find_or_train_their_model(capsys, tmp_path, monkeypatch):
    from refplan.dynamics.ensemble import Ensemble
    from refplan.presets import Preset

    small = Preset(Ensemble(members=2, elites=1, hidden=(8,)), 3, ("small, for a test",))
    monkeypatch.setattr("refplan.dynamics.presets.load_model_preset", lambda *_: small)
    here, there = tmp_path / "here", tmp_path / "there"
    settings = ["sac.hidden=8", "sac.batch_size=8", "imagined.starts=4", "imagined.refresh=2"]
    words = ["fit", "prior", TINY, "--method", "mopo", "--every", "2", "--json"]
    words += [word for setting in settings for word in ("--set", setting)]
    code, out, err = ask(capsys, *words, "--steps", "2", "--out", str(here))
    assert code == 0, err
    assert "training an ensemble first" in err
    assert json.loads(out)["method"] == "mopo"
    about = tomllib.loads((here / "run.toml").read_text())
    assert about["model_learner"]["updates"] == 3, "the model is in the run folder, trained as its preset says"
    assert about["prior_learner"]["imagined.starts"] == 4
    assert not any(name.startswith("model.") for name in about["prior_learner"])
    # the same command again resumes in the same world, whose model is not trained again
    code, _, err = ask(capsys, *words, "--steps", "4", "--out", str(here))
    assert code == 0, err
    assert "training an ensemble first" not in err
    assert [row["step"] for row in read_csv(here / "prior" / "metrics.csv")] == ["2", "4"]
    # another folder, the same world: the same prior
    code, _, err = ask(capsys, *words, "--steps", "4", "--model", str(here), "--out", str(there))
    assert code == 0, err
    assert (there / "prior.safetensors").read_bytes() == (here / "prior.safetensors").read_bytes()
    assert not (there / "model.safetensors").exists()
    assert tomllib.loads((there / "run.toml").read_text())["prior_learner"]["model"] == str(here)
    code, _, err = ask(capsys, *words, "--steps", "4", "--model", str(there), "--out", str(tmp_path / "third"))
    assert code == 2
    assert f"{there}: holds no model to imagine with" in err


def test_collect_random_then_check_with_replay(capsys, tmp_path):
    out = tmp_path / "made.hdf5"
    code, said, _ = ask(
        capsys, "data", "collect", "hopper", "--policy", "random", "--steps", "100", "--out", str(out), "--json"
    )
    assert code == 0
    assert json.loads(said)["transitions"] == len(load(out)) >= 100
    code, said, _ = ask(capsys, "data", "check", str(out), "--replay", "--steps", "5", "--segments", "5", "--json")
    assert code == 0
    assert json.loads(said)["replay"]["ok"] is True
    policy = ["data", "collect", "hopper", "--policy", "hopper-medium", "--steps", "50"]
    assert ask(capsys, *policy, "--out", str(tmp_path / "medium.hdf5"))[0] == 0
    assert load(tmp_path / "medium.hdf5").returns.mean() > 300


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m refplan data list --json | head -c 10"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.slow
def test_the_demo_runs_and_shows_itself_again_at_once(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("refplan.data.tasks.HORIZON", 20)
    command = (
        "demo",
        "--quick",
        "--episodes",
        "1",
        "--planners",
        "prior,loop,refplan",
        "--out",
        str(tmp_path / "demo"),
    )
    code, out, _ = ask(capsys, *command)
    assert code == 0
    assert "iql + refplan" in out and (tmp_path / "demo" / "report.html").exists()
    code, out, _ = ask(capsys, *command)
    assert code == 0 and out.count("there already") == 10
