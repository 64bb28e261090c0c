"""What a model is judged on: runs of logged steps of one episode, with the belief the agent would have had there."""

from typing import NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from jaxtyping import Key as KeyArray

from refplan.agent import AbstractPrior
from refplan.data.dataset import Dataset
from refplan.data.sampling import take_rows
from refplan.dynamics.base import AbstractDynamics, AbstractLatentDynamics, Belief
from refplan.errors import RefplanError
from refplan.types import Key, State, Transition

T = TypeVar("T")
Keys = KeyArray[Array, "..."]  # many keys


class Randomness:
    """Random numbers of a key made on the host: each shape drawn by JAX would compile a generator of its own."""

    def __init__(self, key: Key):
        self.key = key
        self.host = np.random.default_rng(np.asarray(jr.key_data(key)))

    def normal(self, *shape: int) -> Float[Array, "..."]:
        """Standard normal numbers."""
        return jnp.asarray(self.host.standard_normal(shape, np.float32))

    def integers(self, high: int, *shape: int) -> Int[Array, "..."]:
        """Whole numbers from 0 to below `high`."""
        return jnp.asarray(self.host.integers(high, size=shape, dtype=np.int32))

    def keys(self, *shape: int) -> Keys:
        """Keys for what draws its own numbers."""
        words = jr.key_data(self.key).shape[-1]
        bits = self.host.integers(2**32, size=(*shape, words), dtype=np.uint32)
        return jr.wrap_key_data(jnp.asarray(bits), impl=jr.key_impl(self.key))


class Segments(NamedTuple):
    """Runs of consecutive steps of one episode; `valid` is false after an episode that terminated inside the run."""

    steps: Transition
    valid: Bool[Array, "segments time"]
    row: Int[np.ndarray, " segments"]


class Scale(NamedTuple):
    """Mean and std of one-step changes of every observation, then of the reward: the units errors are given in."""

    mean: Float[np.ndarray, " outputs"]
    std: Float[np.ndarray, " outputs"]


class Memory(NamedTuple):
    """What model and prior remember on arriving at some rows, and every step's posterior of a latent model."""

    belief: Belief
    prior: State
    mu: Float[Array, "time episodes latent"] | None
    log_var: Float[Array, "time episodes latent"] | None


def prepare_data(data: Dataset, horizon: int, episodes: int, random: Randomness) -> Dataset:
    """At most `episodes` random episodes with known successors; an error where they cannot serve."""
    if not data.sequential:
        raise RefplanError(
            f"dataset '{data.meta.name}' was split by transition: its rows are a bag, and looking several steps ahead "
            "needs episodes. Diagnose on the whole data, or on a split by='episode'."
        )
    if horizon < 1:
        raise RefplanError(f"diagnose needs a horizon of at least 1 step, got {horizon}.")
    data = data.complete()
    longest = int(data.lengths.max())
    if longest < horizon:
        raise RefplanError(
            f"dataset '{data.meta.name}': its longest episode has {longest} steps, so nothing can be said about "
            f"{horizon} steps ahead. Use a horizon of at most {longest}."
        )
    if data.episodes <= episodes:
        return data
    order = random.host.permutation(data.episodes)[:episodes]
    if data.lengths[order].max() < horizon:
        order[-1] = np.argmax(data.lengths)
    return data.take_episodes(np.sort(order))


def data_scale(data: Dataset) -> Scale:
    """Statistics of [s' - s, r]; a column that never changes is not scaled."""
    change = data.next_observations.astype(np.float64) - data.observations
    outputs = np.concatenate([change, data.rewards[:, None].astype(np.float64)], axis=1)
    std = outputs.std(axis=0)
    return Scale(outputs.mean(axis=0), np.where(std > 1e-6, std, 1.0))


