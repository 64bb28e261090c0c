"""Foreign policies: files made by the libraries themselves (tests/cross/make_fixtures.py) give their actions."""

import json
import pickle
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.errors import MissingExtraError, RefplanError
from refplan.files import save_arrays
from refplan.modules import save_module
from refplan.nn import Normaliser, identity_normaliser
from refplan.priors.external import (
    corl_normaliser,
    from_callable,
    from_corl,
    from_d3rlpy,
    from_onnx,
    from_sb3,
    load_policy,
)

FOLDER = Path(__file__).parent / "fixtures" / "policies"
RECORDS = json.loads((FOLDER / "actions.json").read_text())


def options_of(record):
    options = {name: record[name] for name in ("low", "high") if name in record}
    if "statistics" in record:
        options["normaliser"] = corl_normaliser(np.array(record["statistics"], np.float32))
    return options


def actions_of(policy, obs):
    act = jax.jit(jax.vmap(lambda o: policy.act((), o, jr.key(0))[0]))
    return np.asarray(act(jnp.asarray(obs, jnp.float32)))


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_actions_equal_the_original_library(name):
    record = RECORDS[name]
    actions = actions_of(load_policy(FOLDER / name, **options_of(record)), record["observations"])
    expected = np.array(record["actions"])
    assert expected.std(axis=0).min() > 0.05  # the recorded actions do depend on the observation
    np.testing.assert_allclose(actions, expected, atol=1e-5)


def test_sac_distribution_equals_the_original_library():
    record = RECORDS["sb3_sac.zip"]
    mean, log_std = jax.vmap(from_sb3(FOLDER / "sb3_sac.zip").distribution)(jnp.array(record["observations"]))
    np.testing.assert_allclose(mean, record["mean"], atol=2e-5)
    np.testing.assert_allclose(log_std, record["log_std"], atol=2e-5)


def test_heads_and_bounds_are_recognised():
    heads = {name: load_policy(FOLDER / name, **options_of(RECORDS[name])).head for name in RECORDS}
    assert heads == {
        "sb3_sac.zip": "tanh_gaussian",
        "sb3_sac_tanh.zip": "tanh_gaussian",
        "sb3_td3.zip": "deterministic",
        "sb3_ppo.zip": "gaussian",
        "d3rlpy_cql.d3": "tanh_gaussian",
        "d3rlpy_iql.d3": "gaussian_tanh_mean",
        "d3rlpy_bc.d3": "deterministic",
        "corl_cql.pt": "tanh_gaussian",
        "corl_iql.pt": "gaussian_tanh_mean",
        "corl_edac.pt": "tanh_gaussian",
        "corl_awac.pt": "gaussian",
        "corl_td3_bc.pt": "deterministic",
    }
    for name in ("sb3_sac.zip", "sb3_ppo.zip", "d3rlpy_cql.d3"):
        policy = load_policy(FOLDER / name)
        np.testing.assert_allclose(policy.low, [-2.0, -0.5])
        np.testing.assert_allclose(policy.high, [1.0, 0.75])


def test_ppo_samples_have_the_spread_of_the_file():
    policy = from_sb3(FOLDER / "sb3_ppo.zip", low=-100.0, high=100.0)  # wide bounds: nothing is clipped
    obs = jnp.array(RECORDS["sb3_ppo.zip"]["observations"][0])
    draws, _ = jax.vmap(lambda k: policy.sample((), obs, k))(jr.split(jr.key(1), 4000))
    state = zipfile.ZipFile(FOLDER / "sb3_ppo.zip").read("policy.pth")
    from refplan.priors.foreign.torch_file import load_torch

    std = np.exp(load_torch(state, "policy.pth")["log_std"])
    np.testing.assert_allclose(np.std(draws, axis=0), std, rtol=0.05)


