"""Whether to plan on a prior at all: a planner near it is played in the learned world before the real one sees it.

A critic cannot say that following it leads to a fall; a model can, if falls were logged. A planner's gain is what it
earns more than the prior alone on the same imagined episodes: from logged starts, each in the world of one member from
the first step to the last, no value at the end, nothing farther out than what was logged.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Float

from refplan.agent import AbstractAgent
from refplan.data.dataset import Dataset
from refplan.dynamics.base import AbstractDynamics
from refplan.errors import RefplanError
from refplan.experiments.imagined import Judge, imagined_returns, logged_range
from refplan.experiments.workshop import Stage, Workshop
from refplan.planners.base import AbstractPlanner
from refplan.planners.presets import make_planner, planner_settings_of
from refplan.types import Key

EPISODES, STEPS = 30, 200  # what is imagined, unless told otherwise
NEVER = "away"  # the preset that leaves the prior alone at home
TRIED = ("careful",)  # more than one: the nearer to the prior, the earlier


class Advice(NamedTuple):
    """Imagined returns, undiscounted, of the prior alone and of a planner with every preset, nearest to it first."""

    alone: Float[np.ndarray, " episode"]
    planned: dict[str, Float[np.ndarray, " episode"]]

    def gain(self, preset: str) -> tuple[float, float]:
        """(mean, standard error) of what the preset earns more than the prior, episode by episode."""
        gain = self.planned[preset] - self.alone
        return float(gain.mean()), float(gain.std(ddof=1) / np.sqrt(len(gain)))

    @property
    def choice(self) -> str:
        """The preset nearest to the prior; `away` if even that loses more than a standard error.

        Gains do not decide: the farther a planner goes from the data, the more a model flatters it. A loss in the world
        that a planner itself believes in does.
        """
        nearest = next(iter(self.planned))
        mean, error = self.gain(nearest)
        return NEVER if mean < -error else nearest

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        gains = {preset: dict(zip(("gain", "error"), self.gain(preset), strict=True)) for preset in self.planned}
        return {"alone": float(self.alone.mean()), "presets": gains, "choice": self.choice}


def advice_stage(shop: Workshop, data: Dataset, prior: Stage, ensemble: Stage, seed: int) -> Stage:
    """What the ensemble says of planning on the prior; the preset `advised` does what it says."""

    def agent(preset: str) -> AbstractPlanner:
        return make_planner("loop", prior.made, ensemble.made, preset=preset)

    inputs: dict[str, Any] = {"data": data.fingerprint, "seed": seed, "episodes": EPISODES, "steps": STEPS}
    inputs |= {"prior": prior.digest, "model": ensemble.digest}
    inputs |= {preset: planner_settings_of(agent(preset)) for preset in TRIED}

    def make(_: Path) -> dict[str, Any]:
        return advise(prior.made, agent, ensemble.made, data, key=jr.key(seed)).to_dict()

    stage = shop.document("advice", inputs, make)
    found = stage.made["presets"].items()
    gains = ", ".join(f"{preset} {of['gain']:+.0f} ± {of['error']:.0f}" for preset, of in found)
    shop.say(f"      imagined gain over the prior: {gains}; advised: {stage.made['choice']}")
    return stage


def advise(
    prior: AbstractAgent,
    make: Callable[[str], AbstractAgent],
    model: AbstractDynamics,
    data: Dataset,
    *,
    key: Key,
    episodes: int = EPISODES,
    steps: int = STEPS,
    presets: tuple[str, ...] = TRIED,
    say: Callable[[str], None] = lambda text: None,
) -> Advice:
    """Play the prior and `make(preset)` in the model; all of them meet the same starts, members and noise."""
    if episodes < 2 or steps < 1:
        raise RefplanError(f"advice needs at least 2 episodes of 1 step, got {episodes} of {steps}.")
    key_starts, key = jr.split(key)
    rows = jr.choice(key_starts, jnp.asarray(data.starts), (episodes,), replace=episodes > len(data.starts))
    starts = jnp.asarray(data.observations[np.asarray(rows)])
    judge = Judge(model, None, jnp.ones(()), logged_range(data))

    def play(name: str, agent: AbstractAgent) -> Float[np.ndarray, " episode"]:
        returns = np.asarray(imagined_returns(agent, judge, starts, steps, key), np.float64)
        if not np.isfinite(returns).all():
            raise RefplanError(f"{name} earns {returns.mean()} in the model; is it any good? refplan diagnose says.")
        say(f"{name}: {returns.mean():.0f} in {episodes} imagined episodes of {steps} steps")
        return returns

    return Advice(play("the prior alone", prior), {preset: play(preset, make(preset)) for preset in presets})
