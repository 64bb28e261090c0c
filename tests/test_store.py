import json
import tomllib

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refplan.agent import RandomAgent
from refplan.errors import RefplanError
from refplan.nn import make_mlp
from refplan.result import Result
from refplan.settings import differences, settings_of, to_toml
from refplan.store import COLUMNS, append_results, load_run, read_results, result_row, save


def agent() -> RandomAgent:
    return RandomAgent(-jnp.ones(2), jnp.ones(2))


def make_result() -> Result:
    returns = np.array([1.0, 2.0, 4.0])
    return Result("random", "hopper", returns, np.array([5, 6, 7]), 10 * returns, (1, 2, 3), 0.5, 1.5, 100.0, 2.0)


def test_a_run_folder_comes_back_whole(tmp_path):
    net = make_mlp((2, 3, 1), jr.key(0))
    save(tmp_path / "x", seeds=[0, 1], wall_s=2.5, prior=agent(), model=net, data={"task": "hopper", "rows": 5})
    parts = load_run(tmp_path / "x")
    assert bool(eqx.tree_equal(parts["model"], net))
    assert bool(eqx.tree_equal(parts["prior"], agent()))
    assert parts["data"] == {"task": "hopper", "rows": 5}
    made = parts["provenance"]
    assert made["seeds"] == [0, 1]
    assert made["wall_s"] == 2.5
    assert {"command", "commit", "versions", "machine"} <= set(made)
    assert made["versions"]["jax"]


def test_the_command_reads_as_it_was_typed(monkeypatch):
    from refplan.provenance import command

    for first in ("/somewhere/bin/refplan", "/somewhere/refplan/__main__.py"):
        monkeypatch.setattr("sys.argv", [first, "evaluate", "my run", "--seed", "1"])
        assert command() == "refplan evaluate 'my run' --seed 1"


def test_saving_again_keeps_the_other_parts(tmp_path):
    save(tmp_path, prior=agent())
    save(tmp_path, data={"task": "hopper"})
    assert set(load_run(tmp_path)) == {"prior", "data", "provenance"}


def test_parts_can_be_left_behind(tmp_path):
    save(tmp_path, old={"x": 1}, kept={"x": 2})
    save(tmp_path, without={"old", "new"}, new={"x": 3})
    assert load_run(tmp_path).keys() - {"provenance"} == {"kept", "new"}, "what is saved now is not left out"


def test_damage_is_named(tmp_path):
    with pytest.raises(RefplanError, match="no such run folder"):
        load_run(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RefplanError, match=r"no run\.toml"):
        load_run(tmp_path / "empty")
    save(tmp_path / "x", prior=agent())
    weights = tmp_path / "x" / "prior.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-4])
    with pytest.raises(RefplanError, match="checksum"):
        load_run(tmp_path / "x")
    weights.unlink()
    with pytest.raises(RefplanError, match="not copied whole"):
        load_run(tmp_path / "x")
    (tmp_path / "x" / "run.toml").write_text("[refplan]\nformat = 99\n")
    with pytest.raises(RefplanError, match="upgrade refplan"):
        load_run(tmp_path / "x")
    (tmp_path / "x" / "run.toml").write_text("not [toml")
    with pytest.raises(RefplanError, match="cannot be read"):
        load_run(tmp_path / "x")
    with pytest.raises(RefplanError, match="part name"):
        save(tmp_path / "y", **{"../escape": agent()})


def test_parts_may_have_the_names_of_beliefs(tmp_path):
    save(tmp_path, **{"refined-worlds": agent()})
    assert "refined-worlds" in load_run(tmp_path)


def test_result_rows_have_the_promised_columns_and_grow(tmp_path):
    path = tmp_path / "results.csv"
    row = result_row(make_result(), dataset="d", prior="cql", planner="loop", seed=1, settings={"kappa": 5})
    append_results(path, [row])
    append_results(path, [{**row, "seed": 2, "note": "more"}])
    rows = read_results(path)
    assert [r["seed"] for r in rows] == ["1", "2"]
    assert list(rows[0])[: len(COLUMNS)] == list(COLUMNS)
    assert float(rows[0]["score"]) == pytest.approx(70 / 3)
    assert float(rows[0]["score_lo"]) <= float(rows[0]["score"]) <= float(rows[0]["score_hi"])
    assert json.loads(rows[0]["settings"]) == {"kappa": 5}
    assert rows[1]["note"] == "more"
    with pytest.raises(RefplanError, match="no such results"):
        read_results(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RefplanError, match="another kind of CSV"):
        append_results(tmp_path / "other.csv", [row])


PLAIN = st.one_of(
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), PLAIN))
def test_toml_round_trip(table):
    assert tomllib.loads(to_toml({"t": table}))["t"] == table


def test_settings_read_as_they_were_typed():
    class Inner(eqx.Module):
        rate: jnp.ndarray = eqx.field(converter=jnp.asarray, default=0.1)

    class Outer(eqx.Module):
        inner: Inner
        hidden: tuple = (2, 3)

    found = settings_of(Outer(Inner()))
    assert found == {"inner.rate": 0.1, "hidden": [2, 3]}
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2}) == ["a.b: 1 -> 3"]
