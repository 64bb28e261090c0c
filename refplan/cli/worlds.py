"""`refplan worlds`: the tasks there are, and a picture of the changed ones."""

import argparse
from typing import Any

from refplan.cli.common import add_json, print_json, print_table


def add(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "worlds",
        help="the tasks that have a name here",
        description="List the named tasks; any other Gymnasium id with Box spaces works too.",
    )
    parser.add_argument("--picture", metavar="PNG", help="draw the five changed HalfCheetah worlds (paper, RQ4)")
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print the table, draw the picture."""
    from refplan.data.tasks import TASKS, task

    tasks = [task(name) for name in TASKS]
    if args.json:
        print_json([_plain(t) for t in tasks])
    else:
        rows = [[str(value) for value in _plain(t).values()] for t in tasks]
        print_table(list(_plain(tasks[0])), rows)
    if args.picture:
        from refplan.data.render import draw_worlds

        draw_worlds(args.picture)
    return 0


def _plain(task: Any) -> dict[str, Any]:
    references = task.references
    return {
        "name": task.name,
        "env": task.env_id,
        "obs": task.obs_dim,
        "actions": task.action_dim,
        "horizon": task.horizon,
        "ref_min": None if references is None else references.low,
        "ref_max": None if references is None else references.high,
    }
