"""Imports only point back along the line the data walks (design: one direction, left to right)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "refplan"

# Position in this list = layer; a module may import from its own layer or an earlier one.
LAYERS = [
    ["_version", "errors", "cache", "registry", "turns"],
    ["types", "settings", "provenance"],
    ["nn", "gru", "risk", "agent", "files", "progress", "interrupts"],
    ["logs", "modules"],
    ["data"],
    ["learner"],
    ["train"],
    ["presets"],
    ["dynamics"],
    ["priors"],
    ["planners"],
    ["stats"],
    ["result"],
    ["evaluation"],
    ["store"],
    ["collect"],
    ["experiments"],
    ["report"],
    ["bench"],
    ["cli"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
GYM_ALLOWED = {"data", "evaluation"}


def modules():
    return sorted(path for path in ROOT.rglob("*.py") if path not in (ROOT / "__init__.py", ROOT / "__main__.py"))


def top(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_back(path):
    assert top(path) in RANK, f"{path}: give it a layer in tests/test_layers.py"
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "refplan" or len(parts) < 2 or parts[1] not in RANK:
            continue
        assert RANK[parts[1]] <= RANK[top(path)], f"{path.relative_to(ROOT)} imports {name}, which comes later"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_data_and_evaluate_touch_the_simulator(path):
    if top(path) in GYM_ALLOWED:
        return
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & {"gymnasium", "mujoco"}, path


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_unpickled(path):
    names = imported(path)
    if path.name == "torch_file.py":  # the reader that executes nothing; its own tests hold it to that
        return
    assert not {n.split(".")[0] for n in names} & {"pickle", "cloudpickle", "dill", "joblib"}, path
    assert "allow_pickle=True" not in path.read_text(encoding="utf-8"), path


def test_priors_and_planners_know_only_the_abstract_dynamics():
    for folder in ("priors", "planners"):
        for path in (ROOT / folder).glob("*.py"):
            concrete = {n for n in imported(path) if n.startswith("refplan.dynamics.")} - {
                n for n in imported(path) if n.startswith("refplan.dynamics.base.")
            }
            assert not concrete, f"{path} imports {concrete}"
