"""The same sweep on a real cluster of two nodes, with a worker and then a whole node killed in the middle.

`REFPLAN_RAY_LOG=FILE` keeps what happened, in order.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import h5py
import pytest

from refplan.store import read_results

BUNDLED = Path(__file__).parent.parent / "refplan" / "data" / "bundled"
KINDS = ("medium-replay", "random", "medium", "full-replay", "medium-expert")
pytestmark = pytest.mark.slow


@pytest.fixture
def place():
    """A short path: Ray's sockets live in it, and the system limits their names to about a hundred letters."""
    folder = Path(tempfile.mkdtemp(prefix="rp-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Cluster:
    """A head and a second node on this machine, one CPU each, with a token."""

    def __init__(self, place: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.ray = str(Path(sys.executable).parent / "ray")
        self.env = {**os.environ, "HOME": str(place), "TMPDIR": str(place), "RAY_AUTH_MODE": "token"}
        self.env |= {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        self.place = place
        port = self.address.split(":")[1]
        self.head = self.node("--head", f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={place}/ray")
        self.second = self.node(f"--address={self.address}", "--node-ip-address=127.0.0.1")

    def node(self, *options: str) -> subprocess.Popen:
        """`ray start --block` stays the parent of everything the node runs."""
        command = [self.ray, "start", *options, "--num-cpus=1", "--block", "--disable-usage-stats"]
        log = self.place / f"node{len(list(self.place.glob('node*')))}.log"
        with open(log, "w") as out:
            options = {"env": self.env, "stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(command, **options)
        wait_for(lambda: "Ray runtime started" in log.read_text(), 300, process)
        return process

    def kill(self, node: subprocess.Popen) -> None:
        """Everything of a node at once, as when its power goes."""
        for pid in [*descendants(node.pid), node.pid]:
            stop(pid)
        node.wait()


def stop(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself meanwhile


def processes() -> dict[int, tuple[int, str]]:
    """pid -> (parent, command line) of everything that runs."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                found[int(folder.name)] = (parent, (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except (OSError, ValueError):
                continue
    return found


def descendants(pid: int) -> list[int]:
    running = processes()
    below, new = set(), {pid}
    while new:
        new = {child for child, (parent, _) in running.items() if parent in new} - below
        below |= new
    return sorted(below)


def busy_workers(node: subprocess.Popen) -> list[int]:
    """Ray calls a process by the task it does, and a task is called like its cell."""
    running = processes()
    names = ("ray::prior-", "ray::evaluate-")
    return [pid for pid in descendants(node.pid) if running.get(pid, (0, ""))[1].startswith(names)]


def wait_for(condition, seconds: float, process: subprocess.Popen):
    begun = time.monotonic()
    while not (found := condition()):
        assert process.poll() is None, f"ended early with code {process.returncode}"
        assert time.monotonic() - begun < seconds
        time.sleep(0.2)
    return found


def test_a_worker_and_a_node_die_and_no_row_is_lost_or_doubled(place):
    pytest.importorskip("ray")
    pytest.importorskip("mujoco")
    (place / "data").mkdir()
    for number, kind in enumerate(KINDS):
        path = place / "data" / f"hopper-{kind}.hdf5"
        shutil.copy(BUNDLED / "hopper-medium-replay-tiny.hdf5", path)
        with h5py.File(path, "r+") as file:
            file["rewards"][0] += 0.01 * number  # otherwise all of them would be one and the same training
    said = place / "said.txt"
    cluster = Cluster(place)
    events = [f"two nodes at {cluster.address}, token authentication, one CPU each"]
    try:
        command = [sys.executable, "-m", "refplan", "reproduce", "priors", "--scale", "tiny", "--executor", "ray"]
        command += ["--ray-address", cluster.address, "--data", "data", "--out", "out"]
        command += ["--set", f"kinds={','.join(KINDS)}", "--set", "prior_steps=300", "--set", "seeds=2"]
        root = str(Path(__file__).parent.parent)
        env = {**cluster.env, "PYTHONPATH": root, "REFPLAN_CACHE": str(place / "cache")}
        with open(said, "w") as out:
            driver = subprocess.Popen(command, cwd=place, env=env, stdout=out, stderr=subprocess.STDOUT)
            worker = wait_for(lambda: busy_workers(cluster.head), 600, driver)[0]
            stop(worker)
            events.append("killed a worker of the head while it worked")
            cells = place / "out" / "cells"
            wait_for(lambda: len(list(cells.glob("*.json"))) >= 3 and busy_workers(cluster.second), 1200, driver)
            events.append(f"{len(list(cells.glob('*.json')))} cells are finished")
            cluster.kill(cluster.second)
            events.append("killed the second node while it worked")
            assert driver.wait(timeout=3000) == 0, said.read_text()
        check(place, said.read_text(), events)
    finally:
        for process in (driver, cluster.second, cluster.head):
            cluster.kill(process)
        if os.environ.get("REFPLAN_RAY_LOG"):
            told = [
                line for line in said.read_text().splitlines() if "INFO worker.py" not in line and "raylet" not in line
            ]
            shown = [*events, "", "$ " + " ".join(["refplan", *command[3:]]), *told]
            Path(os.environ["REFPLAN_RAY_LOG"]).write_text("\n".join(shown) + "\n")


def check(place: Path, said: str, events: list[str]) -> None:
    """Every cell once, every row once, and every dataset once per node."""
    rows = read_results(place / "out" / "priors" / "results.csv")
    assert Counter((row["kind"], row["seed"]) for row in rows) == Counter((k, s) for k in KINDS for s in ("0", "1"))
    assert len({row["cell"] for row in rows}) == 10
    assert len(list((place / "out" / "cells").glob("*.json"))) == 20
    assert said.count("lost, trying again") >= 2, "the worker's cell and the node's"
    received = Counter()
    for log in (place / "out" / "logs").glob("*.log"):
        for part in log.read_text().split("on node ")[1:]:
            node = part.split()[0]
            received.update(
                (node, line.split()[2]) for line in part.splitlines() if line.startswith("received dataset")
            )
    assert received and set(received.values()) == {1}, "a dataset goes to a node once"
    events += [f"rows {len(rows)}, distinct cells of rows {len({row['cell'] for row in rows})}"]
    per_node = Counter(node for node, _ in received)
    events += [f"datasets received by each node: {dict(per_node)}, none twice"]
    events += [f"cells lost and done again: {said.count('lost, trying again')}"]
