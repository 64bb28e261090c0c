"""Minari datasets made by Minari's own tools, read with and without its package."""

import gc
import json
import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
from episodes import make_episodes

from refplan.data.check import check_dataset
from refplan.data.minari_source import is_minari_id, local_minari_ids, minari_root
from refplan.data.sources import load, read
from refplan.errors import MissingExtraError, RefplanError

minari = pytest.importorskip("minari")


@pytest.fixture(autouse=True)
def _quiet():
    # Minari advises to state author, code and so on (these datasets live for seconds), and its collector leaves a
    # temporary folder to the garbage collector, which complains.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="minari")
        warnings.filterwarnings("ignore", "Implicitly cleaning up", ResourceWarning)
        yield
        gc.collect()


def save_buffers(name: str, episodes: list[dict], **settings) -> None:
    from minari.data_collector import EpisodeBuffer

    def rows(flag: bool, steps: int) -> list[bool]:
        return [False] * (steps - 1) + [flag]

    buffers = []
    for number, episode in enumerate(episodes):
        steps = len(episode["rewards"])
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=list(episode["observations"].astype(np.float64)),
                actions=list(episode["actions"]),
                rewards=list(episode["rewards"]),
                terminations=rows(episode["terminated"], steps),
                truncations=rows(episode["truncated"], steps),
            )
        )
    box = gym.spaces.Box(-np.inf, np.inf, (11,), np.float64)
    settings = {"action_space": gym.spaces.Box(-1.0, 1.0, (3,), np.float32), "observation_space": box, **settings}
    minari.create_dataset_from_buffers(name, buffers, **settings)


def test_buffers_give_the_records_of_the_episodes():
    episodes = make_episodes()
    save_buffers("mine/hopper/test-v0", episodes)
    data, expected = load("mine/hopper/test-v0"), load(episodes)
    for name in ("observations", "actions", "rewards", "next_observations", "terminated", "truncated", "starts"):
        np.testing.assert_array_equal(getattr(data, name), getattr(expected, name), err_msg=name)
    assert data.observations.dtype == np.float32
    assert (data.meta.name, data.meta.env_id) == ("mine/hopper/test-v0", None)
    assert data.meta.action_high == (1.0, 1.0, 1.0) and len(data.meta.checksum) == 64


def test_more_than_ten_episodes_stay_in_order():
    episodes = make_episodes(tuple(range(1, 13)), ("truncated",) * 12)
    save_buffers("mine/many-v0", episodes)
    assert load("mine/many-v0").lengths.tolist() == list(range(1, 13))


def test_minaris_own_collector():
    env = minari.DataCollector(gym.make("Pendulum-v1", max_episode_steps=6))
    seen = []
    for seed, steps in ((0, 6), (1, 6), (2, 3)):  # the last episode is cut by the end of collecting
        seen.append(env.reset(seed=seed)[0])
        for _ in range(steps):
            seen.append(env.step(np.array([0.5], np.float32))[0])
    env.create_dataset("mine/pendulum/test-v0", ref_min_score=-9.0, ref_max_score=-1.0)
    env.close()
    data = load("mine/pendulum/test-v0")
    assert data.lengths.tolist() == [6, 6, 3]
    assert np.flatnonzero(data.truncated).tolist() == [5, 11, 14] and not data.terminated.any()
    first = np.array([0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 14, 15, 16])
    np.testing.assert_allclose(data.observations, np.array(seen)[first])
    np.testing.assert_allclose(data.next_observations, np.array(seen)[first + 1])
    assert data.meta.env_id == "Pendulum-v1" and (data.meta.ref_min, data.meta.ref_max) == (-9.0, -1.0)
    assert data.meta.action_high == (2.0,) and check_dataset(data).ok
    assert check_dataset(data).summary["score"]["mean"] == pytest.approx(100.0 * (data.returns.mean() + 9.0) / 8.0)


def test_a_folder_and_a_name_are_the_same_and_listed():
    save_buffers("mine/hopper/test-v0", make_episodes())
    assert local_minari_ids() == ["mine/hopper/test-v0"]
    by_path = load(minari_root() / "mine" / "hopper" / "test-v0")
    np.testing.assert_array_equal(by_path.observations, load("mine/hopper/test-v0").observations)


def test_local_data_is_read_without_the_package(monkeypatch):
    save_buffers("mine/hopper/test-v0", make_episodes())
    monkeypatch.setitem(sys.modules, "minari", None)
    assert load("mine/hopper/test-v0").episodes == 4
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(MissingExtraError, match=r"refplan\[minari\]"):
        load("mujoco/hopper/medium-v0")


def test_an_episode_that_ends_both_ways_is_terminated():
    episodes = make_episodes()
    episodes[0]["truncated"] = True
    save_buffers("mine/both-v0", episodes)
    data = load("mine/both-v0")
    assert data.terminated[4] and not data.truncated[4]
    assert any(note.code == "both-flags" for note in check_dataset(read("mine/both-v0")).notes)


def test_recorded_settings_are_not_forgotten():
    env = minari.DataCollector(gym.make("Pendulum-v1", g=5.0, max_episode_steps=2))
    env.reset(seed=0)
    for _ in range(2):
        env.step(np.zeros(1, np.float32))
    env.create_dataset("mine/moon-v0")
    env.close()
    raw = read("mine/moon-v0")
    assert raw.meta.env_id is None and "'g': 5.0" in raw.remarks[0]


def test_other_spaces_are_a_clear_error():
    save_buffers("mine/hopper/test-v0", make_episodes())
    path = minari_root() / "mine/hopper/test-v0/data/metadata.json"
    described = json.loads(path.read_text())
    described["action_space"] = json.dumps({"type": "Discrete", "n": 3, "dtype": "int64"})
    path.write_text(json.dumps(described))
    with pytest.raises(RefplanError, match="action space is Discrete"):
        load("mine/hopper/test-v0")


def test_damaged_metadata_and_data_are_clear_errors():
    save_buffers("mine/hopper/test-v0", make_episodes())
    folder = minari_root() / "mine/hopper/test-v0/data"
    whole = (folder / "main_data.hdf5").read_bytes()
    (folder / "main_data.hdf5").write_bytes(whole[:1000])
    with pytest.raises(RefplanError, match="damaged or cut short"):
        load("mine/hopper/test-v0")
    (folder / "metadata.json").write_text("{")
    with pytest.raises(RefplanError, match=r"metadata\.json cannot be read"):
        load("mine/hopper/test-v0")


def test_offline_is_respected_and_says_what_to_do(monkeypatch):
    save_buffers("mine/hopper/test-v0", make_episodes())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RefplanError, match=r"HF_HUB_OFFLINE forbids.*On this machine: mine/hopper/test-v0"):
        load("mujoco/hopper/medium-v0")


def test_a_failing_download_says_what_to_do(monkeypatch):
    def fail(name):
        raise ConnectionError("no route")

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(minari, "download_dataset", fail)
    with pytest.raises(RefplanError, match=r"cannot be downloaded \(ConnectionError\).*minari download"):
        load("mujoco/hopper/medium-v0")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("mujoco/hopper/medium-v0", True),
        ("D4RL/door/human-v2", True),
        ("hopper-medium-v2", False),
        ("a/b", False),
        ("data/x.hdf5", False),
    ],
)
def test_the_form_of_an_id(name, is_one):
    assert is_minari_id(name) == is_one
