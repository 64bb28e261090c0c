"""refplan: make any offline-learned policy better while it is in use.

The public names, imported on first use so that `import refplan` and the command line start fast.
"""

import importlib
from typing import Any

from refplan._version import __version__
from refplan.errors import RefplanError

_HOME = {
    "refplan.agent": ("AbstractAgent", "AbstractPolicy", "AbstractPrior", "RandomAgent", "Sampled"),
    "refplan.collect.rollout": ("roll_out",),
    "refplan.data.assemble": ("concatenate", "make_dataset"),
    "refplan.data.check": ("check_dataset",),
    "refplan.data.dataset": ("Dataset", "Meta"),
    "refplan.data.hdf5": ("save_hdf5",),
    "refplan.data.replay": ("replay_drift",),
    "refplan.data.sources": ("list_datasets", "load"),
    "refplan.data.starts": ("draw_starts",),
    "refplan.data.tasks": ("Task", "task"),
    "refplan.dynamics.belief": ("BeliefModel",),
    "refplan.dynamics.diagnose": ("diagnose",),
    "refplan.dynamics.ensemble": ("Ensemble",),
    "refplan.dynamics.true": ("make_true_dynamics",),
    "refplan.evaluation": ("evaluate",),
    "refplan.learner": ("AbstractLearner",),
    "refplan.modules": ("register",),
    "refplan.planners.critic_choice": ("CriticChoice",),
    "refplan.planners.loop": ("LOOP",),
    "refplan.planners.mppi": ("MPPI",),
    "refplan.planners.presets": ("make_planner",),
    "refplan.planners.refplan": ("RefPlan",),
    "refplan.priors.bc": ("BC",),
    "refplan.priors.combo": ("COMBO",),
    "refplan.priors.cql": ("CQL",),
    "refplan.priors.distil": ("Distil",),
    "refplan.priors.edac": ("EDAC",),
    "refplan.priors.external": (
        "from_callable",
        "from_corl",
        "from_d3rlpy",
        "from_onnx",
        "from_sb3",
        "load_policy",
    ),
    "refplan.priors.fqe": ("FQE", "value_estimate"),
    "refplan.priors.imagining": ("Imagination",),
    "refplan.priors.iql": ("IQL",),
    "refplan.priors.maple": ("MAPLE",),
    "refplan.priors.mbop": ("MBOP",),
    "refplan.priors.mopo": ("MOPO",),
    "refplan.priors.policy": ("GaussianPolicy", "from_bundled"),
    "refplan.priors.sac": ("SAC",),
    "refplan.store": ("load_run", "save"),
    "refplan.train": ("fit",),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["RefplanError", "__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'refplan' has no attribute '{name}'")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
