"""Settings of planners by name: `default` (by evidence), `careful`, `away`, `fixed` (one for all), `paper`.

`advised` is no settings but a question to the learned model: careful, or not at all (`experiments/advise.py`).
"""

import csv
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refplan.agent import AbstractPrior
from refplan.dynamics.base import AbstractDynamics
from refplan.errors import RefplanError, unknown_name
from refplan.planners import find_planner
from refplan.planners.base import AbstractModelPlanner, AbstractPlanner, check_values
from refplan.presets import as_type_of, robot_and_kind, with_settings
from refplan.settings import settings_of

PRESETS = ("default", "careful", "away", "fixed", "paper")
ADVISED = "advised"
# Kappa is found in every decision, unless it is given: raw kappa depends on the critic's scale (docs/settings.md).
DEFAULT = {"effective": 0.1}
# Near the prior's own action: where a critic cannot tell good actions apart, following it far leads to a fall.
CAREFUL = DEFAULT | {"anchor": "prior", "width": 0.3}
# The prior by itself, until the belief knows of another world: for a prior that is too good to be planned on.
AWAY = DEFAULT | {"anchor": "own"}
OWN = {"default": DEFAULT, "careful": CAREFUL, "away": AWAY}  # ours; the others are the paper's
SOFT = ("loop", "refplan")  # what that was measured for; MPPI and the control keep their own kappa
# The most frequent of the paper's 75 picks: one setting for every dataset, so that nothing is picked by its result.
FIXED = {"horizon": 4, "sigma": 0.05, "kappa": 5.0, "latents": 16, "penalty": 0.1}


def make_planner(
    name: str,
    prior: AbstractPrior,
    model: AbstractDynamics | None = None,
    *,
    preset: str = "default",
    dataset: str = "",
    method: str = "",
    changes: Mapping[str, Any] | None = None,
    adapt: bool = True,
) -> AbstractPlanner:
    """A planner on a prior and a model, with a preset's settings; `method` is the name of the prior's learner.

    `changes` are settings by name; text (from a command line) is read as the setting's type. With a model that knows
    other worlds, the prior is told which one it is in (`Adapted`) unless `adapt` is off.
    """
    kind = find_planner(name)
    settings = planner_settings(preset, dataset, method)
    if issubclass(kind, AbstractModelPlanner):
        if model is None:
            raise RefplanError(f"planner '{name}' imagines what its plans would do; give it a model.")
        planner = kind(model.adapt(prior) if adapt else prior, model)
    else:
        planner = kind(prior)
    known = planner_settings_of(planner)
    if preset in OWN and model is not None:
        settings = {"latents": model.draws} | settings
    if preset in OWN and name not in SOFT:
        settings = {}
    elif "kappa" in (changes or {}):
        settings.pop("effective", None)
    fitting = {setting: value for setting, value in settings.items() if setting in known}
    for setting in changes or {}:
        if setting not in known:
            raise unknown_name(f"setting of planner '{name}'", setting, known)
    return with_settings(planner, fitting | dict(changes or {}))


def planner_defaults(name: str) -> dict[str, Any]:
    """The settings a planner has, known without a prior and a model to build it on."""
    fields = dataclasses.fields(find_planner(name))
    return {f.name: f.default for f in fields if isinstance(f.default, bool | int | float | str)}


def check_planner_settings(name: str, changes: Mapping[str, Any]) -> None:
    """Whether a planner could be built with these settings."""
    known = planner_defaults(name)
    for setting in changes:
        if setting not in known:
            raise unknown_name(f"setting of planner '{name}'", setting, known)
    check_values(f"planner '{name}'", {n: as_type_of(known[n], value, n) for n, value in changes.items()})


def planner_settings(preset: str, dataset: str = "", method: str = "") -> dict[str, Any]:
    """What a preset changes in the defaults, for a dataset of D4RL's recipe and a prior's learner.

    `fixed` and `paper` draw imagined transitions independently, as the paper describes. The paper does not publish
    what it picked for LOOP: there RefPlan's numbers are used too.
    """
    if preset == ADVISED:
        raise RefplanError(
            f"preset '{ADVISED}' asks the learned model first, which 'refplan run' and 'refplan reproduce' do where "
            "they evaluate. Elsewhere ask 'refplan advise RUN' and name the preset it says."
        )
    if preset not in PRESETS:
        raise unknown_name("preset of planners", preset, (*PRESETS, ADVISED))
    if preset in OWN:
        return dict(OWN[preset])
    if preset == "fixed":
        return {**FIXED, "propagation": "sample"}
    table = paper_settings()
    robot, kind = robot_and_kind(dataset)
    if (method, robot, kind) not in table:
        raise RefplanError(
            f"the paper has no planner settings for prior '{method or 'unknown'}' on dataset '{dataset or 'unknown'}'; "
            f"it has them for {', '.join(sorted({row[0] for row in table}))} on D4RL's names such as "
            "hopper-medium-replay. Use the preset 'fixed' or 'default'."
        )
    return {**table[method, robot, kind], "propagation": "sample"}


def asks_first(preset: str, planner: str) -> bool:
    """Whether the model must be asked before this planner's settings are known; others have one preset of ours."""
    return preset == ADVISED and planner in SOFT


def preset_for(planner: str, preset: str, advice: str) -> str:
    """The preset a planner takes, once it is known what was advised."""
    if preset != ADVISED:
        return preset
    return advice if planner in SOFT else "default"


@functools.cache
def paper_settings() -> dict[tuple[str, str, str], dict[str, Any]]:
    """The paper's five tables of hyper-parameters: (prior, robot, kind) to RefPlan's five numbers."""
    with open(Path(__file__).parent / "paper.csv", encoding="utf-8", newline="") as file:
        return {
            (row["prior"], row["robot"], row["kind"]): {
                "horizon": int(row["horizon"]),
                "sigma": float(row["sigma"]),
                "kappa": float(row["kappa"]),
                "latents": int(row["latents"]),
                "penalty": float(row["penalty"]),
            }
            for row in csv.DictReader(file)
        }


def planner_settings_of(planner: AbstractPlanner) -> dict[str, Any]:
    """A planner's own settings, without those of its prior and its model."""
    return {
        name: value for name, value in settings_of(planner).items() if "." not in name and name not in ("low", "high")
    }
