"""The presets of the dynamics models; the numbers and where they come from stand in `presets.toml`."""

import functools
import tomllib
from pathlib import Path
from typing import Any

from refplan.dynamics import find_model
from refplan.presets import Preset, make_preset


def load_model_preset(model: str, preset: str, dataset_name: str = "") -> Preset:
    """The learner of a model with a preset's settings."""
    return make_preset(find_model(model)(), _tables()[model], model, preset, dataset_name)


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "presets.toml").read_text(encoding="utf-8"))
