"""Make the policy files of tests/fixtures/policies with the libraries themselves, and record their actions.

Run in the cross-library environment (see `make test-cross`): python tests/cross/make_fixtures.py [folder]
"""

import io
import itertools
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

OBS, ACTIONS, ROWS = 5, 2, 16
LOW, HIGH = np.array([-2.0, -0.5], np.float32), np.array([1.0, 0.75], np.float32)
FOLDER = Path(__file__).parent.parent / "fixtures" / "policies"
Record = dict[str, object]


class TinyWorld(gym.Env):
    """Spaces to build policies for; it is never stepped."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    action_space = gym.spaces.Box(LOW, HIGH, dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(OBS, np.float32), {}


class Scalar(nn.Module):
    """What CORL's CQL pickles whole, as `__main__.Scalar`."""

    def __init__(self, value: float):
        super().__init__()
        self.constant = nn.Parameter(torch.tensor(value))


def observations(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, OBS)).astype(np.float32) * 2.0


def spread(module: nn.Module) -> None:
    """Larger random weights than a fresh network's, so that actions and log-stds vary."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def record(obs: np.ndarray, actions: np.ndarray, library: str, **more: object) -> Record:
    versions = {name: version(name) for name in ("torch", library) if name}
    return {"observations": obs.tolist(), "actions": np.asarray(actions).tolist(), "versions": versions, **more}


def make_sb3(name: str, algorithm: str, folder: Path, **policy: object) -> Record:
    """An SB3 zip; for SAC also the Gaussian behind its actions."""
    import stable_baselines3

    kind = getattr(stable_baselines3, algorithm)
    small = {"PPO": {"n_steps": 8, "batch_size": 8}, "A2C": {"n_steps": 8}}.get(algorithm, {"buffer_size": 8})
    model = kind("MlpPolicy", TinyWorld(), policy_kwargs={"net_arch": [16, 16], **policy}, seed=0, **small)
    spread(model.policy.actor if hasattr(model.policy, "actor") and model.policy.actor is not None else model.policy)
    model.save(folder / name)
    obs = observations(1)
    more = {}
    if algorithm == "SAC":
        with torch.no_grad():
            mean, log_std, _ = model.actor.get_action_dist_params(torch.as_tensor(obs))
        more = {"mean": mean.tolist(), "log_std": log_std.tolist()}
    return record(obs, model.predict(obs, deterministic=True)[0], "stable_baselines3", **more)


def make_d3rlpy(name: str, config: str, folder: Path, scalers: bool = True, **options: object) -> Record:
    import d3rlpy

    encoder = d3rlpy.models.VectorEncoderFactory([12, 12], activation="tanh" if config == "IQLConfig" else "relu")
    if scalers:
        values = observations(2)
        options["action_scaler"] = d3rlpy.preprocessing.MinMaxActionScaler(minimum=LOW, maximum=HIGH)
        options["observation_scaler"] = (
            d3rlpy.preprocessing.MinMaxObservationScaler(minimum=values.min(0), maximum=values.max(0))
            if config == "IQLConfig"
            else d3rlpy.preprocessing.StandardObservationScaler(mean=values.mean(0), std=values.std(0))
        )
    if config == "BCConfig":
        options["encoder_factory"] = encoder
    else:
        options |= {"actor_encoder_factory": encoder, "critic_encoder_factory": encoder}
    if config == "IQLConfig":
        options["value_encoder_factory"] = encoder
    model = getattr(d3rlpy.algos, config)(**options).create(device="cpu:0")
    model.create_impl((OBS,), ACTIONS)
    spread(model.impl.policy)
    model.save(str(folder / name))
    obs = observations(3)
    return record(obs, model.predict(obs), "d3rlpy")


def mlp(*sizes: int, end: nn.Module | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *([end] if end else []))


class Holder(nn.Module):
    """A module with the given parts, to give state dicts CORL's names."""

    def __init__(self, **parts: nn.Module | nn.Parameter):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def corl_cql() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor], dict]:
    actor = Holder(
        base_network=mlp(OBS, 16, 16, 16, 2 * ACTIONS), log_std_multiplier=Scalar(1.0), log_std_offset=Scalar(-1.0)
    )
    # CORL saves these modules themselves, not their state dicts
    more = {"sac_log_alpha": Scalar(0.0), "cql_log_alpha": Scalar(1.0), "total_it": 3}
    return actor, lambda x: torch.tanh(actor.base_network(x).chunk(2, -1)[0]), more


