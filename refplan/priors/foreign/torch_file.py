"""Read PyTorch weight files with numpy alone, executing nothing.

A torch file is a zip with a pickle `*/data.pkl` that describes the tensors and one raw file `*/data/<key>` per storage.
Pickle is a small language that may call any function it names; this reader lends it three inert ones (rebuild a tensor,
rebuild a parameter, ordered dict). Any other global is refused by name or, where the caller asks for it, replaced by a
`Stub` that keeps its arguments and does nothing. Nothing the file names is ever imported.
"""

import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from refplan.errors import RefplanError

LIMIT = 1 << 29  # bytes of a file and of all a zip unpacks to: far above any policy, far below a machine's memory
_DAMAGED = "It may be damaged or cut short; copy or save it again."
_DTYPES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}


class Stub:
    """Stands for an object of a class the reader does not know: its arguments and state, none of its code."""

    name = "?"
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Lent:
    """A function of ours in the hands of a pickle: it can be called, not changed (pickle may set attributes)."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]):
        object.__setattr__(self, "function", function)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError("the pickle tries to change a function")


class _StorageType(NamedTuple):
    """A storage type the file names: only its dtype is used."""

    dtype: Any


class _Storages:
    """The raw storages of one torch zip, read once each."""

    def __init__(self, archive: zipfile.ZipFile, prefix: str):
        self.archive, self.prefix = archive, prefix
        self.raw: dict[str, bytes] = {}

    def read(self, key: str, dtype: np.dtype, numel: int) -> np.ndarray:
        if key not in self.raw:
            self.raw[key] = self.archive.read(f"{self.prefix}data/{key}")
        # torch writes in the machine's order and every machine it runs on today is little-endian, as is this dtype
        return np.frombuffer(self.raw[key], dtype, numel)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str, storages: _Storages | None, stubs: bool):
        super().__init__(io.BytesIO(data))
        self.where, self.storages, self.stubs = where, storages, stubs

    def find_class(self, module: str, name: str) -> Any:
        if self.storages is not None:
            if (module, name) in _ALLOWED:
                return _ALLOWED[module, name]
            if module in ("torch", "torch.storage") and name in _DTYPES:
                return _StorageType(_DTYPES[name])
        if self.stubs:
            return type("Stub", (Stub,), {"name": f"{module}.{name}"})
        raise RefplanError(
            f"{self.where}: refused. The pickle inside asks for '{module}.{name}', which plain weights do not need and "
            "which could run code; nothing was executed. Save the state dict alone and load that."
        )

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, storage, key, _, numel = pid
        if self.storages is None or kind != "storage" or not isinstance(storage, _StorageType):
            raise pickle.UnpicklingError(f"unknown persistent id {kind!r}")
        return self.storages.read(str(key), np.dtype(storage.dtype), int(numel))


def _rebuild_tensor(storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> np.ndarray:
    """A read-only view of the storage; shape and strides are checked before numpy trusts them."""
    if not isinstance(storage, np.ndarray) or len(shape) != len(stride) or min((offset, *shape, *stride)) < 0:
        raise pickle.UnpicklingError("malformed tensor")
    size = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if size > storage.size or (size > 0 and last >= storage.size):
        raise pickle.UnpicklingError(f"a tensor of shape {tuple(shape)} does not fit its storage")
    steps = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)


def _rebuild_parameter(tensor: Any, *_: Any) -> Any:
    return tensor


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _Lent(_rebuild_tensor),
    ("torch._utils", "_rebuild_parameter"): _Lent(_rebuild_parameter),
}


def _scan(data: bytes) -> None:
    """Refuse what could exhaust memory or bypass `find_class` before anything is unpickled."""
    memo = 0
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name.startswith("EXT"):
            raise pickle.UnpicklingError("extension codes are not read")
        if "PUT" in opcode.name or opcode.name == "MEMOIZE":
            memo += 1
            if argument is not None and argument > 2 * memo + 256:
                raise pickle.UnpicklingError(f"memo number {argument} is out of order")


def _unpickle(data: bytes, where: str, storages: _Storages | None, stubs: bool) -> Any:
    try:
        _scan(data)
        return _Unpickler(data, where, storages, stubs).load()
    except RefplanError:
        raise
    except Exception as error:  # a foreign or damaged pickle can fail in any way; none of them is the caller's concern
        raise RefplanError(
            f"{where}: its pickle cannot be read ({type(error).__name__}: {error}). {_DAMAGED}"
        ) from None


def read_bytes(path: str | Path) -> bytes:
    """A whole file, if it exists and is not absurdly large."""
    path = Path(path)
    if not path.is_file():
        raise RefplanError(f"{path}: no such file.")
    if path.stat().st_size > LIMIT:
        raise RefplanError(f"{path}: {path.stat().st_size} bytes are too many for a policy file (limit {LIMIT}).")
    try:
        return path.read_bytes()
    except OSError as error:
        raise RefplanError(f"{path}: cannot be read ({error}).") from None


def open_zip(data: bytes, where: str) -> zipfile.ZipFile:
    """A zip archive whose members all unpacked stay below the limit."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except Exception as error:  # zipfile raises several types on damaged directories
        raise RefplanError(f"{where}: not a readable zip archive ({error}). {_DAMAGED}") from None
    total = sum(member.file_size for member in archive.infolist())
    if total > LIMIT:
        raise RefplanError(f"{where}: refused, it would unpack to {total} bytes (limit {LIMIT}).")
    return archive


def read_member(archive: zipfile.ZipFile, name: str, where: str) -> bytes:
    """One file of a zip archive."""
    if name not in archive.namelist():
        raise RefplanError(f"{where}: has no '{name}' inside (it has: {', '.join(archive.namelist()[:8])}).")
    try:
        return archive.read(name)
    except Exception as error:  # checksum, compression and password errors have no common type
        raise RefplanError(f"{where}: '{name}' inside cannot be unpacked ({error}). {_DAMAGED}") from None


def load_torch(data: bytes, where: str, *, stubs: bool = False) -> Any:
    """The object in a torch zip file: containers, numbers and, for tensors, read-only numpy arrays.

    With `stubs`, objects of unknown classes become inert `Stub`s instead of an error.
    """
    if not data.startswith(b"PK"):
        raise RefplanError(
            f"{where}: not a torch zip file. One from before torch 1.6 must be saved again with a newer torch. "
            f"Otherwise: {_DAMAGED}"
        )
    archive = open_zip(data, where)
    names = archive.namelist()
    descriptions = [name for name in names if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(descriptions) != 1:
        raise RefplanError(f"{where}: a zip archive but not a torch file, it has {len(descriptions)} data.pkl inside.")
    prefix = descriptions[0].removesuffix("data.pkl")
    if f"{prefix}constants.pkl" in names:
        raise RefplanError(f"{where}: a TorchScript program, not weights. Save the state dict, or export to ONNX.")
    if f"{prefix}byteorder" in names and read_member(archive, f"{prefix}byteorder", where) != b"little":
        raise RefplanError(f"{where}: written on a big-endian machine, which is not read.")
    return _unpickle(read_member(archive, descriptions[0], where), where, _Storages(archive, prefix), stubs)


def load_plain_pickle(data: bytes, where: str) -> Any:
    """A pickle of plain containers, strings, bytes and numbers, such as d3rlpy's .d3: no globals at all."""
    return _unpickle(data, where, None, False)
