"""Many episodes of a task side by side.

`BatchSimulator` steps the robots refplan knows through `mujoco.batch` on all cores, bit for bit as Gymnasium would;
`LoopSimulator` steps any Gymnasium environment one after another.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from refplan.data.envs import KNOWN_ENVS, known_env
from refplan.data.physics import ROBOTS
from refplan.data.render import Camera, Frame
from refplan.data.tasks import Task
from refplan.errors import RefplanError

Step = tuple[
    Float[np.ndarray, "episodes obs"],
    Float[np.ndarray, " episodes"],
    Bool[np.ndarray, " episodes"],
    Bool[np.ndarray, " episodes"],
]


class AbstractSimulator(ABC):
    """Episodes side by side; an episode that has ended stands still, earns nothing and keeps its flags."""

    def __init__(self, task: Task, episodes: int):
        self.task, self.episodes = task, episodes
        self._obs: np.ndarray | None = None
        self._terminated = np.zeros(episodes, bool)
        self._truncated = np.zeros(episodes, bool)
        self._cameras: dict[int, Camera] = {}

    def reset(self, seeds: Sequence[int]) -> Float[np.ndarray, "episodes obs"]:
        """Start every episode exactly as `env.reset(seed=...)` does."""
        if len(seeds) != self.episodes:
            raise RefplanError(f"{len(seeds)} seeds for {self.episodes} episodes of '{self.task.name}'; give one each.")
        self._obs = np.zeros((self.episodes, self.task.obs_dim))
        return self.restart(range(self.episodes), seeds)

    def restart(self, rows: Sequence[int], seeds: Sequence[int]) -> Float[np.ndarray, "episodes obs"]:
        """Start some episodes anew, as `env.reset(seed=...)` does; the others stay where they are."""
        obs = self._need_reset()
        self._close_cameras()
        index = np.asarray(rows, np.int64)
        obs[index] = self._restart(index, seeds)
        self._terminated[index], self._truncated[index] = False, False
        return obs.copy()

    def set_states(
        self, qpos: Float[np.ndarray, "episodes q"], qvel: Float[np.ndarray, "episodes v"]
    ) -> Float[np.ndarray, "episodes obs"]:
        """Put freshly reset episodes into simulator states; what a reset drew besides (terrain, joint) stays."""
        self._need_reset()
        self._obs = self._set_states(np.asarray(qpos, np.float64), np.asarray(qvel, np.float64))
        return self._obs.copy()

    def step(
        self, actions: Float[np.ndarray, "episodes act"], live: Bool[np.ndarray, " episodes"] | None = None
    ) -> Step:
        """One action in every episode that has not ended and that `live` does not mask out."""
        obs = self._need_reset()
        moving = ~(self._terminated | self._truncated)
        if live is not None:
            moving &= live
        rewards = np.zeros(self.episodes)
        if moving.any():
            rows = np.flatnonzero(moving)
            obs[rows], rewards[rows], self._terminated[rows], self._truncated[rows] = self._step(
                np.asarray(actions)[rows], rows
            )
        return obs.copy(), rewards, self._terminated.copy(), self._truncated.copy()

    @abstractmethod
    def states(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(qpos, qvel) of all episodes; None where the environment has no such thing."""

    @abstractmethod
    def frame(self, episode: int) -> Frame:
        """A picture of one episode now."""

    def close(self) -> None:
        """Free what the simulation holds."""
        self._close_cameras()

    @abstractmethod
    def _restart(self, rows: np.ndarray, seeds: Sequence[int]) -> np.ndarray:
        """Start `rows` anew; returns their observations."""

    @abstractmethod
    def _set_states(self, qpos: np.ndarray, qvel: np.ndarray) -> np.ndarray: ...

    @abstractmethod
    def _step(self, actions: np.ndarray, rows: np.ndarray) -> tuple[Any, Any, Any, Any]:
        """Step only `rows`, which `actions` belong to; returns their obs, rewards, terminated, truncated."""

    def _need_reset(self) -> np.ndarray:
        if self._obs is None:
            raise RefplanError(f"the simulator of '{self.task.name}' has not been reset; call reset(seeds) first.")
        return self._obs

    def _close_cameras(self) -> None:
        for camera in self._cameras.values():
            camera.close()
        self._cameras = {}


