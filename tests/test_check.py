"""One report of everything wrong, everything notable; replay catches the wrong environment."""

import argparse
import json

import jax.random as jr
import numpy as np
import pytest
from episodes import flat, make_episodes, write_d4rl

from refplan.cli import data as cli_data
from refplan.data.check import Report, check_dataset
from refplan.data.dataset import Meta
from refplan.data.raw import Raw
from refplan.data.replay import replay_drift, with_replay
from refplan.data.sources import load, read
from refplan.data.tasks import task
from refplan.errors import RefplanError

HOPPER = Meta("test", "Hopper-v5")


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.errors}


def noted(report: Report) -> dict[str, str]:
    return {finding.code: finding.message for finding in report.notes}


def raw(meta=HOPPER, **changes) -> Raw:
    arrays = {**flat(make_episodes()), **changes}
    return Raw({k: v for k, v in arrays.items() if v is not None}, meta)


def changed(name: str, where, value) -> dict:
    array = flat(make_episodes())[name].copy()
    array[where] = value
    return {name: array}


def test_good_data_has_no_errors():
    report = check_dataset(raw())
    assert report.ok and report.summary["episodes"] == 4 and report.summary["terminated_episodes"] == 2
    report.raise_errors()
    assert check_dataset(load(make_episodes())).ok


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["observations", "actions", "rewards", "next_observations", "qpos", "qvel"])
def test_values_that_are_not_finite_are_found_where_they_are(name, value):
    where = 6 if name == "rewards" else (6, 2)
    report = check_dataset(raw(**changed(name, where, value)))
    found = next(f for f in report.errors if f.code == "not-finite")
    assert codes(report) <= {"not-finite", "bounds", "continuity"} - ({"continuity"} if np.isnan(value) else set())
    assert found.first_row == 6 and found.count == 1 and found.message.startswith(f"{name} has 1 values")
    assert name == "rewards" or "column 2" in found.message
    json.dumps(report.to_dict(), allow_nan=False)


def test_loading_never_repairs_nan():
    arrays = flat(make_episodes()) | changed("observations", (3, 0), np.nan)
    with pytest.raises(RefplanError, match="observations has 1 values that are NaN or infinite, first in row 3"):
        load(arrays)


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"actions": np.zeros((18, 3), np.float32)}, "shape", "actions has 18 rows, observations 19"),
        ({"actions": np.zeros(19, np.float32)}, "shape", "actions has shape"),
        ({"rewards": np.zeros((19, 2), np.float32)}, "shape", "one number per row"),
        ({"next_observations": np.zeros((19, 4), np.float32)}, "shape", "rows of shape"),
        ({"observations": np.zeros((19, 2, 2), np.float32)}, "shape", "observations has shape"),
        ({"observations": np.zeros((0, 11), np.float32)}, "empty", "nothing in it"),
        ({"rewards": np.array(["1"] * 19)}, "dtype", "needs real numbers"),
        ({"terminated": np.full(19, 2)}, "dtype", "neither 0 nor 1"),
        ({"rewards": None}, "missing", "'rewards' is missing"),
        (changed("actions", (8, 1), 1.5), "bounds", "1 actions lie outside their bounds, first in row 8"),
        (changed("truncated", 4, True), "both-flags", "first row 4"),
        (changed("next_observations", (2, 3), 9.0), "continuity", "first row 2"),
        (changed("truncated", 7, False), "continuity", "first row 7"),
    ],
)
def test_each_fault_is_named(changes, code, message):
    report = check_dataset(raw(**changes))
    assert code in codes(report) and any(message in f.message for f in report.errors)


def test_a_broken_file_gives_one_report_of_everything():
    faults = changed("observations", (6, 0), np.nan) | changed("actions", (8, 1), 1.5) | changed("truncated", 4, True)
    report = check_dataset(raw(**faults))
    assert {"not-finite", "bounds", "both-flags"} <= codes(report)
    shaped = check_dataset(raw(**faults | {"rewards": np.zeros(3, np.float32)}))
    assert {"shape", "not-finite"} <= codes(shaped)
    with pytest.raises(RefplanError, match=r"(?s)NaN.*outside.*both"):
        load({**flat(make_episodes()), **faults, "action_low": [-1.0] * 3, "action_high": [1.0] * 3})


def test_stated_lengths_must_agree_with_the_flags():
    one = raw()
    one.lengths = np.array([5, 4, 6, 4])
    found = next(f for f in check_dataset(one).errors if f.code == "episodes")
    assert found.first_row == 7
    one = raw(next_observations=None, final_observations=np.zeros((3, 11), np.float32))
    assert "episodes" in codes(check_dataset(one))


def test_the_wrong_env_id_is_an_error():
    assert "environment" in codes(check_dataset(raw(meta=Meta("test", "HalfCheetah-v5"))))


def test_bounds_come_from_the_metadata_first():
    wide = Meta("test", action_low=(-2.0,) * 3, action_high=(2.0,) * 3)
    assert check_dataset(raw(meta=wide, **changed("actions", (8, 1), 1.5))).ok
    assert "bounds" in codes(check_dataset(raw(meta=wide, **changed("actions", (8, 1), 2.5))))
    assert "unknown" in noted(check_dataset(raw(meta=Meta())))["bounds"]


