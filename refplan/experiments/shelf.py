"""Where an experiment's datasets are: a folder of files with D4RL's names, or D4RL itself."""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import jax.random as jr

from refplan.data.dataset import Dataset
from refplan.data.download import fetch_d4rl, find_d4rl
from refplan.data.names import D4RL_NAMES, d4rl_file_name
from refplan.data.sources import load
from refplan.errors import RefplanError
from refplan.files import sha256


@dataclass(frozen=True)
class Data:
    """A dataset by its name without a version (`hopper-medium-replay`), or some rows drawn from it."""

    name: str
    size: int = 0  # transitions, whole episodes drawn at random; 0: all
    seed: int = 0  # of that draw

    @property
    def words(self) -> str:
        """As a person would say it."""
        return f"{self.name} ({self.size:,} rows)" if self.size else self.name


@dataclass(frozen=True)
class Shelf:
    """Finds and loads datasets; `folder` None means the public D4RL files, downloaded once."""

    folder: Path | None = None
    places: dict[str, Path] = field(default_factory=dict)  # name -> file, where somebody has looked already

    def path(self, name: str) -> Path:
        """The file of a dataset."""
        if name in self.places:
            return self.places[name]
        if self.folder is None:
            return fetch_d4rl(f"{name}-v2")
        found = [self.folder / file for file in _spellings(name) if (self.folder / file).is_file()]
        if not found:
            raise RefplanError(
                f"{self.folder}: no dataset '{name}' in it (looked for {', '.join(_spellings(name))}). "
                "Name the folder that has it with --data, or leave it out with --set robots=... or --set kinds=..."
            )
        return found[0]

    def missing(self, names: list[str]) -> list[str]:
        """The datasets that are neither in the folder nor, without a folder, among those D4RL offers."""
        if self.folder is None:
            return [name for name in names if f"{name}-v2" not in D4RL_NAMES]
        return [name for name in names if not any((self.folder / file).is_file() for file in _spellings(name))]

    def checksum(self, name: str, fetch: bool = True) -> str:
        """What tells this data from other data of the same name; without `fetch` nothing is downloaded."""
        if not fetch and self.folder is None and find_d4rl(f"{name}-v2") is None:
            return "not here yet"
        return file_checksum(self.path(name))

    def load(self, data: Data) -> Dataset:
        """The rows; they carry the plain name, by which presets know them."""
        whole = load(self.path(data.name)).replace_meta(name=data.name)
        return whole.subsample(data.size, key=jr.key(data.seed)) if data.size else whole


def _spellings(name: str) -> tuple[str, ...]:
    return (f"{name}.hdf5", f"{name}-v2.hdf5", d4rl_file_name(f"{name}-v2"), f"{name}.npz")


@functools.cache
def file_checksum(path: Path) -> str:
    """The checksum of a dataset's file, which may be large: read once per process."""
    return sha256(path)


def find_shelf(folder: str | None) -> Shelf:
    """The folder a user named, else `data` in the working directory if it is there, else D4RL's own files."""
    if folder is None:
        return Shelf(Path("data") if Path("data").is_dir() else None)
    if not Path(folder).is_dir():
        raise RefplanError(f"{folder}: no such folder of datasets.")
    return Shelf(Path(folder))
