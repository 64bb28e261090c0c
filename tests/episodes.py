"""Small logged episodes and the ways to write them, shared by the tests of data sources."""

import h5py
import numpy as np

ROBOT = {"obs": 11, "act": 3}  # Hopper's sizes


def make_episodes(lengths=(5, 3, 7, 4), ends=("terminated", "truncated", "terminated", None), seed=0) -> list[dict]:
    """Episodes with T+1 observations, states and one flag for the end (None: cut without a flag)."""
    random = np.random.default_rng(seed)
    episodes = []
    for steps, end in zip(lengths, ends, strict=True):
        episodes.append(
            {
                "observations": random.normal(size=(steps + 1, ROBOT["obs"])).astype(np.float32),
                "actions": random.uniform(-0.9, 0.9, size=(steps, ROBOT["act"])).astype(np.float32),
                "rewards": random.normal(size=steps).astype(np.float32),
                "qpos": random.normal(size=(steps, 6)).astype(np.float32),
                "qvel": random.normal(size=(steps, 6)).astype(np.float32),
                "terminated": end == "terminated",
                "truncated": end == "truncated",
            }
        )
    return episodes


def flat(episodes: list[dict]) -> dict[str, np.ndarray]:
    """The same episodes as flat arrays with true successors."""
    arrays = {name: np.concatenate([e[name] for e in episodes]) for name in ("actions", "rewards", "qpos", "qvel")}
    arrays["observations"] = np.concatenate([e["observations"][:-1] for e in episodes])
    arrays["next_observations"] = np.concatenate([e["observations"][1:] for e in episodes])
    last = np.cumsum([len(e["rewards"]) for e in episodes]) - 1
    for flag in ("terminated", "truncated"):
        arrays[flag] = np.zeros(len(arrays["rewards"]), bool)
        arrays[flag][last] = [e[flag] for e in episodes]
    return arrays


def write_d4rl(path, arrays: dict[str, np.ndarray], **changes) -> None:
    """A file in D4RL's layout; `changes` replace arrays, None leaves one out."""
    names = {"terminated": "terminals", "truncated": "timeouts", "qpos": "infos/qpos", "qvel": "infos/qvel"}
    with h5py.File(path, "w") as file:
        for name, array in {**arrays, **changes}.items():
            if array is not None:
                file[names.get(name, name)] = array
        file["metadata/algorithm"] = np.bytes_("SAC")
        file["metadata/policy/fc0/weight"] = np.zeros((2, 2))