def corl_iql() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor], dict]:
    actor = Holder(net=Holder(net=mlp(OBS, 16, 16, ACTIONS, end=nn.Tanh())), log_std=nn.Parameter(torch.zeros(ACTIONS)))
    return actor, lambda x: actor.net.net(x), {"vf": mlp(OBS, 8, 1).state_dict(), "total_it": 3}


def corl_edac() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor], dict]:
    trunk = nn.Sequential(*mlp(OBS, 16, 16), nn.ReLU())
    actor = Holder(trunk=trunk, mu=nn.Linear(16, ACTIONS), log_sigma=nn.Linear(16, ACTIONS))
    return actor, lambda x: torch.tanh(actor.mu(actor.trunk(x))), {"log_alpha": 0.1}


def corl_awac() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor], dict]:
    """AWAC's mean is in the world's units and not squashed."""
    actor = Holder(_mlp=mlp(OBS, 16, 16, ACTIONS), _log_std=nn.Parameter(torch.zeros(ACTIONS)))
    return actor, lambda x: actor._mlp(x).clamp(-1.5, 1.5) / 1.5, {}


def corl_td3_bc() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor], dict]:
    actor = Holder(net=mlp(OBS, 16, 16, ACTIONS, end=nn.Tanh()))
    return actor, lambda x: actor.net(x), {"total_it": 3}


def make_corl(name: str, build: Callable, folder: Path) -> Record:
    """A checkpoint with CORL's layout; `max_action` is 1.5, as in a world whose actions are in [-1.5, 1.5]."""
    actor, act, more = build()
    spread(actor)
    optimiser = torch.optim.Adam(actor.parameters())
    act(torch.zeros(1, OBS)).sum().backward()
    optimiser.step()
    # as if this script were CORL's own: it runs as __main__ there
    Scalar.__module__ = "__main__"
    sys.modules["__main__"].Scalar = Scalar
    buffer = io.BytesIO()
    torch.save({"actor": actor.state_dict(), "actor_optim": optimiser.state_dict(), **more}, buffer)
    (folder / name).write_bytes(buffer.getvalue())
    obs, statistics = observations(4), observations(5)
    scaled = obs if build is corl_edac else (obs - statistics.mean(0)) / (statistics.std(0) + 1e-3)
    with torch.no_grad():
        actions = 1.5 * act(torch.as_tensor(scaled))
    extra = {} if build is corl_edac else {"statistics": statistics.tolist()}
    return record(obs, actions.numpy(), "", low=-1.5, high=1.5, **extra)


def make_all(folder: Path) -> dict[str, Record]:
    """Every file and what its own library answers."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "sb3_sac.zip": make_sb3("sb3_sac.zip", "SAC", folder),
        "sb3_sac_tanh.zip": make_sb3("sb3_sac_tanh.zip", "SAC", folder, activation_fn=nn.Tanh),
        "sb3_td3.zip": make_sb3("sb3_td3.zip", "TD3", folder),
        "sb3_ppo.zip": make_sb3("sb3_ppo.zip", "PPO", folder),
        "d3rlpy_cql.d3": make_d3rlpy("d3rlpy_cql.d3", "CQLConfig", folder),
        "d3rlpy_iql.d3": make_d3rlpy("d3rlpy_iql.d3", "IQLConfig", folder),
        "d3rlpy_bc.d3": make_d3rlpy("d3rlpy_bc.d3", "BCConfig", folder, scalers=False),
        "corl_cql.pt": make_corl("corl_cql.pt", corl_cql, folder),
        "corl_iql.pt": make_corl("corl_iql.pt", corl_iql, folder),
        "corl_edac.pt": make_corl("corl_edac.pt", corl_edac, folder),
        "corl_awac.pt": make_corl("corl_awac.pt", corl_awac, folder),
        "corl_td3_bc.pt": make_corl("corl_td3_bc.pt", corl_td3_bc, folder),
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    records = make_all(folder)
    (folder / "actions.json").write_text(json.dumps(records, indent=None, separators=(",", ":")) + "\n")
    for name in records:
        size = (folder / name).stat().st_size
        assert size < 60_000, f"{name} has {size} bytes, too many for a fixture"
        print(f"{name}: {size} bytes")


if __name__ == "__main__":
    main()
