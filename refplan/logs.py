"""Where learning curves go: CSV always, TensorBoard and Weights & Biases when asked.

A log is a callable `(step, row)` that can also `rewind(step)`: after a kill, rows newer than the checkpoint are
dropped, so a resumed run writes exactly what an uninterrupted one would have.
"""

import csv
import importlib
import io
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from refplan.errors import MissingExtraError, RefplanError
from refplan.files import write_text, writing

Row = dict[str, float]


class AbstractLog(ABC):
    """Takes rows of metrics as training goes."""

    @abstractmethod
    def __call__(self, step: int, row: Row) -> None:
        """Record one row."""

    @abstractmethod
    def rewind(self, step: int) -> None:
        """Forget rows after `step`."""

    @abstractmethod
    def close(self) -> None:
        """Flush and release."""


class CsvLog(AbstractLog):
    """`metrics.csv`: a `step` column and one column per metric, one flushed line per row."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.columns: list[str] = []

    def __call__(self, step: int, row: Row) -> None:
        """Append one line; the first line of a new file names the columns."""
        if not self.columns:
            self._open(["step", *row])
        if set(row) != set(self.columns) - {"step"}:
            raise RefplanError(f"{self.path}: metrics changed from {self.columns[1:]} to {list(row)} during a run.")
        with writing(self.path), open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow([step, *(repr(float(row[c])) for c in self.columns[1:])])

    def _open(self, columns: list[str]) -> None:
        rows = read_csv(self.path) if self.path.exists() and self.path.stat().st_size else []
        self.columns = list(rows[0]) if rows else columns
        if not rows:
            write_text(self.path, ",".join(columns) + "\n")

    def rewind(self, step: int) -> None:
        """Keep whole rows up to `step`; a half-written last line goes too."""
        if not self.path.exists():
            return
        rows = [row for row in read_csv(self.path) if int(row["step"]) <= step]
        if not rows:
            self.path.unlink()
            return
        out = io.StringIO(newline="")
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows(row.values() for row in rows)
        write_text(self.path, out.getvalue())

    def close(self) -> None:
        """Nothing is held open."""


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """The complete rows of a CSV file; a last line cut by a kill is left out."""
    text = Path(path).read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(whole, newline=""))
    return [row for row in reader if None not in row.values() and None not in row]


class TensorBoardLog(AbstractLog):
    """Scalars as TensorBoard event files (extra `tensorboard`)."""

    def __init__(self, folder: str | Path):
        try:
            import tensorboard.compat.proto.event_pb2 as event_pb2
            import tensorboard.compat.proto.summary_pb2 as summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "tensorboard", "Logging to TensorBoard") from None
        # Generated classes: type checkers cannot see them.
        self._event, self._summary = vars(event_pb2)["Event"], vars(summary_pb2)["Summary"]
        self._writer: Any = EventFileWriter(str(folder))

    def __call__(self, step: int, row: Row) -> None:
        """One event with all scalars of the row."""
        values = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in row.items()]
        self._writer.add_event(self._event(step=step, summary=self._summary(value=values)))

    def rewind(self, step: int) -> None:
        """TensorBoard drops later events itself when a session restarts at an earlier step."""
        log = self._event(step=step + 1, session_log={"status": 1})
        self._writer.add_event(log)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbLog(AbstractLog):
    """Rows to Weights & Biases (extra `wandb`); offline unless the user set it up otherwise."""

    def __init__(self, folder: str | Path, project: str = "refplan", config: dict[str, Any] | None = None):
        try:
            wandb = importlib.import_module("wandb")
        except ImportError:
            raise MissingExtraError("wandb", "wandb", "Logging to Weights & Biases") from None
        self._run: Any = wandb.init(project=project, dir=str(folder), config=config or {}, resume="allow")

    def __call__(self, step: int, row: Row) -> None:
        """One point in the run's history."""
        self._run.log(row, step=step)

    def rewind(self, step: int) -> None:
        """W&B keeps its history; repeated steps are ignored by its server."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
