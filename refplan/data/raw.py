"""`Raw`: what a source read, before anyone judged it.

Every source fills one; `refplan.data.check` judges it as a whole, and only then does it become a `Dataset`.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from refplan.data.assemble import assemble
from refplan.data.dataset import Dataset, Meta

REQUIRED = ("observations", "actions", "rewards", "terminated", "truncated")
PER_ROW = (*REQUIRED, "next_observations", "qpos", "qvel")
FLAGS = ("terminated", "truncated", "known_final")
BLOCK = 1 << 16  # rows looked at together: large enough to be fast, small enough to need no memory


@dataclass
class Raw:
    """Arrays under the argument names of `make_dataset`, with any shape, type and content."""

    arrays: dict[str, np.ndarray]
    meta: Meta = field(default_factory=Meta)
    lengths: np.ndarray | None = None  # of the episodes, where the source states them
    remarks: list[str] = field(default_factory=list)  # what the reader of the file should know
    both_flags: bool = False  # Gymnasium may end an episode both ways at once; D4RL may not
    sequential: bool = True

    def build(self) -> Dataset:
        """The dataset; the arrays move into it."""
        if self.both_flags:
            self.arrays["truncated"] = self.arrays["truncated"] & ~np.asarray(self.arrays["terminated"], bool)
        return assemble(self.arrays, self.meta)

    def replace_meta(self, **changes: object) -> None:
        """Change the metadata."""
        self.meta = dataclasses.replace(self.meta, **changes)


def raw_of(data: Dataset) -> Raw:
    """A dataset as if it had just been read, to be checked again."""
    arrays = {name: value for name, value in data.arrays().items() if name != "known_next"}
    return Raw(arrays, data.meta, lengths=data.lengths if data.sequential else None, sequential=data.sequential)


def blocks(rows: int) -> Iterator[slice]:
    """Slices that cover all rows."""
    for at in range(0, rows, BLOCK):
        yield slice(at, min(at + BLOCK, rows))


def gaps(raw: Raw, tolerance: float = 1e-4) -> np.ndarray:
    """Rows inside an episode whose successor is not the next row's observation."""
    obs, successors = raw.arrays["observations"], raw.arrays["next_observations"]
    last = np.asarray(raw.arrays["terminated"], bool).reshape(-1) | np.asarray(raw.arrays["truncated"], bool).reshape(
        -1
    )
    found = []
    for block in blocks(len(obs) - 1):
        after = obs[block.start + 1 : block.stop + 1]
        with np.errstate(invalid="ignore"):  # what is not finite is found elsewhere, and no gap
            apart = np.abs(successors[block] - after) > tolerance * (1.0 + np.abs(after))
        found.append(block.start + np.flatnonzero(apart.any(axis=1) & ~last[block]))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def cut_gaps(raw: Raw) -> None:
    """Mark the row before every gap as truncated: the recording jumped there."""
    if "next_observations" not in raw.arrays:
        return
    rows = gaps(raw)
    if len(rows):
        truncated = np.array(raw.arrays["truncated"], bool)
        truncated[rows] = True
        raw.arrays["truncated"] = truncated
        raw.remarks.append(f"{len(rows)} gaps inside episodes were made episode ends (gaps='truncate')")
