"""A family of worlds with a hidden parameter, where the right belief is known to the digit.

s' = s + theta a + noise, theta ~ N(0, 1) fixed within an episode. After steps with actions a_0 .. a_{t-1} the exact
posterior of theta is N(mean, 1 / precision), precision = 1 + sum a^2 / noise^2, mean = sum a (s' - s) / noise^2 /
precision. The reward is noise that knows nothing, so that (s', r) are two outputs and the model's reconstruction term
is the exact negative log-likelihood: a KL weight of 1 then makes its bound the true one.
"""

from typing import NamedTuple

import numpy as np

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Dataset, Meta

NOISE, STEPS = 0.4, 20


class Hidden(NamedTuple):
    data: Dataset
    theta: np.ndarray  # (episodes,)
    mean: np.ndarray  # (episodes, steps): exact posterior when standing at s_t
    std: np.ndarray
    ahead: np.ndarray  # the posterior's std if one more average action had been seen


def hidden_worlds(episodes: int, seed: int, signs: bool) -> Hidden:
    """Actions are +-1 (`signs`) or uniform in [-1, 1]."""
    random = np.random.default_rng(seed)
    theta = random.normal(size=episodes)
    shape = (episodes, STEPS)
    action = random.choice([-1.0, 1.0], shape) if signs else random.uniform(-1, 1, shape)
    change = theta[:, None] * action + NOISE * random.normal(size=shape)
    state = np.cumsum(np.concatenate([0.5 * random.normal(size=(episodes, 1)), change], axis=1), axis=1)

    def before(values):
        return np.concatenate([np.zeros((episodes, 1)), np.cumsum(values, axis=1)[:, :-1]], axis=1) / NOISE**2

    precision = 1.0 + before(action**2)
    unseen = (1.0 if signs else 1 / 3) / NOISE**2
    rows = episodes * STEPS
    column = lambda x: x.reshape(rows, 1).astype(np.float32)  # noqa: E731
    data = make_dataset(
        column(state[:, :-1]),
        column(action),
        0.5 * random.normal(size=rows).astype(np.float32),
        np.zeros(rows, bool),
        np.tile(np.arange(STEPS) == STEPS - 1, episodes),
        next_observations=column(state[:, 1:]),
        meta=Meta(name="hidden worlds"),
    )
    return Hidden(data, theta, before(action * change) / precision, precision**-0.5, (precision + unseen) ** -0.5)
