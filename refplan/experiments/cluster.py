"""Cells as Ray tasks on a running cluster; nodes need refplan installed and nothing else, no shared disk.

Datasets and the stages a cell needs are put into Ray's object store once, fetched by a node when it first needs them,
and kept in a folder of that node. What a cell made comes back as an archive; only the driver writes into the store, so
a cell that ran twice because a node went away still gives its rows once.
"""

import contextlib
import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from refplan.cache import cache_folder
from refplan.errors import MissingExtraError, RefplanError
from refplan.experiments.cells import Cell
from refplan.experiments.local import available_cpus
from refplan.experiments.shelf import file_checksum
from refplan.experiments.sweep import AbstractExecutor
from refplan.experiments.work import Outcome, Request, add_to_log, do_cell, outcome_from
from refplan.files import atomic_path

NOT_SHIPPED = ("checkpoint.safetensors",)  # what only a training that goes on needs


def import_ray() -> Any:
    """Ray, or how to get it."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray", "--executor ray") from None
    return ray


class RayExecutor(AbstractExecutor):
    """Tasks on a cluster; Ray decides where and when, by the resources each cell asks for."""

    def __init__(self, address: str | None = None, gpus: float = 0.0):
        self.ray, self.gpus = import_ray(), gpus
        try:
            self.ray.init(address=address or "auto", log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RefplanError(
                f"no Ray cluster answers at {address or 'this machine'} ({str(error).splitlines()[0]}). Start one with "
                "'ray start --head' and name it with --ray-address HOST:PORT; with token authentication every node and "
                "this command need the same RAY_AUTH_MODE=token and RAY_AUTH_TOKEN."
            ) from None
        self.shipped: dict[str, Any] = {}  # file or stage -> reference
        self.running: dict[Any, tuple[Cell, Request]] = {}
        # A fresh process per cell: compiled programs pile up, and its CPUs are pinned before JAX starts.
        self.task = self.ray.remote(max_calls=1, max_retries=0)(do_remotely)

    def room(self, cell: Cell) -> bool:
        """Ray keeps the queue."""
        return True

    def submit(self, cell: Cell, request: Request) -> None:
        """Hand a cell to the cluster."""
        files = {name: self._ship_file(Path(path)) for name, path in request.files.items()}
        stages = {name: self._ship_stage(Path(request.store), name) for name in request.stages.values()}
        options = {"num_cpus": cell.cpus or self._whole_node(), "num_gpus": self.gpus}
        reference = self.task.options(**options, name=cell.name).remote(request._asdict(), files, stages)
        self.running[reference] = (cell, request)

    def _whole_node(self) -> float:
        """All CPUs of the smallest node: what is timed there has nothing beside it."""
        return min(node["Resources"].get("CPU", 1.0) for node in self.ray.nodes() if node["Alive"])

    def _ship_file(self, path: Path) -> tuple[str, list[Any]]:
        key = f"{file_checksum(path)}{path.suffix}"
        if key not in self.shipped:
            self.shipped[key] = self.ray.put(path.read_bytes())
        # Inside a list a reference stays a reference: the node fetches it only if it must.
        return key, [self.shipped[key]]

    def _ship_stage(self, store: Path, name: str) -> list[Any]:
        if name not in self.shipped:
            self.shipped[name] = self.ray.put(pack(store / "stages" / name))
        return [self.shipped[name]]

    def wait(self) -> list[Outcome]:
        """The outcomes of tasks that ended, or whose process or node did."""
        ended, _ = self.ray.wait(list(self.running), num_returns=1)
        return [self._outcome(reference, *self.running.pop(reference)) for reference in ended]

    def _outcome(self, reference: Any, cell: Cell, request: Request) -> Outcome:
        try:
            answer = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            words = f"{type(error).__name__} on the cluster"
            return Outcome(cell.name, error=words, crashed=True)
        add_to_log(Path(request.log), f"on node {answer['node']}\n{answer['log']}")
        outcome = outcome_from(answer["outcome"])
        if not outcome.error:
            unpack(answer["archive"], Path(request.store) / "stages" / outcome.stage)
        return outcome

    def close(self) -> None:
        """Give back what still runs, and leave the cluster."""
        for reference in self.running:
            self.ray.cancel(reference, force=True)
        self.ray.shutdown()


def do_remotely(request: dict[str, Any], files: dict[str, Any], stages: dict[str, Any]) -> dict[str, Any]:
    """On a node: fetch what is missing, do the cell, pack what it made."""
    ray = import_ray()
    node = ray.get_runtime_context().get_node_id()[:12]
    place = Path(tempfile.gettempdir()) / "refplan-ray" / node
    log = place / "logs" / f"{request['name']}-{os.getpid()}.log"
    said: list[str] = []
    with _pinned(place, ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)):
        paths = {name: str(_fetch(place, key, held, ray, said)) for name, (key, held) in files.items()}
        for name, held in stages.items():
            _fetch_stage(place, name, held, ray, said)
        _use_compilation_cache()
        outcome = do_cell(Request(**request)._replace(files=paths, store=str(place), log=str(log)))
    archive = b"" if outcome.error else pack(place / "stages" / outcome.stage)
    text = log.read_text(encoding="utf-8", errors="replace")
    log.unlink()
    return {"outcome": outcome._asdict(), "archive": archive, "node": node, "log": "\n".join([*said, text])}


def _fetch(place: Path, key: str, held: list[Any], ray: Any, said: list[str]) -> Path:
    """A dataset in the node's folder, written there by whoever needs it first."""
    path = place / "data" / key
    with _locked(place, key):
        if not path.is_file():
            content = ray.get(held[0])
            with atomic_path(path) as temporary:
                temporary.write_bytes(content)
            said.append(f"received dataset {key[:12]}, {len(content):,} bytes")
    return path


def _fetch_stage(place: Path, name: str, held: list[Any], ray: Any, said: list[str]) -> None:
    """A stage in the node's folder; one that was made here is there already."""
    with _locked(place, name):
        if not (place / "stages" / name / "stage.json").is_file():
            unpack(ray.get(held[0]), place / "stages" / name)
            said.append(f"received stage {name}")


@contextlib.contextmanager
def _locked(place: Path, key: str) -> Generator[None]:
    """One process of a node at a time; the lock goes with the process that holds it."""
    import fcntl

    (place / "locks").mkdir(parents=True, exist_ok=True)
    with open(place / "locks" / key, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _pinned(place: Path, count: float) -> Generator[None]:
    """Confined to CPUs nobody else of this node holds; if too few are free, the system decides."""
    import fcntl

    (place / "locks").mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        mine: list[int] = []
        for cpu in available_cpus():
            if len(mine) >= max(int(count), 1):
                break
            file = stack.enter_context(open(place / "locks" / f"cpu-{cpu}", "a", encoding="utf-8"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine.append(cpu)
        if mine and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, mine)
        yield


def _use_compilation_cache() -> None:
    import jax

    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pack(folder: Path) -> bytes:
    """The files of a finished stage as one archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name not in NOT_SHIPPED:
                archive.write(path, path.relative_to(folder).as_posix())
    return buffer.getvalue()


def unpack(content: bytes, folder: Path) -> None:
    """The archive's files in `folder`, all at once: another process sees no half of it."""
    if (folder / "stage.json").is_file():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist():
                if not (temporary / name).resolve().is_relative_to(temporary.resolve()):
                    raise RefplanError(f"a cell sent back a file outside its folder: {name!r}.")
            archive.extractall(temporary)
        shutil.rmtree(folder, ignore_errors=True)  # an unfinished one of an earlier, local sitting
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
