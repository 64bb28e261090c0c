"""Cells: the pieces an experiment is made of, and the graph of who needs whom.

A cell is one training, one evaluation, one search or one timing. Its name is a digest of everything it depends on: its
settings and what they come to today, the bytes of its data, the seed, and the cells before it. So the same cell is one
cell, whichever experiments ask for it, and a finished one is never made again.
"""

from dataclasses import dataclass, field
from typing import Any

from refplan.experiments.shelf import Data, Shelf
from refplan.experiments.workshop import digest_inputs


@dataclass(frozen=True)
class Cell:
    """One piece of work, described by plain data."""

    kind: str
    settings: dict[str, Any]
    needs: dict[str, str]  # role ("prior", "model") -> name of a cell
    data: dict[str, Data]  # role ("train", "starts") -> dataset
    cpus: int  # 0: the whole machine, nothing beside it
    digest: str

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.kind}-{self.digest}"

    @property
    def words(self) -> str:
        """One line for people."""
        get = self.settings.get
        what = {
            "model": f"model {get('model')}",
            "prior": f"prior {get('method')}",
            "advise": f"ask the model about planning on {get('method')}",
            "evaluate": f"evaluate {get('planner')} on {get('method')}",
            "tune": f"tune by {get('search')} on {get('method')}",
            "epochs": f"time epochs of {get('model')}",
            "steps": f"time {get('planner')} steps",
        }[self.kind]
        changed = [f"{name} {value}" for name, value in self.settings.get("changes", {}).items()]
        of = [self.data["train"].words] if "train" in self.data else [str(get("dataset", ""))]
        world = [f"in {get('task')}"] if get("task") else []
        world += [f"believing in {get('around')}"] if get("around") else []
        starts = [f"from states of {self.data['starts'].words}"] if "starts" in self.data else []
        parts = [what, *of, *world, *starts, *changed, f"seed {get('seed')}"]
        return ", ".join(part for part in parts if part)


@dataclass
class Graph:
    """Cells in an order in which each comes after those it needs, and which rows they give to which experiment."""

    shelf: Shelf
    fetch: bool = True  # whether missing D4RL files may be downloaded now
    cells: dict[str, Cell] = field(default_factory=dict)
    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # (cell, labels of its rows)

    def add(
        self,
        kind: str,
        settings: dict[str, Any],
        *,
        basis: dict[str, Any],
        needs: dict[str, str] | None = None,
        data: dict[str, Data] | None = None,
        cpus: int = 1,
    ) -> str:
        """A cell's name; the cell is new only if nothing like it is there. `basis`: what its presets say today."""
        needs, data = needs or {}, data or {}
        inputs = {"kind": kind, "settings": settings, "basis": basis, "needs": needs}
        inputs["data"] = {
            role: [self.shelf.checksum(each.name, self.fetch), each.name, each.size, each.seed if each.size else 0]
            for role, each in data.items()
        }
        cell = Cell(kind, settings, needs, data, cpus, digest_inputs(inputs))
        self.cells.setdefault(cell.name, cell)
        return cell.name

    def give(self, cell: str, labels: dict[str, Any]) -> None:
        """An experiment shows the rows of a cell under these labels."""
        self.rows.append((cell, labels))

    def after(self, cell: str) -> list[str]:
        """All cells that cannot be made without this one."""
        lost = {cell}
        for name, each in self.cells.items():
            if lost & set(each.needs.values()):
                lost.add(name)
        return [name for name in self.cells if name in lost and name != cell]
