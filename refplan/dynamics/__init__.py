"""Learned models of the world, with their own doubt about it."""

import importlib
from typing import Any

from refplan.errors import unknown_name

# One line per model: the name on the command line, and where it lives. Feeds the CLI, the contract tests, the docs.
MODELS = {
    "ensemble": "refplan.dynamics.ensemble:Ensemble",
    "belief": "refplan.dynamics.belief:BeliefModel",
}


def find_model(name: str) -> Any:
    """The learner class of a name."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    module, _, attribute = MODELS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
