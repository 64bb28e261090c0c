"""The wheel carries everything: built, installed elsewhere, run."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("refplan-*.whl"))


def test_the_wheel_holds_data_policies_presets_and_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for ending in (
        "bundled/halfcheetah-medium-replay-mini.hdf5",
        "bundled/hopper-medium-replay-tiny.hdf5",
        "bundled/policies/hopper-medium.safetensors",
        "priors/presets.toml",
        "report/assets/page.html",
        "report/assets/explorer.js",
        "licenses/LICENSE",
    ):
        assert any(name.endswith(ending) for name in names), ending
    assert wheel.stat().st_size < 12e6


def test_installed_elsewhere_it_runs(wheel, tmp_path):
    place = tmp_path / "place"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(place)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    env = {**os.environ, "PYTHONPATH": str(place), "REFPLAN_CACHE": str(tmp_path / "cache")}
    where = "import refplan; print(refplan.__file__)"

    def run(*words: str) -> str:
        command = [sys.executable, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env, cwd=tmp_path).stdout

    assert str(place) in run("-c", where), "the installed copy is the one that runs"
    said = json.loads(run("-m", "refplan", "data", "info", "halfcheetah-medium-replay-mini", "--json"))
    assert said["transitions"] == 40000
    assert (place / "bin" / "refplan").exists()
