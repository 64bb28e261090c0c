"""From an experiment's declaration to its cells."""

import dataclasses
import functools
import itertools
import json
from typing import Any

from refplan.data.envs import world_version
from refplan.dynamics.around import AROUND, usual_settings
from refplan.dynamics.presets import load_model_preset
from refplan.errors import RefplanError
from refplan.experiments.advise import EPISODES, NEVER, STEPS, TRIED
from refplan.experiments.cells import Graph
from refplan.experiments.plan import MODEL_OF, needs_model
from refplan.experiments.recipes import Agent, Recipe, Scale
from refplan.experiments.shelf import Data
from refplan.experiments.workshop import inputs_of
from refplan.planners.presets import asks_first, planner_defaults, planner_settings, preset_for
from refplan.presets import with_settings
from refplan.priors.presets import load_preset

BELIEF = "belief"  # the paper's own; other models of the registry may stand in its place


@dataclasses.dataclass(frozen=True)
class Builder:
    """Adds one experiment at one scale to a graph."""

    graph: Graph
    recipe: Recipe
    scale_name: str
    scale: Scale
    beliefs: tuple[str, ...] = (BELIEF,)

    def build(self) -> None:
        """All cells and the labels of their rows; data that is not there is an error before anything begins."""
        missing = self.graph.shelf.missing(self.datasets())
        if missing:
            raise RefplanError(
                f"{self.recipe.name} needs datasets that are not in {self.graph.shelf.folder or 'D4RL'}: "
                f"{', '.join(missing)}. Name a folder that has them with --data, or leave them out with --set."
            )
        {"evaluate": self._evaluations, "tune": self._searches, "time": self._timings}[self.recipe.cells]()

    def datasets(self) -> list[str]:
        """The names of all datasets it uses."""
        kinds = dict.fromkeys([*self.scale.kinds, *(agent.starts for agent in self.recipe.agents if agent.starts)])
        return [f"{robot}-{kind}" for robot in self.scale.robots for kind in kinds]

    def _grid(self) -> Any:
        s = self.scale
        seeds = range(s.first_seed, s.first_seed + s.seeds)
        # Seeds last to vary, so that a sweep that is stopped early has something of everything.
        return itertools.product(seeds, s.robots, s.kinds, s.sizes or (0,), s.priors)

    def _labels(self, robot: str, kind: str, prior: str, seed: int, **more: Any) -> dict[str, Any]:
        about = {"experiment": self.recipe.name, "scale": self.scale_name, "robot": robot, "kind": kind}
        return {**about, "prior": prior, "seed": seed, **more, "note": self.scale.note}

    def _evaluations(self) -> None:
        for seed, robot, kind, size, prior in self._grid():
            data = Data(f"{robot}-{kind}", size, seed if size else 0)
            for agent, belief in self._agents():
                draws = self.scale.draws if agent.per else (0,)
                for world, count in itertools.product(self.scale.worlds or ("",), draws):
                    changes = {**self.scale.planner_settings, **agent.changes}
                    changes |= {agent.per: count} if agent.per else {}
                    cell = self._evaluate(data, robot, prior, seed, agent, belief, world, changes)
                    axes = {"size": size} if size else {"draws": count} if count else {}
                    self.graph.give(
                        cell, self._labels(robot, kind, prior, seed, agent=_named(agent.name, belief), **axes)
                    )

    def _agents(self) -> list[tuple[Agent, str]]:
        """Every agent, as often as there are beliefs it could use."""
        found = []
        for agent in self.recipe.agents:
            uses = BELIEF in (agent.trained_in, MODEL_OF.get(agent.planner))
            found += [(agent, belief) for belief in (self.beliefs if uses else ("",))]
        return found

    def _evaluate(
        self, data: Data, robot: str, prior: str, seed: int, agent: Agent, belief: str, world: str, changes: dict
    ) -> str:
        imagined = belief if agent.trained_in == BELIEF else agent.trained_in
        needs, basis = {"prior": self.prior(data, prior, seed, imagined)}, {}
        settings: dict[str, Any] = {"planner": agent.planner, "dataset": data.name, "task": world}
        model = MODEL_OF.get(agent.planner)
        if model:
            needs["model"], around = self.believed(data, belief if model == BELIEF else model, seed)
            settings |= around
        settings |= {"episodes": self.scale.episodes, "seed": seed, "method": prior}
        settings |= {"replans": self.scale.replans} if self.scale.replans else {}
        sources = {"train": data}
        if agent.starts:
            sources["starts"] = Data(f"{robot}-{agent.starts}")
        if agent.planner != "prior":
            settings |= {"planner_preset": self.scale.planner_preset, "changes": _known(agent.planner, changes)}
            numbers, more = self._planner_numbers(agent.planner, data, prior, seed, imagined)
            basis, needs = numbers | _around_basis(settings), needs | more
        return self.graph.add("evaluate", settings, needs=needs, data=sources, basis=basis | world_version(world))

    def _planner_numbers(
        self, planner: str, data: Data, prior: str, seed: int, imagined: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """(what a planner's settings come to today, the cell to ask first): whatever may be advised."""
        preset = self.scale.planner_preset
        if not asks_first(preset, planner):
            return _planner_basis(planner, preset_for(planner, preset, ""), data.name, prior), {}
        basis = {
            f"{each}.{name}": value
            for each in (*TRIED, NEVER)
            for name, value in _planner_basis(planner, each, data.name, prior).items()
        }
        return basis, {"advice": self.advice(data, prior, seed, imagined)}

    def advice(self, data: Data, method: str, seed: int, imagined: str = "ensemble") -> str:
        """The cell that asks the ensemble about planning on a prior."""
        needs = {"prior": self.prior(data, method, seed, imagined), "model": self.model(data, "ensemble", seed)}
        basis: dict[str, Any] = {"episodes": EPISODES, "steps": STEPS}
        basis |= {preset: _planner_basis("loop", preset, data.name, method) for preset in TRIED}
        settings = {"dataset": data.name, "method": method, "seed": seed}
        return self.graph.add("advise", settings, needs=needs, data={"train": data}, basis=basis)

    def model(self, data: Data, name: str, seed: int) -> str:
        """The cell that trains a model of the world."""
        settings = self.scale.of_model(name, data.name.partition("-")[2])
        mine, basis = self._model_basis(name, data.name, settings)
        about = {"model": name, "preset": self.scale.preset, "settings": mine, "seed": seed}
        return self.graph.add("model", about, data={"train": data}, basis=basis)

    def believed(self, data: Data, name: str, seed: int) -> tuple[str, dict[str, Any]]:
        """The cell that trains a model, and what its user must say: some are made around a trained ensemble."""
        if name not in AROUND:
            return self.model(data, name, seed), {}
        return self.model(data, "ensemble", seed), {"around": name}

    def _model_basis(self, name: str, dataset: str, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Those of the settings a model has, and all its settings with them.

        Models share a table of settings, so a name only has to mean something to one of them; declarations are written
        with the paper's own belief in mind, whether or not it is among those asked for.
        """
        names = tuple(dict.fromkeys(("ensemble", BELIEF, *self.beliefs, name)))
        known = {key for each in names for key in _learner_settings(each, self.scale.preset, dataset, "{}")}
        for setting in settings:
            if setting not in known:
                raise RefplanError(
                    f"{self.recipe.name}: none of the models {', '.join(names)} has a setting '{setting}'."
                )
        own = _learner_settings(name, self.scale.preset, dataset, "{}")
        mine = {key: value for key, value in settings.items() if key in own}
        return mine, _learner_settings(name, self.scale.preset, dataset, json.dumps(mine, sort_keys=True))

    def prior(self, data: Data, method: str, seed: int, imagined: str = "ensemble") -> str:
        """The cell that trains a prior, in a model if it learns in one."""
        changes = self.scale.of_prior(method)
        usual, learns_in_model, basis = _prior_settings(
            method, self.scale.preset, data.name, json.dumps(changes, sort_keys=True)
        )
        settings: dict[str, Any] = {"method": method, "preset": self.scale.preset, "seed": seed, "settings": changes}
        settings |= {"steps": self.scale.prior_steps or usual, "critic_steps": self.scale.critic_steps}
        needs = {}
        if learns_in_model:
            needs["model"], around = self.believed(data, imagined, seed)
            settings |= around
            basis = basis | _around_basis(around)
        return self.graph.add("prior", settings, needs=needs, data={"train": data}, basis=basis)

    def _searches(self) -> None:
        for seed, robot, kind, size, prior in self._grid():
            data = Data(f"{robot}-{kind}", size, seed if size else 0)
            for belief in self.beliefs:
                model, around = self.believed(data, belief, seed)
                needs = {"prior": self.prior(data, prior, seed), "model": model}
                basis = _planner_basis("refplan", self.scale.planner_preset, data.name, prior) | _around_basis(around)
                for search, trials in (("bayes", self.scale.trials), ("grid", self.scale.grid)):
                    settings: dict[str, Any] = {**around, "search": search, "trials": trials, "seed": seed}
                    settings |= {"episodes": self.scale.episodes}
                    settings |= {"changes": _known("refplan", self.scale.planner_settings), "method": prior}
                    settings |= {"dataset": data.name, "planner_preset": self.scale.planner_preset}
                    cell = self.graph.add("tune", settings, needs=needs, data={"train": data}, basis=basis)
                    self.graph.give(cell, self._labels(robot, kind, prior, seed, agent=_named(search, belief)))

    def _timings(self) -> None:
        for robot, kind, belief in itertools.product(self.scale.robots, self.scale.kinds, self.beliefs):
            if belief in AROUND:
                continue  # nothing of it is trained
            data = Data(f"{robot}-{kind}")
            settings = {"epochs": self.scale.epochs, "decoder_epochs": self.scale.epochs}
            settings = {**self.scale.of_model(belief, kind), **settings}
            mine, basis = self._model_basis(belief, data.name, settings)
            about = {"model": belief, "preset": self.scale.preset, "settings": mine, "seed": 0}
            cell = self.graph.add("epochs", about, data={"train": data}, basis=basis, cpus=0)
            self.graph.give(cell, self._labels(robot, kind, "", 0))
        robot = "halfcheetah" if "halfcheetah" in self.scale.robots else self.scale.robots[0]
        # What is only timed need not be trained.
        short = _one_epoch(self.scale.model_settings)
        quick = dataclasses.replace(self, scale=dataclasses.replace(self.scale, model_settings=short))
        quick._timed_steps(robot, self.scale.kinds[0], self.scale.priors[0])

    def _timed_steps(self, robot: str, kind: str, prior: str) -> None:
        data = Data(f"{robot}-{kind}")
        for horizon, latents, belief in itertools.product(self.scale.horizons, self.scale.draws, self.beliefs):
            model, settings = self.believed(data, belief, 0)
            needs = {"prior": self.prior(data, prior, 0), "model": model}
            changes = {**self.scale.planner_settings, "horizon": horizon, "latents": latents}
            settings |= {"planner": "refplan", "planner_preset": self.scale.planner_preset, "changes": changes}
            settings |= {"dataset": data.name, "method": prior, "steps": self.scale.steps, "seed": 0}
            basis = _planner_basis("refplan", self.scale.planner_preset, data.name, prior) | _around_basis(settings)
            cell = self.graph.add("steps", settings, needs=needs, data={"train": data}, basis=basis, cpus=0)
            axes = {"horizon": horizon, "latents": latents, "agent": _named("refplan", belief)}
            self.graph.give(cell, self._labels(robot, kind, prior, 0, **axes))


# What presets say costs milliseconds to find out, and a large graph asks hundreds of times.
@functools.cache
def _learner_settings(model: str, preset: str, dataset: str, changes: str) -> dict[str, Any]:
    """The settings of a model's learner."""
    return inputs_of(with_settings(load_model_preset(model, preset, dataset).learner, json.loads(changes)))


@functools.cache
def _prior_settings(method: str, preset: str, dataset: str, changes: str) -> tuple[int | None, bool, dict[str, Any]]:
    """(updates of the preset, whether it learns in a model, all settings) of a prior's learner."""
    found = load_preset(method, preset, dataset)
    return found.steps, needs_model(method), inputs_of(with_settings(found.learner, json.loads(changes)))


def _named(agent: str, belief: str) -> str:
    """An agent with another belief model than the paper's says so."""
    return agent if belief in ("", BELIEF) else f"{agent} ({belief})"


def _one_epoch(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """As short as a training can be."""
    return {**settings, "all": {**settings.get("all", {}), "epochs": 1, "decoder_epochs": 1}}


def _known(planner: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Those settings the planner has: `latents` means nothing to LOOP. One that no planner has is an error."""
    everywhere = {name for each in ("loop", "refplan") for name in planner_defaults(each)}
    for name in changes:
        if name not in everywhere:
            raise RefplanError(f"neither LOOP nor RefPlan has a setting '{name}'.")
    return {name: value for name, value in changes.items() if name in planner_defaults(planner)}


def _around_basis(settings: dict[str, Any]) -> dict[str, Any]:
    """What a belief expects today, where a cell makes it around an ensemble."""
    name = settings.get("around", "")
    return {f"{name}.{setting}": value for setting, value in (usual_settings(name) if name else {}).items()}


def _planner_basis(planner: str, preset: str, dataset: str, method: str) -> dict[str, Any]:
    """What a planner's settings come to today."""
    return {**planner_defaults(planner), **planner_settings(preset, dataset, method)}