def rewrite_zip(source, target, **parts):
    """A copy of a zip with some members replaced, or left out where the new content is None."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = parts.get(name.replace(".", "_"), old.read(name))
            if content is not None:
                new.writestr(name, content)
    return target


def test_sb3_asks_for_bounds_it_cannot_read(tmp_path):
    settings = json.loads(zipfile.ZipFile(FOLDER / "sb3_sac.zip").read("data"))
    settings["action_space"] = {":serialized:": settings["action_space"][":serialized:"]}
    path = rewrite_zip(FOLDER / "sb3_sac.zip", tmp_path / "x.zip", data=json.dumps(settings))
    with pytest.raises(RefplanError, match=r"from_sb3\(path, low, high\)"):
        from_sb3(path)
    record = RECORDS["sb3_sac.zip"]
    actions = actions_of(from_sb3(path, [-2.0, -0.5], [1.0, 0.75]), record["observations"])
    np.testing.assert_allclose(actions, record["actions"], atol=1e-5)


def test_sb3_reads_the_activation_and_refuses_unknown_ones(tmp_path):
    settings = json.loads(zipfile.ZipFile(FOLDER / "sb3_sac.zip").read("data"))
    for name, expected in (("Tanh", jnp.tanh), ("SiLU", jax.nn.swish)):
        settings["policy_kwargs"] = {"activation_fn": f"<class 'torch.nn.modules.activation.{name}'>"}
        path = rewrite_zip(FOLDER / "sb3_sac.zip", tmp_path / "x.zip", data=json.dumps(settings))
        assert from_sb3(path).net.activation is expected
    settings["policy_kwargs"] = {"activation_fn": "<class 'torch.nn.modules.activation.ELU'>"}
    path = rewrite_zip(FOLDER / "sb3_sac.zip", tmp_path / "x.zip", data=json.dumps(settings))
    with pytest.raises(RefplanError, match="unknown activation 'elu'"):
        from_sb3(path)


def test_sb3_never_decodes_the_pickled_fields(tmp_path):
    settings = json.loads(zipfile.ZipFile(FOLDER / "sb3_sac.zip").read("data"))
    for value in settings.values():
        if isinstance(value, dict) and ":serialized:" in value:
            value[":serialized:"] = "not base64 at all"
    path = rewrite_zip(FOLDER / "sb3_sac.zip", tmp_path / "x.zip", data=json.dumps(settings))
    record = RECORDS["sb3_sac.zip"]
    np.testing.assert_allclose(actions_of(from_sb3(path), record["observations"]), record["actions"], atol=1e-5)


def change_d3(tmp_path, change):
    outer = pickle.loads((FOLDER / "d3rlpy_cql.d3").read_bytes())  # our own fixture
    config = json.loads(outer["config"])
    change(config["config"])
    path = tmp_path / "x.d3"
    path.write_bytes(pickle.dumps({**outer, "config": json.dumps(config)}))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["params"]["observation_scaler"].update(type="pixel"), "unknown observation scaler 'pixel'"),
        (lambda c: c["params"]["action_scaler"].update(type="custom"), "unknown action scaler 'custom'"),
        (lambda c: c["params"]["observation_scaler"]["params"].update(mean=None), "was it fitted"),
        (lambda c: c["params"]["observation_scaler"]["params"].update(std=[0.0] * 5, eps=0.0), "divides by zero"),
        (lambda c: c["params"]["actor_encoder_factory"].update(type="simba"), "type 'simba'"),
        (lambda c: c["params"]["actor_encoder_factory"]["params"].update(activation="geglu"), "activation 'geglu'"),
        (lambda c: c.update(type="plas"), "unknown d3rlpy actor 'plas'"),
        (lambda c: c.update(type="td3"), "no '_fc.weight'"),
        (lambda c: c.pop("params"), "not a d3rlpy 2 file"),
    ],
)
def test_d3rlpy_settings_that_are_not_understood_are_refused(tmp_path, change, message):
    with pytest.raises(RefplanError, match=message):
        from_d3rlpy(change_d3(tmp_path, change))


def test_corl_asks_for_what_its_files_do_not_hold(tmp_path):
    with pytest.raises(RefplanError, match=r"from_corl\(path, low, high\)"):
        load_policy(FOLDER / "corl_cql.pt")
    with pytest.raises(RefplanError, match="corl_normaliser"):
        from_corl(FOLDER / "corl_cql.pt", -1.0, 1.0)
    copy = tmp_path / "checkpoint_9.pt"
    copy.write_bytes((FOLDER / "corl_cql.pt").read_bytes())
    (tmp_path / "config.yaml").write_text("env: hopper-medium-v2\nnormalize: false\n")
    obs = np.array(RECORDS["corl_cql.pt"]["observations"])
    raw = from_corl(FOLDER / "corl_cql.pt", -1.0, 1.0, normaliser=identity_normaliser(5))
    np.testing.assert_array_equal(actions_of(from_corl(copy, -1.0, 1.0), obs), actions_of(raw, obs))


def test_corl_log_std_has_its_factor_and_offset():
    record = RECORDS["corl_cql.pt"]
    path, given = FOLDER / "corl_cql.pt", options_of(record)
    policy = from_corl(path, **given)
    from refplan.priors.foreign.torch_file import load_torch

    actor = load_torch(path.read_bytes(), "corl", stubs=True)["actor"]
    h = np.asarray(given["normaliser"](jnp.array(record["observations"][0])))
    for layer in (0, 2, 4):
        h = np.maximum(actor[f"base_network.{layer}.weight"] @ h + actor[f"base_network.{layer}.bias"], 0.0)
    raw = (actor["base_network.6.weight"] @ h + actor["base_network.6.bias"])[2:]
    expected = actor["log_std_multiplier.constant"] * raw + actor["log_std_offset.constant"]
    log_std = policy.distribution(jnp.array(record["observations"][0]))[1]
    np.testing.assert_allclose(log_std, np.clip(expected, -20.0, 2.0), atol=1e-5)


def test_an_actor_with_more_in_it_is_refused():
    from refplan.priors.foreign.weights import ActorWeights

    layer = {"mu.0.weight": np.ones((2, 3)), "mu.0.bias": np.ones(2)}
    weights = ActorWeights({**layer, "norm.weight": np.ones(3)}, "x.zip")
    assert [w.shape for w, _ in weights.sequence("mu")] == [(3, 2)]
    with pytest.raises(RefplanError, match=r"no place for: norm\.weight"):
        weights.finish()
    with pytest.raises(RefplanError, match="no linear layer"):
        ActorWeights({"mu.0.weight": np.ones(3), "mu.0.bias": np.ones(3)}, "x.zip").sequence("mu")


def test_load_policy_refuses_what_it_does_not_know(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"hello")
    for path, message in ((tmp_path / "x.bin", "not a policy file"), (tmp_path / "missing", "no such file")):
        with pytest.raises(RefplanError, match=message):
            load_policy(path)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(RefplanError, match="not a policy file"):
        load_policy(tmp_path / "x.zip")
    with pytest.raises(RefplanError, match=r"no option kappa \(its options: noise\)"):
        load_policy(FOLDER / "d3rlpy_cql.d3", kappa=1.0)


def test_load_policy_reads_refplans_own_files(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        f"{layer}_{part}": rng.normal(size=(*shape, 4) if layer[0] == "l" and layer != "ls" else (*shape, 2))
        for layer, inputs in (("l0", 3), ("l1", 4), ("mu", 4), ("ls", 4))
        for part, shape in (("w", (inputs,)), ("b", ()))
    }
    arrays = {name: value.astype(np.float32) for name, value in arrays.items()}
    np.savez(tmp_path / "x.npz", **arrays)
    save_arrays(tmp_path / "x.safetensors", arrays, {})
    policy = load_policy(tmp_path / "x.npz")
    save_module(tmp_path / "saved.safetensors", policy)
    obs = rng.normal(size=(6, 3))
    expected = actions_of(policy, obs)
    for name in ("x.safetensors", "saved.safetensors"):
        np.testing.assert_array_equal(actions_of(load_policy(tmp_path / name), obs), expected)
    save_module(tmp_path / "other.safetensors", Normaliser(jnp.zeros(2), jnp.ones(2)))
    with pytest.raises(RefplanError, match="holds a Normaliser"):
        load_policy(tmp_path / "other.safetensors")


MATRIX = np.array([[0.5, -1.0], [0.25, 0.5], [0.0, 2.0]], np.float32)


def test_callable_is_one_call_under_nested_vmaps_and_stays_in_bounds():
    shapes = []

    def function(obs):
        shapes.append(obs.shape)
        return obs @ MATRIX

    policy = from_callable(function, [-1.0, -2.0], [1.0, 2.0])
    obs = jr.normal(jr.key(0), (4, 5, 3)) * 2.0
    act = jax.jit(jax.vmap(jax.vmap(lambda o: policy.act((), o, jr.key(0))[0])))
    actions = np.asarray(act(obs))
    assert shapes == [(20, 3)]
    np.testing.assert_allclose(actions, np.clip(np.asarray(obs) @ MATRIX, [-1.0, -2.0], [1.0, 2.0]), atol=1e-6)


def test_callable_noise_and_its_log_probability():
    policy = from_callable(lambda obs: 0.0 * obs[:, :1] + 0.5, [0.0], [4.0], noise=0.1)
    keys = jr.split(jr.key(0), 2000)
    actions, log_probs = jax.jit(jax.vmap(lambda k: policy.sample((), jnp.ones(3), k)))(keys)
    assert abs(float(actions.std()) - 0.2) < 0.01
    expected = -0.5 * ((actions[:, 0] - 0.5) / 0.2) ** 2 - np.log(0.2) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(log_probs, expected, atol=1e-3)
    certain = from_callable(lambda obs: 0.0 * obs[:, :1] + 0.5, [0.0], [4.0])
    action, log_prob = certain.sample((), jnp.ones(3), jr.key(0))
    assert (float(action[0]), float(log_prob)) == (0.5, 0.0)


def test_callable_own_samples_follow_the_key():
    def draw(obs, generator):
        noise = generator.normal(size=(len(obs), 2))
        return obs @ MATRIX + 0.1 * noise, -noise.sum(axis=1)

    policy = from_callable(lambda obs: obs @ MATRIX, [-9.0, -9.0], [9.0, 9.0], sample_function=draw)
    many = jax.jit(jax.vmap(lambda k: policy.sample((), jnp.ones(3), k)))
    first, again, other = (many(jr.split(jr.key(seed), 6)) for seed in (0, 0, 1))
    assert first[0].shape == (6, 2) and first[1].shape == (6,)
    np.testing.assert_array_equal(first[0], again[0])
    assert not np.allclose(first[0], other[0])
    assert len(np.unique(np.asarray(first[1]))) == 6
    noise = (np.asarray(first[0]) - MATRIX.sum(axis=0)) / 0.1
    np.testing.assert_allclose(-noise.sum(axis=1), first[1], atol=1e-4)


def test_callable_row_by_row_equals_batched():
    def one(obs):
        assert obs.shape == (3,)
        return obs @ MATRIX

    rows = from_callable(one, [-9.0, -9.0], [9.0, 9.0], batched=False)
    batch = from_callable(lambda obs: obs @ MATRIX, [-9.0, -9.0], [9.0, 9.0])
    obs = np.random.default_rng(0).normal(size=(7, 3))
    np.testing.assert_allclose(actions_of(rows, obs), actions_of(batch, obs), atol=1e-6)


def test_callable_errors_say_what_went_wrong():
    def broken(obs):
        raise ZeroDivisionError("the wheel came off")

    for function, message in (
        (broken, "policy function failed on 4 observations: ZeroDivisionError: the wheel came off"),
        (lambda obs: obs[0], r"returned shape \(3,\) where \(4, 2\) was expected"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            actions_of(from_callable(function, [-1.0, -1.0], [1.0, 1.0]), np.ones((4, 3)))
    for low, high in (([0.0, 0.0], [1.0, 0.0]), ([0.0], [1.0, 2.0, 3.0]), (0.0, 1.0), ([0.0], [np.inf])):
        with pytest.raises(RefplanError, match="action bounds"):
            from_callable(broken, low, high)


def test_callable_nan_becomes_the_middle():
    policy = from_callable(lambda obs: np.full((len(obs), 2), np.nan), [0.0, 0.0], [2.0, 4.0])
    np.testing.assert_array_equal(actions_of(policy, np.ones((3, 3))), [[1.0, 2.0]] * 3)


def onnx_file(path, batch, middle_batch=None):
    """obs @ MATRIX as a graph; with `middle_batch` a Reshape inside holds that batch size as a constant."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    nodes = [helper.make_node("MatMul", ["obs", "matrix"], ["product"])]
    weights = [numpy_helper.from_array(MATRIX, "matrix")]
    if middle_batch is None:
        nodes.append(helper.make_node("Identity", ["product"], ["action"]))
    else:
        weights.append(numpy_helper.from_array(np.array([middle_batch, 2], np.int64), "shape"))
        nodes.append(helper.make_node("Reshape", ["product", "shape"], ["action"]))
    nodes.append(helper.make_node("Tanh", ["action"], ["squashed"]))
    graph = helper.make_graph(
        nodes,
        "policy",
        [helper.make_tensor_value_info("obs", TensorProto.FLOAT, [batch, 3])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 2]) for name in ("action", "squashed")],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, str(path))
    return path


