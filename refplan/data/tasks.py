"""`Task`: where an agent is judged: an environment, its horizon and bounds, its scores, when it ends."""

import contextlib
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from refplan.data.envs import HORIZON, KNOWN_ENVS, KnownEnv, known_env, register_envs
from refplan.data.physics import ROBOTS, Termination
from refplan.errors import MissingExtraError, RefplanError, unknown_name

if TYPE_CHECKING:
    import gymnasium as gym

    from refplan.data.dataset import Dataset


@dataclass(frozen=True)
class References:
    """The returns that count as 0 and as 100, and who said so."""

    low: float
    high: float
    source: str


@dataclass(frozen=True, eq=False)
class Task:
    """An environment and what is known about it.

    `termination(obs, action, next_obs)` is a pure JAX rule, true when the world ends at next_obs; None means unknown,
    to be learned from data. `env_id` None means that there is only data: nothing can be simulated.
    """

    name: str
    env_id: str | None
    horizon: int
    obs_dim: int
    action_dim: int
    low: Float[np.ndarray, " act"]
    high: Float[np.ndarray, " act"]
    references: References | None = None
    termination: Termination | None = None
    reward: Callable[..., Any] | None = None
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def make(self, **kwargs: Any) -> "gym.Env":
        """The Gymnasium environment; keyword arguments go to `gymnasium.make`."""
        if self.env_id is None:
            raise RefplanError(
                f"task '{self.name}' has no environment, only data, so nothing can be simulated. If the data came from "
                "a Gymnasium environment, set its id: dataset.replace_meta(env_id='...')."
            )
        settings = {"max_episode_steps": self.horizon, "disable_env_checker": True, **self.env_kwargs, **kwargs}
        return _make_env(self.env_id, **settings)

    def score(self, returns: Any) -> Any:
        """100 (return - low) / (high - low), for one return or an array of them; None without references."""
        if self.references is None:
            return None
        low, high = self.references.low, self.references.high
        return 100.0 * (np.asarray(returns, np.float64) - low) / (high - low)


def task(name: str, **env_kwargs: Any) -> Task:
    """The task of a name: one of ours (`TASKS`), or any Gymnasium id with Box spaces.

    Keyword arguments go to the environment, e.g. `task("halfcheetah-hill", heights="original")`.
    """
    ours = known_env(name)
    name = ours[0] if ours else name
    if name in TASKS:
        return TASKS[name](**env_kwargs)
    return _measured_task(name, env_kwargs)


def task_for(dataset: "Dataset") -> Task:
    """The task a dataset was recorded in, from its metadata.

    References in the metadata win over the published ones. Without an env id the task has no environment, a horizon as
    long as the longest episode, and the action bounds the metadata states, else -1 and 1 if all logged actions lie
    inside, else their smallest and largest value.
    """
    meta = dataset.meta
    found = _data_only(dataset) if meta.env_id is None else task(_name_with_flavour(meta.env_id, meta.flavour))
    if (found.obs_dim, found.action_dim) != (dataset.obs_dim, dataset.action_dim):
        raise RefplanError(
            f"dataset '{meta.name}': the environment '{meta.env_id}' does not match the data: it has observations of "
            f"size {found.obs_dim} and actions of size {found.action_dim}, the data {dataset.obs_dim} and "
            f"{dataset.action_dim}. Correct the env id in the data."
        )
    if meta.ref_min is not None and meta.ref_max is not None:
        found = replace(found, references=References(meta.ref_min, meta.ref_max, meta.ref_source or meta.source))
    return found


def _name_with_flavour(env_id: str, flavour: str) -> str:
    """Our D4RL-faithful name when the data asks for those physics of a robot we know, else the id itself."""
    if flavour not in ("v5", "d4rl"):
        raise unknown_name("flavour of physics", flavour, ["v5", "d4rl"])
    robot = re.sub(r"-v\d+$", "", env_id).lower()
    return f"{robot}-d4rl" if flavour == "d4rl" and robot in ROBOTS else env_id


