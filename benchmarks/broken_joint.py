"""What knowing the world could be worth with a joint off: the belief beside one that is told, and beside MuJoCo itself.

python -m benchmarks.broken_joint PRIOR ENSEMBLE --out results/belief/broken-joint.csv

PRIOR and ENSEMBLE are the .safetensors files of a prior and an ensemble of HalfCheetah (of a run folder, or
`product.safetensors` of a stage of `refplan reproduce`). Each of the joints 1 to 5 is off in turn.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import jax.random as jr

from benchmarks.common import parser
from refplan.agent import AbstractAgent
from refplan.data.tasks import Task, task
from refplan.dynamics.true import make_true_dynamics
from refplan.dynamics.worlds import World, WorldBelief, WorldsDynamics, around
from refplan.evaluation import evaluate
from refplan.modules import load_module
from refplan.planners.base import AbstractPlanner, PlannerState
from refplan.planners.presets import make_planner, planner_settings_of
from refplan.store import append_results, result_row
from refplan.types import Action, Key, Obs, Transition


class Told(AbstractAgent):
    """A planner whose belief is given and stays: the oracle."""

    planner: AbstractPlanner
    belief: WorldBelief

    def start(self) -> PlannerState:
        return self.planner.start()._replace(belief=self.belief)

    def observe(self, state: PlannerState, transition: Transition) -> PlannerState:
        return self.planner.observe(state, transition)._replace(belief=self.belief)

    def act(self, state: PlannerState, obs: Obs, key: Key) -> tuple[Action, PlannerState]:
        return self.planner.act(state, obs, key)


def certain(worlds: WorldsDynamics, gains: tuple[float, ...]) -> WorldBelief:
    """All that is to be known about a world with these gains."""
    latent = worlds.write(World(jnp.asarray(gains, jnp.float32), *jnp.zeros((3, worlds.obs_std.shape[0]))))
    return WorldBelief(latent, 1e-12 * jnp.eye(latent.shape[0]))


def agents(prior: Any, ensemble: Any, broken: Task, gains: tuple[float, ...]) -> dict[str, tuple[Any, dict]]:
    """Every agent by name, with its settings; each knows more of the world than the one before."""
    worlds = around(ensemble)
    truth = make_true_dynamics(broken)
    planners: dict[str, AbstractPlanner] = {
        "loop": make_planner("loop", prior, ensemble),
        "refplan, worlds": make_planner("refplan", prior, worlds),
        "refplan, told the gains": make_planner("refplan", prior, worlds),
        "loop in the true world": make_planner("loop", prior, truth),
        "loop in the true world, H 6": make_planner("loop", prior, truth, changes={"horizon": 6}),
    }
    made: dict[str, tuple[Any, dict]] = {"prior": (prior, {})}
    for name, planner in planners.items():
        told = Told(planner, certain(worlds, gains)) if "told" in name else planner
        made[name] = (told, planner_settings_of(planner))
    return made


def main() -> None:
    args = parser(__doc__, episodes=4, steps=400).parse_args()
    prior, ensemble = load_module(args.prior), load_module(args.ensemble)
    for joint in range(1, 6):
        gains = tuple(float(actuator != joint) for actuator in range(6))
        broken = dataclasses.replace(task("halfcheetah-joint", gains=gains), horizon=args.steps)
        for name, (agent, settings) in agents(prior, ensemble, broken, gains).items():
            result = evaluate(agent, broken, args.episodes, key=jr.key(0), name=name, show=False)
            labels = {
                "dataset": args.name,
                "prior": args.method,
                "planner": name,
                "seed": args.seed,
                "settings": settings,
            }
            append_results(args.out, [result_row(result, **labels) | {"joint": joint, "steps": args.steps}])
            print(f"joint {joint}, {name}: {result.returns.mean():.0f}", flush=True)


if __name__ == "__main__":
    main()
