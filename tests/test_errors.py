"""Errors as a person meets them: what the command line says, that it leaves nothing half-made, and that docs/errors.md
shows the same words."""

import io
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from mistakes import ask, ask_elsewhere, lay_out

pytest.importorskip("mujoco")
PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
TINY = "hopper-medium-replay-tiny"
SMALL = "--steps 5 --episodes 1 --set-prior hidden=8,8 --set-prior batch_size=16 --set-model members=2"
SMALL += " --set-model elites=2 --set-model hidden=8,8 --set-model epochs=1 --set-planner plans=4"
MISTAKES = {
    # wrong files
    "run nowhere.hdf5 --out x": "nowhere.hdf5: no such file.",
    "run text.hdf5 --out x": "text.hdf5: cannot be read as HDF5 (its first bytes are not those of HDF5).",
    "run cut.hdf5 --out x": "cut.hdf5: cannot be read as HDF5",
    "run text.npz --out x": "text.npz: cannot be read as .npz (it is not a zip of arrays",
    "run pictures.hdf5 --out x": "it lacks observations, actions, rewards, terminated. It holds: images.",
    "run table.csv --out x": "unknown kind of file '.csv'. refplan reads .hdf5, .h5, .npz.",
    "run folder --out x": "folder: a folder, but not a Minari dataset",
    "run dones.npz --out x": "'dones' does not say whether the world ended",
    "evaluate folder": "folder: not a finished refplan run folder",
    "evaluate text.npz --task hopper": "text.npz: not a policy file that refplan reads",
    "report folder": "folder: nothing to report on.",
    # names
    "run hoper-medium-v2 --out x": "unknown dataset 'hoper-medium-v2'. Did you mean 'hopper-medium-v2'",
    f"run {TINY} --prior cqll --out x": "unknown prior 'cqll'. Did you mean 'cql'",
    f"run {TINY} --planners prior,lop --out x": "unknown planner 'lop'. Did you mean 'loop'",
    f"run {TINY} --planners ',' --out x": "no planner is named",
    f"run {TINY} --preset gpu --out x": "unknown preset of iql 'gpu'. Did you mean 'cpu'",
    f"run {TINY} --planners loop --planner-preset papr --out x": "unknown preset of planners 'papr'.",
    f"run {TINY} --set-prior hiden=8 --out x": "unknown setting of IQL 'hiden'. Did you mean 'hidden'",
    f"run {TINY} --planners loop --set-model epochz=1 --out x": "unknown setting of models 'epochz'.",
    f"run {TINY} --planners prior --set-model epochs=1 --out x": "this plan has none of them",
    f"run {TINY} --planners loop --set-planner kapa=1 --out x": "unknown setting of planners 'kapa'.",
    f"fit dynamics {TINY} --model ensembel --out x": "unknown model 'ensembel'. Did you mean 'ensemble'",
    "evaluate random --task halfcheetah-hil": "unknown task 'halfcheetah-hil'. Did you mean 'halfcheetah-hill'",
    f"run {TINY} --epsiodes 3 --out x": "unrecognised argument '--epsiodes'. Did you mean --episodes",
    "tune folder --method bays": "unknown method 'bays'. Did you mean 'bayes'",
    "tune folder --planner critic": "unknown planner with settings to find 'critic'",
    # values
    f"run {TINY} --steps 0 --out x": "argument --steps: must be at least 1, got 0",
    f"run {TINY} --episodes many --out x": "argument --episodes: must be a whole number, got 'many'",
    f"run {TINY} --planners loop --set-planner kappa=abc --out x": "setting 'kappa' must be a number, got 'abc'.",
    f"run {TINY} --planners loop --set-planner horizon=0 --out x": "horizon of planner 'loop' must be at least 1",
    f"run {TINY} --planners loop --set-planner effective=20 --out x": "effective of planner 'loop' is a share",
    f"run {TINY} --planners loop --set-planner sigma=-1 --out x": "sigma of planner 'loop' must not be negative",
    f"run {TINY} --planners loop --set-planner shortlist=-1 --out x": "shortlist of planner 'loop' must not be",
    f"run {TINY} --planners loop --set-planner spread=sd --out x": "unknown spread of planner 'loop' 'sd'",
    f"run {TINY} --planners loop --set-model elites=9 --out x": "elites must lie between 1 and members (7), got 9.",
    f"fit prior {TINY} --set anneal=-1 --out x": "setting 'anneal' of IQL must not be negative, got -1.0.",
    f"fit prior {TINY} --set hidden=0 --out x": "setting 'hidden' of IQL must be at least 1, got [0].",
    f"fit prior {TINY} --set rate=-1 --out x": "setting 'rate' of IQL must not be negative, got -1.0.",
    # data that does not fit
    "run none.npz --out x": "observations has shape (0, 11): there is nothing in it",
    "run one.npz --planners loop --out x": "dataset 'one' has one row; an ensemble needs rows to train and to judge.",
    "run small.npz --planners refplan --belief belief --out x": "lanes=1 and length=49 would do.",
    "run walker.npz --out x": "the environment Walker2d-v5 has observations of size 17 and actions of size 6",
    "run small.npz --task walker2d --out x": "the data 11 and 3: the env id is wrong",
    f"run {TINY} --also-in walker2d --out x": "walker2d has observations of size 17 and actions of size 6, the data 11",
    "run typo.npz --out x": "unknown task 'Hoper-v5'. Did you mean 'Hopper-v5'",
    "run small.npz --policy nothing.zip --out x": "nothing.zip: no such file.",
    "run small.npz --policy sac.zip --out x": "agent 'sac.zip' does not accept the 11-dimensional observations",
    "evaluate hopper-medium --task walker2d": "does not accept the 17-dimensional observations of walker2d",
    "evaluate hopper-medium --planner loop": "has no value function to plan with",
    # places that cannot be written
    f"run {TINY} --out text.npz": "cannot be written (Not a directory). A file or folder of that name is in the way",
    "evaluate random --task hopper --out folder": "folder: cannot be written (Is a directory).",
}
if Path("/sys/kernel").is_dir():  # nobody may make files there, not even root
    MISTAKES |= {
        f"fit prior {TINY} --out /sys/x": "/sys/x/run.toml: cannot be written",
        f"run {TINY} --planners prior --out /sys/x": "Choose a place you may write to.",
        "evaluate random --task hopper --out /sys/x.csv": "/sys/x.csv: cannot be written (Permission denied).",
    }
