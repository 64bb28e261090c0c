"""`evaluate`: run an agent in its task, all episodes side by side, and say how well it did and how fast it was.

Start states come from the key alone, so every agent evaluated under one key meets the same episodes. One compiled `act`
serves all of them; finished episodes stay in the batch, masked.
"""

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int

from refplan.agent import AbstractAgent, act_many, start_many
from refplan.data.simulate import AbstractSimulator, make_simulator
from refplan.data.starts import Starts
from refplan.data.tasks import Task
from refplan.data.tasks import task as find_task
from refplan.errors import RefplanError
from refplan.progress import progress
from refplan.result import Result, Trace
from refplan.types import Key, Obs, State, Transition


class AbstractWatcher(ABC):
    """Looks over the shoulder of the first episode; its time is not counted as the agent's."""

    @abstractmethod
    def before(
        self, agent: AbstractAgent, state: State, obs: Obs, key: Key, step: int, simulator: AbstractSimulator
    ) -> None:
        """Called before every step with what the agent decides from; `key` is the one it decides with."""

    @abstractmethod
    def after(self, action: Float[np.ndarray, " act"], reward: float, terminated: bool) -> None:
        """Called after every step with what was done and what came of it."""


def evaluate(
    agent: AbstractAgent,
    task: Task | str,
    episodes: int = 10,
    *,
    key: Key,
    starts: Starts | None = None,
    trace: bool = False,
    video: str | Path | None = None,
    watcher: AbstractWatcher | None = None,
    name: str | None = None,
    show: bool | None = None,
    batched: bool | None = None,
) -> Result:
    """Run `episodes` episodes of `agent` in `task`.

    `starts` puts each episode into a given simulator state (paper, RQ1) instead of the task's own start. `trace` keeps
    every step; `video` writes the first episode to an .mp4; `watcher` sees each of its decisions. `batched=False`
    forces plain Gymnasium stepping.
    """
    task = find_task(task) if isinstance(task, str) else task
    if episodes < 1:
        raise RefplanError(f"episodes must be at least 1, got {episodes}.")
    key_seeds, key_act = jr.split(key)
    seeds = episode_seeds(key_seeds, episodes)
    simulator = make_simulator(task, episodes, batched=batched)
    begun = time.perf_counter()
    try:
        obs = _reset(simulator, seeds, starts, task)
        run = _Episodes(agent, task, simulator, obs, key_act, keep=trace, film=video is not None, watcher=watcher)
        with progress(f"evaluate {name or type(agent).__name__}", task.horizon, "steps", show) as advance:
            while run.live.any() and run.time < task.horizon:
                run.step()
                advance(run.time, f"return {run.returns.mean():.0f}")
    finally:
        simulator.close()
    if video is not None:
        from refplan.data.render import write_video

        write_video(video, run.frames)
    return run.result(name or type(agent).__name__, seeds, time.perf_counter() - begun)


def check_agent(agent: AbstractAgent, name: str, task: Task) -> None:
    """One abstract call finds an agent of the wrong sizes before anything is trained or simulated."""
    obs = jax.ShapeDtypeStruct((task.obs_dim,), jnp.float32)
    try:
        action, _ = jax.eval_shape(lambda o: agent.act(agent.start(), o, jr.key(0)), obs)
    except (TypeError, ValueError) as error:
        detail = str(error).splitlines()[0]
        raise RefplanError(
            f"agent '{name}' does not accept the {task.obs_dim}-dimensional observations of {task.name} ({detail})."
        ) from None
    if action.shape != (task.action_dim,):
        raise RefplanError(
            f"agent '{name}' gives actions of shape {action.shape}; {task.name} needs ({task.action_dim},)."
        )


def episode_seeds(key: Key, episodes: int) -> tuple[int, ...]:
    """One environment seed per episode; the first ones stay the same when more are asked for."""
    draw = jax.vmap(lambda e: jr.randint(jr.fold_in(key, e), (), 0, 2**31 - 1))
    return tuple(int(seed) for seed in draw(jnp.arange(episodes)))


def _reset(simulator: AbstractSimulator, seeds: tuple[int, ...], starts: Starts | None, task: Task) -> np.ndarray:
    obs = simulator.reset(seeds)
    if starts is None:
        return obs
    if len(starts.qpos) != len(seeds):
        raise RefplanError(f"{len(starts.qpos)} start states for {len(seeds)} episodes of {task.name}; give one each.")
    return simulator.set_states(starts.qpos, starts.qvel)


