"""Named settings of learners (`paper`, `cpu`), and settings changed by name.

Each folder of learners keeps its numbers and their sources in a `presets.toml`; a preset holds only what differs from
the defaults.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from refplan.data.names import D4RL_ENVS, D4RL_KINDS
from refplan.errors import RefplanError, unknown_name
from refplan.learner import AbstractLearner
from refplan.settings import settings_of

T = TypeVar("T")


class Preset(NamedTuple):
    """A learner ready to `fit`, for how many updates (None: it knows itself), and where its numbers come from."""

    learner: AbstractLearner
    steps: int | None
    notes: tuple[str, ...]


def make_preset(learner: AbstractLearner, table: dict[str, Any], name: str, preset: str, dataset_name: str) -> Preset:
    """A learner with a preset's settings for a dataset, told by its name ("hopper-medium-replay-v2")."""
    presets = [known for known in table if known != "data"]
    if preset not in presets:
        raise unknown_name(f"preset of {name}", preset, presets)
    chosen = table[preset]
    robot, kind = robot_and_kind(dataset_name)
    per_data = table.get("data", {})
    settings = dict(per_data.get(f"{robot}-{kind}", {}))
    settings |= chosen.get("settings", {}) | chosen.get("data", {}).get(robot, {})
    settings |= {"epochs": chosen["epochs"]} if "epochs" in chosen else {}
    notes = [f"{name}, preset '{preset}': {chosen['source']}"]
    for_kind = chosen.get("kinds", {}).get(kind, {})
    for_kind = for_kind if robot in for_kind.get("robots", [robot]) else {}
    settings |= for_kind.get("settings", {})
    notes += [f"For {kind}: {for_kind['source']}"] if for_kind else []
    if per_data and f"{robot}-{kind}" not in per_data:
        notes.append(f"{name} has no published numbers for dataset '{dataset_name}'; its defaults are used.")
    return Preset(with_settings(learner, settings), for_kind.get("updates", chosen.get("updates")), tuple(notes))


def robot_and_kind(dataset_name: str) -> tuple[str, str]:
    """("hopper", "medium-replay") from any spelling of a dataset of D4RL's recipe; empty where it is none."""
    name = re.sub(r"[/_ ]", "-", dataset_name.lower())
    # The longest kind first: "medium" is also the beginning of "medium-replay".
    kinds = "|".join(sorted(D4RL_KINDS, key=len, reverse=True))
    found = re.search(rf"(?:^|-)({'|'.join(D4RL_ENVS)})-({kinds})(?:$|[-.])", name)
    return (found[1], found[2]) if found else ("", "")


def with_settings(thing: T, changes: Mapping[str, Any]) -> T:
    """The same learner with other settings, by dotted name; text (from a command line) is read as the setting's type.

    `with_settings(CQL(), {"weight": 5.0, "sac.batch_size": "128", "sac.hidden": "256,256"})`
    """
    known = settings_of(thing)
    nested: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in known:
            raise unknown_name(f"setting of {type(thing).__name__}", name, known)
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = as_type_of(known[name], value, name)
    return _replaced(thing, nested)


def _replaced(thing: Any, changes: dict[str, Any]) -> Any:
    """All changes of one object at once: it is checked as a whole, so that the order they were given in is nothing."""
    fixed = [field.name for field in dataclasses.fields(thing) if not field.init and field.name in changes]
    if fixed:
        raise RefplanError(f"'{fixed[0]}' of {type(thing).__name__} follows from its other settings.")
    values = {n: _replaced(getattr(thing, n), v) if isinstance(v, dict) else v for n, v in changes.items()}
    return dataclasses.replace(thing, **values) if values else thing


def as_type_of(example: Any, value: Any, name: str) -> Any:
    """`value` as the type of `example`, the setting's present value."""
    if isinstance(example, bool):
        return _bool(value, name)
    if isinstance(example, str):
        return _expect(isinstance(value, str), value, name, "text")
    if isinstance(example, int):
        return int(_number(value, name, whole=True))
    if isinstance(example, float):
        return float(_number(value, name, whole=False))
    items = [item for item in value.strip("[]() ,").split(",") if item] if isinstance(value, str) else value
    whole = all(type(each) is int for each in example)
    kind = "whole numbers such as 256,256" if whole else "numbers such as 0.1,0.2"
    _expect(isinstance(items, list | tuple) and len(items) > 0, value, name, kind)
    numbers = [_number(item, name, whole) for item in items]
    return tuple(int(number) if whole else float(number) for number in numbers)


def _bool(value: Any, name: str) -> bool:
    word = value.strip().lower() if isinstance(value, str) else value
    answer = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(str(word).lower())
    return _expect(isinstance(word, str | bool) and answer is not None, answer, name, "true or false", value)


def _number(value: Any, name: str, whole: bool) -> float | int:
    kind = "a whole number" if whole else "a number"
    _expect(not isinstance(value, bool), value, name, kind)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    _expect(bool(np.isfinite(number)) and (not whole or number == int(number)), value, name, kind)
    return number


def _expect(fits: bool, value: Any, name: str, kind: str, given: Any = None) -> Any:
    if not fits:
        shown = value if given is None else given
        raise RefplanError(f"setting '{name}' must be {kind}, got {shown!r}.")
    return value
