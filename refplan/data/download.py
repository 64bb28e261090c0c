"""D4RL files from the public server: cached, resumed after a break, verified by checksum."""

import contextlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any

from refplan._version import __version__
from refplan.cache import cache_folder
from refplan.data.names import d4rl_file_name
from refplan.errors import RefplanError
from refplan.files import sha256, write_text

D4RL_URL = "http://rail.eecs.berkeley.edu/datasets/offline_rl/gym_mujoco_v2"
ATTEMPTS = 4
TIMEOUT = 20.0  # seconds without a byte
Progress = Callable[[int, int | None], None]  # bytes received so far, bytes in total if known


def find_d4rl(name: str) -> Path | None:
    """The local file of a D4RL name: in our cache, or in the folder the d4rl package downloads to."""
    theirs = Path(os.environ.get("D4RL_DATASET_DIR") or Path.home() / ".d4rl" / "datasets")
    places = (cache_folder() / "d4rl" / d4rl_file_name(name), theirs / d4rl_file_name(name))
    return next((path for path in places if path.is_file()), None)


def fetch_d4rl(name: str, progress: Progress | None = None) -> Path:
    """The local file of a D4RL name, downloaded first if it is not there."""
    found = find_d4rl(name)
    if found is not None:
        return found
    target = cache_folder() / "d4rl" / d4rl_file_name(name)
    base = os.environ.get("REFPLAN_D4RL_URL", D4RL_URL).rstrip("/")
    url = f"{base}/{target.name}"
    advice = (
        f"Fetch it on a machine with network and put it at {target}, or use data that is already here "
        "(refplan data list)."
    )
    if os.environ.get("REFPLAN_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        raise RefplanError(f"dataset '{name}' is not in the cache and REFPLAN_OFFLINE forbids a download. {advice}")
    try:
        with _shown(name, progress) as show:
            download(url, target, show)
    except OSError as error:  # URLError, timeouts and refused connections are all of this kind
        reason = getattr(error, "reason", None) or error
        raise RefplanError(f"dataset '{name}' cannot be downloaded from {url} ({reason}). {advice}") from None
    return target


def download(url: str, target: Path, progress: Progress) -> None:
    """Fetch a file, continuing a broken `.part` where it stopped; record its checksum beside it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    with _lock(target.parent):
        if target.is_file():  # another process was faster
            return
        for attempt in range(ATTEMPTS):
            try:
                _fetch(url, part, progress)
                break
            except (OSError, http.client.HTTPException) as error:
                never_began = isinstance(
                    error, urllib.error.URLError
                )  # refused, unknown host, 404: no use in insisting
                if never_began or attempt == ATTEMPTS - 1:
                    raise error if isinstance(error, OSError) else OSError(str(error)) from None
        _check_hdf5(part, url)
        write_text(checksum_file(target), sha256(part) + "\n")
        os.replace(part, target)
        _validator_file(part).unlink(missing_ok=True)


def verify(path: Path, checksum: str) -> None:
    """Compare a file's checksum with the one recorded when it was downloaded, if there is one."""
    recorded = checksum_file(path)
    if recorded.is_file() and recorded.read_text().split()[:1] != [checksum]:
        raise RefplanError(
            f"{path}: its checksum is not the one recorded when it was downloaded, so it was damaged or replaced. "
            f"Delete it and {recorded.name} to download it again, or only {recorded.name} if the new content is right."
        )


def checksum_file(path: Path) -> Path:
    """Where the checksum of a downloaded file is kept."""
    return path.with_name(f"{path.name}.sha256")


def _fetch(url: str, part: Path, progress: Progress) -> None:
    """One attempt: ask for the bytes after those already there, and append what comes."""
    have = part.stat().st_size if part.is_file() else 0
    validator = _validator_file(part).read_text().strip() if _validator_file(part).is_file() else ""
    headers = {"User-Agent": f"refplan/{__version__}"}
    if have and validator:  # without a validator nobody can tell whether the file there is still the same
        headers |= {"Range": f"bytes={have}-", "If-Range": validator}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing after what we have: it was complete, or is no longer the same file
            part.unlink()
            return _fetch(url, part, progress)
        raise
    with answer:
        resumed = answer.status == 206
        length = answer.headers.get("Content-Length")
        begin = have if resumed else 0
        total = begin + int(length) if length is not None else None
        write_text(_validator_file(part), answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "")
        with open(part, "ab" if resumed else "wb") as file:
            received = _copy(answer, file, begin, total, progress)
    if total is not None and received < total:
        raise http.client.IncompleteRead(b"", total - received)


def _copy(
    answer: http.client.HTTPResponse, file: IO[bytes], received: int, total: int | None, progress: Progress
) -> int:
    progress(received, total)
    while block := answer.read(1 << 16):
        file.write(block)
        received += len(block)
        progress(received, total)
    file.flush()
    os.fsync(file.fileno())
    return received


def _validator_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.etag")


def _check_hdf5(part: Path, url: str) -> None:
    with open(part, "rb") as file:
        if file.read(8) == b"\x89HDF\r\n\x1a\n":
            return
    part.unlink()
    raise RefplanError(f"{url}: the server answered with something that is not an HDF5 file (a login or error page?).")


@contextlib.contextmanager
def _lock(folder: Path) -> Generator[None]:
    """One downloader per folder at a time; the operating system frees the lock of a killed process."""
    try:
        import fcntl
    except ImportError:  # no such lock on this platform: two downloaders would do the work twice
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _shown(name: str, progress: Progress | None) -> Generator[Progress]:
    """The caller's progress function, or a bar on the terminal."""
    if progress is not None:
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns: tuple[Any, ...] = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Bar(TextColumn(name), *columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)
        yield lambda received, total: bar.update(task, completed=received, total=total)
