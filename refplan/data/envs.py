"""The Gymnasium ids refplan adds, registered without importing a simulator."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownEnv:
    """An environment whose robot and physics refplan knows."""

    env_id: str
    robot: str  # a key of physics.ROBOTS
    flavour: str = "v5"  # "v5" (current) or "d4rl"
    world: str = "flat"  # or one of the RQ4 worlds
    entry_point: str | None = None  # None: Gymnasium's own


KNOWN_ENVS = {
    "hopper": KnownEnv("Hopper-v5", "hopper"),
    "halfcheetah": KnownEnv("HalfCheetah-v5", "halfcheetah"),
    "walker2d": KnownEnv("Walker2d-v5", "walker2d"),
    "hopper-d4rl": KnownEnv("refplan/HopperD4RL-v0", "hopper", "d4rl", entry_point="HopperD4RL"),
    "halfcheetah-d4rl": KnownEnv("refplan/HalfCheetahD4RL-v0", "halfcheetah", "d4rl", entry_point="HalfCheetahD4RL"),
    "walker2d-d4rl": KnownEnv("refplan/Walker2dD4RL-v0", "walker2d", "d4rl", entry_point="Walker2dD4RL"),
} | {
    f"halfcheetah-{world}": KnownEnv(
        f"refplan/HalfCheetah{world.capitalize()}-v{version}",
        "halfcheetah",
        world=world,
        entry_point=f"HalfCheetah{world.capitalize()}",
    )
    # Terrains of version 0 had a seam every tenth of a metre, over which robots stumbled.
    for world, version in (("joint", 0), ("hill", 1), ("gentle", 1), ("steep", 1), ("field", 1))
}
HORIZON = 1000  # of all of them


def register_envs() -> None:
    """Add refplan's ids to Gymnasium's registry; calling it again changes nothing."""
    from gymnasium.envs.registration import register, registry

    for env in KNOWN_ENVS.values():
        if env.entry_point is not None and env.env_id not in registry:
            register(env.env_id, entry_point=f"refplan.data.worlds:{env.entry_point}", max_episode_steps=HORIZON)


def known_env(env_id: str) -> tuple[str, KnownEnv] | None:
    """Our name and record of a Gymnasium id, if it is one of ours."""
    return next(((name, env) for name, env in KNOWN_ENVS.items() if env.env_id == env_id), None)


def world_version(name: str) -> dict[str, str]:
    """What to add to all a result depends on: the version of a world that has been changed since its first one.

    First versions say nothing, so that results keep the names they had before there were others.
    """
    env_id = KNOWN_ENVS[name].env_id if name in KNOWN_ENVS else ""
    return {"env": env_id} if env_id.startswith("refplan/") and not env_id.endswith("-v0") else {}
