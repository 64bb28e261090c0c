"""How long a cell may take: the matrix products it will make, at the speed this machine makes such products.

Products are counted in the jaxpr of one update or one decision (see `products`), for HalfCheetah's sizes. What cannot
be known beforehand is left out or guessed: early stopping, how long an episode lasts, how much compiling is cached.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from refplan.bench.planner import ACT, OBS, decide, make_decoder, make_model, make_prior
from refplan.bench.products import flops, median_seconds, products
from refplan.data.assemble import make_dataset
from refplan.data.dataset import Dataset, Meta
from refplan.dynamics.around import believe
from refplan.dynamics.base import NeverTerminates
from refplan.dynamics.ensemble import EnsembleDynamics
from refplan.dynamics.presets import load_model_preset
from refplan.experiments.advise import EPISODES, STEPS, TRIED
from refplan.experiments.cells import Cell, Graph
from refplan.experiments.plan import needs_model
from refplan.experiments.shelf import Data, Shelf
from refplan.experiments.workshop import inputs_of
from refplan.planners.presets import make_planner, preset_for
from refplan.presets import with_settings
from refplan.priors.presets import load_preset
from refplan.types import Key, Transition

ROWS = 3400  # of the data products are counted on; the belief model needs 3200 for one update
MANY = 1_000_000
START_S = 20.0  # to begin a process, load, compile
STEP_S = 2e-4  # one step of one simulated robot, and the way to it and back
EPISODE_STEPS = {"halfcheetah": 1000}  # it never falls
OTHER_STEPS = 500
# Everything that is not a product, as a factor on the time of the products; guessed, then compared with a few runs.
TRAINING, PLANNING = 1.6, 1.3
SEARCH = {"horizon": 3, "latents": 7}  # a middling point of the paper's grid


class Speed(NamedTuple):
    """What one CPU does."""

    gflops: float

    @classmethod
    def measured(cls) -> "Speed":
        """The speed of products as networks of this size make them, in under a second."""
        a, b = jnp.ones((5, 256, 200)), jnp.ones((5, 200, 200))
        run = jax.jit(lambda a, b: jnp.einsum("mij,mjk->mik", a, b))
        seconds = median_seconds(lambda: jax.block_until_ready(run(a, b)), 50)
        return cls(2 * 5 * 256 * 200 * 200 / seconds / 1e9)


def cell_seconds(cell: Cell, graph: Graph, speed: Speed) -> float:
    """An estimate for one cell on one CPU."""
    rows = rows_of(graph.shelf, cell.data["train"], graph.fetch) if "train" in cell.data else 0
    gflop, more = _COSTS[cell.kind](cell, rows)
    return START_S + more + gflop / speed.gflops


@functools.cache
def _rows(path: Any) -> int:
    import h5py

    if path.suffix == ".npz":
        return len(np.load(path, allow_pickle=False)["rewards"])
    with h5py.File(path, "r") as file:
        return int(file["rewards"].shape[0])


def rows_of(shelf: Shelf, data: Data, fetch: bool = True) -> int:
    """How many rows a dataset has, without loading it; a million for D4RL's, if it may not be fetched."""
    if data.size:
        return data.size
    return 1_000_000 if shelf.checksum(data.name, fetch) == "not here yet" else _rows(shelf.path(data.name))


def _text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def _model_cost(cell: Cell, rows: int) -> tuple[float, float]:
    chosen = cell.settings
    stages = _model_stages(chosen["model"], chosen["preset"], _text(chosen["settings"]))
    return TRAINING * sum(gflop * updates for updates, gflop in stages) * rows / MANY, 0.0


@functools.cache
def _model_stages(model: str, preset: str, settings: str) -> list[tuple[int, float]]:
    """(most updates on a million rows, gflop per update) of every stage of a model's training."""
    first: Any = load_model_preset(model, preset).learner
    known = inputs_of(first)
    first = with_settings(first, {n: v for n, v in json.loads(settings).items() if n in known})
    updates: list[int] = []

    def begin(learner: Any, stage: int, key: Key) -> tuple[Any, Any]:
        """The learner of a stage, and the state it begins with, untrained."""
        state = learner.init(_some_data(), key)
        return (learner, state) if stage == 0 else begin(learner.following(learner.result(state)), stage - 1, key)

    def number(stage: int) -> float:
        def update(learner_state: Any, key: Key) -> Any:
            learner, state = learner_state
            updates.append(learner.schedule(_some_data(MANY, 1, 1))[1])
            return learner.update(state, learner.batch(learner.prepare(_some_data()), state, key), key)[1]

        return _more(lambda key: begin(first, stage, key), update)

    stages = [number(stage) for stage in range(2 if hasattr(first, "following") else 1)]
    return list(zip(updates, stages, strict=True))


def _more(before: Callable[[Key], Any], then: Callable[[Any, Key], Any]) -> float:
    """gflop of `then(before(key), key)` without those of `before`; both are only traced, nothing is computed."""
    whole = flops(products(lambda key: then(before(key), key), jr.key(0)))
    return (whole - flops(products(lambda key: eqx.filter(before(key), eqx.is_array), jr.key(0)))) / 1e9