@pytest.mark.parametrize(("batch", "middle"), [("rows", None), (1, None), (4, None), (1, 1), (4, 4)])
def test_onnx_with_free_and_fixed_batches(tmp_path, batch, middle):
    path = onnx_file(tmp_path / "x.onnx", batch, middle)
    obs = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    policy = load_policy(path, low=[-9.0, -9.0], high=[9.0, 9.0])
    np.testing.assert_allclose(actions_of(policy, obs), obs @ MATRIX, atol=1e-5)
    squashed = from_onnx(path, [0.0, 0.0], [2.0, 4.0], output="squashed", unit=True)
    np.testing.assert_allclose(actions_of(squashed, obs), [1.0, 2.0] + [1.0, 2.0] * np.tanh(obs @ MATRIX), atol=1e-5)


def test_onnx_errors(tmp_path):
    with pytest.raises(RefplanError, match="Give low"):
        load_policy(onnx_file(tmp_path / "x.onnx", 1))
    with pytest.raises(RefplanError, match="no output 'q'; it has action, squashed"):
        from_onnx(tmp_path / "x.onnx", [-1.0, -1.0], [1.0, 1.0], output="q")
    (tmp_path / "bad.onnx").write_bytes(b"hello")
    with pytest.raises(RefplanError, match="not a readable ONNX graph"):
        from_onnx(tmp_path / "bad.onnx", [-1.0, -1.0], [1.0, 1.0])


def test_onnx_names_the_missing_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"refplan\[onnx\]"):
        from_onnx(tmp_path / "x.onnx", [-1.0, -1.0], [1.0, 1.0])


def test_damaged_files_never_fail_with_anything_but_a_clear_error(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("sb3_sac.zip", "d3rlpy_cql.d3", "corl_cql.pt"):
        whole = (FOLDER / name).read_bytes()
        copies = [whole[: int(len(whole) * part)] for part in (0.0, 0.01, 0.3, 0.9, 0.999)]
        for _ in range(60):
            flipped = bytearray(whole)
            for at in rng.integers(0, len(whole), 8):
                flipped[at] ^= int(rng.integers(1, 256))
            copies.append(bytes(flipped))
        for copy in copies:
            path = tmp_path / name
            path.write_bytes(copy)
            try:
                load_policy(path, **options_of(RECORDS[name]))
            except RefplanError as error:
                assert name in str(error)
