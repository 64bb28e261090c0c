import dataclasses
import os
import signal
import threading
import time

import jax.random as jr
import numpy as np
import pytest

from refplan.agent import Sampled
from refplan.collect.online import OnlineRun, OnlineSettings
from refplan.collect.recipes import KINDS, Recipe, collect_online, collect_random, random_policy
from refplan.collect.rollout import roll_out
from refplan.data.check import check_dataset
from refplan.data.dataset import Meta
from refplan.data.tasks import task
from refplan.errors import RefplanError
from refplan.interrupts import Interrupted
from refplan.modules import load_module
from refplan.priors.sac import SAC

TINY = SAC(hidden=(8,), batch_size=8)


def hopper(horizon: int = 25):
    return dataclasses.replace(task("hopper"), horizon=horizon)


def settings(steps: int = 120) -> OnlineSettings:
    return OnlineSettings(steps, lanes=3, warmup=30, snapshot_every=30, log_every=30, sac=TINY)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return OnlineRun(hopper(), tmp_path_factory.mktemp("whole"), settings(), key=jr.key(0)).train()


def test_the_log_is_a_clean_dataset_of_all_steps(whole):
    data = whole.dataset(Meta(name="replay", env_id="Hopper-v5"))
    report = check_dataset(data)
    assert report.ok, report.text()
    assert len(data) == 120
    assert data.terminated.any()
    assert data.truncated.any()
    assert not (data.terminated & data.truncated).any()
    assert data.qpos.shape == (120, 6)


def test_logged_actions_replayed_from_logged_states_give_the_logged_successors(whole):
    data = whole.dataset(Meta(env_id="Hopper-v5"))
    env = task("hopper").make()
    env.reset(seed=0)
    for row in range(0, 120, 7):
        env.unwrapped.set_state(data.qpos[row].astype(float), data.qvel[row].astype(float))
        obs, reward, *_ = env.step(data.actions[row])
        assert np.allclose(obs, data.next_observations[row], atol=2e-3)
        assert reward == pytest.approx(float(data.rewards[row]), abs=2e-3)
    env.close()


def test_stop_and_resume_is_exact(whole, tmp_path):
    OnlineRun(hopper(), tmp_path, dataclasses.replace(settings(), steps=60), key=jr.key(0)).train()
    resumed = OnlineRun(hopper(), tmp_path, settings(), key=jr.key(0))
    assert resumed.round == 20
    resumed.train()
    for name, log in whole.log.items():
        assert np.array_equal(log, resumed.log[name]), name
    for step, path in whole.snapshots().items():
        assert resumed.snapshots()[step].read_bytes() == path.read_bytes(), step
    assert (tmp_path / "metrics.csv").read_bytes() == (whole.folder / "metrics.csv").read_bytes()


def test_an_interrupt_saves_and_the_rerun_continues(whole, tmp_path):
    def interrupt_soon():
        while not (tmp_path / "metrics.csv").exists():
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_soon).start()
    with pytest.raises(Interrupted, match="Run the same command again"):
        OnlineRun(hopper(), tmp_path, settings(), key=jr.key(0)).train()
    again = OnlineRun(hopper(), tmp_path, settings(), key=jr.key(0))
    assert 0 < again.round < 40
    again.train()
    assert np.array_equal(again.log["actions"], whole.log["actions"])


def test_other_settings_are_refused(whole):
    changed = dataclasses.replace(settings(), warmup=60)
    with pytest.raises(RefplanError, match="warmup: 30 -> 60"):
        OnlineRun(hopper(), whole.folder, changed, key=jr.key(0))
    with pytest.raises(RefplanError, match="key"):
        OnlineRun(hopper(), whole.folder, settings(), key=jr.key(1))


def test_learning_starts_after_the_warmup(whole):
    first, later = (load_module(whole.snapshots()[step]) for step in (0, 120))
    warm = load_module(whole.snapshots()[30])
    assert np.array_equal(first.net.layers[0].weight, warm.net.layers[0].weight)
    assert not np.array_equal(first.net.layers[0].weight, later.net.layers[0].weight)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_made_from_one_run(kind, whole):
    options = {"key": jr.key(0), "name": kind}
    # The fixture's folder was trained under the key that collect_online derives.
    run_key = jr.split(jr.key(0))[0]
    folder = whole.folder.parent / "kinds"
    OnlineRun(hopper(), folder, settings(), key=run_key).train()
    data = collect_online(kind, hopper(), folder, settings(), Recipe(rows=60, judge_episodes=2), **options)
    assert check_dataset(data).ok, check_dataset(data).text()
    assert data.meta.name == kind
    assert "SAC" in data.meta.recipe
    if kind == "full-replay":
        assert len(data) == 120
    elif kind == "medium-replay":
        assert 0 < len(data) <= 120
    else:
        assert 60 <= len(data) < 60 + 50


def test_unknown_kinds_are_named(tmp_path):
    with pytest.raises(RefplanError, match="Did you mean 'medium'"):
        collect_online("mediun", hopper(), tmp_path, settings(), Recipe(10), key=jr.key(0), name="x")


def test_rollouts_keep_whole_episodes_in_order_and_repeat():
    policy = Sampled(random_policy(hopper(), jr.key(1)))
    make = lambda rows: roll_out(policy, hopper(), rows, key=jr.key(2), name="x", recipe="", episodes=4)  # noqa: E731
    small, large = make(20), make(150)
    assert len(small) >= 20
    assert len(small) - small.lengths[-1] < 20
    assert np.array_equal(small.observations, large.observations[: len(small)])
    with pytest.raises(RefplanError, match="at least one"):
        make(0)


def test_random_data_names_its_recipe():
    data = collect_random(hopper(), 30, key=jr.key(0), name="hopper-random")
    assert "randomly initialised" in data.meta.recipe
    assert data.meta.env_id == "Hopper-v5"
    assert data.meta.versions["mujoco"]
