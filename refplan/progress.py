"""One live line for long work: what, how far, how fast, how long still."""

import contextlib
import sys
import time
from collections.abc import Callable, Generator

Advance = Callable[[int, str], None]  # (steps reached, a few words) -> None


@contextlib.contextmanager
def progress(
    label: str, total: int, unit: str = "steps", show: bool | None = None, begin: int = 0
) -> Generator[Advance]:
    """Yield a function to call with the number of steps reached; a bar on a terminal, sparse lines elsewhere.

    `begin` is where a resumed piece of work starts. `show=None` shows only where a person looks (standard error is a
    terminal); `show=True` always prints.
    """
    terminal = sys.stderr.isatty()
    if show is False or (show is None and not terminal):
        yield lambda reached, words="": None
    elif terminal:
        with _bar(label, total, unit, begin) as advance:
            yield advance
    else:
        yield _lines(label, total, unit, begin)


@contextlib.contextmanager
def _bar(label: str, total: int, unit: str, begin: int) -> Generator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[words]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total, rate="", words="")
        begun = time.perf_counter()

        def advance(reached: int, words: str = "") -> None:
            rate = (reached - begin) / max(time.perf_counter() - begun, 1e-9)
            bar.update(task, completed=reached, rate=f"{rate:,.0f} {unit}/s" if rate else "", words=words)

        yield advance


def _lines(label: str, total: int, unit: str, begin: int, gap: float = 30.0) -> Advance:
    """A line at most every `gap` seconds, for logs of jobs nobody watches."""
    begun = last = time.perf_counter()

    def advance(reached: int, words: str = "") -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last < gap and reached < total:
            return
        last = now
        rate = max((reached - begin) / max(now - begun, 1e-9), 1e-9)
        left = (total - reached) / rate
        print(f"{label}: {reached}/{total} {unit}, {rate:,.0f}/s, {left:,.0f} s left  {words}", file=sys.stderr)

    return advance
