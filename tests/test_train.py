import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from toy import TRACES, PatientToy, Toy, Twice, toy_data

from refplan.errors import RefplanError
from refplan.interrupts import Interrupted
from refplan.logs import CsvLog, read_csv
from refplan.train import Diverged, fit


def same(a, b) -> bool:
    return bool(eqx.tree_equal(a, b))


def test_fit_learns_and_logs_means_of_chunks():
    rows = []
    fit(Toy(), toy_data(), steps=250, key=jr.key(0), every=100, logs=[lambda step, row: rows.append((step, row))])
    assert [step for step, _ in rows] == [100, 200, 250]
    assert rows[-1][1]["loss"] < 0.3 * rows[0][1]["loss"]


def test_same_key_same_weights_other_key_others():
    first = fit(Toy(), toy_data(), steps=30, key=jr.key(0))
    assert same(first, fit(Toy(), toy_data(), steps=30, key=jr.key(0)))
    assert not same(first, fit(Toy(), toy_data(), steps=30, key=jr.key(1)))


def test_chunk_size_does_not_change_what_is_learned():
    whole = fit(Toy(), toy_data(), steps=30, key=jr.key(0), every=30)
    assert same(whole, fit(Toy(), toy_data(), steps=30, key=jr.key(0), every=7))


def test_a_short_last_chunk_does_not_compile_again():
    fit(Toy(width=9), toy_data(), steps=10, key=jr.key(0), every=10)
    before = len(TRACES)
    fit(Toy(width=9), toy_data(), steps=25, key=jr.key(0), every=10)
    assert len(TRACES) == before
    fit(Toy(width=10), toy_data(), steps=10, key=jr.key(0), every=10)
    assert len(TRACES) > before


def test_resume_extends_a_finished_run_exactly(tmp_path):
    fit(Toy(), toy_data(), steps=20, key=jr.key(0), every=10, folder=tmp_path / "a")
    resumed = fit(Toy(), toy_data(), steps=50, key=jr.key(0), every=10, folder=tmp_path / "a")
    straight = fit(Toy(), toy_data(), steps=50, key=jr.key(0), every=10, folder=tmp_path / "b")
    assert same(resumed, straight)
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learner": Toy(rate=2e-2)}, "rate: 0.01 -> 0.02"),
        ({"data": toy_data(seed=1)}, "data"),
        ({"key": jr.key(5)}, "key"),
    ],
)
def test_resume_with_other_settings_is_refused_by_name(tmp_path, change, named):
    base = {"learner": Toy(), "data": toy_data(), "key": jr.key(0)}

    def run(learner, data, key):
        return fit(learner, data, steps=10, key=key, every=10, folder=tmp_path)

    run(**base)
    with pytest.raises(RefplanError, match=named):
        run(**{**base, **change})


def test_early_stopping_stops_and_its_state_survives_a_resume(tmp_path):
    train, held = toy_data().split(0.8, key=jr.key(0))
    options = {"key": jr.key(0), "every": 20}
    straight = fit(PatientToy(), train, held, steps=100_000, folder=tmp_path / "a", **options)
    steps = [int(row["step"]) for row in read_csv(tmp_path / "a" / "metrics.csv")]
    assert steps[-1] < 100_000
    fit(PatientToy(), train, held, steps=40, folder=tmp_path / "b", **options)
    assert same(straight, fit(PatientToy(), train, held, steps=100_000, folder=tmp_path / "b", **options))
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()


def test_a_reviewing_learner_knows_its_schedule_and_holds_out_by_itself(tmp_path):
    fit(PatientToy(), toy_data(), key=jr.key(0), folder=tmp_path)
    steps = [int(row["step"]) for row in read_csv(tmp_path / "metrics.csv")]
    assert steps[:2] == [20, 40]
    with pytest.raises(RefplanError, match="how long should Toy train"):
        fit(Toy(), toy_data(), key=jr.key(0))


def test_stages_follow_each_other_and_resume_anywhere(tmp_path):
    straight = fit(Twice(), toy_data(), key=jr.key(0), folder=tmp_path / "a")
    first = fit(Twice().first, toy_data(), key=jr.key(0), steps=60)
    assert not same(straight, first)
    calls = []

    def interrupt(step, row):
        calls.append(step)
        if len(calls) == 5:  # inside the second stage
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        fit(Twice(), toy_data(), key=jr.key(0), folder=tmp_path / "b", logs=[interrupt])
    assert same(straight, fit(Twice(), toy_data(), key=jr.key(0), folder=tmp_path / "b"))


