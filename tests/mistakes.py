"""What people get wrong: files that are none, data that does not fit, and a way to ask the command line about them."""

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np

from refplan.cli import main
from refplan.data.sources import BUNDLED_FOLDER

POLICIES = Path(__file__).parent / "fixtures" / "policies"


def rows(count: int, obs: int = 11, act: int = 3, **more: object) -> dict[str, object]:
    """Noise in the shape of Hopper's data, one episode."""
    draw = np.random.default_rng(0)
    return {
        "observations": draw.normal(size=(count, obs)).astype(np.float32),
        "actions": draw.uniform(-0.9, 0.9, (count, act)).astype(np.float32),
        "rewards": draw.normal(size=count).astype(np.float32),
        "terminated": np.zeros(count, bool),
        "truncated": np.arange(count) == count - 1,
        **more,
    }


def lay_out(folder: Path) -> None:
    """Everything the cases name."""
    (folder / "text.hdf5").write_text("no HDF5 file at all\n")
    (folder / "text.npz").write_text("no zip at all\n")
    (folder / "table.csv").write_text("a,b\n1,2\n")
    (folder / "folder").mkdir()
    with h5py.File(folder / "pictures.hdf5", "w") as file:
        file["images"] = np.zeros((3, 4))
    whole = (BUNDLED_FOLDER / "hopper-medium-replay-tiny.hdf5").read_bytes()
    (folder / "cut.hdf5").write_bytes(whole[: len(whole) // 2])
    np.savez(folder / "small.npz", **rows(50, env_id="Hopper-v5"))
    np.savez(folder / "logs.npz", **rows(60))
    np.savez(folder / "one.npz", **rows(1, env_id="Hopper-v5", final_observations=np.zeros((1, 11), np.float32)))
    np.savez(folder / "none.npz", **rows(0, env_id="Hopper-v5"))
    np.savez(folder / "walker.npz", **rows(50, env_id="Walker2d-v5"))
    np.savez(folder / "typo.npz", **rows(50, env_id="Hoper-v5"))
    ended = rows(50)
    np.savez(folder / "dones.npz", **{"dones": ended.pop("terminated"), **ended})
    (folder / "sac.zip").write_bytes((POLICIES / "sb3_sac.zip").read_bytes())


def ask(words: str, out: io.StringIO | None = None) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of one command, in this process."""
    out, err = io.StringIO() if out is None else out, io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(shlex.split(words))
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()


def ask_elsewhere(setup: str, *commands: str, folder: Path) -> list[tuple[int, str, str]]:
    """The same for several commands in one other process, after `setup` (Python) has spoilt it."""
    script = f"import json, sys\nfrom mistakes import ask\n{setup}\n"
    script += f"answers = [ask(words) for words in {list(commands)!r}]\nprint(json.dumps(answers))"
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    spoilt = {**os.environ, "PYTHONPATH": paths, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=spoilt, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [tuple(answer) for answer in json.loads(done.stdout.splitlines()[-1])]
