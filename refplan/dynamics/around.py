"""Beliefs that are made around a trained ensemble, without any training of their own: by name."""

import dataclasses
from typing import Any

from refplan.dynamics.base import AbstractDynamics
from refplan.dynamics.refined import AbstractRefining, RefinedDynamics, refine
from refplan.dynamics.refined_worlds import AbstractRefinedWorlds, RefinedWorldsDynamics, refine_worlds
from refplan.dynamics.worlds import AbstractWorlds, WorldsDynamics, around
from refplan.errors import unknown_name

# Name: (what makes it, what it makes, its settings).
AROUND = {
    "worlds": (around, WorldsDynamics, AbstractWorlds),
    "refined": (refine, RefinedDynamics, AbstractRefining),
    "refined-worlds": (refine_worlds, RefinedWorldsDynamics, AbstractRefinedWorlds),
}
# Raised when a belief answers otherwise than before at the same settings, so that no old answer is taken for a new one.
VERSIONS = {"worlds": 2, "refined-worlds": 3}


def believe(name: str, model: AbstractDynamics) -> Any:
    """The belief of a name around an ensemble; a model that is one already stays."""
    if name not in AROUND:
        raise unknown_name("belief around an ensemble", name, AROUND)
    make, kind, _ = AROUND[name]
    return model if isinstance(model, kind) else make(model)


def expectations(belief: Any, name: str) -> dict[str, Any]:
    """What a belief of a name, or its learner, expects."""
    return {field.name: getattr(belief, field.name) for field in dataclasses.fields(AROUND[name][2])}


def usual_settings(name: str) -> dict[str, Any]:
    """What a belief expects unless told otherwise: part of the name of whatever is made with it."""
    version = {"version": VERSIONS[name]} if name in VERSIONS else {}
    return version | {field.name: field.default for field in dataclasses.fields(AROUND[name][2])}
