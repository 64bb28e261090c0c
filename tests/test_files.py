import functools
import json
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from safetensors.numpy import save_file

from refplan.agent import RandomAgent
from refplan.errors import RefplanError
from refplan.files import FORMAT, atomic_path, load_arrays, save_arrays, write_text
from refplan.modules import load_leaves, load_module, register, save_leaves, save_module
from refplan.nn import fit_normaliser, make_ensemble, make_mlp


def test_module_round_trip_keeps_every_bit_and_every_choice(tmp_path):
    net = make_ensemble(2, (3, 4, 2), jr.key(0), jax.nn.swish)
    save_module(tmp_path / "net.safetensors", net)
    back = load_module(tmp_path / "net.safetensors")
    assert eqx.tree_equal(net, back) is True or bool(eqx.tree_equal(net, back))
    assert back.activation is jax.nn.swish


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_leaves_round_trip_with_keys(tmp_path):
    tree = {"a": jnp.arange(3.0), "key": jr.key(7), "n": jnp.asarray(3), "static": "word"}
    save_leaves(tmp_path / "c", tree, {"step": 4})
    like = {"a": jnp.zeros(3), "key": jr.key(0), "n": jnp.asarray(0), "static": "word"}
    back, header = load_leaves(tmp_path / "c", like)
    assert header["step"] == 4
    assert np.array_equal(back["a"], tree["a"])
    assert jr.normal(back["key"]) == jr.normal(tree["key"])


def test_leaves_of_other_settings_are_refused(tmp_path):
    save_leaves(tmp_path / "c", make_mlp((3, 4, 1), jr.key(0)))
    with pytest.raises(RefplanError, match="shape"):
        load_leaves(tmp_path / "c", make_mlp((3, 5, 1), jr.key(0)))
    with pytest.raises(RefplanError, match="other settings"):
        load_leaves(tmp_path / "c", make_mlp((3, 4, 4, 1), jr.key(0)))


@pytest.mark.parametrize("keep", [0, 7, 100, 0.9])
def test_truncated_files_say_so(tmp_path, keep):
    path = tmp_path / "x"
    save_module(path, make_mlp((3, 40, 1), jr.key(0)))
    raw = path.read_bytes()
    path.write_bytes(raw[: int(keep * len(raw)) if keep < 1 else keep])
    with pytest.raises(RefplanError, match="damaged or cut short"):
        load_module(path)


def test_foreign_newer_and_missing_files(tmp_path):
    with pytest.raises(RefplanError, match="no such file"):
        load_arrays(tmp_path / "none")
    save_file({"x": np.zeros(2)}, str(tmp_path / "foreign"))
    with pytest.raises(RefplanError, match="not written by refplan"):
        load_arrays(tmp_path / "foreign")
    save_file({}, str(tmp_path / "new"), metadata={"refplan": json.dumps({"format": FORMAT + 1, "version": "9"})})
    with pytest.raises(RefplanError, match="newer than this refplan"):
        load_arrays(tmp_path / "new")
    save_file({}, str(tmp_path / "odd"), metadata={"refplan": "not json"})
    with pytest.raises(RefplanError, match="header is damaged"):
        load_arrays(tmp_path / "odd")
    save_arrays(tmp_path / "bare", {"x": np.zeros(1)}, {})
    with pytest.raises(RefplanError, match="no object"):
        load_module(tmp_path / "bare")


@pytest.mark.parametrize("kind", ["os:system", "subprocess:Popen", "refplan.modules:re", "refplan.cli:main"])
def test_a_file_cannot_name_code_to_run(tmp_path, kind):
    structure = {"class": kind, "fields": {}}
    save_arrays(tmp_path / "bad", {}, {"structure": structure})
    with pytest.raises(RefplanError):
        load_module(tmp_path / "bad")


def halve(x):
    return 0.5 * x


class Mine(eqx.Module):
    x: jax.Array
    later: int = 3


def test_own_classes_need_registering_and_new_fields_take_defaults(tmp_path):
    with pytest.raises(RefplanError, match=r"decorate it with refplan\.register\."):
        save_module(tmp_path / "m", Mine(jnp.ones(2)))
    register(Mine)
    save_module(tmp_path / "m", Mine(jnp.ones(2)))
    arrays, header = load_arrays(tmp_path / "m")
    del header["structure"]["fields"]["later"]
    save_arrays(tmp_path / "older", arrays, header)
    assert load_module(tmp_path / "older").later == 3
    del header["structure"]["fields"]["x"]
    save_arrays(tmp_path / "older", arrays, header)
    with pytest.raises(RefplanError, match="older refplan"):
        load_module(tmp_path / "older")


def test_own_functions_need_registering_and_are_found_by_name(tmp_path, monkeypatch):
    net = make_mlp((1, 1, 1), jr.key(0), halve)
    with pytest.raises(RefplanError, match=r"test_files:halve.*decorate it with refplan\.register"):
        save_module(tmp_path / "net", net)
    monkeypatch.setattr("refplan.modules._EXTRA_FUNCTIONS", {})
    assert register(halve) is halve
    save_module(tmp_path / "net", net)
    assert load_module(tmp_path / "net").activation is halve
    monkeypatch.setattr("refplan.modules._EXTRA_FUNCTIONS", {})
    with pytest.raises(RefplanError, match=r"function 'test_files:halve', which is not registered"):
        load_module(tmp_path / "net")


def test_functions_without_a_name_of_their_own_are_not_registered():
    def inner(x):
        return x

    for wrong in (lambda x: x, inner, Mine(jnp.ones(2)).__init__, 3, functools.partial(halve)):
        with pytest.raises(RefplanError, match="cannot register"):
            register(wrong)


def test_lambdas_cannot_be_saved(tmp_path):
    net = make_mlp((1, 1, 1), jr.key(0), lambda x: x)
    with pytest.raises(RefplanError, match="without pickling"):
        save_module(tmp_path / "x", net)


def test_another_process_reads_the_same_agent(tmp_path):
    agent = RandomAgent(jnp.asarray([-2.0, -1.0]), jnp.asarray([2.0, 0.5]))
    save_module(tmp_path / "agent", agent)
    code = (
        "import sys, jax.random as jr, jax.numpy as jnp; from refplan.modules import load_module;"
        "a = load_module(sys.argv[1]); print(a.act((), jnp.zeros(3), jr.key(1))[0].tolist())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "agent")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path.cwd(),
    ).stdout
    assert json.loads(out) == agent.act((), jnp.zeros(3), jr.key(1))[0].tolist()


def test_normaliser_centres_constant_columns_and_inverts():
    x = np.stack([np.full(50, 3.0), np.linspace(-1, 1, 50)], 1)
    normaliser = fit_normaliser(x)
    z = normaliser(jnp.asarray(x, jnp.float32))
    assert np.allclose(z.mean(0), 0, atol=1e-6)
    assert np.allclose(z.std(0), [0, 1], atol=1e-5)
    assert np.allclose(normaliser.inverse(z), x, atol=1e-6)
