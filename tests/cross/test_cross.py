"""Files made now by the installed libraries, read without them, against the libraries' own actions.

Runs only in the cross-library environment: `make test-cross`.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")

import jax
import jax.numpy as jnp
import jax.random as jr
import torch
from torch import nn

from refplan.priors.external import corl_normaliser, from_callable, from_d3rlpy, from_onnx, from_sb3, load_policy
from refplan.priors.foreign.torch_file import load_torch

# torch's exporters and d3rlpy's old gym warn about themselves
pytestmark = [pytest.mark.filterwarnings("default")]


def load_maker():
    path = Path(__file__).with_name("make_fixtures.py")
    spec = importlib.util.spec_from_file_location("make_fixtures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = load_maker()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    return folder, maker.make_all(folder)


def act(policy, obs):
    return np.asarray(jax.vmap(lambda o: policy.act((), o, jr.key(0))[0])(jnp.asarray(obs, jnp.float32)))


def test_every_file_gives_its_librarys_actions(made):
    folder, records = made
    for name, record in records.items():
        options = {key: record[key] for key in ("low", "high") if key in record}
        if "statistics" in record:
            options["normaliser"] = corl_normaliser(np.array(record["statistics"], np.float32))
        policy = load_policy(folder / name, **options)
        np.testing.assert_allclose(act(policy, record["observations"]), record["actions"], atol=1e-5, err_msg=name)


def test_the_kept_fixtures_are_what_the_script_makes(made):
    _, records = made
    kept = json.loads((maker.FOLDER / "actions.json").read_text())
    assert kept.keys() == records.keys()
    for name, record in records.items():
        np.testing.assert_allclose(kept[name]["actions"], record["actions"], atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "config", ["SACConfig", "AWACConfig", "TD3Config", "TD3PlusBCConfig", "DDPGConfig", "CalQLConfig"]
)
def test_further_d3rlpy_algorithms(config, tmp_path):
    record = maker.make_d3rlpy("x.d3", config, tmp_path)
    np.testing.assert_allclose(
        act(from_d3rlpy(tmp_path / "x.d3"), record["observations"]), record["actions"], atol=1e-5
    )


@pytest.mark.parametrize(("algorithm", "policy"), [("DDPG", {}), ("A2C", {}), ("SAC", {"activation_fn": nn.SiLU})])
def test_further_sb3_algorithms(algorithm, policy, tmp_path):
    record = maker.make_sb3("x.zip", algorithm, tmp_path, **policy)
    np.testing.assert_allclose(act(from_sb3(tmp_path / "x.zip"), record["observations"]), record["actions"], atol=1e-5)


def test_sac_log_probability_equals_sb3(made):
    """SB3's density is that of the action in [-1, 1]; ours that of the world's: they differ by the scale."""
    from stable_baselines3 import SAC

    folder, records = made
    model, policy = SAC.load(folder / "sb3_sac.zip"), from_sb3(folder / "sb3_sac.zip")
    obs = torch.tensor(records["sb3_sac.zip"]["observations"])
    with torch.no_grad():
        unit, expected = model.actor.action_log_prob(obs)
    world = jax.vmap(policy.to_world)(jnp.asarray(unit.numpy()))
    ours = jax.vmap(policy.log_prob)(jnp.asarray(obs.numpy()), world)
    scale = np.log(0.5 * (maker.HIGH - maker.LOW)).sum()
    inside = np.abs(unit.numpy()).max(axis=1) < 0.99  # SB3 adds 1e-6 inside its logarithm, which shows at the border
    assert inside.sum() >= 4
    np.testing.assert_allclose(ours[inside] + scale, expected.numpy()[inside], atol=5e-3)


def test_reader_is_bit_equal_to_torch_load(tmp_path):
    base = torch.randn(6, 4)
    state = {
        "float": base,
        "transposed": base.T,
        "slice": base[1:4, ::2],
        "double": base.double(),
        "half": base.half(),
        "brain": base.bfloat16(),
        "long": torch.arange(5),
        "flag": torch.tensor([True, False]),
        "number": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "parameter": nn.Parameter(base),
        "nested": [1, "two", {"three": (3.0, None)}],
    }
    torch.save(state, tmp_path / "x.pt")
    read = load_torch((tmp_path / "x.pt").read_bytes(), "x.pt")
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert read[name].shape == tuple(value.shape)
            np.testing.assert_array_equal(read[name].astype(np.float64), value.detach().double().numpy())
    assert read["nested"] == state["nested"]


def test_a_torch_module_as_a_callable(made):
    from stable_baselines3 import SAC

    folder, records = made
    model = SAC.load(folder / "sb3_sac.zip")
    policy = from_callable(lambda obs: model.predict(obs, deterministic=True)[0], maker.LOW, maker.HIGH)
    record = records["sb3_sac.zip"]
    np.testing.assert_allclose(act(policy, record["observations"]), record["actions"], atol=1e-5)
    net = nn.Linear(maker.OBS, maker.ACTIONS)
    with_gradients = from_callable(lambda obs: net(torch.as_tensor(obs)), maker.LOW, maker.HIGH)
    assert np.isfinite(act(with_gradients, record["observations"])).all()


class Squashed(nn.Module):
    """SAC's mean path: what an exported SB3 actor answers, in [-1, 1]."""

    def __init__(self, actor):
        super().__init__()
        self.latent, self.mu = actor.latent_pi, actor.mu

    def forward(self, obs):
        return torch.tanh(self.mu(self.latent(obs)))


def test_an_exported_actor_with_a_fixed_batch(made, tmp_path):
    from stable_baselines3 import SAC

    folder, records = made
    actor = Squashed(SAC.load(folder / "sb3_sac.zip").actor)
    path = tmp_path / "actor.onnx"
    torch.onnx.export(actor, (torch.zeros(1, maker.OBS),), str(path), dynamo=False)
    record = records["sb3_sac.zip"]
    policy = from_onnx(path, maker.LOW, maker.HIGH, unit=True)
    np.testing.assert_allclose(act(policy, record["observations"]), record["actions"], atol=1e-5)