@functools.cache
def _some_data(rows: int = ROWS, obs_dim: int = OBS, action_dim: int = ACT) -> Dataset:
    """Data of which only the sizes matter."""
    obs, ends = np.zeros((rows, obs_dim), np.float32), np.arange(rows) % 100 == 99
    actions, rewards = np.zeros((rows, action_dim), np.float32), np.arange(rows, dtype=np.float32)
    flags = np.zeros(rows, bool)
    return make_dataset(obs, actions, rewards, flags, ends, next_observations=obs, meta=Meta("sizes"))


def _prior_cost(cell: Cell, rows: int) -> tuple[float, float]:
    chosen = cell.settings
    per_update = _prior_update(chosen["method"], chosen["preset"], _text(chosen["settings"]))
    return TRAINING * per_update * chosen["steps"], 0.0


@functools.cache
def _prior_update(method: str, preset: str, settings: str) -> float:
    """gflop of one update, imagined rollouts counted as often as they happen."""
    learner: Any = with_settings(load_preset(method, preset).learner, json.loads(settings))
    if not needs_model(method):
        return _count(learner, learner.update)
    starts, refresh = learner.imagined.starts, learner.imagined.refresh
    small = dataclasses.replace(learner.imagined, starts=8, retain=1, block=8)
    learner = dataclasses.replace(learner, imagined=small, model=make_model(_elites(preset)))
    return _count(learner, learner.improve) + _count(learner, learner.renew) * starts / 8 / refresh


def _count(learner: Any, step: Callable[..., Any]) -> float:
    """gflop of one step of a learner."""
    data = _some_data()

    def before(key: Key) -> tuple[Any, Any]:
        state = learner.init(data, key)
        return state, learner.batch(learner.prepare(data), state, key)

    return _more(before, lambda begun, key: step(*begun, key))


def _elites(preset: str) -> int:
    learner: Any = load_model_preset("ensemble", preset).learner
    return int(learner.elites)


def _evaluate_cost(cell: Cell, rows: int) -> tuple[float, float]:
    chosen = cell.settings
    steps = EPISODE_STEPS.get(chosen["dataset"].split("-")[0], OTHER_STEPS)
    decisions = steps * (chosen["episodes"] + chosen.get("replans", 0))
    simulated = STEP_S * steps * chosen["episodes"]
    if chosen["planner"] == "prior":
        return 0.0, simulated
    return PLANNING * decisions * _decision_of(chosen), simulated


def _advise_cost(cell: Cell, rows: int) -> tuple[float, float]:
    one = _decision("loop", "default", cell.settings["dataset"], cell.settings["method"], "{}", "")
    return PLANNING * EPISODES * STEPS * len(TRIED) * one, 0.0


def _decision_of(chosen: dict[str, Any]) -> float:
    preset = preset_for(chosen["planner"], chosen["planner_preset"], "default")  # whichever is advised costs as much
    about = (chosen["dataset"], chosen["method"], _text(chosen["changes"]), chosen.get("around", ""))
    return _decision(chosen["planner"], preset, *about)


@functools.cache
def _decision(planner: str, preset: str, dataset: str, method: str, changes: str, around: str) -> float:
    """gflop of one decision; a preset with the paper's numbers also means the paper's number of elites."""
    elites = _elites("paper" if preset == "paper" else "cpu")
    model = believe(around, _make_ensemble(elites)) if around else make_model(elites)
    options: dict[str, Any] = {"preset": preset, "dataset": dataset, "method": method, "changes": json.loads(changes)}
    agent = make_planner(planner, make_prior(), model, **options)
    obs = jnp.zeros((1, OBS))
    step = Transition(obs, jnp.zeros((1, ACT)), jnp.zeros(1), obs, jnp.zeros(1, bool))
    state = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], agent.start())
    return flops(products(decide, agent, state, step, jr.split(jr.key(0), 1))) / 1e9


def _make_ensemble(elites: int) -> EnsembleDynamics:
    """A fresh ensemble of the paper's size."""
    parts: dict[str, Any] = {"decoder": make_decoder(elites, latent=0), "held_mse": jnp.zeros(elites)}
    return EnsembleDynamics(**parts, termination=NeverTerminates())


def _tune_cost(cell: Cell, rows: int) -> tuple[float, float]:
    chosen: dict[str, Any] = {**cell.settings, "planner": "refplan", "changes": {**SEARCH, **cell.settings["changes"]}}
    gflop, simulated = _evaluate_cost(dataclasses.replace(cell, settings=chosen), rows)
    return chosen["trials"] * gflop, chosen["trials"] * simulated


def _steps_cost(cell: Cell, rows: int) -> tuple[float, float]:
    chosen = cell.settings
    return PLANNING * chosen["steps"] * _decision_of(chosen), 0.0


_COSTS = {
    "model": _model_cost,
    "prior": _prior_cost,
    "advise": _advise_cost,
    "evaluate": _evaluate_cost,
    "tune": _tune_cost,
    "epochs": _model_cost,
    "steps": _steps_cost,
}
