"""`python -m tests.together`: the tests in two processes that begin at either end and go on until they meet.

Most of a test's time is one thread that traces and compiles, so a second core would idle. A file of tests belongs to
the process that claims it first, by making a file that can be made only once.
"""

import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CLAIMS, BACKWARDS = "REFPLAN_TEST_CLAIMS", "REFPLAN_TEST_BACKWARDS"  # where files are claimed; who begins at the end
COUNTED = ("passed", "failed", "error", "skipped")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The second process begins with the last file; the order inside a file stays."""
    if BACKWARDS in os.environ:
        files = collections.defaultdict(list)
        for item in items:
            files[item.path].append(item)
        items[:] = [item for path in reversed(files) for item in files[path]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """What the other process has claimed is done there."""
    return None if _is_mine(Path(os.environ[CLAIMS]), item.path) else True


def _is_mine(claims, path):
    claim = claims / path.as_posix().replace("/", "-")
    try:
        with open(claim, "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        # Empty while the other process is about to write its number there.
        return claim.read_text() == str(os.getpid())
    return True


def pytest_terminal_summary(terminalreporter):
    """What this process counted, for the sum; what happens while files are collected, both see and the first counts."""
    counts = {
        name: sum(
            isinstance(report, pytest.TestReport) or BACKWARDS not in os.environ
            for report in terminalreporter.stats.get(name, ())
        )
        for name in COUNTED
    }
    (Path(os.environ[CLAIMS]) / f"counts-{os.getpid()}.json").write_text(json.dumps(counts))


def main(arguments):
    """Run both, show one after the other, sum up."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "second.txt", "w+", errors="replace") as second:
        command = [sys.executable, "-m", "pytest", "-p", "tests.together", *arguments]
        # A launcher that a test starts in the second process must not take its first one for a second.
        env = {name: value for name, value in os.environ.items() if name != BACKWARDS} | {CLAIMS: folder}
        processes = [
            subprocess.Popen(command, env=env),
            subprocess.Popen(command, env={**env, BACKWARDS: "1"}, stdout=second, stderr=subprocess.STDOUT),
        ]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
        second.seek(0)
        print(second.read())
        counts = [json.loads(path.read_text()) for path in Path(folder).glob("counts-*.json")]
    total = {name: sum(count[name] for count in counts) for name in COUNTED}
    print(f"{total['passed']} passed, {total['failed'] + total['error']} failed, {total['skipped']} skipped")
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
