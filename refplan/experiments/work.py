"""Doing one cell: from plain data to a stage in a store and the rows it gives. Runs in any process on any machine."""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from refplan.errors import RefplanError
from refplan.files import write_text


class Request(NamedTuple):
    """Everything another process needs to do a cell; plain data, so that it travels as JSON."""

    name: str
    kind: str
    settings: dict[str, Any]
    stages: dict[str, str]  # role -> folder of a finished stage inside the store
    data: dict[str, list[Any]]  # role -> [name, size, seed]
    files: dict[str, str]  # dataset -> path
    store: str
    log: str
    argv: list[str]  # the command all this is done for; rows say it


class Outcome(NamedTuple):
    """How a cell ended; `error` is empty if it ended well."""

    name: str
    stage: str = ""
    rows: tuple[dict[str, Any], ...] = ()
    wall_s: float = 0.0
    error: str = ""
    crashed: bool = False  # the process went away without a word: worth another try


def outcome_from(values: dict[str, Any]) -> Outcome:
    """An outcome that travelled as plain data."""
    return Outcome(**values)._replace(rows=tuple(values["rows"]))


@dataclass(frozen=True)
class Bench:
    """What a kind of cell works with."""

    request: Request
    shop: Any
    shelf: Any
    stages: dict[str, Any] = field(default_factory=dict)  # those read already: a search asks at every trial

    @property
    def seed(self) -> int:
        """The seed of the cell."""
        return self.request.settings["seed"]

    def load(self, role: str = "train") -> Any:
        """The rows of one of its datasets."""
        from refplan.experiments.shelf import Data

        return self.shelf.load(Data(*self.request.data[role]))

    def stage(self, role: str) -> Any:
        """What another cell made; None if it needs none in this role."""
        from refplan.experiments.line import belief_around

        if role not in self.request.stages:
            return None
        if role not in self.stages:
            stage = self.shop.found(self.request.stages[role])
            around = self.request.settings.get("around", "") if role == "model" else ""
            self.stages[role] = belief_around(around, stage) if around else stage
        return self.stages[role]

    def plan(self, **settings: Any) -> Any:
        """The settings of the line, as the stages want them."""
        from refplan.experiments.plan import Plan

        given: Any = {name: tuple(v.items()) if isinstance(v, dict) else v for name, v in settings.items()}
        return Plan(**given)

    def planner(self, changes: dict[str, Any]) -> Any:
        """The cell's planner with some settings changed."""
        from refplan.planners.presets import make_planner

        settings, prior = self.request.settings, self.stage("prior")
        options: Any = {
            "preset": settings["planner_preset"],
            "dataset": settings["dataset"],
            "method": settings["method"],
        }
        model = self.stage("model")
        name = settings.get("planner", "refplan")
        return make_planner(name, prior.made, model.made, changes={**settings["changes"], **changes}, **options)


def do_cell(request: Request) -> Outcome:
    """Do a cell; everything printed goes to its log, and no error leaves this function."""
    begun = time.perf_counter()
    with _printing_to(Path(request.log)), _said_by(request.argv):
        try:
            from refplan.experiments.kinds import WORK
            from refplan.experiments.shelf import Shelf
            from refplan.experiments.workshop import Workshop

            shelf = Shelf(places={name: Path(path) for name, path in request.files.items()})
            bench = Bench(request, Workshop(Path(request.store)), shelf)
            stage, rows = WORK[request.kind](bench)
            found = [{**row, "made": _now(), "versions": _versions()} for row in rows]
            return Outcome(request.name, stage.folder.name, tuple(found), time.perf_counter() - begun)
        except KeyboardInterrupt:
            raise
        except RefplanError as error:
            if type(error).__name__ == "Interrupted":
                raise KeyboardInterrupt from None
            print(f"failed: {error}")
            return Outcome(request.name, error=str(error), wall_s=time.perf_counter() - begun)
        except Exception as error:
            traceback.print_exc()
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            return Outcome(request.name, error=words, wall_s=time.perf_counter() - begun)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _versions() -> str:
    import json

    from refplan.provenance import versions

    return json.dumps(versions(), sort_keys=True)


@contextlib.contextmanager
def _printing_to(path: Path) -> Generator[None]:
    """Standard output and error of this process, and of what it starts, into a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush(), sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with open(path, "ab") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    with open(1, "w", closefd=False) as out, open(2, "w", closefd=False) as err:
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                yield
        finally:
            out.flush(), err.flush()
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)


@contextlib.contextmanager
def _said_by(argv: list[str]) -> Generator[None]:
    """Rows name the command a person gave, not the worker's own."""
    own, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = own


def add_to_log(path: Path, text: str) -> None:
    """Add a line about a cell to its log."""
    old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    write_text(path, old + text + "\n")