def test_notable_things_are_noted():
    episodes = make_episodes()
    episodes.insert(2, episodes[0])
    arrays = flat(episodes)
    arrays["observations"][:, 4] = arrays["next_observations"][:, 4] = 1.0
    arrays["actions"][6, 0] = 1.0
    notes = noted(check_dataset(Raw(arrays, HOPPER)))
    assert "columns are constant: [4]" in notes["constant"]
    assert "episode 2 is a copy of episode 0" in notes["duplicate"]
    assert "1 rows have an action component at or beyond its bound, first row 6" in notes["at-bound"]
    assert "2 episodes are incomplete" in notes["incomplete"]
    assert "counts as a truncation" in notes["end"]


def test_unknown_successors_are_noted_before_and_after_loading():
    arrays = flat(make_episodes())
    del arrays["next_observations"]
    assert noted(check_dataset(Raw(dict(arrays), HOPPER)))["successor"].startswith("4 rows")
    assert noted(check_dataset(load(arrays)))["successor"].startswith("2 rows")


def test_scores_and_coverage_are_summed_up():
    summary = check_dataset(load("hopper-medium-replay-tiny")).summary
    assert summary["score"]["max"] == pytest.approx(90.03, abs=0.01)
    assert 0.0 < summary["action_saturation"] < 0.2
    assert len(summary["obs_min"]) == 11 and summary["obs_min"][0] == pytest.approx(0.7, abs=0.01)


def test_a_split_by_transition_can_be_checked_too():
    bag, _ = load(make_episodes()).split(0.5, key=jr.key(0), by="transition")
    assert check_dataset(bag).ok and "episodes" not in check_dataset(bag).summary


@pytest.fixture(scope="module")
def hopper():
    return load("hopper-medium-replay-tiny")


def test_replay_confirms_the_right_environment(hopper):
    drift = replay_drift(hopper, key=jr.key(0), steps=50, segments=10)
    assert drift.ok and drift.open_loop.shape == (10, 50)
    assert drift.open_loop.max() < 1e-3  # Hopper: even 50 steps without correction
    report = with_replay(check_dataset(hopper), drift)
    assert report.ok and report.replay is not None and report.replay["segments_within_tolerance"] == 1.0


def test_replay_catches_other_physics(hopper):
    drift = replay_drift(hopper, task("hopper-d4rl"), key=jr.key(0), steps=20, segments=10)
    report = with_replay(check_dataset(hopper), drift)
    assert codes(report) == {"replay"} and "another version" in report.text()


def test_replay_catches_actions_of_the_wrong_row(hopper):
    shifted = load({**{k: v for k, v in hopper.arrays().items()}, "actions": np.roll(hopper.actions, 1, axis=0)})
    assert not replay_drift(shifted, hopper.task, key=jr.key(0), steps=5, segments=10).ok


def test_replay_without_states_or_with_a_foreign_robot_is_a_clear_error(hopper):
    arrays = {k: v for k, v in hopper.arrays().items() if k not in ("qpos", "qvel")}
    with pytest.raises(RefplanError, match="no simulator states"):
        replay_drift(load(arrays, task="hopper"), key=jr.key(0))
    with pytest.raises(RefplanError, match="not the environment of this data"):
        replay_drift(hopper, task("walker2d"), key=jr.key(0))


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli_data.add(parser.add_subparsers())
    args = parser.parse_args(["data", *words])
    return args.run(args)


def test_command_list(capsys):
    assert run("list", "--json") == 0
    names = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert names["hopper-medium-replay-tiny"]["here"] and "walker2d-expert-v2" in names
    assert run("list") == 0 and "halfcheetah-medium-replay-mini" in capsys.readouterr().out


def test_command_info(capsys):
    assert run("info", "hopper-medium-replay-tiny", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["env_id"] == "Hopper-v5" and said["transitions"] == 7149 and said["errors"] == 0
    assert run("info", "hopper-medium-replay-tiny") == 0 and "Hopper-v5" in capsys.readouterr().out


def test_command_check_of_good_data_with_replay(capsys):
    assert run("check", "hopper-medium-replay-tiny", "--replay", "--segments", "3", "--steps", "5", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] and said["replay"]["one_step"]["max"] < 1e-3


def test_command_check_of_broken_data_exits_with_1(tmp_path, capsys):
    write_d4rl(tmp_path / "x.hdf5", flat(make_episodes()) | changed("rewards", 2, np.nan))
    assert run("check", str(tmp_path / "x.hdf5"), "--task", "hopper", "--replay") == 1
    out = capsys.readouterr().out
    assert "not-finite" in out and "Not replayed" in out
    assert run("check", str(tmp_path / "x.hdf5"), "--json") == 1
    assert json.loads(capsys.readouterr().out)["errors"][0]["first_row"] == 2
    with pytest.raises(RefplanError, match="no such file"):
        run("check", "nowhere.hdf5")


def test_reading_alone_does_not_judge():
    arrays = flat(make_episodes()) | changed("rewards", 2, np.nan)
    assert np.isnan(read(arrays).arrays["rewards"][2])
