"""What the readers of foreign weight files share: an actor's arrays, taken one layer at a time until none is left."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refplan.errors import RefplanError, unknown_name
from refplan.nn import Activation
from refplan.priors.policy import Bound, GaussianPolicy, check_bounds, make_policy

Layer = tuple[np.ndarray, np.ndarray]
ACTIVATIONS: dict[str, Activation] = {"relu": jax.nn.relu, "tanh": jnp.tanh, "swish": jax.nn.swish}


class ActorWeights:
    """An actor's state dict, from which layers are taken until nothing is left."""

    def __init__(self, arrays: Any, where: str):
        if not isinstance(arrays, Mapping) or not all(isinstance(value, np.ndarray) for value in arrays.values()):
            raise RefplanError(f"{where}: holds no state dict of plain arrays where the actor's was expected.")
        self.left: dict[str, np.ndarray] = {str(name): value for name, value in arrays.items()}
        self.where = where

    def array(self, name: str) -> np.ndarray:
        """Take one array."""
        if name not in self.left:
            raise RefplanError(f"{self.where}: the actor has no '{name}' (left: {', '.join(sorted(self.left)[:8])}).")
        return np.asarray(self.left.pop(name), np.float32)

    def linear(self, name: str) -> Layer:
        """Take the linear layer `name`, its weight turned to (inputs, outputs)."""
        weight, bias = self.array(f"{name}.weight"), self.array(f"{name}.bias")
        if weight.ndim != 2 or bias.shape != weight.shape[:1]:
            raise RefplanError(
                f"{self.where}: '{name}' is no linear layer (weight {weight.shape}, bias {bias.shape}); "
                "convolutions and normalisation layers are not read. Use from_callable or from_onnx."
            )
        return weight.T, bias

    def sequence(self, name: str) -> list[Layer]:
        """Take the linear layers `name.<number>`, in order."""
        found = {int(m[1]) for key in self.left if (m := re.fullmatch(rf"{re.escape(name)}\.(\d+)\.weight", key))}
        return [self.linear(f"{name}.{number}") for number in sorted(found)]

    def finish(self) -> None:
        """Refuse an actor with more in it than was taken."""
        if self.left:
            raise RefplanError(
                f"{self.where}: the actor has arrays this reader has no place for: {', '.join(sorted(self.left)[:8])}. "
                "Use from_callable or from_onnx for this architecture."
            )


def activation_named(name: str, where: str) -> Activation:
    """An activation by the name its library gives it."""
    if name not in ACTIVATIONS:
        raise RefplanError(f"{where}: {unknown_name('activation', name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def named(state: Any, where: str) -> Mapping[str, Any]:
    """A dictionary with names for keys, or an error."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise RefplanError(f"{where}: its weights are not a dictionary of names, so not a policy of a known library.")
    return state


def build_policy(where: str, layers: list[Layer], low: Bound, high: Bound, **options: Any) -> GaussianPolicy:
    """`make_policy`, its complaints led by the file's name."""
    try:
        return make_policy(layers, low, high, **options)
    except RefplanError as error:
        raise RefplanError(f"{where}: {error}") from None


def to_unit_gaussian(layers: list[Layer], low: Bound, high: Bound) -> list[Layer]:
    """A last layer for (mean, log-std) in the world's units, rewritten to units of half the action range."""
    *hidden, (weight, bias) = layers
    low, high = (np.asarray(bound) for bound in check_bounds(low, high, bias.size // 2))
    middle, half = 0.5 * (low + high), 0.5 * (high - low)
    mean, log_std = np.split(bias, 2)
    scale = np.concatenate([half, np.ones_like(half)])  # the log-std has no weights of its own
    return [*hidden, (weight / scale, np.concatenate([(mean - middle) / half, log_std - np.log(half)]))]
