"""The paper's experiments: what is declared, what is made once, what happens when something dies, what is drawn."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from refplan.agent import AbstractAgent
from refplan.bench.estimate import START_S, STEP_S, Speed, cell_seconds
from refplan.cli import main
from refplan.data.envs import KNOWN_ENVS
from refplan.dynamics.worlds import AbstractWorlds
from refplan.errors import MissingExtraError, RefplanError
from refplan.experiments.build import Builder
from refplan.experiments.cells import Cell, Graph
from refplan.experiments.cluster import RayExecutor, pack, unpack
from refplan.experiments.local import LocalExecutor
from refplan.experiments.recipes import NAMES, SCALES, change_scale, load_recipe, published
from refplan.experiments.shelf import Data, Shelf, find_shelf
from refplan.experiments.spread import ActionSpread
from refplan.experiments.sweep import Store, sweep
from refplan.report.paper import aggregate_table, make_tables, measured
from refplan.report.paper_page import draw
from refplan.stats import iqm
from refplan.store import read_results, write_results

pytest.importorskip("mujoco")
BUNDLED = Path(__file__).parent.parent / "refplan" / "data" / "bundled"
ROBOTS = ("hopper", "halfcheetah", "walker2d")
KINDS = {"R": "random", "M": "medium", "MR": "medium-replay", "ME": "medium-expert", "FR": "full-replay"}


@pytest.fixture(scope="module")
def names_only(tmp_path_factory) -> Shelf:
    """A folder with a file for every dataset; nothing in them, which is enough to plan with."""
    folder = tmp_path_factory.mktemp("names")
    for robot in ROBOTS:
        for kind in KINDS.values():
            (folder / f"{robot}-{kind}.hdf5").write_text(f"{robot}-{kind}")
    return Shelf(folder)


def build(shelf, *names, scale="cpu", beliefs=("belief",), **changes) -> Graph:
    graph = Graph(shelf)
    for name in names:
        recipe = load_recipe(name)
        Builder(graph, recipe, scale, recipe.scale(scale, changes), beliefs).build()
    return graph


def count(graph, kind):
    return sum(cell.kind == kind for cell in graph.cells.values())


# What is declared


def test_the_papers_numbers_are_typed_in_correctly():
    """The tables of the paper, read from its own text, against the file that ships."""
    text = (Path(__file__).parent / "fixtures" / "paper_result_tables.tex").read_text(encoding="utf-8")
    tables = re.split(r"\\begin\{table\*?\}", text)[1:]
    found = {name: set() for name in ("rq1", "rq2", "budget", "rq4", "nm-train", "priors", "runtime")}
    robot_blocks = re.compile(r"\{90\}\{(\w+)\}")
    for prior, body in zip(*[iter(re.split(r"\{\*\}\{(CQL|MAPLE|COMBO)\}", tables[0])[1:])] * 2, strict=True):
        for robot, line in re.findall(r"& (Hopper|HalfCheetah|Walker2d) &(.*?)\\\\", body):
            found["rq1"] |= {(prior.lower(), robot.lower(), a, v) for a, v in zip(AGENTS1, numbers(line), strict=True)}
    for name, table, agents in (("rq2", 1, ("prior", "loop", "refplan")), ("priors", 5, ("published", "reproduced"))):
        columns = [(prior, agent) for prior in ("cql", "edac", "mopo", "combo", "maple") for agent in agents]
        for robot, body in pairs(robot_blocks.split(tables[table])[1:]):
            for short, line in re.findall(r"^\s*& (R|M|MR|ME|FR)\s+&(.*?)\\\\", body, re.DOTALL | re.MULTILINE):
                for (prior, agent), value in zip(columns, numbers(line), strict=True):
                    found[name] |= {(prior, robot.lower(), KINDS[short], agent, value)} if value is not None else set()
    for robot, body in pairs(re.split(r"\{\*\}\{(Hopper|Walker2d|HalfCheetah)\}", tables[2])[1:]):
        for short, line in re.findall(r"& (MR|FR) &(.*?)\\\\", body):
            for agent, value in zip(("loop 16x", "refplan"), numbers(line), strict=True):
                found["budget"].add((robot.lower(), KINDS[short], agent, value))
    for world, line in re.findall(r"\\textit\{(\w+)\} &(.*?)\\\\", tables[3]):
        for agent, value in zip(("prior", "loop", "refplan"), numbers(line), strict=True):
            found["rq4"].add((f"halfcheetah-{world}", agent, value))
    for prior, half in zip(("mopo", "combo"), tables[4].split(r"\begin{minipage}")[1:], strict=True):
        for robot, body in pairs(robot_blocks.split(half)[1:]):
            for short, line in re.findall(r"& (M|MR|ME) +&(.*?)\\\\", body, re.DOTALL):
                for agent, value in zip(("prior", "nm", "nm + refplan", "refplan"), numbers(line), strict=True):
                    row = (prior, robot.lower(), KINDS[short], agent, value)
                    found["nm-train"] |= {row} if value is not None else set()
    times = re.findall(r"([\d.]+)s", tables[6])
    parts = [(robot, agent) for robot in ROBOTS for agent in ("encoder", "decoder")]
    found["runtime"] = {(*part, "", "", float(t)) for part, t in zip(parts, times, strict=True)}
    for horizon, line in re.findall(r"^\s*([24]) &(.*?)\\\\", tables[7], re.MULTILINE):
        for latents, (head, power) in enumerate(re.findall(r"([\d.]+) ?\\times ?10\^\{(-\d)\}", line), 1):
            row = ("halfcheetah", "refplan", horizon, str(latents), float(f"{head}e{power}"))
            found["runtime"].add(row)
    keys = {
        "rq1": ("prior", "robot", "agent"),
        "rq2": ("prior", "robot", "kind", "agent"),
        "budget": ("robot", "kind", "agent"),
        "rq4": ("world", "agent"),
        "nm-train": ("prior", "robot", "kind", "agent"),
        "priors": ("prior", "robot", "kind", "agent"),
        "runtime": ("robot", "agent", "horizon", "latents"),
    }
    for name, parts in keys.items():
        shipped = {(*(row[part] for part in parts), float(row["value"])) for row in published(name)}
        assert shipped == found[name], name
    assert {name: len(rows) for name, rows in found.items()} == {
        "rq1": 36, "rq2": 225, "budget": 12, "rq4": 15, "nm-train": 68, "priors": 141, "runtime": 14
    }  # fmt: skip


AGENTS1 = ("orig", "prior", "loop", "refplan")


def pairs(items):
    return zip(items[::2], items[1::2], strict=True)


def numbers(line):
    """The first number of every cell; None for a dash."""
    found = [re.search(r"\d+(?:\.\d+)?", cell.replace("^*", "")) for cell in line.split("&")]
    return [None if match is None else float(match[0]) for match in found]


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_can_be_planned_at_every_scale(names_only, name):
    for scale in SCALES:
        graph = build(names_only, name, scale=scale)
        assert graph.rows
        seen = set()
        for cell in graph.cells.values():
            assert set(cell.needs.values()) <= seen, "a cell comes after those it needs"
            seen.add(cell.name)
        assert all(labels["note"] for _, labels in graph.rows), "every row says what its scale means"


def test_the_papers_scale_is_the_papers(names_only):
    table2 = build(names_only, "rq2", scale="paper")
    assert count(table2, "evaluate") == 5 * 3 * 5 * 3 * 3
    assert count(table2, "prior") == 5 * 15 * 3 and count(table2, "model") == 2 * 15 * 3
    assert count(build(names_only, "rq1", scale="paper"), "evaluate") == 3 * 3 * 4 * 3
    assert count(build(names_only, "rq4", scale="paper"), "evaluate") == 6 * 3 * 3
    sizes = {cell.data["train"].size for cell in build(names_only, "rq3", scale="paper").cells.values()}
    assert sizes == {50_000, 100_000, 250_000, 500_000}


def test_experiments_share_what_they_have_in_common(names_only):
    apart = [set(build(names_only, name).cells) for name in ("rq1", "rq2", "budget", "latents")]
    together = build(names_only, "rq1", "rq2", "budget", "latents")
    assert set(together.cells) == set.union(*apart)
    assert len(together.cells) < sum(map(len, apart)) - 30
    assert len(together.rows) == sum(len(build(names_only, name).rows) for name in ("rq1", "rq2", "budget", "latents"))


def test_a_cell_is_known_by_all_it_depends_on(names_only, tmp_path):
    before = build(names_only, "rq4")
    assert set(build(names_only, "rq4").cells) == set(before.cells)
    assert not set(build(names_only, "rq4", **{"model_settings.all.epochs": "3", "prior_steps": "7"}).cells) & set(
        before.cells
    )
    more = build(names_only, "rq4", seeds="3")
    assert set(before.cells) < set(more.cells), "another seed adds to what is there"
    third = build(names_only, "rq4", seeds="1", first_seed="2")
    assert set(third.cells) == set(more.cells) - set(before.cells), "and can be asked for alone"
    shutil.copytree(names_only.folder, tmp_path / "other")
    (tmp_path / "other" / "halfcheetah-full-replay.hdf5").write_text("other rows")
    assert not set(build(Shelf(tmp_path / "other"), "rq4").cells) & set(before.cells)


def test_what_is_expected_of_worlds_is_part_of_a_cell(names_only, monkeypatch):
    before = set(build(names_only, "rq4", beliefs=("worlds",)).cells)
    monkeypatch.setattr(AbstractWorlds.__dataclass_fields__["significance"], "default", 9.0)
    changed = build(names_only, "rq4", beliefs=("worlds",)).cells
    assert {changed[name].settings["around"] for name in set(changed) - before} == {"worlds"}
    assert len(set(changed) - before) == 12, "every evaluation among worlds, and nothing else"


def test_the_version_of_a_changed_world_is_part_of_a_cell(names_only, monkeypatch):
    before = set(build(names_only, "rq4").cells)
    newer = dataclasses.replace(KNOWN_ENVS["halfcheetah-hill"], env_id="refplan/HalfCheetahHill-v9")
    monkeypatch.setitem(KNOWN_ENVS, "halfcheetah-hill", newer)
    changed = build(names_only, "rq4").cells
    assert {changed[name].settings["task"] for name in set(changed) - before} == {"halfcheetah-hill"}
    assert len(set(changed) - before) == 6, "three agents, two seeds"


def test_another_belief_model_gets_columns_of_its_own(names_only):
    graph = build(names_only, "rq1", beliefs=("belief", "worlds"))
    assert {labels["agent"] for _, labels in graph.rows} == {*AGENTS1, "refplan (worlds)"}
    plain = build(names_only, "rq1")
    assert count(graph, "model") == count(plain, "model"), "worlds are made around the ensemble LOOP plans with"
    assert set(plain.cells) < set(graph.cells) and count(graph, "evaluate") == count(plain, "evaluate") + 6


def test_before_advised_planners_act_the_model_is_asked_once_per_training(names_only):
    graph = build(names_only, "rq4", beliefs=("worlds", "refined-worlds"), planner_preset="advised", seeds="2")
    assert count(graph, "advise") == 2
    plain = build(names_only, "rq4", beliefs=("worlds", "refined-worlds"), seeds="2")
    assert count(graph, "evaluate") == count(plain, "evaluate")
    for cell in graph.cells.values():
        if cell.kind == "evaluate":
            asked = cell.settings["planner"] != "prior"
            assert ("advice" in cell.needs) == asked
            if asked:
                advice = graph.cells[cell.needs["advice"]]
                assert advice.needs == {role: cell.needs[role] for role in ("prior", "model")}
    with pytest.raises(RefplanError, match="asks the learned model first"):
        build(names_only, "bayesopt", planner_preset="advised")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "runtime"])  # which times the belief's training
def test_every_experiment_can_do_without_the_papers_belief(names_only, name):
    graph = build(names_only, name, beliefs=("worlds",))
    assert {cell.settings["model"] for cell in graph.cells.values() if cell.kind == "model"} == {"ensemble"}


def test_scales_can_be_changed_and_mistakes_are_explained(names_only):
    scale = load_recipe("rq4").scale("cpu", {"priors": "cql, maple", "planner_settings.kappa": "1"})
    assert scale.priors == ("cql", "maple") and scale.planner_settings == {"kappa": "1"}
    assert "changed: priors=cql, maple" in scale.note
    for changes, message in (
        ({"prior": "cql"}, "Did you mean 'priors'"),
        ({"seeds": "two"}, "needs a whole number"),
        ({"draws": "1,x"}, "whole numbers"),
        ({"model_settings": "3"}, "named like"),
    ):
        with pytest.raises(RefplanError, match=message):
            change_scale(load_recipe("rq4").scale("cpu"), changes)
    for name, changes, message in (
        ("rq4", {"model_settings.all.epoch": "3"}, "has a setting 'epoch'"),
        ("rq4", {"planner_settings.kapa": "3"}, "has a setting 'kapa'"),
        ("rq4", {"robots": "ant"}, "ant-full-replay"),
        ("rq4", {"priors": "cqll"}, "cqll"),
    ):
        with pytest.raises(RefplanError, match=message):
            build(names_only, name, **changes)
    with pytest.raises(RefplanError, match="unknown experiment 'rq5'"):
        load_recipe("rq5")
    with pytest.raises(RefplanError, match="no such folder"):
        find_shelf("nowhere")


# What is made


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Hopper's bundled rows under two names, and a file that cannot be read under a third."""
    folder = tmp_path_factory.mktemp("data")
    for kind in ("medium-replay", "random", "full-replay"):
        shutil.copy(BUNDLED / "hopper-medium-replay-tiny.hdf5", folder / f"hopper-{kind}.hdf5")
    (folder / "hopper-medium.hdf5").write_text("no HDF5 at all")
    return folder