def _known_task(name: str, env: KnownEnv, **env_kwargs: Any) -> Task:
    """A task from constants alone: no simulator is imported and no environment made."""
    robot = ROBOTS[env.robot]
    if env_kwargs and env.world == "flat":
        raise RefplanError(
            f"task '{name}' takes no settings, got {', '.join(env_kwargs)}: its termination rule and scores hold for "
            "the standard environment only. Register your variant as a Gymnasium id of its own and use that id."
        )
    source = "D4RL reference returns (random policy, expert)"
    if env.world != "flat":
        source += ", of the flat HalfCheetah: this world has no published ones"
    return Task(
        name=name,
        env_id=env.env_id,
        env_kwargs=env_kwargs,
        horizon=HORIZON,
        obs_dim=robot.obs_dim,
        action_dim=robot.action_dim,
        low=-np.ones(robot.action_dim, np.float32),
        high=np.ones(robot.action_dim, np.float32),
        references=References(robot.return_min, robot.return_max, source),
        termination=robot.termination,
    )


TASKS: dict[str, Callable[..., Task]] = {name: partial(_known_task, name, env) for name, env in KNOWN_ENVS.items()}


def _data_only(dataset: "Dataset") -> Task:
    actions, meta = dataset.actions, dataset.meta
    if meta.action_low is not None and meta.action_high is not None:
        low, high = np.asarray(meta.action_low, np.float32), np.asarray(meta.action_high, np.float32)
    elif np.abs(actions).max() <= 1.0:
        low, high = -np.ones(dataset.action_dim, np.float32), np.ones(dataset.action_dim, np.float32)
    else:
        low, high = actions.min(axis=0), actions.max(axis=0)
    horizon = int(dataset.lengths.max()) if dataset.sequential else HORIZON
    return Task(dataset.meta.name, None, horizon, dataset.obs_dim, dataset.action_dim, low, high)


def _measured_task(env_id: str, env_kwargs: dict[str, Any]) -> Task:
    """A task for any Gymnasium id: sizes, bounds and horizon are read from the environment itself."""
    env = _make_env(env_id, **env_kwargs)
    try:
        obs_dim = _flat_size(env_id, "observation", env.observation_space)
        action_dim = _flat_size(env_id, "action", env.action_space)
        low, high = env.action_space.low, env.action_space.high  # ty: ignore[missing-attribute]
        horizon = env.spec.max_episode_steps if env.spec else None
    finally:
        env.close()
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise RefplanError(
            f"environment '{env_id}': its actions are unbounded, and planning needs bounds. Register it with a "
            "gymnasium.wrappers.RescaleAction or ClipAction around it."
        )
    low, high = low.astype(np.float32), high.astype(np.float32)
    return Task(env_id, env_id, horizon or HORIZON, obs_dim, action_dim, low, high, env_kwargs=env_kwargs)


def _flat_size(env_id: str, what: str, space: Any) -> int:
    from gymnasium.spaces import Box

    if isinstance(space, Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating):
        return space.shape[0]
    raise RefplanError(
        f"environment '{env_id}': its {what} space is {space}, but refplan needs a Box of real numbers with one axis. "
        "Register it with a wrapper that flattens it (gymnasium.wrappers.FlattenObservation); discrete actions and "
        "images are not supported."
    )


def _make_env(env_id: str, **kwargs: Any) -> "gym.Env":
    """`gymnasium.make` with errors a person can act on."""
    import gymnasium as gym
    from gymnasium import error

    register_envs()
    try:
        with _clean_output(env_id):
            return gym.make(env_id, **kwargs)
    except (error.NameNotFound, error.NamespaceNotFound, error.VersionNotFound, error.UnregisteredEnv):
        near = difflib.get_close_matches(env_id, gym.registry, n=2)
        more = " Any registered Gymnasium id with Box spaces works too."
        raise unknown_name("task", env_id, {*TASKS, *near}, more) from None
    except (error.DependencyNotInstalled, ModuleNotFoundError) as problem:
        if "mujoco" in str(problem).lower() or "imageio" in str(problem).lower():
            raise MissingExtraError("mujoco", "mujoco", f"simulating '{env_id}'") from None
        raise RefplanError(f"environment '{env_id}' cannot be made: {problem}") from None
    except (error.Error, ImportError, TypeError) as problem:
        if isinstance(problem, TypeError) and "unexpected keyword" not in str(problem):
            raise
        raise RefplanError(f"environment '{env_id}' cannot be made: {problem}") from None


def _clean_output(env_id: str) -> contextlib.AbstractContextManager[None]:
    """Keeps MuJoCo's complaint about Gymnasium's half_cheetah.xml off the screen."""
    if not env_id.startswith("HalfCheetah-"):
        return contextlib.nullcontext()
    from refplan.data.worlds import without_total_mass_warning

    return without_total_mass_warning()
