"""Learned models of the world, with their own doubt about it."""

from typing import Any

from refplan.registry import find

# One line per model: the name on the command line, and where it lives. Feeds the CLI, the contract tests, the docs.
MODELS = {
    "ensemble": "refplan.dynamics.ensemble:Ensemble",
    "belief": "refplan.dynamics.belief:BeliefModel",
    "worlds": "refplan.dynamics.around_learner:Worlds",
    "refined": "refplan.dynamics.around_learner:Refined",
    "refined-worlds": "refplan.dynamics.around_learner:RefinedWorlds",
}


def find_model(name: str) -> Any:
    """The learner class of a name."""
    return find("model", MODELS, name)
