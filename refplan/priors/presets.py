"""The presets of the prior learners; the numbers and where they come from stand in `presets.toml`."""

import functools
import tomllib
from pathlib import Path
from typing import Any

from refplan.presets import Preset, make_preset
from refplan.priors import find_prior


def load_preset(method: str, preset: str, dataset_name: str = "") -> Preset:
    """The learner of a method with a preset's settings for a dataset, told by its name ("hopper-medium-replay-v2")."""
    return make_preset(find_prior(method)(), _tables()[method], method, preset, dataset_name)


def preset_names(method: str) -> list[str]:
    """The presets a method has."""
    return sorted(name for name in _tables().get(method, {}) if name != "data")


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "presets.toml").read_text(encoding="utf-8"))
