"""Hyper-parameters as plain data: to compare, to print, to write as TOML."""

import dataclasses
import hashlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

Plain = bool | int | float | str | list[Any]


def settings_of(thing: Any, prefix: str = "") -> dict[str, Plain]:
    """The numbers and words among a dataclass's fields, nested ones with dotted names; large arrays are left out."""
    found: dict[str, Plain] = {}
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found |= settings_of(value, f"{name}.")
        elif (plain := _plain(value)) is not None:
            found[name] = plain
    return found


def _plain(value: Any) -> Plain | None:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        # A float32 0.1 printed as a double reads 0.10000000149; its shortest form is what the user typed.
        return _shortest(np.asarray(value)) if np.size(value) <= 32 else None
    if isinstance(value, tuple | list) and all(isinstance(v, bool | int | float | str) for v in value):
        return list(value)
    return value.__name__ if callable(value) and hasattr(value, "__name__") else None


def _shortest(array: np.ndarray) -> Any:
    if array.dtype.kind != "f":
        return array.tolist()
    plain = [float(np.format_float_positional(x, unique=True)) if np.isfinite(x) else float(x) for x in array.ravel()]
    return np.reshape(plain, array.shape).tolist()


def digest_of(tree: Any) -> Int[Array, "4"]:
    """A digest of all arrays of a pytree, for settings that are whole networks; functions are not looked into."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)):
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        digest.update(np.ascontiguousarray(jax.random.key_data(leaf) if is_key else leaf).tobytes())
    return jnp.asarray(np.frombuffer(digest.digest(), np.int32))


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Readable differences between two nested settings, `name: old -> new`."""
    found = []
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            found.append(f"{prefix}{name}: {a} -> {b}")
    return found


def to_toml(tables: dict[str, dict[str, Any]]) -> str:
    """Tables of plain values as TOML (the standard library reads it back with `tomllib`)."""
    lines: list[str] = []
    for table, values in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{_toml_key(k)} = {_toml_value(v)}" for k, v in values.items() if v is not None]
        lines.append("")
    return "\n".join(lines)


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating):
        text = repr(float(value))
        return text if any(c in text for c in ".enf") else f"{text}.0"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(str(k))} = {_toml_value(v)}" for k, v in value.items()) + "}"
    return _toml_string(str(value))


def _toml_string(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    body = "".join(escapes.get(c, c if c.isprintable() else f"\\U{ord(c):08x}") for c in text)
    return f'"{body}"'
