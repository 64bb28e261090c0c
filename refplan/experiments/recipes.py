"""The paper's experiments as declared in `paper/*.toml`: what is compared, at which scale, and how it is shown."""

import csv
import dataclasses
import functools
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refplan.errors import RefplanError, unknown_name

FOLDER = Path(__file__).parent / "paper"
NAMES = ("rq1", "rq2", "budget", "rq3", "rq4", "nm-train", "latents", "priors", "bayesopt", "runtime")
SCALES = ("cpu", "paper", "tiny")
ALL = "all"  # settings for every prior, every model, every dataset


@dataclass(frozen=True)
class Agent:
    """One column of a table: a prior, alone or under a planner."""

    name: str
    planner: str = "prior"  # "prior": the prior alone
    changes: dict[str, Any] = field(default_factory=dict)  # settings of the planner
    starts: str = ""  # the kind of data whose states episodes start from; empty: the task's own starts
    trained_in: str = "ensemble"  # the model the prior learns in, if it learns in one
    per: str = ""  # the planner's setting that takes the values of `draws`


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    robots: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    priors: tuple[str, ...] = ()
    worlds: tuple[str, ...] = ()  # empty: the data's own task
    sizes: tuple[int, ...] = ()  # empty: all rows
    draws: tuple[int, ...] = ()  # latents, or repeats of LOOP
    horizons: tuple[int, ...] = ()
    seeds: int = 1
    first_seed: int = 0  # so that several machines can share the seeds
    episodes: int = 10
    preset: str = "cpu"  # of priors and models
    planner_preset: str = "default"
    prior_steps: int = 0  # 0: the preset's
    critic_steps: int = 20_000
    replans: int = 0  # how often a decision is repeated to see how much it varies
    trials: int = 20
    grid: int = 0
    epochs: int = 3  # that are timed
    steps: int = 200  # that are timed
    prior_settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # by method, or "all"
    model_settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # by model, by kind of data, or "all"
    planner_settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def of_prior(self, method: str) -> dict[str, Any]:
        """The settings of one prior."""
        return {**self.prior_settings.get(ALL, {}), **self.prior_settings.get(method, {})}

    def of_model(self, model: str, kind: str) -> dict[str, Any]:
        """The settings of one model on one kind of data; the more special wins."""
        chosen = [self.model_settings.get(name, {}) for name in (ALL, model, kind, f"{model}.{kind}")]
        return {name: value for settings in chosen for name, value in settings.items()}


@dataclass(frozen=True)
class Table:
    """Which rows become which lines and columns, and where the paper's numbers for them are.

    `beside` names the paper's columns where they differ from ours, `match` the labels that tell its lines apart.
    """

    rows: tuple[str, ...]
    columns: tuple[str | int, ...]
    value: str
    title: str = ""
    beside: tuple[str, ...] = ()
    match: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """How the same rows are drawn."""

    kind: str
    panels: str = ""
    marks: str = ""
    x: str = ""
    values: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """One experiment of the paper."""

    name: str
    title: str
    about: str
    cells: str  # how its cells are made: evaluate, tune or time
    agents: tuple[Agent, ...]
    tables: tuple[Table, ...]
    figure: Figure
    scales: dict[str, dict[str, Any]]

    def scale(self, name: str, changes: dict[str, str] | None = None) -> Scale:
        """One of its scales, with changes as a command line gives them."""
        if name not in SCALES:
            raise unknown_name("scale", name, SCALES)
        chosen = _smallest(self.scales["cpu"]) if name == "tiny" else self.scales[name]
        scale = change_scale(_record(Scale, chosen, f"scale '{name}' of {self.name}"), changes or {})
        said = ", ".join(f"{setting}={value}" for setting, value in (changes or {}).items())
        return dataclasses.replace(scale, note=f"{scale.note}; changed: {said}") if said else scale


@functools.cache
def load_recipe(name: str) -> Recipe:
    """An experiment by its name on the command line."""
    if name not in NAMES:
        raise unknown_name("experiment", name, NAMES)
    table = _read(name)
    scales = {scale: table.pop(scale) for scale in ("paper", "cpu")}
    where = f"{name}.toml"
    table["agents"] = tuple(_record(Agent, agent, where) for agent in table.get("agents", []))
    table["tables"] = tuple(_record(Table, each, where) for each in table["tables"])
    table["figure"] = _record(Figure, table["figure"], where)
    return Recipe(name=name, scales=scales, **table)


@functools.cache
def published(experiment: str) -> list[dict[str, str]]:
    """The paper's own numbers for an experiment, from its tables; figures without numbers have none."""
    with open(FOLDER / "published.csv", encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["experiment"] == experiment]


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def _record(kind: Any, values: dict[str, Any], where: str) -> Any:
    """A record of a class from a table; an entry it does not know is an error."""
    known = {each.name for each in dataclasses.fields(kind)}
    for name in values:
        if name not in known:
            raise unknown_name(f"entry of {where}", name, known)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _smallest(cpu: dict[str, Any]) -> dict[str, Any]:
    """The cpu scale cut to a size at which only the machinery is tried."""
    tiny = _read("tiny")
    sizes = [tiny.pop("sizes")] if cpu.get("sizes") else []
    kept = {
        name: value[: 2 if name in ("worlds", "draws") else 1] for name, value in cpu.items() if isinstance(value, list)
    }
    tiny["planner_settings"] = {**cpu.get("planner_settings", {}), **tiny["planner_settings"]}
    return {**cpu, **kept, **tiny, "sizes": sizes}


def change_scale(scale: Scale, changes: dict[str, str]) -> Scale:
    """A scale with other settings, given as text: `priors=cql,mopo`, `seeds=3`, `planner_settings.kappa=1`."""
    for name, text in changes.items():
        first, _, rest = name.partition(".")
        known = {each.name for each in dataclasses.fields(Scale)}
        if first not in known:
            raise unknown_name("setting of an experiment", first, known)
        old = getattr(scale, first)
        if isinstance(old, dict) != bool(rest):
            raise RefplanError(f"'{name}' cannot be set; settings of parts are named like model_settings.all.epochs.")
        new = _nested(old, rest.split("."), text) if rest else _as(old, first, text)
        scale = dataclasses.replace(scale, **{first: new})
    return scale


def _nested(table: dict[str, Any], path: list[str], text: str) -> dict[str, Any]:
    """planner_settings.kappa has one step below it, prior_settings.cql.sac.alpha_start a name with a dot."""
    if len(path) == 1:
        return {**table, path[0]: text}
    return {**table, path[0]: {**table.get(path[0], {}), ".".join(path[1:]): text}}


def _as(old: Any, name: str, text: str) -> Any:
    """Text as the type of a setting of `Scale`."""
    try:
        if isinstance(old, tuple):
            items = [item.strip() for item in text.split(",") if item.strip()]
            return tuple(int(item) for item in items) if name in ("sizes", "draws", "horizons") else tuple(items)
        return type(old)(text)
    except ValueError:
        kind = "whole numbers such as 1,4" if isinstance(old, tuple) else "a whole number"
        raise RefplanError(f"setting '{name}' needs {kind}, got {text!r}.") from None
