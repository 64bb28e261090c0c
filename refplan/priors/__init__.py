"""Policies learned from data, and policies brought from elsewhere."""

from typing import Any

from refplan.registry import find

# One line per learner: the name on the command line, and where it lives. Feeds the CLI, the contract tests, the docs.
PRIORS = {
    "bc": "refplan.priors.bc:BC",
    "mbop": "refplan.priors.mbop:MBOP",
    "iql": "refplan.priors.iql:IQL",
    "cql": "refplan.priors.cql:CQL",
    "edac": "refplan.priors.edac:EDAC",
    "mopo": "refplan.priors.mopo:MOPO",
    "combo": "refplan.priors.combo:COMBO",
    "maple": "refplan.priors.maple:MAPLE",
}


def find_prior(name: str) -> Any:
    """The learner class of a name."""
    return find("prior", PRIORS, name)