ANSWERS: dict[str, tuple[int, str, str]] = {}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    lay_out(folder)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def answer(words: str) -> tuple[int, str, str]:
    """What a command says; asked once."""
    if words not in ANSWERS:
        ANSWERS[words] = ask(words)
    return ANSWERS[words]


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_explained_before_anything_is_made(lab, words):
    before = {path: path.stat().st_mtime_ns for path in lab.rglob("*")}
    code, _, err = answer(words)
    assert code == 2, err
    assert err.startswith("refplan: error: "), err
    assert MISTAKES[words] in err
    assert "Traceback" not in err
    made = {path: path.stat().st_mtime_ns for path in lab.rglob("*")}
    assert {p: t for p, t in made.items() if p.is_file()} == {p: t for p, t in before.items() if p.is_file()}


def test_data_without_an_environment_is_trained_on_and_judged(lab):
    code, out, err = ask(f"run logs.npz --planners prior,loop {SMALL} --out logs")
    assert code == 0, err
    assert "note: only 59 transitions: far too few to learn" in out
    assert "note: the data names no environment" in out
    assert "[4/4] diagnosis-ensemble" in out and "evaluation" not in out
    judged = json.loads((lab / "logs" / "ensemble" / "diagnosis.json").read_text())["diagnoses"]["home"]
    assert judged["verdict"] in " ".join(out.split()), "the verdict is said where the model was judged"
    assert (lab / "logs" / "report.html").is_file() and not (lab / "logs" / "results.csv").exists()
    code, _, err = ask("tune logs --planner loop --objective online")
    assert code == 2 and "unknown task 'logs'" in err


FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))"
WIDE = "hidden=64,64"
ON_A_FULL_DISK = (
    f"fit prior {TINY} --method bc --set {WIDE} --steps 3 --every 1 --out full/fit",
    f"run {TINY} --prior bc --planners prior --set-prior {WIDE} --steps 3 --out full/run",
    "data collect hopper --policy random --steps 600 --out full/made.hdf5",
)


@pytest.fixture(scope="module")
def full_disk(lab):
    """A limit on the size of files stands for the disk: the same calls fail, with EFBIG instead of ENOSPC."""
    return ask_elsewhere(FULL, *ON_A_FULL_DISK, folder=lab)


def test_a_full_disk_ends_with_words_and_nothing_half_written(lab, full_disk):
    for code, _, err in full_disk:
        last = err.splitlines()[-1]
        assert code == 2 and last.startswith("refplan: error: "), err
        assert "cannot be written (File too large). Make room there and run the same command again" in last
        assert "Traceback" not in err and "Exception ignored" not in err
    left = {path.relative_to(lab / "full").parts[0] + "/" + path.name for path in (lab / "full").rglob("*.*")}
    assert left == {"fit/metrics.csv", "run/metrics.csv", "run/product.json", "run/stage.json"}, "no parts, no weights"
    metrics = (lab / "full" / "fit" / "prior" / "metrics.csv").read_text()
    assert re.fullmatch(r"step,loss\n(\d,[\d.e+-]+\n){1,3}", metrics), "every row is whole"


