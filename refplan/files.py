"""Files that survive a kill and are never executed.

Writing goes to a temporary neighbour which is flushed and then renamed, so a reader sees the old file or the new one.
Arrays are safetensors: named arrays plus a JSON header, no code; `modules` writes whole objects that way.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from refplan._version import __version__
from refplan.errors import RefplanError

FORMAT = 1


@contextlib.contextmanager
def writing(path: str | Path) -> Generator[None]:
    """Whatever keeps `path` from being written becomes an error a person can act on."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RefplanError(f"{path}: cannot be written ({reason}).{_ADVICE.get(error.errno or 0, '')}") from None


_FULL = " Make room there and run the same command again; what was saved before is whole."
_FORBIDDEN = " Choose a place you may write to."
_IN_THE_WAY = " A file or folder of that name is in the way; choose another name."
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _FORBIDDEN),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.EISDIR), _IN_THE_WAY),
}


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Generator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed to disk and renamed over `path`."""
    path = Path(path)
    with writing(path):
        temporary = _temporary_beside(path)
        try:
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _temporary_beside(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    return Path(name)


def check_writable(path: str | Path) -> None:
    """Find out now, not after hours of work, that a file cannot be made here."""
    path = Path(path)
    with writing(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _temporary_beside(path).unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: str | Path, text: str) -> None:
    """Write a whole text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path: str | Path) -> str:
    """The checksum of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def save_arrays(path: str | Path, arrays: dict[str, Any], header: dict[str, Any]) -> None:
    """Named arrays and a JSON header in one safetensors file."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    plain = {name: np.asarray(value, order="C") for name, value in arrays.items()}
    meta = {"refplan": json.dumps({"format": FORMAT, "version": __version__, **header})}
    with atomic_path(path) as temporary:
        try:
            save_file(plain, str(temporary), metadata=meta)
        except SafetensorError as error:
            raise _as_os_error(error) from None


def _as_os_error(error: Exception) -> OSError:
    """safetensors tells of a full disk in words only: `... I/O error: No space left on device (os error 28)`."""
    number = int((re.search(r"os error (\d+)", str(error)) or [0, 0])[1])
    return OSError(number, os.strerror(number)) if number else OSError(str(error))


def load_arrays(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read back what `save_arrays` wrote; anything else is a clear error."""
    return _open_arrays(path, None)


def _open_arrays(path: str | Path, names: tuple[str, ...] | None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Some arrays of a file (None: all of them) and its header."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise RefplanError(f"{path}: no such file.")
    try:
        with safe_open(str(path), "numpy") as file:
            meta = (file.metadata() or {}).get("refplan")
            arrays = {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}
    except (SafetensorError, OSError, ValueError) as error:
        raise RefplanError(
            f"{path}: not a readable safetensors file ({error}). It may be damaged or cut short; "
            "restore it from a copy or make it again."
        ) from None
    if meta is None:
        raise RefplanError(f"{path}: a safetensors file, but not written by refplan (no 'refplan' header).")
    return arrays, _check_header(path, meta)


def read_header(path: str | Path) -> dict[str, Any]:
    """The JSON header of a refplan file, without its arrays."""
    return _open_arrays(path, ())[1]


def _check_header(path: Path, meta: str) -> dict[str, Any]:
    try:
        header = json.loads(meta)
        made_with = int(header["format"])
    except (ValueError, KeyError, TypeError):
        raise RefplanError(f"{path}: its refplan header is damaged.") from None
    if made_with > FORMAT:
        raise RefplanError(
            f"{path}: written by refplan {header.get('version')} in format {made_with}, newer than this refplan "
            f"({__version__}, format {FORMAT}). Upgrade refplan to read it."
        )
    return header
