"""An actuator that fails, or weakens, in the middle of an episode: how soon is it believed, what is earned after it?

python -m benchmarks.failing_actuator PRIOR ENSEMBLE --out results/belief/failing-actuator.csv

PRIOR and ENSEMBLE are .safetensors files of HalfCheetah, as for `benchmarks.broken_joint`. Every change happens at step
500. `after` is the return from there on, `afters` that of every episode (planners meet the same ones, so they can be
paired); `believed` the median over episodes of the steps until the believed gain of the actuator is nearer to the true
one than to 1, `believed_for_good` until it stays so, `believed_share` in how many of the steps after the change it is
so, all counted along the episodes of that planner.
"""

import json
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from benchmarks.belief_figure import NAMES, steps_of
from benchmarks.common import parser
from refplan.data.tasks import task
from refplan.dynamics.around import believe
from refplan.dynamics.worlds import WorldsDynamics, around
from refplan.evaluation import evaluate
from refplan.modules import load_module
from refplan.planners.presets import make_planner, planner_settings_of
from refplan.result import Trace
from refplan.stats import mean_interval
from refplan.store import append_results, result_row
from refplan.types import Transition

FAILS = 500
# Actuator and what is left of it; none of the partial strengths is one that anything here was chosen with.
CHANGES = ((0, 0.0), (3, 0.0), (3, 0.25), (4, 0.6))


@eqx.filter_jit
def believed_gains(worlds: WorldsDynamics, steps: Transition) -> Float[Array, "time episodes act"]:
    """The gains at the belief's centre after each step."""

    def one(belief: Any, step: Transition) -> tuple[Any, Array]:
        belief = worlds.observe(belief, step)
        return belief, worlds.read(worlds.centre(belief, step.next_obs)).gain

    return jax.vmap(lambda episode: jax.lax.scan(one, worlds.start(), episode)[1], 1, 1)(steps)


class Noticed(NamedTuple):
    """Steps after the change (one beyond the last step: never) and a share of them, medians over episodes."""

    believed: float
    believed_for_good: float
    believed_share: float


def steps_to_believe(worlds: WorldsDynamics, trace: Trace, actuator: int, gain: float) -> Noticed:
    """How soon the actuator is believed changed, and from when on without interruption."""
    gains = np.asarray(believed_gains(worlds, steps_of(trace)))
    wrong = gains[FAILS:, :, actuator] > 0.5 * (1.0 + gain)
    first = [np.flatnonzero(~episode).min(initial=len(episode)) + 1 for episode in wrong.T]
    for_good = [np.flatnonzero(episode).max(initial=-1) + 2 for episode in wrong.T]
    return Noticed(*(float(np.median(each)) for each in (first, for_good, 1.0 - wrong.mean(axis=0))))


def main() -> None:
    asked = parser(__doc__, episodes=10)
    asked.add_argument("--beliefs", default="worlds,refined-worlds", help="separated by commas")
    args = asked.parse_args()
    prior, ensemble = load_module(args.prior), load_module(args.ensemble)
    worlds = around(ensemble)
    agents = {"loop": make_planner("loop", prior, ensemble)}
    for name in args.beliefs.split(","):
        agents[f"refplan, {name}"] = make_planner("refplan", prior, believe(name, ensemble))
    for actuator, gain in CHANGES:
        gains = tuple(gain if each == actuator else 1.0 for each in range(len(NAMES)))
        failing = task("halfcheetah-joint", gains=gains, fail_at=FAILS)
        for name, agent in agents.items():
            result = evaluate(agent, failing, args.episodes, key=jr.key(0), name=name, show=False, trace=True)
            afters = result.trace.rewards[FAILS:].sum(axis=0)
            after, noticed = mean_interval(afters), steps_to_believe(worlds, result.trace, actuator, gain)
            labels = {"dataset": args.name, "prior": args.method, "planner": name, "seed": args.seed}
            more = {"actuator": NAMES[actuator], "gain": gain, "after": after.value}
            more |= {"after_lo": after.low, "after_hi": after.high, "afters": json.dumps(afters.round(2).tolist())}
            row = result_row(result, settings=planner_settings_of(agent), **labels) | more | noticed._asdict()
            append_results(args.out, [row])
            print(f"{NAMES[actuator]} at {gain}, {name}: {after}, believed after {noticed.believed:.0f}", flush=True)


if __name__ == "__main__":
    main()
