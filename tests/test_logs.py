"""Logs besides CSV: TensorBoard read back by TensorBoard itself; a missing extra says what to install."""

import sys

import jax.random as jr
import pytest
from toy import Toy, toy_data

from refplan.errors import MissingExtraError
from refplan.logs import TensorBoardLog, WandbLog
from refplan.train import fit


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_reads_what_fit_wrote(tmp_path):
    rows = []
    log = TensorBoardLog(tmp_path / "tb")
    fit(Toy(), toy_data(), steps=30, every=10, key=jr.key(0), logs=[log, lambda step, row: rows.append((step, row))])
    assert [(step, pytest.approx(row["loss"], rel=1e-6)) for step, row in rows] == scalars(tmp_path / "tb", "loss")


def test_a_resumed_run_shows_no_step_twice(tmp_path):
    for steps in (20, 40):
        log = TensorBoardLog(tmp_path / "tb")
        fit(Toy(), toy_data(), steps=steps, every=10, key=jr.key(0), folder=tmp_path / "run", logs=[log])
    assert [step for step, _ in scalars(tmp_path / "tb", "loss")] == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("log", "package"), [(TensorBoardLog, "tensorboard"), (WandbLog, "wandb")], ids=["tensorboard", "wandb"]
)
def test_a_missing_extra_says_what_to_install(log, package, tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'refplan\[{package}\]'"):
        log(tmp_path)
