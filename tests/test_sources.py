"""One `load` for every source; the same episodes give equal records whichever way they were stored."""

import json
import subprocess
import sys

import h5py
import numpy as np
import pytest
from episodes import flat, make_episodes, write_d4rl

from refplan.data.check import check_dataset
from refplan.data.dataset import Dataset
from refplan.data.hdf5 import save_hdf5
from refplan.data.names import D4RL_NAMES, d4rl_file_name, d4rl_name_of_file
from refplan.data.sources import bundled_index, bundled_policies, list_datasets, load
from refplan.errors import RefplanError
from refplan.files import load_arrays

FIELDS = ("observations", "actions", "rewards", "next_observations", "terminated", "truncated", "starts")


def assert_same(a: Dataset, b: Dataset, states=True):
    for name in FIELDS + (("qpos", "qvel") if states else ()):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@pytest.fixture(scope="module")
def episodes():
    return make_episodes()


def test_the_flags_and_successors_are_those_of_the_episodes(episodes):
    data = load(episodes)
    assert data.lengths.tolist() == [5, 3, 7, 4]
    assert np.flatnonzero(data.terminated).tolist() == [4, 14]
    assert np.flatnonzero(data.truncated).tolist() == [7, 18]  # the last episode was cut without a flag
    for start, end, episode in zip(data.starts, data.ends, episodes, strict=True):
        np.testing.assert_array_equal(data.next_observations[start:end], episode["observations"][1:])


def test_every_source_gives_equal_records(episodes, tmp_path):
    expected = load(episodes)
    arrays = flat(episodes)
    write_d4rl(tmp_path / "d4rl.hdf5", arrays)
    save_hdf5(expected, tmp_path / "ours.h5")
    np.savez(tmp_path / "mine.npz", **arrays)
    with h5py.File(tmp_path / "ours.h5") as file:
        assert "next_observations" not in file and file["final_observations"].shape == (4, 11)
    for source in (tmp_path / "d4rl.hdf5", str(tmp_path / "ours.h5"), tmp_path / "mine.npz", arrays):
        assert_same(load(source), expected)


def test_float64_data_becomes_float32(episodes, tmp_path):
    arrays = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in flat(episodes).items()}
    write_d4rl(tmp_path / "x.hdf5", arrays)
    assert_same(load(tmp_path / "x.hdf5"), load(episodes))
    assert_same(load(arrays), load(episodes))


def test_a_d4rl_file_without_next_observations_keeps_what_it_knows(episodes, tmp_path):
    write_d4rl(tmp_path / "x.hdf5", flat(episodes), next_observations=None)
    data, whole = load(tmp_path / "x.hdf5"), load(episodes)
    assert data.lengths.tolist() == [5, 2, 7, 3]  # cut rows have no successor; terminal rows stay
    assert data.known_next is not None and np.flatnonzero(~data.known_next).tolist() == [4, 13]
    kept = np.delete(np.arange(19), [7, 18])
    known = data.known_next
    np.testing.assert_array_equal(data.next_observations[known], whole.next_observations[kept][known])


def test_unknown_successors_survive_saving(episodes, tmp_path):
    arrays = flat(episodes)
    del arrays["next_observations"]
    data = load(arrays)
    save_hdf5(data, tmp_path / "x.hdf5")
    again = load(tmp_path / "x.hdf5")
    assert_same(again, data)
    np.testing.assert_array_equal(again.known_next, data.known_next)


def test_metadata_survives_saving(episodes, tmp_path):
    data = load(episodes, task="Hopper-v5").replace_meta(
        name="mine", recipe="by hand", versions={"mujoco": "4.0"}, flavour="d4rl"
    )
    save_hdf5(data, tmp_path / "x.hdf5")
    meta = load(tmp_path / "x.hdf5").meta
    assert (meta.name, meta.env_id, meta.recipe, meta.flavour) == ("mine", "Hopper-v5", "by hand", "d4rl")
    assert meta.versions == {"mujoco": "4.0"} and meta.action_low == (-1.0,) * 3
    assert (meta.ref_min, meta.ref_max) == (-20.272305, 3234.3)
    assert len(meta.checksum) == 64 and meta.source == str(tmp_path / "x.hdf5")


def test_saving_a_bag_of_rows_is_refused(episodes, tmp_path):
    import jax.random as jr

    bag, _ = load(episodes).split(0.5, key=jr.key(0), by="transition")
    with pytest.raises(RefplanError, match="split by transition"):
        save_hdf5(bag, tmp_path / "x.hdf5")
    assert not (tmp_path / "x.hdf5").exists()