def command(out, data, *more, name="priors"):
    given = ["reproduce", name, "--scale", "tiny", "--data", str(data), "--out", str(out), "--workers", "1"]
    return [*given, *more]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """One experiment with a cell that fails: (folder, exit code, what was said)."""
    out = tmp_path_factory.mktemp("out")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent.parent / ".pytest_cache" / "xla")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(command(out, data, "--set", "kinds=medium,medium-replay"))
    return out, code, said.getvalue()


def test_a_failed_cell_is_reported_and_the_rest_goes_on(finished):
    out, code, said = finished
    assert code == 1
    assert "FAILED prior cql, hopper-medium, seed 0" in said and "1 cells that need it are skipped" in said
    log = next((out / "logs").glob("prior-*.log"))
    assert any("failed:" in path.read_text() for path in (out / "logs").glob("prior-*.log")), log
    rows = read_results(out / "priors" / "results.csv")
    assert [(row["kind"], row["agent"], row["prior"]) for row in rows] == [("medium-replay", "prior", "cql")]


def test_rows_say_where_they_came_from(finished):
    out, _, _ = finished
    row = read_results(out / "priors" / "results.csv")[0]
    assert row["scale"] == "tiny" and "mean nothing" in row["note"]
    assert float(row["score_lo"]) <= float(row["score"]) <= float(row["score_hi"])
    assert len(json.loads(row["returns"])) == int(row["episodes"]) == 2
    assert json.loads(row["versions"])["jax"] and json.loads(row["settings"])["updates"] == 20
    assert float(row["wall_s"]) > 0 and row["made"].endswith("Z") and row["seed"] == "0"
    assert row["command"] and "local" not in row["command"].split()[0], "the user's command, not the worker's"
    assert (out / "cells" / f"{row['cell']}.json").is_file()


