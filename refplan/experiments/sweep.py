"""`sweep`: do every cell of a graph that is not finished, as many at once as an executor has room for.

store/
  cells/NAME.json   one per finished cell: its rows, and the stage it made; written whole, by one process only
  logs/NAME.log     what the cell printed
  stages/           trained priors and models, evaluations (see `workshop`)
"""

import contextlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from refplan.errors import RefplanError
from refplan.experiments.cells import Cell, Graph
from refplan.experiments.work import Outcome, Request, add_to_log
from refplan.files import write_text

TRIES = 4  # a process that went away may have been unlucky; one that says why has not


class AbstractExecutor(ABC):
    """Where cells are done."""

    @abstractmethod
    def room(self, cell: Cell) -> bool:
        """Whether a cell can begin now."""

    @abstractmethod
    def submit(self, cell: Cell, request: Request) -> None:
        """Begin a cell."""

    @abstractmethod
    def wait(self) -> list[Outcome]:
        """Block until at least one cell has ended."""

    @abstractmethod
    def close(self) -> None:
        """Stop what still runs."""


@dataclass
class Store:
    """The folder a sweep keeps everything in."""

    folder: Path
    read: dict[str, Outcome] = field(default_factory=dict)  # finished cells: their files do not change any more

    def outcome(self, name: str) -> Outcome | None:
        """How a finished cell ended; None if it is not finished."""
        path = self.folder / "cells" / f"{name}.json"
        if name in self.read or not path.is_file():
            return self.read.get(name)
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.read[name] = Outcome(name, kept["stage"], tuple(kept["rows"]), kept["wall_s"])
            return self.read[name]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RefplanError(f"{path}: cannot be read ({error!r}). Remove it; the cell is then made again.") from None

    def keep(self, cell: Cell, outcome: Outcome) -> None:
        """Write down that a cell is finished."""
        document: dict[str, Any] = {"words": cell.words, "settings": cell.settings, "stage": outcome.stage}
        document |= {"wall_s": outcome.wall_s, "rows": list(outcome.rows)}
        write_text(self.folder / "cells" / f"{cell.name}.json", json.dumps(document, indent=1, default=str) + "\n")

    def log(self, name: str) -> Path:
        """Where a cell's output goes."""
        return self.folder / "logs" / f"{name}.log"

    def rows(self, graph: Graph, experiment: str) -> list[dict[str, Any]]:
        """The rows of an experiment's finished cells, in the order of its declaration."""
        found = []
        for name, labels in graph.rows:
            outcome = self.outcome(name) if labels["experiment"] == experiment else None
            found += [{**row, **labels, "cell": name} for row in outcome.rows] if outcome else []
        return found

    @contextlib.contextmanager
    def alone(self, say: Callable[[str], None], patience: float = 60.0) -> Generator[int | None]:
        """Nobody else works in this folder meanwhile; workers hold the lock too, so that orphans are waited for."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "a", encoding="utf-8") as file:
            _lock(file, self.folder, say, patience)
            yield file.fileno()


def _lock(file: IO[str], folder: Path, say: Callable[[str], None], patience: float) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return
    begun, told = time.monotonic(), False
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() - begun > patience:
            raise RefplanError(f"{folder}: another refplan reproduce works here. Wait for it, or use another --out.")
        if not told:
            say(f"waiting for another refplan reproduce in {folder}")
            told = True
        time.sleep(0.5)


@dataclass
class Report:
    """What a sweep did."""

    made: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def sweep(
    graph: Graph,
    store: Store,
    executor: AbstractExecutor,
    *,
    say: Callable[[str], None] = print,
    progress: Callable[[], None] = lambda: None,
) -> Report:
    """Do what is missing; a failed cell takes only those that need it with it. `progress` is called after each."""
    run = _Sweep(graph, store, executor, say)
    try:
        while run.waiting or run.running:
            run.begin_some()
            if not run.running:
                break  # everything left depends on something that failed
            for outcome in executor.wait():
                run.end(outcome)
                progress()
    finally:
        executor.close()
    return run.report


class _Sweep:
    """The moving parts of a sweep."""

    def __init__(self, graph: Graph, store: Store, executor: AbstractExecutor, say: Callable[[str], None]):
        self.graph, self.store, self.executor, self.say = graph, store, executor, say
        self.report, self.running, self.tries = Report(), set[str](), dict[str, int]()
        self.finished: dict[str, Outcome] = {}
        for name in graph.cells:
            outcome = store.outcome(name)
            if outcome is not None:
                self.finished[name] = outcome
        self.report.known = list(self.finished)
        self.waiting = [name for name in graph.cells if name not in self.finished]
        self.total = len(self.waiting)
        if self.finished:
            say(f"{len(self.finished)} of {len(graph.cells)} cells are there already")

    def begin_some(self) -> None:
        """Submit every ready cell there is room for, in order."""
        for name in list(self.waiting):
            cell = self.graph.cells[name]
            if not all(need in self.finished for need in cell.needs.values()):
                continue
            if not self.executor.room(cell):
                # A cell that wants the whole machine must not be overtaken for ever by small ones.
                if cell.cpus == 0:
                    return
                continue
            self.waiting.remove(name)
            self.running.add(name)
            self.executor.submit(cell, self._request(cell))

    def _request(self, cell: Cell) -> Request:
        data = {role: [each.name, each.size, each.seed] for role, each in cell.data.items()}
        return Request(
            name=cell.name,
            kind=cell.kind,
            settings=cell.settings,
            stages={role: self.finished[need].stage for role, need in cell.needs.items()},
            data=data,
            files={each.name: str(self.graph.shelf.path(each.name).resolve()) for each in cell.data.values()},
            store=str(self.store.folder.resolve()),
            log=str(self.store.log(cell.name).resolve()),
            argv=list(sys.argv),
        )

    def end(self, outcome: Outcome) -> None:
        """Keep what was made, try again what was lost, give up what failed."""
        name, cell = outcome.name, self.graph.cells[outcome.name]
        self.running.discard(name)
        self.tries[name] = self.tries.get(name, 0) + 1
        if outcome.crashed and self.tries[name] < TRIES:
            add_to_log(self.store.log(name), f"lost: {outcome.error}; trying again")
            self.say(f"lost, trying again: {cell.words} ({outcome.error})")
            self.waiting.insert(0, name)
            return
        if outcome.error:
            self._give_up(cell, outcome)
            return
        self.store.keep(cell, outcome)
        self.finished[name] = outcome
        self.report.made.append(name)
        self.say(f"{self._place()} {cell.words}: {outcome.wall_s:.0f} s")

    def _give_up(self, cell: Cell, outcome: Outcome) -> None:
        self.report.failed[cell.name] = outcome.error
        lost = [name for name in self.graph.after(cell.name) if name in self.waiting]
        self.report.skipped += lost
        self.waiting = [name for name in self.waiting if name not in lost]
        more = f" {len(lost)} cells that need it are skipped." if lost else ""
        self.say(f"{self._place()} FAILED {cell.words}: {outcome.error} (log: {self.store.log(cell.name)}).{more}")

    def _place(self) -> str:
        ended = len(self.report.made) + len(self.report.failed) + len(self.report.skipped)
        return f"[{ended}/{self.total}]"