def test_d4rl_file_names_bring_their_metadata(episodes, tmp_path):
    write_d4rl(tmp_path / "hopper_medium_replay-v2.hdf5", flat(episodes))
    data = load(tmp_path / "hopper_medium_replay-v2.hdf5")
    assert (data.meta.name, data.meta.env_id, data.meta.flavour) == ("hopper-medium-replay-v2", "Hopper-v5", "d4rl")
    assert data.meta.recipe == "D4RL hopper-medium-replay-v2 (algorithm SAC)"
    assert data.task.score(3234.3) == pytest.approx(100.0)


def test_d4rl_names_cover_every_env_and_kind_both_ways():
    assert len(D4RL_NAMES) == 24 and "halfcheetah-medium-expert-v2" in D4RL_NAMES
    for name in D4RL_NAMES:
        assert d4rl_name_of_file(d4rl_file_name(name).removesuffix(".hdf5")) == name
    assert d4rl_file_name("hopper-full-replay-v2") == "hopper_full_replay-v2.hdf5"


def test_a_d4rl_name_reads_the_cache(episodes, tmp_path, monkeypatch):
    monkeypatch.setenv("REFPLAN_CACHE", str(tmp_path))
    (tmp_path / "d4rl").mkdir()
    write_d4rl(tmp_path / "d4rl" / "hopper_medium-v2.hdf5", flat(episodes))
    assert_same(load("hopper-medium-v2"), load(episodes))
    assert next(one for one in list_datasets() if one.name == "hopper-medium-v2").here


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("hoper-medium-v2", "Did you mean 'hopper-medium-v2'"),
        ("halfcheetah-medium-replay-min", "'halfcheetah-medium-replay-mini'"),
        ("/nowhere/x.hdf5", "no such file"),
        ("nothing.npz", "no such file"),
    ],
)
def test_unknown_names_say_what_was_probably_meant(name, hint):
    with pytest.raises(RefplanError, match=hint):
        load(name)


def test_other_files_and_folders_are_clear_errors(tmp_path):
    (tmp_path / "x.csv").write_text("1,2")
    (tmp_path / "text.hdf5").write_text("not hdf5")
    (tmp_path / "text.npz").write_text("not npz")
    np.savez(tmp_path / "pickled.npz", observations=np.array([{}], dtype=object))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["images"] = np.zeros(3)
    for name, hint in [
        ("x.csv", "unknown kind of file '.csv'"),
        ("text.hdf5", "cannot be read as HDF5"),
        ("text.npz", "cannot be read as .npz"),
        ("pickled.npz", "never loaded"),
        ("other.h5", "lacks observations, actions, rewards, terminated. It holds: images"),
        (".", "not a Minari dataset"),
    ]:
        with pytest.raises(RefplanError, match=hint):
            load(tmp_path / name)


def test_a_file_cut_short_is_a_clear_error(episodes, tmp_path):
    save_hdf5(load(episodes), tmp_path / "x.hdf5")
    whole = (tmp_path / "x.hdf5").read_bytes()
    (tmp_path / "x.hdf5").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RefplanError, match="damaged or cut short"):
        load(tmp_path / "x.hdf5")


def test_one_flag_for_both_meanings_is_refused(episodes):
    arrays = flat(episodes)
    arrays["dones"] = arrays.pop("terminated")
    with pytest.raises(RefplanError, match="whether the world ended or only the recording"):
        load(arrays)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"actions": None}, "lacks actions"),
        ({"obs": np.zeros((19, 11))}, "twice"),
        ({"acts": np.zeros((19, 3))}, "Did you mean 'actions'"),
    ],
)
def test_dicts_with_wrong_names_are_clear_errors(episodes, change, hint):
    with pytest.raises(RefplanError, match=hint):
        load({**flat(episodes), **change})


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"actions": np.zeros((2, 3))}, "episode 1 of the list: actions has shape"),
        ({"terminated": "yes"}, "needs true or false"),
        ({"rewards": np.zeros(0)}, "has no steps"),
        ({"observations": np.zeros((4, 5))}, "disagree on the size of observations"),
        ({"qpos": None}, "holds other arrays than episode 0: qpos"),
    ],
)
def test_broken_episodes_are_clear_errors(episodes, change, hint):
    broken = [episodes[0], {**episodes[1], **change}]
    with pytest.raises(RefplanError, match=hint):
        load(broken)