WITHOUT = "for name in ('mujoco', 'optuna', 'onnxruntime', 'matplotlib'): sys.modules[name] = None"


@pytest.fixture(scope="module")
def missing_extras(lab):
    (lab / "graph.onnx").write_bytes(b"")
    (lab / "drawn").mkdir()
    (lab / "drawn" / "metrics.csv").write_text("step,loss\n1,2\n")
    commands = (
        f"run {TINY} --planners prior --out x",
        "tune folder",
        "evaluate graph.onnx --task hopper",
        "plot drawn",
    )
    return ask_elsewhere(WITHOUT, *commands, folder=lab)


def test_a_missing_extra_is_named_before_anything_is_trained(missing_extras):
    for (code, _, err), extra in zip(missing_extras, ("mujoco", "hpo", "onnx", "plot"), strict=True):
        assert code == 2 and f"pip install 'refplan[{extra}]'" in err, err
        assert "Traceback" not in err


class Interrupter(io.StringIO):
    """Standard output that answers one line with Ctrl-C."""

    def __init__(self, line: str):
        super().__init__()
        self.line = line

    def write(self, text: str) -> int:
        if self.line and re.fullmatch(self.line, text):
            self.line = ""
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


STAGES = ("check", "prior", "ensemble", "diagnosis-ensemble", "evaluation-prior", "evaluation-loop", "report")


@pytest.fixture(scope="module")
def interrupted_run(lab):
    command = f"run small.npz --planners prior,loop {SMALL} --out kept"
    # A shell starts background jobs with Ctrl-C ignored, and the tests may be one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        broken = [ask(command, Interrupter(rf"(\[\d/6\] )?{stage}")) for stage in STAGES]
    finally:
        signal.signal(signal.SIGINT, before)
    return broken, ask(command)


def test_ctrl_c_in_any_stage_keeps_what_is_finished(lab, interrupted_run):
    broken, (code, out, err) = interrupted_run
    assert code == 0, err
    assert out.count("there already") == 6 and "report: kept/report.html" in out
    for number, (code, out, err) in enumerate(broken):
        assert code == 130, (STAGES[number], err)
        assert out.count("there already") == max(number - 1, 0), "all is found but what was stopped the last time"
        assert err.splitlines()[-1] == (
            "refplan: interrupted. What is finished is kept in kept; run the same command again to go on."
        )
    assert not list((lab / "kept").rglob("*.part"))


def interrupt_when(path: Path, stopped: threading.Event) -> None:
    """Ctrl-C as soon as `path` has grown."""
    before = path.stat().st_size if path.exists() else 0
    while not stopped.is_set():
        if path.exists() and path.stat().st_size > before:
            os.kill(os.getpid(), signal.SIGINT)
            return
        time.sleep(0.01)


@pytest.fixture(scope="module")
def interrupted_training(lab):
    def once() -> tuple[int, str, str]:
        stopped = threading.Event()
        watcher = threading.Thread(target=interrupt_when, args=(lab / "halted" / "prior" / "metrics.csv", stopped))
        watcher.start()
        try:
            return ask(f"fit prior {TINY} --method bc --set hidden=8,8 --steps 1000000 --every 5 --out halted")
        finally:
            stopped.set()
            watcher.join()

    return [once(), once()]


def test_ctrl_c_while_training_saves_and_says_how_to_resume(interrupted_training):
    said = r"refplan: error: stopped at update (\d+) of 1000000, saved in halted/prior\. Run the same command again .*"
    found = [re.fullmatch(said, err.splitlines()[-1]) for _, _, err in interrupted_training]
    assert [code for code, _, _ in interrupted_training] == [130, 130] and all(found), interrupted_training
    first, second = (int(match[1]) for match in found if match)
    assert 0 < first < second, "the second sitting went on where the first stopped"


def test_the_page_about_errors_shows_real_messages(
    lab, full_disk, missing_extras, interrupted_run, interrupted_training
):
    answers = [*map(answer, MISTAKES), *full_disk, *missing_extras, *interrupted_run[0], *interrupted_training]
    shown = re.findall(r"^\| `(refplan: [^`]+)` \| \S.* \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) >= 20
    for message in shown:
        pattern = re.escape(message).replace(re.escape("..."), ".*")
        assert any(re.search(pattern, err) for _, _, err in answers), f"nothing says: {message}"
