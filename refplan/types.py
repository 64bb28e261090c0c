"""The records and array names every other module speaks in.

Shapes are written once, here or in a signature, as jaxtyping annotations; tests check them with beartype.
Records hold one example; a leading `*batch` means the same record may also hold many.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from jaxtyping import Key as KeyOf

Obs = Float[Array, " obs"]
Action = Float[Array, " act"]
Scalar = Float[Array, ""]
Flag = Bool[Array, ""]
Key = PRNGKeyArray
Keys = KeyOf[Array, " batch"]  # one per row
State = Any  # whatever an agent or a model carries from step to step: any pytree
Metrics = dict[str, Float[Array, ""]]


class Transition(NamedTuple):
    """One real step: what was seen, what was done, what came of it."""

    obs: Float[Array, "*batch obs"]
    action: Float[Array, "*batch act"]
    reward: Float[Array, "*batch"]
    next_obs: Float[Array, "*batch obs"]
    terminated: Bool[Array, "*batch"]


class Window(NamedTuple):
    """A run of consecutive steps of one episode, padded where `valid` is false."""

    steps: Transition
    valid: Bool[Array, "*batch time"]
    first: Bool[Array, "*batch time"]
    row: Int[Array, "*batch time"]
