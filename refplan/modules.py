"""Trees of arrays and whole objects as files that are never executed. Two uses:

- `save_leaves` / `load_leaves`: the arrays of a pytree whose structure the caller already has (training checkpoints);
- `save_module` / `load_module`: a whole refplan object, its structure described in the header (run folders).
"""

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from refplan._version import __version__
from refplan.errors import RefplanError
from refplan.files import load_arrays, save_arrays

T = TypeVar("T")
_EXTRA_CLASSES: dict[str, type] = {}
_EXTRA_FUNCTIONS: dict[str, Any] = {}
_FUNCTIONS = {"relu": jax.nn.relu, "swish": jax.nn.swish, "tanh": jnp.tanh, "gelu": jax.nn.gelu}


def _leaf_names(tree: Any) -> tuple[list[str], list[Any], Any]:
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path) for path, _ in pairs], [leaf for _, leaf in pairs], structure


def _pack(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def save_leaves(
    path: str | Path, tree: Any, header: dict[str, Any] | None = None, extra: dict[str, np.ndarray] | None = None
) -> None:
    """The array leaves of a pytree, named by their place in it, and any `extra` arrays under names of their own."""
    names, leaves, _ = _leaf_names(eqx.filter(tree, eqx.is_array))
    packed = {n: _pack(x) for n, x in zip(names, leaves, strict=True)}
    save_arrays(path, {**packed, **(extra or {})}, {**(header or {}), "extra": sorted(extra or {})})


def load_leaves(path: str | Path, like: T) -> tuple[T, dict[str, Any]]:
    """Fill the arrays of `like` from a file; names, shapes and dtypes must agree."""
    arrays, header = load_arrays(path)
    arrays = {name: array for name, array in arrays.items() if name not in header.get("extra", ())}
    dynamic, static = eqx.partition(like, eqx.is_array)
    names, leaves, structure = _leaf_names(dynamic)
    if set(names) != set(arrays):
        odd = sorted(set(names) ^ set(arrays))
        raise RefplanError(
            f"{path}: was written for other settings: {len(odd)} arrays differ, first {odd[0]!r}. "
            "Use the settings it was made with, or start in a new folder."
        )
    filled = [_unpack(path, n, arrays[n], leaf) for n, leaf in zip(names, leaves, strict=True)]
    return eqx.combine(jax.tree_util.tree_unflatten(structure, filled), static), header


def _unpack(path: str | Path, name: str, array: np.ndarray, like: Any) -> Any:
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    expected = np.shape(_pack(like)) if is_key else like.shape
    if array.shape != expected:
        raise RefplanError(
            f"{path}: array {name!r} has shape {array.shape}, expected {expected}. "
            "Use the settings it was made with, or start in a new folder."
        )
    if is_key:
        return jax.random.wrap_key_data(jax.device_put(array), impl=jax.random.key_impl(like))
    array = array.astype(like.dtype, copy=False)
    return jax.device_put(array) if isinstance(like, jax.Array) else array


def register(thing: T) -> T:
    """Allow a class or a function from outside refplan in saved files (use as a decorator).

    A file holds only the name, so whoever loads it must have registered the same thing before. A function needs a name
    that is its alone: no lambda, no method, none made inside another function (what it remembers would be lost).
    """
    if isinstance(thing, type):
        _EXTRA_CLASSES[_name_of(thing)] = thing
        return thing
    if not callable(thing) or not _is_plain_name(_name_of(thing)) or inspect.ismethod(thing):
        raise RefplanError(
            f"cannot register {thing!r}: give a class, or a function defined with a name at the top of a module. A "
            "rule with numbers of its own can be a class (an equinox.Module with __call__)."
        )
    _EXTRA_FUNCTIONS[_name_of(thing)] = thing
    return thing


def _name_of(thing: Any) -> str:
    """module:name of a class or a function; empty parts for what has none."""
    return f"{getattr(thing, '__module__', None) or ''}:{getattr(thing, '__qualname__', '')}"


def _is_plain_name(kind: str) -> bool:
    """Whether it says where something is defined: no <lambda>, no <locals>."""
    module, _, name = kind.partition(":")
    return bool(module) and bool(name) and "<" not in name


def save_module(path: str | Path, module: eqx.Module, header: dict[str, Any] | None = None) -> None:
    """A whole object: its structure as JSON in the header, its arrays by number."""
    arrays: dict[str, np.ndarray] = {}
    structure = _describe(module, "", arrays)
    save_arrays(path, arrays, {**(header or {}), "structure": structure})


def load_module(path: str | Path) -> Any:
    """The object `save_module` wrote. Only refplan's own and registered classes are built; nothing is executed."""
    arrays, header = load_arrays(path)
    if "structure" not in header:
        raise RefplanError(f"{path}: holds arrays but no object; it is a checkpoint, not a saved agent or model.")
    try:
        return _build(header["structure"], arrays)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RefplanError(
            f"{path}: its structure cannot be read (written by refplan {header.get('version')}): {error!r}"
        ) from None


def _describe(value: Any, where: str, arrays: dict[str, np.ndarray]) -> Any:
    """JSON for one value; arrays go to `arrays` and leave their name behind."""
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if eqx.is_array(value) or isinstance(value, np.ndarray | np.generic):
        is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        arrays[where] = _pack(value)
        return {"key": where} if is_key else {"array": where, "host": not isinstance(value, jax.Array)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _describe_fields(value, value._fields, where, arrays)
    if isinstance(value, tuple | list):
        items = [_describe(v, f"{where}.{i}", arrays) for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if isinstance(value, dict):
        return {"dict": {str(k): _describe(v, f"{where}.{k}", arrays) for k, v in value.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _describe_fields(value, [f.name for f in dataclasses.fields(value)], where, arrays)
    return _describe_function(value, where)


def _describe_fields(value: Any, names: Any, where: str, arrays: dict[str, np.ndarray]) -> Any:
    kind = _name_of(type(value))
    _class(kind)
    fields = {n: _describe(getattr(value, n), f"{where}.{n}".lstrip("."), arrays) for n in names}
    return {"class": kind, "fields": fields}


def _describe_function(value: Any, where: str) -> Any:
    for name, function in _FUNCTIONS.items():
        if value is function:
            return {"function": name}
    kind = _name_of(value)
    if _EXTRA_FUNCTIONS.get(kind) is value:
        return {"registered": kind}
    module, _, name = kind.partition(":")
    if module.startswith("refplan.") and name.isidentifier():
        return {"refplan": kind}
    if callable(value) and _is_plain_name(kind):
        raise RefplanError(
            f"cannot save the function '{kind}' at '{where}': decorate it with refplan.register, here and in the "
            "program that loads the file. Only its name is written; nothing is pickled."
        )
    raise RefplanError(
        f"cannot save {type(value).__name__} at '{where}': only numbers, strings, arrays, containers, refplan objects "
        "and named functions (your own after refplan.register) can be written without pickling."
    )


def _class(kind: str) -> type:
    if kind in _EXTRA_CLASSES:
        return _EXTRA_CLASSES[kind]
    cls = _refplan_attribute(kind)
    if isinstance(cls, type) and (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")):
        return cls
    raise RefplanError(f"'{kind}' is not a record or module class that refplan can store.")


def _registered_function(kind: str) -> Any:
    if kind in _EXTRA_FUNCTIONS:
        return _EXTRA_FUNCTIONS[kind]
    raise RefplanError(
        f"the file names the function '{kind}', which is not registered. If it is yours, import its module first and "
        "decorate it with refplan.register."
    )


def _refplan_attribute(kind: str) -> Any:
    module, _, name = kind.partition(":")
    if not (module == "refplan" or module.startswith("refplan.")) or not name.isidentifier():
        raise RefplanError(
            f"the file names the class '{kind}', which is not part of refplan. If it is yours, "
            "import its module first and decorate it with refplan.register."
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise RefplanError(f"the file names '{kind}', which this refplan ({__version__}) does not have.") from None


def _build(node: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    (tag, body), *_ = node.items()
    if tag == "value":
        return body
    if tag == "array":
        # Not jnp.asarray: it compiles a program for every shape, a third of a second for a model.
        return arrays[body] if node["host"] else jax.device_put(arrays[body])
    if tag == "key":
        return jax.random.wrap_key_data(jax.device_put(arrays[body]))
    if tag in ("tuple", "list"):
        return (tuple if tag == "tuple" else list)(_build(item, arrays) for item in body)
    if tag == "dict":
        return {k: _build(v, arrays) for k, v in body.items()}
    if tag == "function":
        return _FUNCTIONS[body]
    if tag == "refplan":
        return _refplan_attribute(body)
    if tag == "registered":
        return _registered_function(body)
    return _build_fields(_class(body), node["fields"], arrays)


def _build_fields(cls: Any, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    """Set fields directly, without running constructors; fields newer than the file take their defaults."""
    values = {name: _build(node, arrays) for name, node in fields.items()}
    if hasattr(cls, "_fields"):
        return cls(**values)
    made = object.__new__(cls)
    for field in dataclasses.fields(cls):
        if field.name in values:
            value = values[field.name]
        elif field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            raise RefplanError(f"the file lacks '{field.name}' of {cls.__name__}; it was made by an older refplan.")
        object.__setattr__(made, field.name, value)
    return made
