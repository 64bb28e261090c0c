"""The two processes of `make test` do every test once between them, and their sum says so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(folder, tests):
    """The launcher on files of tests that append their names to a log."""
    head = "from pathlib import Path\nLOG = Path(__file__).parent / 'log.txt'\n"
    body = "def {}():\n    with open(LOG, 'a') as file:\n        file.write('{} ')\n    assert {}\n"
    for file, names in tests.items():
        lines = [body.format(name, name, "'bad' not in " + repr(name)) for name in names]
        (folder / f"test_{file}.py").write_text(head + "\n".join(lines))
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "tests.together", "-c", str(folder / "pytest.ini"), str(folder), "-q"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=120)
    return done, sorted((folder / "log.txt").read_text().split())


def test_every_test_is_done_once(tmp_path):
    tests = {file: [f"test_{file}_{number}" for number in range(3)] for file in "abcdefg"}
    done, log = run(tmp_path, tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert log == sorted(name for names in tests.values() for name in names)
    assert "21 passed, 0 failed, 0 skipped" in done.stdout.splitlines()
    parts = [int(count) for count in re.findall(r"^(\d+) passed in", done.stdout, re.MULTILINE)]
    assert sum(parts) == 21


@pytest.mark.parametrize("started_by", ["a person", "a test of the second process"])
def test_a_file_that_is_skipped_as_a_whole_is_counted_once(tmp_path, monkeypatch, started_by):
    if started_by != "a person":
        monkeypatch.setenv("REFPLAN_TEST_BACKWARDS", "1")
    (tmp_path / "test_x.py").write_text("import pytest\npytest.importorskip('nothing_of_that_name')\n")
    done, _ = run(tmp_path, {"a": ["test_1"], "z": ["test_2"]})
    assert "2 passed, 0 failed, 1 skipped" in done.stdout.splitlines()


@pytest.mark.parametrize("place", ["a", "d"])
def test_a_failure_in_either_process_is_a_failure(tmp_path, place):
    done, _ = run(tmp_path, {"a": ["test_1"], "c": ["test_2"], "d": ["test_3"]} | {place: ["test_bad"]})
    assert done.returncode == 1
    assert "test_bad" in done.stdout
    assert re.search(r"^\d passed, 1 failed, 0 skipped$", done.stdout, re.MULTILINE)