def test_episodes_may_lack_the_last_observation(episodes):
    short = [{**e, "observations": e["observations"][:-1]} for e in episodes]
    mixed = [episodes[0], short[1], episodes[2], short[3]]
    data = load(mixed)
    assert data.lengths.tolist() == [5, 2, 7, 3] and data.known_next is None
    kept = np.delete(np.arange(19), [7, 18])
    np.testing.assert_array_equal(data.next_observations, load(episodes).next_observations[kept])


def test_own_logs_need_no_environment_and_take_one_by_name(episodes):
    data = load(episodes)
    assert data.meta.env_id is None and data.task.env_id is None
    named = load(episodes, task="hopper")
    assert named.meta.env_id == "Hopper-v5" and named.task.score(3234.3) == pytest.approx(100.0)
    with pytest.raises(RefplanError, match="observations of size 17"):
        load(episodes, task="HalfCheetah-v5")


def test_gaps_are_an_error_or_on_request_an_episode_end(episodes):
    arrays = flat(episodes)
    arrays["truncated"][7] = False  # episodes 1 and 2 now run together
    with pytest.raises(RefplanError, match="1 rows inside an episode have a next observation"):
        load(arrays)
    assert_same(load(arrays, gaps="truncate"), load(episodes))


@pytest.mark.parametrize("name", ["halfcheetah-medium-replay-mini", "hopper-medium-replay-tiny"])
def test_bundled_data_is_whole_and_clean(name):
    data = load(name)
    entry = bundled_index()[name]
    report = check_dataset(data)
    assert report.ok and report.summary["incomplete_episodes"] == 0
    assert (len(data), data.episodes) == (entry["transitions"], entry["episodes"])
    assert data.qpos is not None and data.meta.env_id and "make_bundled" in data.meta.recipe


def test_bundled_sizes_and_variety():
    mini, tiny = load("halfcheetah-medium-replay-mini"), load("hopper-medium-replay-tiny")
    assert 40_000 <= len(mini) <= 50_000 and bundled_index()["halfcheetah-medium-replay-mini"]["megabytes"] < 6.0
    assert bundled_index()["hopper-medium-replay-tiny"]["megabytes"] < 1.0
    assert tiny.terminated.any() and tiny.truncated.any()
    assert mini.returns.min() < 0.0 and mini.returns.max() > 4500.0


def test_bundled_policies_have_their_layers():
    policies = bundled_policies()
    assert set(policies) == {"hopper-medium", "halfcheetah-medium", "walker2d-medium"}
    arrays, _ = load_arrays(policies["hopper-medium"])
    assert arrays["l0_w"].shape == (11, 256) and arrays["mu_w"].shape == (256, 3)


def test_a_damaged_bundled_file_is_noticed(tmp_path, monkeypatch):
    from refplan.data import sources

    (tmp_path / "index.json").write_text(json.dumps(sources.bundled_index()))
    save_hdf5(load(make_episodes()), tmp_path / "hopper-medium-replay-tiny.hdf5")
    monkeypatch.setattr(sources, "BUNDLED_FOLDER", tmp_path)
    with pytest.raises(RefplanError, match="checksum is wrong"):
        load("hopper-medium-replay-tiny")


PEAK = """
import resource, sys
from refplan.data.sources import load
import h5py, refplan.data.tasks, refplan.data.physics
load("hopper-medium-replay-tiny")  # everything imported and warm
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
data = load(sys.argv[1])
print(peak() - before, sum(a.nbytes for a in data.arrays().values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is counted in other units elsewhere")
@pytest.mark.parametrize("with_next", [True, False])
def test_loading_needs_less_than_2_5_times_the_arrays(tmp_path, with_next):
    rows = 400_000
    obs = np.random.default_rng(0).normal(size=(rows + 1, 17)).astype(np.float32)
    ends = np.arange(rows) % 1000 == 999
    arrays = {"observations": obs[:-1], "actions": np.zeros((rows, 6), np.float32)}
    arrays |= {"rewards": np.zeros(rows, np.float32), "terminated": np.zeros(rows, bool), "truncated": ends}
    if with_next:
        arrays["next_observations"] = obs[1:]
    write_d4rl(tmp_path / "big.hdf5", arrays)
    out = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path / "big.hdf5"], capture_output=True, text=True, check=True
    )
    peak, _ = map(int, out.stdout.split())
    assert peak < 2.5 * sum(a.nbytes for a in arrays.values())
