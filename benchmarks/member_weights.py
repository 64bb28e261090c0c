"""Exact Bayes over the members of an ensemble: does the posterior foretell the next step better than all alike?

python -m benchmarks.member_weights PRIOR ENSEMBLE --out results/belief/member-weights.csv

LOOP runs in each world. Along its episodes every member e has a weight, equal at first, that follows the likelihood of
what was seen, tempered and with forgetting, so that it can follow a change:

    log w_e <- forget log w_e + temper log p_e(s', r | s, a)

Each step is foretold before it is learned from. `nll`: of the mixture, per dimension; `error`: of the weighted mean,
in standard deviations of the logged changes; `effective`: 1 / sum w^2, how many members still speak. Medians over
steps after the first 50 but for `effective`, a mean. A temper of 0 is the plain ensemble. All members take part, elites
or not.
"""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from benchmarks.belief_figure import steps_of
from benchmarks.belief_nll import SETTLED, places
from benchmarks.common import parser
from refplan.dynamics.ensemble import EnsembleDynamics
from refplan.evaluation import evaluate
from refplan.modules import load_module
from refplan.planners.presets import make_planner
from refplan.store import append_results, result_row
from refplan.types import Scalar, Transition

TEMPERS = (0.0, 0.02, 0.1, 1.0)
FORGET = 0.98


class Foretold(NamedTuple):
    """How well one step was foretold."""

    nll: Scalar
    error: Scalar
    effective: Scalar


def everyone(model: EnsembleDynamics) -> EnsembleDynamics:
    """The ensemble with all its members as elites."""
    count = model.decoder.nets.layers[0].weight.shape[0]
    return dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, elites=count))


@eqx.filter_jit
def follow(model: EnsembleDynamics, steps: Transition, temper: Float[Array, ""]) -> Foretold:
    """Medians over all settled steps of all episodes."""
    scale = model.decoder.targets.std

    def one(belief: Float[Array, " member"], step: Transition) -> tuple[Array, Foretold]:
        outcome = model.predict_from((), step.obs, step.action)
        mean = jnp.concatenate([outcome.next_obs, outcome.reward[:, None]], axis=1) / scale
        std = jnp.concatenate([outcome.next_obs_std, outcome.reward_std[:, None]], axis=1) / scale
        seen = jnp.append(step.next_obs, step.reward) / scale
        each = jnp.sum(jax.scipy.stats.norm.logpdf(seen, mean, std), axis=1)
        weights = jax.nn.softmax(belief)
        nll = -jax.scipy.special.logsumexp(jax.nn.log_softmax(belief) + each) / scale.shape[0]
        error = jnp.mean(jnp.abs(weights @ mean - seen))
        return FORGET * belief + temper * each, Foretold(nll, error, 1.0 / jnp.sum(weights**2))

    def episode(steps: Transition) -> Foretold:
        return jax.lax.scan(one, jnp.zeros(model.members), steps)[1]

    late = jax.tree.map(lambda leaf: leaf[:, SETTLED:], jax.vmap(episode, 1)(steps))
    return Foretold(jnp.median(late.nll), jnp.median(late.error), jnp.mean(late.effective))


def main() -> None:
    args = parser(__doc__, episodes=5, steps=400).parse_args()
    prior, ensemble = load_module(args.prior), load_module(args.ensemble)
    agent, model = make_planner("loop", prior, ensemble), everyone(ensemble)
    for name, place in places(args.steps).items():
        result = evaluate(agent, place, args.episodes, key=jr.key(0), name="loop", show=False, trace=True)
        labels = {"dataset": args.name, "prior": args.method, "planner": "loop", "seed": args.seed}
        more: dict[str, Any] = {"place": name, "steps": args.steps, "forget": FORGET}
        for temper in TEMPERS:
            found = {
                key: float(value) for key, value in follow(model, steps_of(result.trace), temper)._asdict().items()
            }
            append_results(args.out, [result_row(result, **labels) | more | {"temper": temper} | found])
            print(f"{name}, temper {temper}: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items()), flush=True)


if __name__ == "__main__":
    main()