class BatchSimulator(AbstractSimulator):
    """The known robots and worlds, stepped by `mujoco.batch` with Gymnasium's formulas on whole arrays."""

    def __init__(self, task: Task, episodes: int):
        super().__init__(task, episodes)
        from mujoco.batch import Batch

        known = known_env(task.env_id or "")
        if known is None:
            raise RefplanError(f"'{task.name}' cannot be batched: it is not one of {', '.join(KNOWN_ENVS)}.")
        self._known, self._robot = known[1], ROBOTS[known[1].robot]
        self._gym = task.make()
        self._env: Any = self._gym.unwrapped
        self._batch = Batch(self._env.model, episodes)
        self._qpos, self._qvel, self._ctrl = (self._batch.bind(name) for name in ("qpos", "qvel", "ctrl"))
        self._elapsed = np.zeros(episodes, np.int64)
        self._fresh = np.array(self._batch.state)
        self._gains = np.ones((episodes, task.action_dim))
        self._models: list[Any] = [self._env.model] * episodes

    def _restart(self, rows: np.ndarray, seeds: Sequence[int]) -> np.ndarray:
        import mujoco

        for row, seed in zip(rows, seeds, strict=True):
            self._gym.reset(seed=int(seed))
            mujoco.mj_getState(
                self._env.model, self._env.data, self._batch.state[row], mujoco.mjtState.mjSTATE_INTEGRATION
            )
            if self._known.world == "joint":
                self._gains[row] = self._env.gains
            if self._known.world == "field":  # every episode has its own ground
                self._models[row] = copy.copy(self._env.model)
        if self._known.world == "field":
            self._batch.set_models(self._models)
        self._elapsed[rows] = 0
        self._fresh[rows] = self._batch.state[rows]
        return self._robot.observe(self._qpos[rows], self._qvel[rows])

    def revive(self) -> None:
        """Every episode back to the state of its reset, solver memory included, whatever happened since."""
        self._need_reset()
        self._terminated[:], self._truncated[:], self._elapsed[:] = False, False, 0
        self._batch.state[:] = self._fresh

    def _set_states(self, qpos: np.ndarray, qvel: np.ndarray) -> np.ndarray:
        self._qpos[:], self._qvel[:] = qpos, qvel
        self._batch.forward()
        return self._robot.observe(self._qpos, self._qvel)

    def _step(self, actions: np.ndarray, rows: np.ndarray) -> tuple[Any, Any, Any, Any]:
        robot, env = self._robot, self._env
        if self._known.world == "joint":
            from refplan.data.worlds import weaken

            failed = (self._elapsed[rows] >= env.fail_at)[:, None]
            actions = np.where(failed, weaken(actions, self._gains[rows]), actions)
        before = self._qpos[rows, 0]
        self._ctrl[rows] = actions
        self._batch.step(rows.astype(np.int32), nstep=env.frame_skip)
        self._elapsed[rows] += 1
        qpos, qvel = self._qpos[rows], self._qvel[rows]
        healthy = robot.healthy(qpos, qvel)
        forward = (qpos[:, 0] - before) / env.dt
        bonus = robot.healthy_bonus * (healthy | (self._known.flavour == "d4rl"))
        # In the precision of the actions, like Gymnasium, or the last bits of the reward differ.
        cost = robot.control_cost * np.sum(np.square(actions), axis=1)
        return robot.observe(qpos, qvel), forward + bonus - cost, ~healthy, self._elapsed[rows] >= self.task.horizon

    def states(self) -> tuple[np.ndarray, np.ndarray]:
        """(qpos, qvel) of all episodes."""
        return self._qpos.copy(), self._qvel.copy()

    def frame(self, episode: int) -> Frame:
        """A picture of one episode now."""
        self._need_reset()
        which = episode if self._known.world == "field" else 0
        if which not in self._cameras:
            self._cameras[which] = Camera(self._batch.get_model(episode))
        return self._cameras[which].frame(self._batch.get_data(episode))

    def close(self) -> None:
        """Free what the simulation holds."""
        super().close()
        self._gym.close()