def episode_of(data: Dataset, row: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
    """The episode each row belongs to."""
    return np.searchsorted(data.starts, row, side="right") - 1


def eligible_rows(data: Dataset, horizon: int) -> Int[np.ndarray, " rows"]:
    """Rows whose next `horizon` steps are known: enough steps are left, or the world ends before (nothing follows)."""
    row = np.arange(len(data))
    episode = episode_of(data, row)
    left = data.ends[episode] - row
    return row[(left >= horizon) | data.terminated[data.ends[episode] - 1]]


def take_steps(data: Dataset, index: Int[np.ndarray, "*batch"]) -> Transition:
    """The rows at `index`, in its shape; picked on the host, where nothing has to be compiled."""
    columns = data.observations, data.actions, data.rewards, data.next_observations, data.terminated
    return Transition(*(jnp.asarray(column[index]) for column in columns))


def cut_segments(data: Dataset, first: Int[np.ndarray, " segments"], horizon: int) -> Segments:
    """The run of `horizon` steps from each given row, never past its episode's end."""
    end = data.ends[episode_of(data, first)][:, None]
    index = first[:, None] + np.arange(horizon)[None, :]
    return Segments(take_steps(data, np.minimum(index, end - 1)), jnp.asarray(index < end), first)


def draw_rows(rows: Int[np.ndarray, " rows"], count: int, random: Randomness) -> Int[np.ndarray, " picked"]:
    """At most `count` of the rows, in random order, none twice."""
    return rows[random.host.permutation(len(rows))[:count]]


def remember(
    model: AbstractDynamics,
    prior: AbstractPrior | None,
    data: Dataset,
    row: Int[np.ndarray, " rows"],
    random: Randomness,
) -> Memory:
    """Walk whole episodes once, side by side, and keep what model and prior remember on arriving at `row`."""
    start = (model.start(), () if prior is None else prior.start())
    latent = isinstance(model, AbstractLatentDynamics)
    if not jax.tree.leaves(start) and not latent:
        return Memory(*start, None, None)
    episode = episode_of(data, row)
    time = row - data.starts[episode]
    table, slot = _meeting_table(time, episode, int(data.lengths.max()))
    kept, posteriors = _walk(
        model,
        prior,
        data.device(),
        jnp.asarray(data.starts),
        jnp.asarray(data.ends - 1),
        jnp.asarray(table),
        random.keys(),
    )
    belief, state = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[time, slot]), kept)
    return Memory(belief, state, *(posteriors or (None, None)))


def part_of(tree: T, which: slice) -> T:
    """The same slice of every array."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[which]), tree)


def _meeting_table(
    time: Int[np.ndarray, " rows"], episode: Int[np.ndarray, " rows"], length: int
) -> tuple[Int[np.ndarray, "time slots"], Int[np.ndarray, " rows"]]:
    """Which episodes to look at at each time, and the slot of each row; keeping every state would fill the memory."""
    order = np.argsort(time, kind="stable")
    counts = np.bincount(time, minlength=length)
    slot = np.empty(len(time), np.int64)
    slot[order] = np.arange(len(time)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.zeros((length, max(int(counts.max()), 1)), np.int64)
    table[time, slot] = episode
    return table, slot


@eqx.filter_jit
def _walk(
    model: AbstractDynamics,
    prior: AbstractPrior | None,
    rows: Transition,
    first: Int[Array, " episodes"],
    last: Int[Array, " episodes"],
    table: Int[Array, "time slots"],
    key: Key,
) -> tuple[tuple[Belief, State], tuple[Float[Array, "time episodes latent"], ...]]:
    def advance(belief: Belief, state: State, step: Transition) -> tuple[Belief, State]:
        if prior is not None:
            _, state = prior.act(state, step.obs, key)
            state = prior.observe(state, step)
        return model.observe(belief, step), state

    def walk(carry: tuple[Belief, State], x: tuple[Int[Array, ""], Int[Array, " slots"]]):
        time, episodes = x
        steps = take_rows(rows, jnp.minimum(first + time, last))
        kept = jax.tree.map(lambda leaf: leaf[episodes], carry)
        posterior = jax.vmap(model.posterior)(carry[0], steps.obs) if isinstance(model, AbstractLatentDynamics) else ()
        return jax.vmap(advance)(*carry, steps), (kept, posterior)

    start = (model.start(), () if prior is None else prior.start())
    many = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (first.shape[0], *jnp.shape(leaf))), start)
    return jax.lax.scan(walk, many, (jnp.arange(table.shape[0]), table))[1]
