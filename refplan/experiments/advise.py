"""Whether to plan, and how far from the prior: every preset is played in the learned world before the real one sees it.

A critic cannot say that following it leads to a fall; a model can, if falls were logged. A planner's gain is what it
earns more than the prior alone on the same imagined episodes: from logged starts, each in the world of one member from
the first step to the last, no value at the end, nothing farther out than what was logged.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Float

from refplan.agent import AbstractAgent
from refplan.data.dataset import Dataset
from refplan.dynamics.base import AbstractDynamics
from refplan.errors import RefplanError
from refplan.experiments.imagined import Judge, imagined_returns, logged_range
from refplan.types import Key

NEVER = "away"  # the preset that leaves the prior alone at home
ADVISED = ("careful", "default")


class Advice(NamedTuple):
    """Imagined returns, undiscounted, of the prior alone and of a planner with every preset."""

    alone: Float[np.ndarray, " episode"]
    planned: dict[str, Float[np.ndarray, " episode"]]

    def gain(self, preset: str) -> tuple[float, float]:
        """(mean, standard error) of what the preset earns more than the prior, episode by episode."""
        gain = self.planned[preset] - self.alone
        return float(gain.mean()), float(gain.std(ddof=1) / np.sqrt(len(gain)))

    @property
    def choice(self) -> str:
        """The preset that gains most, of those that gain more than a standard error; `away` if there is none."""
        gains = {preset: self.gain(preset) for preset in self.planned}
        better = {preset: mean for preset, (mean, error) in gains.items() if mean > error}
        return max(better, key=lambda preset: better[preset]) if better else NEVER


def advise(
    prior: AbstractAgent,
    make: Callable[[str], AbstractAgent],
    model: AbstractDynamics,
    data: Dataset,
    *,
    key: Key,
    episodes: int = 30,
    steps: int = 200,
    presets: tuple[str, ...] = ADVISED,
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