class LoopSimulator(AbstractSimulator):
    """Any Gymnasium environment, one copy per episode, stepped one after another."""

    def __init__(self, task: Task, episodes: int):
        super().__init__(task, episodes)
        first = task.make()
        self._is_mujoco = hasattr(first.unwrapped, "set_state") and hasattr(first.unwrapped, "model")
        modes = first.metadata.get("render_modes") or []
        settings = {"render_mode": "rgb_array"} if "rgb_array" in modes and not self._is_mujoco else {}
        first.close()
        self._envs = [task.make(**settings) for _ in range(episodes)]

    def _restart(self, rows: np.ndarray, seeds: Sequence[int]) -> np.ndarray:
        return np.stack([self._envs[row].reset(seed=int(seed))[0] for row, seed in zip(rows, seeds, strict=True)])

    def _set_states(self, qpos: np.ndarray, qvel: np.ndarray) -> np.ndarray:
        if not self._is_mujoco:
            raise RefplanError(f"'{self.task.name}' is not a MuJoCo environment; its simulator state cannot be set.")
        worlds: list[Any] = [env.unwrapped for env in self._envs]
        for world, position, velocity in zip(worlds, qpos, qvel, strict=True):
            world.set_state(position, velocity)
        return np.stack([world._get_obs() for world in worlds])

    def _step(self, actions: np.ndarray, rows: np.ndarray) -> tuple[Any, Any, Any, Any]:
        steps = [self._envs[row].step(action) for row, action in zip(rows, actions, strict=True)]
        obs, rewards, terminated, truncated, _ = zip(*steps, strict=True)
        return np.stack(obs), rewards, terminated, truncated

    def states(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(qpos, qvel) of all episodes; None where the environment is not MuJoCo."""
        if not self._is_mujoco:
            return None
        worlds: list[Any] = [env.unwrapped for env in self._envs]
        return np.stack([w.data.qpos.copy() for w in worlds]), np.stack([w.data.qvel.copy() for w in worlds])

    def frame(self, episode: int) -> Frame:
        """A picture of one episode now."""
        env = self._envs[episode]
        if not self._is_mujoco:
            return _rendered(env, self.task.name)
        world: Any = env.unwrapped
        if episode not in self._cameras:
            self._cameras[episode] = Camera(world.model)
        return self._cameras[episode].frame(world.data)

    def close(self) -> None:
        """Free what the simulation holds."""
        super().close()
        for env in self._envs:
            env.close()


def _rendered(env: Any, name: str) -> Frame:
    from gymnasium.error import DependencyNotInstalled

    try:
        frame = env.render()
    except DependencyNotInstalled as problem:
        raise RefplanError(f"'{name}' cannot be drawn: {problem}") from None
    if not isinstance(frame, np.ndarray):
        raise RefplanError(f"'{name}' draws no pictures: its environment has no render mode 'rgb_array'.")
    return frame


def can_batch(task: Task) -> bool:
    """Whether `mujoco.batch` is there (MuJoCo 3.17 and later) and refplan knows the task's formulas."""
    try:
        import mujoco.batch  # noqa: F401
    except ImportError:
        return False
    return task.env_id is not None and known_env(task.env_id) is not None


def make_simulator(task: Task, episodes: int, batched: bool | None = None) -> AbstractSimulator:
    """The fastest simulator that can run the task; `batched` forces one or the other."""
    if episodes < 1:
        raise RefplanError(f"a simulator needs at least one episode, got {episodes}.")
    if batched is None:
        batched = can_batch(task)
    elif batched and not can_batch(task):
        raise RefplanError(
            f"'{task.name}' cannot be batched: that needs MuJoCo 3.17 or later and one of {', '.join(KNOWN_ENVS)}."
        )
    return BatchSimulator(task, episodes) if batched else LoopSimulator(task, episodes)
