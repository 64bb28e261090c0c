"""Cells in worker processes of this machine, each confined to CPUs of its own.

A worker serves cell after cell (starting one costs seconds) and is replaced when it has worked for long: compiled
programs pile up in a process. Requests and outcomes are lines of JSON.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from refplan.errors import RefplanError
from refplan.experiments.cells import Cell
from refplan.experiments.sweep import AbstractExecutor
from refplan.experiments.work import Outcome, Request, do_cell, outcome_from

RETIRE_AFTER = 120.0  # seconds of work


def available_cpus() -> list[int]:
    """The CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class LocalExecutor(AbstractExecutor):
    """Worker processes; `workers` at most at once, the CPUs dealt out among them."""

    def __init__(self, workers: int | None = None, hold: int | None = None):
        cpus = available_cpus()
        count = len(cpus) if workers is None else workers
        if count < 1:
            raise RefplanError(f"--workers must be at least 1, got {count}.")
        count = min(count, len(cpus))
        # Each worker's share of the CPUs; the last may get fewer.
        self.shares = [tuple(cpus[n::count]) for n in range(count)]
        self.free = list(self.shares)
        self.hold = hold  # an open lock that workers keep until they end
        self.idle: list[_Worker] = []
        self.busy: dict[int, _Worker] = {}
        self.selector = selectors.DefaultSelector()

    def room(self, cell: Cell) -> bool:
        """A free share, or all of them for a cell that must be alone."""
        if cell.cpus == 0:
            return len(self.free) == len(self.shares)
        return bool(self.free)

    def submit(self, cell: Cell, request: Request) -> None:
        """To a worker that is confined to the right CPUs, or to a new one."""
        taken = list(self.shares) if cell.cpus == 0 else self.free[:1]
        self.free = [share for share in self.free if share not in taken]
        cpus = tuple(sorted(cpu for share in taken for cpu in share))
        worker = next((each for each in self.idle if each.cpus == cpus), None)
        if worker is None:
            worker = _Worker(cpus, self.hold)
        else:
            self.idle.remove(worker)
        worker.send(request, taken)
        self.busy[worker.pipe.fileno()] = worker
        self.selector.register(worker.pipe, selectors.EVENT_READ, worker)

    def wait(self) -> list[Outcome]:
        """The outcomes of those that have answered or died."""
        ended = []
        for key, _ in self.selector.select():
            worker: _Worker = key.data
            self.selector.unregister(worker.pipe)
            del self.busy[worker.pipe.fileno()]
            ended.append(worker.receive())
            self.free += worker.taken
            if worker.alive and worker.worked < RETIRE_AFTER:
                self.idle.append(worker)
            else:
                worker.stop()
        self.free.sort()
        return ended

    def close(self) -> None:
        """Ask the busy ones to save what they have and stop; then wait for them."""
        workers = [*self.idle, *self.busy.values()]
        for worker in workers:
            worker.ask_to_stop()
        for worker in workers:
            worker.stop()
        self.idle, self.busy = [], {}


class _Worker:
    """One process and the pipes to it."""

    def __init__(self, cpus: tuple[int, ...], hold: int | None):
        self.cpus, self.worked, self.alive = cpus, 0.0, True
        self.begun, self.name, self.taken = 0.0, "", list[tuple[int, ...]]()
        read, write = os.pipe()
        command = [sys.executable, "-m", "refplan.experiments.local", str(write), str(os.getpid()), *map(str, cpus)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[write, *([] if hold is None else [hold])],
            start_new_session=True,  # a Ctrl-C reaches it through us, once
        )
        os.close(write)
        self.pipe = open(read, encoding="utf-8")

    def send(self, request: Request, taken: list[tuple[int, ...]]) -> None:
        """Begin a cell."""
        self.name, self.taken, self.begun = request.name, taken, time.monotonic()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(request._asdict()).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it died between two cells; the closed pipe says so at once

    def receive(self) -> Outcome:
        """The answer; an empty one means that the process is gone."""
        line = self.pipe.readline()
        self.worked += time.monotonic() - self.begun
        if not line.endswith("\n"):
            self.alive = False
            code = self.process.wait()
            return Outcome(self.name, error=f"its process ended with code {code}", crashed=True)
        answer = json.loads(line)
        return outcome_from(answer)

    def ask_to_stop(self) -> None:
        """Trainings save what they have when they are asked."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the process, by force if it does not listen."""
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except OSError:
                pass  # it is gone already
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.pipe.close()


def main(arguments: Sequence[str]) -> None:
    """The worker: pinned before anything heavy is imported, gone when its parent is."""
    answers, parent, *cpus = (int(argument) for argument in arguments)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    with open(answers, "w", encoding="utf-8") as pipe:
        for line in sys.stdin:
            outcome = do_cell(Request(**json.loads(line)))
            pipe.write(json.dumps(outcome._asdict(), default=float) + "\n")
            pipe.flush()
            _free_programs()


def _leave(*_: Any) -> None:
    raise SystemExit(1)


def _leave_with(parent: int) -> None:
    """An orphan would go on writing where the next command wants to."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _free_programs() -> None:
    import gc

    import jax

    jax.clear_caches()
    gc.collect()


if __name__ == "__main__":
    main(sys.argv[1:])
