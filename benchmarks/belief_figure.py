"""The belief over worlds along two episodes: an actuator that fails at step 500, and a slope.

python -m benchmarks.belief_figure PRIOR_RUN ENSEMBLE_RUN --out docs/images/worlds-belief.png
"""

import argparse
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from refplan.data.tasks import task
from refplan.dynamics.worlds import WorldsDynamics, around
from refplan.evaluation import evaluate
from refplan.planners.presets import make_planner
from refplan.store import load_run
from refplan.types import Transition

NAMES = ("back thigh", "back shin", "back foot", "front thigh", "front shin", "front foot")


@eqx.filter_jit
def follow(worlds: WorldsDynamics, steps: Transition) -> tuple[Any, Any, Any]:
    """(world at the mean, standard deviations, errors of the home world and of the believed one) after each step."""

    def one(belief: Any, step: Transition) -> tuple[Any, Any]:
        seen = jnp.append(step.next_obs - step.obs, step.reward) / worlds.change_std
        told = (worlds.home(), worlds.centre(belief, step.obs))
        errors = [jnp.median(jnp.abs(seen - worlds.expected(m, step.obs, step.action)[0])) for m in told]
        belief = worlds.observe(belief, step)
        return belief, (worlds.read(belief.mean), jnp.sqrt(jnp.diagonal(belief.covariance)), jnp.stack(errors))

    return jax.lax.scan(one, worlds.start(), steps)[1]


def steps_of(trace: Any) -> Transition:
    """Every step of an evaluation, (time, episodes, ...)."""
    rows = (trace.observations, trace.actions, trace.rewards, trace.next_observations, trace.terminated)
    return Transition(*(jnp.asarray(x) for x in rows))


def episode(prior: Any, worlds: WorldsDynamics, world: Any, seed: int) -> tuple[Any, Any, Any]:
    """One episode of RefPlan in a world, and the belief along it."""
    agent = make_planner("refplan", prior, worlds, changes={"latents": 1})
    trace = evaluate(agent, world, 1, key=jr.key(seed), trace=True, show=False).trace
    return follow(worlds, jax.tree.map(lambda leaf: leaf[:, 0], steps_of(trace)))


def draw(failing: tuple, slope: tuple, worlds: WorldsDynamics, out: str) -> None:
    """Three panels: gains, height offset, one-step errors."""
    import matplotlib.pyplot as plt

    figure, (gains, errors, offset) = plt.subplots(3, 1, figsize=(8, 7.5), constrained_layout=True)
    believed, std, error = jax.tree.map(np.asarray, failing)
    for actuator, name in enumerate(NAMES):
        width = 2 * float(worlds.gain_std) * std[:, actuator]
        gains.plot(believed.gain[:, actuator], label=name, lw=1)
        gains.fill_between(
            np.arange(len(width)), believed.gain[:, actuator] - width, believed.gain[:, actuator] + width, alpha=0.15
        )
    gains.axvline(500, color="grey", ls=":")
    gains.set(ylabel="gain (2 std)", title="the front thigh fails at step 500", ylim=(-0.3, 1.6))
    gains.legend(ncols=6, fontsize=7, loc="lower left")
    for kind, name in enumerate(("home world", "believed world")):
        smooth = np.convolve(error[:, kind], np.ones(20) / 20, mode="valid")
        errors.plot(np.arange(19, 19 + len(smooth)), smooth, label=name, lw=1)
    errors.axvline(500, color="grey", ls=":")
    errors.set(
        ylabel="one-step error", title="error of the prediction in the same episode, mean of 20 steps", yscale="log"
    )
    errors.legend(fontsize=7)
    believed, std, _ = jax.tree.map(np.asarray, slope)
    height, width = believed.offset[:, 0], 2 * float(worlds.offset_std * worlds.obs_std[0]) * std[:, 6]
    offset.plot(height, lw=1)
    offset.fill_between(np.arange(len(width)), height - width, height + width, alpha=0.2)
    offset.set(
        ylabel="metres (2 std)",
        xlabel="step",
        title="height of the ground, another episode: steep slope, then a plateau at 0.5 m",
    )
    figure.savefig(out)


def main() -> None:
    """Run the two episodes and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prior")
    parser.add_argument("model")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prior, worlds = load_run(args.prior)["prior"], around(load_run(args.model)["model"])
    failing = episode(prior, worlds, task("halfcheetah-joint", gains=(1, 1, 1, 0, 1, 1), fail_at=500), args.seed)
    slope = episode(prior, worlds, task("halfcheetah-steep"), args.seed)
    gain = np.asarray(failing[0].gain)[:, 3]
    print(
        f"the failed thigh is believed below 0.5 after {np.argmax(gain[500:] < 0.5) + 1} steps, below 0.2 after "
        f"{np.argmax(gain[500:] < 0.2) + 1}"
    )
    draw(failing, slope, worlds, args.out)


if __name__ == "__main__":
    main()
