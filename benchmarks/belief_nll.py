"""Does the belief say which world this is? One-step NLL under the episode's own belief, another world's, and none.

python -m benchmarks.belief_nll PRIOR ENSEMBLE --out results/belief/nll.csv --figure docs/images/belief-nll.png

PRIOR and ENSEMBLE are .safetensors files of HalfCheetah, as for `benchmarks.broken_joint`. RefPlan over worlds runs in
every world; each step is then foretold under what was believed before it ("own"), under what was believed at that step
of an episode in another world ("shuffled"), and at home ("home"). Medians over steps: a contact that nothing foresees
costs hundreds of nats, and a mean would show nothing else. The first 50 steps, in which the belief settles, are left
out.
"""

import dataclasses
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from benchmarks.belief_figure import steps_of
from benchmarks.common import parser
from refplan.data.tasks import Task, task
from refplan.dynamics.diagnose_rollout import log_density
from refplan.dynamics.worlds import WorldsDynamics, around
from refplan.evaluation import evaluate
from refplan.modules import load_module
from refplan.planners.presets import make_planner
from refplan.store import append_results, result_row
from refplan.types import Transition

SETTLED = 50
KINDS = ("own", "shuffled", "home")


def places(steps: int) -> dict[str, Task]:
    """Home, other ground, weak and dead actuators."""
    whole = {
        "home": task("halfcheetah"),
        "steep": task("halfcheetah-steep"),
        "gentle": task("halfcheetah-gentle"),
        "field": task("halfcheetah-field"),
        "front thigh off": task("halfcheetah-joint", gains=(1, 1, 1, 0, 1, 1)),
        "front shin at 0.6": task("halfcheetah-joint", gains=(1, 1, 1, 1, 0.6, 1)),
    }
    return {name: dataclasses.replace(each, horizon=steps) for name, each in whole.items()}


@eqx.filter_jit
def believed(worlds: WorldsDynamics, steps: Transition) -> Float[Array, "time episodes latent"]:
    """The centre of the belief before each step."""

    def one(belief: Any, step: Transition) -> tuple[Any, Array]:
        return worlds.observe(belief, step), worlds.centre(belief, step.obs)

    return jax.vmap(lambda episode: jax.lax.scan(one, worlds.start(), episode)[1], 1, 1)(steps)


@eqx.filter_jit
def nll(worlds: WorldsDynamics, latents: Float[Array, "time episodes latent"], steps: Transition) -> Float[Array, ""]:
    """Median over steps of -log p(s', r | s, a, m) per dimension, after the belief has settled."""
    one = lambda m, step: -jnp.mean(log_density(worlds, m, step, worlds.change_std)[0])  # noqa: E731
    late = lambda leaf: leaf[SETTLED:]  # noqa: E731
    return jnp.median(jax.vmap(jax.vmap(one))(late(latents), jax.tree.map(late, steps)))


def draw(found: dict[str, dict[str, float]], out: str) -> None:
    """One group of bars per world."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.5), constrained_layout=True)
    for at, kind in enumerate(KINDS):
        axes.bar(np.arange(len(found)) + 0.27 * (at - 1), [each[kind] for each in found.values()], 0.25, label=kind)
    axes.axhline(0, color="grey", lw=0.5)
    axes.set_xticks(np.arange(len(found)), list(found))
    axes.set(ylabel="NLL per dimension (median)", title="one step ahead, told the own belief, another world's, or home")
    axes.legend()
    figure.savefig(out, dpi=110)


def main() -> None:
    asked = parser(__doc__, episodes=5, steps=300)
    asked.add_argument("--figure", required=True)
    args = asked.parse_args()
    prior, worlds = load_module(args.prior), around(load_module(args.ensemble))
    agent = make_planner("refplan", prior, worlds)
    results = {
        name: evaluate(agent, place, args.episodes, key=jr.key(0), name="refplan", show=False, trace=True)
        for name, place in places(args.steps).items()
    }
    steps = {name: steps_of(result.trace) for name, result in results.items()}
    told = {name: believed(worlds, steps[name]) for name in results}
    names, found = list(results), {}
    for at, (name, result) in enumerate(results.items()):
        others = (told[name], told[names[at - 1]], jnp.zeros_like(told[name]))
        found[name] = {kind: float(nll(worlds, m, steps[name])) for kind, m in zip(KINDS, others, strict=True)}
        labels = {"dataset": args.name, "prior": args.method, "planner": "refplan (worlds)", "seed": args.seed}
        more = {f"nll_{kind}": value for kind, value in found[name].items()}
        append_results(args.out, [result_row(result, **labels) | more | {"place": name, "steps": args.steps}])
    print(json.dumps(found, indent=1))
    draw(found, args.figure)


if __name__ == "__main__":
    main()
