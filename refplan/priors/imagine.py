"""Imagined experience: rollouts of a policy in a learned model, from logged states, and the ring they are kept in.

Written for any `AbstractDynamics` and any policy: what either remembers of an episode starts where the logged episode
stands (a belief model's GRU state of that row, paper appendix B.1) and follows the imagined steps. A new hypothesis is
drawn from the belief at every step.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from refplan.agent import AbstractAgent, AbstractPolicy
from refplan.data.lanes import Layout
from refplan.data.sampling import take_rows
from refplan.dynamics.base import AbstractDynamics, Belief, Outcome
from refplan.types import Key, Scalar, State, Transition

Doubt = Literal["aleatoric", "disagreement"]
Bounds = tuple[Float[Array, " obs"], Float[Array, " obs"]]


def aleatoric(outcome: Outcome) -> Scalar:
    """max_i |sigma_i| over next state and reward (MOPO): the noise the most doubtful member expects."""
    stds = jnp.concatenate([outcome.next_obs_std, outcome.reward_std[:, None]], axis=1)
    return jnp.max(jnp.linalg.norm(stds, axis=1))


def disagreement(outcome: Outcome) -> Scalar:
    """max_i |mu_i - mean_j mu_j| over the next state (MOPO's alternative): how far the members are apart."""
    centre = jnp.mean(outcome.next_obs, axis=0, keepdims=True)
    return jnp.max(jnp.linalg.norm(outcome.next_obs - centre, axis=1))


DOUBTS: dict[str, Callable[[Outcome], Scalar]] = {"aleatoric": aleatoric, "disagreement": disagreement}


class Start(NamedTuple):
    """Where a rollout stands: at `obs`, with what the model believes and the policy remembers of the episode so far."""

    obs: Float[Array, "*batch obs"]
    belief: Belief
    memory: State


class Rollouts(NamedTuple):
    """Imagined steps, and whether each was taken before the imagined world had ended; the others are never used."""

    steps: Transition
    valid: Bool[Array, "*batch time"]
    uncertainty: Float[Array, "*batch time"]


def imagine(
    model: AbstractDynamics,
    policy: AbstractPolicy,
    start: Start,
    key: Key,
    *,
    length: int,
    doubt: Callable[[Outcome], Scalar],
    one_member: bool = False,
    bounds: Bounds | None = None,
) -> Rollouts:
    """`length` sampled steps of one rollout, which stands still once its world has ended.

    The elite that moves it is drawn anew at each step or, with `one_member`, once. `bounds` clip the next state, after
    it was asked whether the world ends there.
    """
    key_member, key_noise, key_steps = jr.split(key, 3)
    members = jr.randint(key_member, (length,), 0, model.members)
    members = jnp.full_like(members, members[0]) if one_member else members
    size = start.obs.size + 1
    noise = jr.normal(key_noise, (length * size,)).reshape(length, size)

    def step(carry: tuple[Start, Array], given: tuple[Array, Array, Array]) -> tuple[tuple[Start, Array], Rollouts]:
        (at, alive), (member, noise, keys) = carry, given
        action, _ = policy.sample(at.memory, at.obs, keys[0])
        outcome = model.predict_from(model.sample(at.belief, at.obs, keys[1]), at.obs, action)
        mean, reward, std, reward_std = (x[member] for x in outcome)
        next_obs, reward = mean + std * noise[:-1], reward + reward_std * noise[-1]
        ended = model.termination(at.obs, action, next_obs)
        next_obs = next_obs if bounds is None else jnp.clip(next_obs, *bounds)
        taken = Transition(at.obs, action, reward, next_obs, ended)
        after = Start(next_obs, model.observe(at.belief, taken), policy.observe(at.memory, taken))
        goes_on = alive & ~ended
        after = jax.tree.map(lambda new, old: jnp.where(goes_on, new, old), after, at)
        return (after, goes_on), Rollouts(taken, alive, doubt(outcome))

    given = members, noise, jr.split(key_steps, (length, 2))
    _, rollout = jax.lax.scan(step, (start, jnp.ones((), bool)), given)
    return rollout


def states_along(thing: AbstractAgent | AbstractDynamics, rows: Transition, layout: Layout) -> Any:
    """What an agent remembers or a model believes before each logged row, every episode from its own start."""
    if not jax.tree.leaves(thing.start()):
        return thing.start()
    lanes, time = layout.row.shape
    fresh = jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *jnp.shape(x))), thing.start())

    def step(states: Any, at: tuple[Int[Array, " lanes"], Bool[Array, " lanes"]]) -> tuple[Any, Any]:
        index, first = at
        states = jax.tree.map(lambda new, old: jnp.where(_like(first, new), new, old), fresh, states)
        return jax.vmap(thing.observe)(states, take_rows(rows, index)), states

    _, states = jax.lax.scan(step, fresh, (layout.row.T, layout.first.T))
    count = rows.reward.shape[0]
    target = jnp.where(layout.valid, layout.row, count).T.reshape(-1)  # padding goes out of bounds and is dropped

    def scatter(values: Array) -> Array:
        flat = values.reshape(lanes * time, *values.shape[2:])
        return jnp.zeros((count, *flat.shape[1:]), flat.dtype).at[target].set(flat, mode="drop")

    return jax.tree.map(scatter, states)


def _like(flags: Bool[Array, " lanes"], values: Array) -> Array:
    return flags.reshape(-1, *(1,) * (values.ndim - 1))


class Ring(NamedTuple):
    """The newest items of a stream, on the device: any pytree with a leading axis of places."""

    items: Any
    size: Int[Array, ""]  # places that hold something
    place: Int[Array, ""]  # where the next one goes


def make_ring(example: Any, places: int) -> Ring:
    """An empty ring for things shaped like `example`."""
    items = jax.tree.map(lambda x: jnp.zeros((places, *jnp.shape(x)), jnp.result_type(x)), example)
    return Ring(items, jnp.zeros((), int), jnp.zeros((), int))


def put(ring: Ring, items: Any, keep: Bool[Array, " new"]) -> Ring:
    """Write the items marked by `keep` one after another, over the oldest ones when the ring is full."""
    places = jax.tree.leaves(ring.items)[0].shape[0]
    target = jnp.where(keep, (ring.place + jnp.cumsum(keep) - 1) % places, places)
    written = jax.tree.map(lambda old, new: old.at[target].set(new, mode="drop"), ring.items, items)
    count = jnp.sum(keep)
    return Ring(written, jnp.minimum(ring.size + count, places), (ring.place + count) % places)


def draw(ring: Ring, key: Key, count: int) -> Any:
    """`count` of the ring's items, uniformly with replacement."""
    index = jr.randint(key, (count,), 0, jnp.maximum(ring.size, 1))
    return jax.tree.map(lambda x: x[index], ring.items)
