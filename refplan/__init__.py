"""refplan: make any offline-learned policy better while it is in use.

The public names, imported on first use so that `import refplan` and the command line start fast.
"""

import importlib
from typing import Any

from refplan._version import __version__
from refplan.errors import RefplanError

_HOME = {
    "AbstractAgent": "refplan.agent",
    "AbstractPrior": "refplan.agent",
    "RandomAgent": "refplan.agent",
    "Sampled": "refplan.agent",
    "Dataset": "refplan.data.dataset",
    "Meta": "refplan.data.dataset",
    "make_dataset": "refplan.data.assemble",
}

__all__ = ["RefplanError", "__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'refplan' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