def test_finished_cells_are_never_made_again(finished, data, capsys, monkeypatch):
    out, _, _ = finished
    kept = {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    assert len(kept) == 2
    monkeypatch.setattr(LocalExecutor, "submit", lambda *_: pytest.fail("nothing is left to do"))
    assert main(command(out, data)) == 0
    assert "2 of 2 cells are there already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()} == kept


def test_tables_and_figures_follow_the_csv_alone(finished, tmp_path, capsys):
    out, _, _ = finished
    shutil.copytree(out / "priors", tmp_path / "priors")
    path = tmp_path / "priors" / "results.csv"
    rows = read_results(path)
    old = (tmp_path / "priors" / "figure.svg").read_text()
    write_results(path, [{**rows[0], "score": "77.0", "returns": json.dumps([2000.0, 2000.0])}])
    assert main(["reproduce", "priors", "--redraw", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "77.0 [77.0, 77.0]" in said and "48.6" in said and "94.6" in said, "ours, published, reproduced"
    assert "77.0 [77.0, 77.0]" in (tmp_path / "priors" / "table.md").read_text()
    assert "77.0 [77.0, 77.0]" in (tmp_path / "priors" / "page.html").read_text()
    assert (tmp_path / "priors" / "figure.svg").read_text() != old
    assert (tmp_path / "priors" / "figure.png").stat().st_size > 5000
    assert main(["reproduce", "priors", "--redraw", "--json", "--out", str(tmp_path)]) == 0
    table = json.loads(capsys.readouterr().out)["priors"][0]
    assert table["headings"] == ["prior", "robot", "kind", "prior", "paper: published", "paper: reproduced"]


def test_a_dry_run_makes_nothing_and_counts_what_is_there(finished, data, tmp_path, capsys):
    out, _, _ = finished
    assert main(command(tmp_path / "new", data, "--dry-run", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["cells"]) == 2 and found["seconds"] > 0 and found["gflops"] > 0
    assert not (tmp_path / "new").exists()
    assert main(command(out, data, "--dry-run")) == 0
    assert "2 cells, 0 to do" in capsys.readouterr().out


def test_the_estimate_knows_that_worlds_are_drawn_once_and_the_paper_s_latents_four_times():
    settings = {"planner": "refplan", "planner_preset": "default", "dataset": "halfcheetah-medium", "method": "cql"}
    settings |= {"changes": {}, "episodes": 10}

    def seconds(**more):
        cell = Cell("evaluate", settings | more, {}, {}, 1, "digest")
        return cell_seconds(cell, Graph(Shelf(places={})), Speed(50.0)) - START_S

    assert 3 < seconds() / seconds(around="worlds") < 4.5


def test_the_estimate_counts_every_imagined_step_of_an_advice():
    graph, fast = Graph(Shelf(places={})), Speed(50.0)
    data, settings = {"dataset": "halfcheetah-medium", "method": "cql"}, {"planner_preset": "advised", "changes": {}}
    advice = cell_seconds(Cell("advise", data, {}, {}, 1, "digest"), graph, fast) - START_S
    evaluation = Cell("evaluate", data | settings | {"planner": "loop", "episodes": 6}, {}, {}, 1, "digest")
    simulated = 6 * 1000 * STEP_S
    assert advice == pytest.approx(cell_seconds(evaluation, graph, fast) - START_S - simulated), "30 x 200 decisions"


def test_a_lost_worker_is_replaced_and_its_cell_done_again(tmp_path):
    """Reading a pipe that nobody writes to keeps a worker busy for ever; then it is killed."""
    path = tmp_path / "rows.npz"
    os.mkfifo(path)
    settings = {"method": "cql", "preset": "cpu", "steps": 1, "critic_steps": 1, "settings": {}, "seed": 0}
    graph = Graph(Shelf(places={"hopper-medium": path}))
    cell = Cell("prior", settings, {}, {"train": Data("hopper-medium")}, 1, "digest")
    graph.cells[cell.name] = cell
    executor, said = LocalExecutor(1), []

    def kill() -> None:
        while not executor.busy:
            time.sleep(0.05)
        path.unlink()
        path.write_text("not rows")
        os.kill(next(iter(executor.busy.values())).process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    report = sweep(graph, Store(tmp_path / "store"), executor, say=said.append)
    killer.join()
    assert "lost, trying again" in said[0] and "code -9" in said[0]
    assert list(report.failed) == [cell.name] and "rows.npz" in report.failed[cell.name]
    assert "trying again" in (tmp_path / "store" / "logs" / f"{cell.name}.log").read_text()


def test_nobody_else_works_in_the_folder(tmp_path):
    store, said = Store(tmp_path), []
    with store.alone(said.append), pytest.raises(RefplanError, match="another refplan reproduce"):
        with Store(tmp_path).alone(said.append, patience=0.1):
            pass
    with store.alone(said.append):
        pass
    assert len(said) == 1


def test_a_damaged_outcome_says_what_to_do(tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "prior-1.json").write_text("{")
    with pytest.raises(RefplanError, match="Remove it"):
        Store(tmp_path).outcome("prior-1")


# What is measured


class Noisy(AbstractAgent):
    """Acts at random with a known spread."""

    scale: float = eqx.field(default=0.5)

    def start(self):
        return ()

    def observe(self, state, transition):
        return state

    def act(self, state, obs, key):
        return self.scale * jr.normal(key, (3,)), state


def test_the_spread_of_an_action_is_its_variance():
    watcher = ActionSpread(200)
    for step in range(10):
        watcher.before(Noisy(), (), jnp.zeros(2), jr.key(step), step, None)
    assert watcher.variance == pytest.approx(0.25, rel=0.1)
    still = ActionSpread(5)
    still.before(Noisy(0.0), (), jnp.zeros(2), jr.key(0), 0, None)
    assert still.variance == 0.0


def row(agent, score, seed=0, **labels):
    names = {"dataset": "hopper-medium", "world": "hopper", "robot": "hopper", "kind": "medium", "prior": "cql"}
    return {**names, "agent": agent, "seed": seed, "score": score, "returns": "", **labels}


def test_aggregates_are_those_of_the_statistics_module():
    random = np.random.default_rng(0)
    scores = {agent: random.normal(50 + shift, 5, (3, 4)) for agent, shift in (("loop", 0), ("refplan", 5))}
    rows = [
        row(agent, found[seed, task], seed, dataset=f"data{task}")
        for agent, found in scores.items()
        for seed in range(3)
        for task in range(4)
    ]
    table = aggregate_table(rows, "rq2")
    line = next(line for line in table.lines if line[0] == "iqm")
    for agent, text in zip(("loop", "refplan"), line[1:3], strict=True):
        assert text.startswith(f"{float(iqm(scores[agent])):.1f} [")
    assert table.lines[-1][0] == "P(refplan beats loop)"
    rows.append(row("refplan", 0.0, 0, dataset="half there"))
    assert aggregate_table(rows, "rq2").lines == table.lines, "a task that lacks seeds is left out"


def test_one_seed_has_no_interval():
    rows = [row(agent, score, dataset=f"data{score}") for agent in ("loop", "refplan") for score in (10.0, 30.0)]
    table = aggregate_table(rows, "rq2")
    assert "one seed" in table.title
    assert next(line for line in table.lines if line[0] == "mean")[1:3] == ["20.0", "20.0"]
    assert not any("[" in text for line in table.lines for text in line)
    rows += [row("loop", score + 2, 1, dataset=f"data{score}") for score in (10.0, 30.0)]
    line = next(line for line in aggregate_table(rows, "rq2").lines if line[0] == "mean")
    assert "[" in line[1] and line[2] == "20.0", "an agent of two seeds beside one of one"


def test_the_papers_aggregates_are_of_the_same_tasks():
    rows = [
        row(agent, 10.0, dataset=f"hopper-{kind}") for agent in ("loop", "refplan") for kind in ("medium", "random")
    ]
    line = next(line for line in aggregate_table(rows, "rq2").lines if line[0] == "mean")
    assert line[3:] == [f"{(73.9 + 1.1) / 2:.1f}", f"{(85.1 + 1.2) / 2:.1f}"]


def test_seeds_and_their_episodes_give_one_number():
    returns = [json.dumps([1000.0, 1200.0]), json.dumps([1400.0, 1600.0])]
    scores = [100 * (r + 20.272305) / (3234.3 + 20.272305) for r in (1100.0, 1500.0)]
    rows = [row("prior", s, n, returns=r) for n, (s, r) in enumerate(zip(scores, returns, strict=True))]
    assert measured(rows, "return").value == 1300.0
    found = measured(rows, "score")
    assert found.value == pytest.approx(np.mean(scores)) and found.low < found.value < found.high
    assert measured([], "score") is None


def test_the_papers_number_stands_beside_ours():
    rows = [row(agent, 50.0, world="halfcheetah-hill", **{"return": 700.0}) for agent in ("prior", "loop", "refplan")]
    table = make_tables(load_recipe("rq4"), rows)[0]
    assert table.headings[-3:] == ["paper: prior", "paper: loop", "paper: refplan"]
    assert table.lines == [["cql", "halfcheetah-hill", *["700 [700, 700]"] * 3, "327.1", "949.7", "1224"]]


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_is_drawn_from_rows_of_its_kind(names_only, tmp_path, name):
    """Rows as the cells of its tiny scale would give them, with made-up numbers."""
    graph = build(names_only, name, scale="tiny")
    rows = []
    for cell, labels in graph.rows:
        kind = graph.cells[cell].kind
        made = dict.fromkeys(("dataset", "prior", "planner", "world", "episodes", "settings", "command", "commit"), "")
        made |= {"score": 10.0, "return": 300.0, "score_lo": 9.0, "score_hi": 11.0, "ms_per_action": 1.0, "wall_s": 2.0}
        made |= {"world": "hopper", "returns": "[250.0, 350.0]", "action_variance": 0.1, "seconds": "", "best": ""}
        many = [made]
        if kind == "tune":
            many = [{**made, "returns": "", "trial": n, "best": 10.0 + n} for n in (1, 2)]
        elif kind == "epochs":
            many = [{**made, "score": "", "agent": part, "seconds": 1.5, "rows": 7} for part in ("encoder", "decoder")]
        elif kind == "steps":
            many = [{**made, "score": "", "seconds": 0.004}]
        rows += [{**each, **labels, "cell": cell} for each in many]
    write_results(tmp_path / "results.csv", rows)
    tables = draw(load_recipe(name), tmp_path)
    assert tables and all(len(line) == len(table.headings) for table in tables for line in table.lines)
    for file in ("table.md", "figure.png", "figure.svg", "page.html"):
        assert (tmp_path / file).stat().st_size > 300
    assert not re.search(r'(src|href)="[a-z]+:/', (tmp_path / "page.html").read_text()), "it needs no network"


# Elsewhere


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"refplan\[ray\]"):
        RayExecutor()


def test_an_archive_travels_whole_and_stays_in_its_folder(tmp_path):
    stage = tmp_path / "prior-1"
    (stage / "critic").mkdir(parents=True)
    (stage / "stage.json").write_text("{}")
    (stage / "critic" / "metrics.csv").write_text("step\n")
    (stage / "checkpoint.safetensors").write_text("only for going on")
    unpack(pack(stage), tmp_path / "there" / "prior-1")
    files = sorted(path.name for path in (tmp_path / "there").rglob("*") if path.is_file())
    assert files == ["metrics.csv", "stage.json"]
    bad = io.BytesIO()
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("../outside", "x")
    with pytest.raises(RefplanError, match="outside its folder"):
        unpack(bad.getvalue(), tmp_path / "there" / "prior-2")
    assert not (tmp_path / "there" / "prior-2").exists()


# Whole lines, minutes each


def all_data(folder: Path) -> Path:
    folder.mkdir()
    for kind in KINDS.values():
        shutil.copy(BUNDLED / "hopper-medium-replay-tiny.hdf5", folder / f"hopper-{kind}.hdf5")
        shutil.copy(BUNDLED / "halfcheetah-medium-replay-mini.hdf5", folder / f"halfcheetah-{kind}.hdf5")
    return folder


@pytest.mark.slow
def test_every_experiment_runs_from_data_to_figure(tmp_path, capsys):
    data = all_data(tmp_path / "data")
    assert main(["reproduce", "all", "--scale", "tiny", "--data", str(data), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    for name in NAMES:
        assert load_recipe(name).title in said
        assert read_results(tmp_path / "out" / name / "results.csv"), name
        assert (tmp_path / "out" / name / "figure.png").stat().st_size > 5000
    variances = read_results(tmp_path / "out" / "latents" / "results.csv")
    assert all(float(each["action_variance"]) >= 0 for each in variances)


def run_command(out: Path, data: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "refplan", *command(out, data, *more)]


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_and_ends_with_the_same_rows(tmp_path, data):
    some = ("--set", "kinds=medium-replay,random,full-replay")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(run_command(whole, data, *some), check=True, capture_output=True)
    process = subprocess.Popen(run_command(broken, data, *some), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list((broken / "cells").glob("*.json"))) < 2:
        assert process.poll() is None
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in (broken / "cells").iterdir()}
    assert len(kept) < 6
    subprocess.run(run_command(broken, data, *some), check=True, capture_output=True)
    assert all(path.stat().st_mtime_ns == made for path, made in kept.items())
    ours, theirs = (read_results(folder / "priors" / "results.csv") for folder in (broken, whole))
    assert [each["returns"] for each in ours] == [each["returns"] for each in theirs]
    assert len({each["cell"] for each in ours}) == len(ours) == 3
