"""Planners: they weigh a prior's proposals by what a model says they would earn."""

from typing import Any

from refplan.registry import find

# One line per planner: the name on the command line, and where it lives. Feeds the CLI, the contract tests, the docs.
PLANNERS = {
    "critic": "refplan.planners.critic_choice:CriticChoice",
    "mppi": "refplan.planners.mppi:MPPI",
    "loop": "refplan.planners.loop:LOOP",
    "refplan": "refplan.planners.refplan:RefPlan",
}


def find_planner(name: str) -> Any:
    """The planner class of a name."""
    return find("planner", PLANNERS, name)
