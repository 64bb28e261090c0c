"""Registries are plain dicts of name -> "module:attribute"; what they name is imported when it is asked for."""

import importlib
from collections.abc import Mapping
from typing import Any

from refplan.errors import unknown_name


def find(kind: str, registry: Mapping[str, str], name: str) -> Any:
    """What a registry holds under a name; an unknown one is an error with the nearest names."""
    if name not in registry:
        raise unknown_name(kind, name, registry)
    module, _, attribute = registry[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
