"""Ctrl-C and termination requests that wait until what is running can be saved."""

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from refplan.errors import RefplanError


class Interrupted(RefplanError):
    """Training was stopped by the user or the system; everything up to `step` is saved."""


class Interrupts:
    """Ctrl-C and termination requests wait for the running chunk, so that it can be saved; a second one does not."""

    def __init__(self) -> None:
        self.seen = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
        # Not `print`: a signal may come in the middle of one.
        os.write(2, b"\nstopping after the running chunk of updates, which is saved; again: at once, without it\n")

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def leave(self, where: str, folder: Path | None) -> NoReturn:
        """Say what is saved and how to go on."""
        kept = "nothing was saved (no folder given)" if folder is None else f"saved in {folder}"
        raise Interrupted(f"stopped at {where}, {kept}. Run the same command again to resume.")
