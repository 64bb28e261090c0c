"""The D4RL dataset names and what is known about them without opening a file (`algorithms.md` 7.1 and 7.3)."""

import re
from dataclasses import replace

from refplan.data.dataset import Meta

D4RL_ENVS = ("hopper", "halfcheetah", "walker2d", "ant")
D4RL_KINDS = ("random", "medium", "expert", "medium-replay", "full-replay", "medium-expert")
D4RL_NAMES = tuple(f"{env}-{kind}-v2" for env in D4RL_ENVS for kind in D4RL_KINDS)
D4RL_SOURCE = "D4RL reference returns (d4rl/infos.py)"
_ENV_IDS = {"hopper": "Hopper-v5", "halfcheetah": "HalfCheetah-v5", "walker2d": "Walker2d-v5"}
_ANT_RETURNS = (-325.6, 3879.7)


def d4rl_file_name(name: str) -> str:
    """`hopper-medium-replay-v2` -> `hopper_medium_replay-v2.hdf5`, the file's public name."""
    stem, version = name.rsplit("-", 1)
    return f"{stem.replace('-', '_')}-{version}.hdf5"


def d4rl_name_of_file(stem: str) -> str | None:
    """The D4RL name a file name stands for, with either spelling; None for other files."""
    name = re.sub(r"_", "-", stem)
    return name if name in D4RL_NAMES else None


def d4rl_meta(name: str, source: str = "") -> Meta:
    """Environment, physics and reference returns of a D4RL dataset.

    Ant has no env id: D4RL recorded 111 observations, which no current Gymnasium Ant returns by default.
    """
    from refplan.data.physics import ROBOTS

    env = name.split("-")[0]
    low, high = (ROBOTS[env].return_min, ROBOTS[env].return_max) if env in ROBOTS else _ANT_RETURNS
    size = ROBOTS[env].action_dim if env in ROBOTS else 8
    meta = Meta(name, _ENV_IDS.get(env), "d4rl", f"D4RL {name}", low, high, D4RL_SOURCE, source)
    return replace(meta, action_low=(-1.0,) * size, action_high=(1.0,) * size)