def test_divergence_is_an_error_and_the_last_good_checkpoint_stays(tmp_path):
    fit(Toy(), toy_data(), steps=10, key=jr.key(0), every=10, folder=tmp_path)
    good = (tmp_path / "checkpoint.safetensors").read_bytes()
    data = toy_data()
    data.rewards[:] = np.inf
    with pytest.raises(Diverged, match="loss not finite before update 10"):
        fit(Toy(), data, steps=10, key=jr.key(0), every=10, folder=tmp_path / "bad")
    assert not (tmp_path / "bad" / "checkpoint.safetensors").exists()
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == good


def test_impossible_numbers_are_refused():
    with pytest.raises(RefplanError, match="at least 1"):
        fit(Toy(), toy_data(), steps=0, key=jr.key(0))


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import jax.random as jr
from toy import Toy, toy_data
from refplan.modules import save_module
from refplan.train import fit
save = lambda net: save_module({folder!r} + "/result.safetensors", net)
slow = lambda step, row: __import__("time").sleep(0.02)
save(fit(Toy(), toy_data(), steps=300, key=jr.key(3), every=5, folder={folder!r}, save_seconds=0.0, logs=[slow]))
"""


def start(folder: Path) -> subprocess.Popen:
    code = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(folder))
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "xla"), "REFPLAN_TEST": "1"}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True)


def wait_for_progress(folder: Path, process: subprocess.Popen, beyond: int) -> int:
    """Until the checkpoint has moved on; returns the step it holds."""
    metrics = folder / "metrics.csv"
    while process.poll() is None:
        rows = read_csv(metrics) if metrics.exists() and metrics.stat().st_size else []
        if rows and int(rows[-1]["step"]) > beyond:
            return int(rows[-1]["step"])
        time.sleep(0.005)
    return 300


def kill_until_done(folder: Path, kills: int) -> int:
    """Kill -9 a run `kills` times at odd moments, then let it finish; returns how many kills hit a running process."""
    chance, reached, hit = random.Random(0), 0, 0
    for _ in range(kills):
        process = start(folder)
        reached = wait_for_progress(folder, process, reached)
        time.sleep(chance.uniform(0, 0.1))
        hit += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
    process = start(folder)
    error = process.communicate()[1]
    assert process.returncode == 0, error
    return hit


def test_kill_nine_and_resume_gives_the_same_weights_bit_for_bit(tmp_path):
    assert kill_until_done(tmp_path / "killed", kills=2) == 2
    assert kill_until_done(tmp_path / "whole", kills=0) == 0
    for name in ("result.safetensors", "metrics.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.slow
def test_ten_real_kills(tmp_path):
    assert kill_until_done(tmp_path / "killed", kills=10) >= 8
    kill_until_done(tmp_path / "whole", kills=0)
    for name in ("result.safetensors", "metrics.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_an_interrupt_saves_and_says_how_to_resume(tmp_path):
    def interrupt_self(step, row):
        if step == 20:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="update 20 of 50"):
        fit(Toy(), toy_data(), steps=50, key=jr.key(0), every=10, folder=tmp_path, logs=[interrupt_self])
    resumed = fit(Toy(), toy_data(), steps=50, key=jr.key(0), every=10, folder=tmp_path)
    assert same(resumed, fit(Toy(), toy_data(), steps=50, key=jr.key(0), every=10))


def test_csv_log_drops_half_a_line_and_later_rows(tmp_path):
    log = CsvLog(tmp_path / "m.csv")
    for step in (1, 2, 3):
        log(step, {"a": step / 3, "b": 1.0})
    whole = (tmp_path / "m.csv").read_bytes()
    with open(tmp_path / "m.csv", "a") as file:
        file.write("4,0.5")
    assert [row["step"] for row in read_csv(tmp_path / "m.csv")] == ["1", "2", "3"]
    CsvLog(tmp_path / "m.csv").rewind(3)
    assert (tmp_path / "m.csv").read_bytes() == whole
    CsvLog(tmp_path / "m.csv").rewind(1)
    assert [float(row["a"]) for row in read_csv(tmp_path / "m.csv")] == [1 / 3]
    with pytest.raises(RefplanError, match="metrics changed"):
        log(5, {"c": jnp.nan})