class _Episodes:
    """The running sums of a batch of episodes."""

    def __init__(
        self,
        agent: AbstractAgent,
        task: Task,
        simulator: AbstractSimulator,
        obs: np.ndarray,
        key: Key,
        keep: bool,
        film: bool,
        watcher: AbstractWatcher | None,
    ):
        self.agent, self.task, self.simulator, self.key = agent, task, simulator, key
        self.obs = np.asarray(obs, np.float32)
        count = len(obs)
        self.state = start_many(agent, count)
        self.remembers = bool(jax.tree.leaves(self.state))
        self.live = np.ones(count, bool)
        self.returns, self.lengths = np.zeros(count), np.zeros(count, np.int64)
        self.time, self.acting, self.calls = 0, 0.0, 0
        self.keep, self.film, self.watcher = keep, film, watcher
        self.kept: list[tuple[np.ndarray, ...]] = []
        self.frames: list[np.ndarray] = []
        # Compile before the clock starts: the first call of a process would otherwise dominate every timing.
        jax.block_until_ready(_act(agent, self.state, jnp.asarray(self.obs), key, jnp.asarray(0)))

    def step(self) -> None:
        """One action in every live episode."""
        watcher = self.watcher if self.live[0] else None
        if watcher is not None:
            first = jax.tree.map(lambda leaf: leaf[0], self.state)
            key = _key(self.key, jnp.asarray(0), jnp.asarray(self.time))
            watcher.before(self.agent, first, jnp.asarray(self.obs[0]), key, self.time, self.simulator)
        begun = time.perf_counter()
        action, state = _act(self.agent, self.state, jnp.asarray(self.obs), self.key, jnp.asarray(self.time))
        actions = np.asarray(action)
        self.acting += time.perf_counter() - begun
        self._check(actions)
        before, live = self.obs, self.live.copy()
        states = self.simulator.states() if self.keep else None
        after, rewards, terminated, truncated = self.simulator.step(actions, live)
        after = np.asarray(after, np.float32)
        begun = time.perf_counter()
        self.state = self._observe(state, before, action, rewards, after, terminated)
        self.acting += time.perf_counter() - begun
        self.returns += np.where(live, rewards, 0.0)
        self.lengths += live
        if self.keep:
            # The simulator's horizon is the task's; a last step that nothing else ended is a truncation.
            cut = (truncated | (self.time + 1 >= self.task.horizon)) & ~terminated
            row = (before, actions, rewards.astype(np.float32), after, terminated, cut, live)
            self.kept.append((*row, *(s.astype(np.float32) for s in states)) if states else row)
        if watcher is not None:
            watcher.after(actions[0], float(rewards[0]), bool(terminated[0]))
        if self.film and live[0]:
            self.frames.append(self.simulator.frame(0))
        self.live &= ~(terminated | truncated)
        self.obs = np.where(self.live[:, None], after, before)
        self.time, self.calls = self.time + 1, self.calls + 1

    def _observe(self, state: State, before: Any, action: Array, rewards: Any, after: Any, terminated: Any) -> State:
        if not self.remembers:
            return state
        reward = jnp.asarray(rewards, jnp.float32)
        steps = Transition(jnp.asarray(before), action, reward, jnp.asarray(after), jnp.asarray(terminated))
        return jax.block_until_ready(_observe(self.agent, state, steps))

    def _check(self, actions: np.ndarray) -> None:
        inside = np.isfinite(actions) & (actions >= self.task.low) & (actions <= self.task.high)
        bad = self.live & ~inside.all(axis=1)
        if bad.any():
            episode = int(np.flatnonzero(bad)[0])
            raise RefplanError(
                f"{type(self.agent).__name__} returned {actions[episode]} at step {self.time} of episode {episode}: "
                f"not finite or outside the bounds [{self.task.low}, {self.task.high}] of {self.task.name}."
            )

    def result(self, name: str, seeds: tuple[int, ...], wall: float) -> Result:
        """The sums as a `Result`."""
        columns = [np.stack(c) for c in zip(*self.kept, strict=True)] if self.kept else None
        per_call = 1e3 * self.acting / max(self.calls, 1)
        return Result(
            name,
            self.task.name,
            self.returns,
            self.lengths,
            self.task.score(self.returns),
            seeds,
            per_call / len(seeds),
            per_call,
            float(self.lengths.sum() / wall),
            wall,
            None if columns is None else Trace(*columns),
        )


def _key(key: Key, episode: Int[Array, ""], time: Int[Array, ""]) -> Key:
    """The key of one decision; it does not depend on how many episodes there are."""
    return jr.fold_in(jr.fold_in(key, episode), time)


@eqx.filter_jit
def _act(
    agent: AbstractAgent, state: State, obs: Float[Array, "episodes obs"], key: Key, time: Int[Array, ""]
) -> tuple[Float[Array, "episodes act"], State]:
    """One decision in every episode."""
    keys = jax.vmap(_key, (None, 0, None))(key, jnp.arange(len(obs)), time)
    return act_many(agent, state, obs, keys)


@eqx.filter_jit
def _observe(agent: AbstractAgent, state: State, steps: Transition) -> State:
    return jax.vmap(agent.observe)(state, steps)
