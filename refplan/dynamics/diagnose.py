"""`diagnose`: can this model of the world be planned with?

A model is run along logged actions from logged states, with the belief the agent would have had there, and compared
with what really came. Nothing is simulated, so it works on any data, also on data from another world.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from refplan.agent import AbstractPrior
from refplan.data.dataset import Dataset
from refplan.dynamics.base import AbstractDynamics, AbstractLatentDynamics
from refplan.dynamics.diagnose_data import (
    Memory,
    Randomness,
    Scale,
    Segments,
    cut_segments,
    data_scale,
    draw_rows,
    eligible_rows,
    part_of,
    prepare_data,
    remember,
    take_steps,
)
from refplan.dynamics.diagnose_latent import measure_latent
from refplan.dynamics.diagnose_measure import (
    match_returns,
    measure_doubt,
    measure_ends,
    measure_errors,
    measure_plans,
    truth_of,
)
from refplan.dynamics.diagnose_plans import PlanDraws, score_plans
from refplan.dynamics.diagnose_record import Diagnosis, Ends, LatentUse, PlanNoise, ReturnMatch
from refplan.dynamics.diagnose_rollout import (
    Rollout,
    first_step_density,
    predict_ends,
    real_returns,
    roll_returns,
    roll_segments,
)
from refplan.errors import RefplanError
from refplan.types import Key

HORIZONS = (2, 4, 10)  # planning horizons worth a line of their own
END_ROWS = (1000, 3000)  # at most this many rows with an end, and without


def diagnose(
    model: AbstractDynamics,
    data: Dataset,
    *,
    key: Key,
    horizon: int = 10,
    prior: AbstractPrior | None = None,
    segments: int = 1024,
    episodes: int = 128,
    particles: int = 40,
    states: int = 32,
    plans: int = 32,
    repeats: int = 8,
    sigma: float = 0.2,
    discount: float = 0.99,
) -> Diagnosis:
    """Judge a model on logged episodes.

    `segments` random rows of at most `episodes` random episodes are followed for `horizon` steps, with about
    `particles` sampled runs each. For `states` of them, `plans` plans are scored `repeats` times: sampled from `prior`
    if there is one (its value is then added at the end, discounted), else the logged actions plus noise of `sigma`
    times their std.
    """
    model = model.as_trained()
    _check_sizes(model, data)
    random = Randomness(key)
    data = prepare_data(data, horizon, episodes, random)
    scale = data_scale(data)
    first, ends = draw_rows(eligible_rows(data, horizon), segments, random), _end_rows(data, random)
    memory = remember(model, prior, data, np.concatenate([first, ends]), random)
    here, at_ends = _part(memory, slice(0, len(first))), _part(memory, slice(len(first), None))
    cut = cut_segments(data, first, horizon)
    horizons = tuple(sorted({h for h in HORIZONS if h <= horizon} | {horizon}))
    world = _World(model, prior, data, scale, random, {"horizons": horizons, "discount": discount})
    found, diverged = _judge(world, here, cut, max(-(-particles // model.members), 2))
    return Diagnosis(
        data=data.meta.name,
        transitions=len(data),
        episodes=data.episodes,
        segments=len(first),
        members=model.members,
        horizon=horizon,
        diverged=diverged,
        **found,
        plans=_plans(world, here, cut, (states, plans, repeats), sigma),
        ends=_ends(world, at_ends, ends),
        latent=_latent(world, memory, first),
    )


class _World(NamedTuple):
    """What every part of a diagnosis needs."""

    model: AbstractDynamics
    prior: AbstractPrior | None
    data: Dataset
    scale: Scale
    random: Randomness
    settings: dict[str, Any]


def _check_sizes(model: AbstractDynamics, data: Dataset) -> None:
    obs, action = jnp.zeros(data.obs_dim), jnp.zeros(data.action_dim)
    try:
        belief = model.start()
        outcome = jax.eval_shape(lambda o, a: model.predict_from(model.centre(belief, o), o, a), obs, action)
        fits = outcome.next_obs.shape == (model.members, data.obs_dim)
        said = f"its next observations have shape {outcome.next_obs.shape}"
    except (TypeError, ValueError) as error:
        fits, said = False, str(error).splitlines()[0]
    if not fits:
        raise RefplanError(
            f"the model does not fit dataset '{data.meta.name}' (observations of size {data.obs_dim}, actions of size "
            f"{data.action_dim}): {said}. Diagnose it on data of the robot it was trained for."
        )


def _part(memory: Memory, which: slice) -> Memory:
    belief, prior = part_of((memory.belief, memory.prior), which)
    return memory._replace(belief=belief, prior=prior)


def _judge(world: _World, here: Memory, cut: Segments, draws: int) -> tuple[dict[str, Any], float]:
    """Errors, doubt and returns of the segments that stayed finite, and the share that did not."""
    model, random = world.model, world.random
    count, horizon = cut.valid.shape
    noise = random.normal(count, draws, horizon, model.members, world.data.obs_dim + 1)
    keys = random.keys(count, draws)
    roll = roll_segments(model, world.prior, here.belief, here.prior, cut.steps, noise, keys, **world.settings)
    finite = np.logical_and.reduce([np.isfinite(x).reshape(count, -1).all(axis=1) for x in roll if x is not None])
    if not finite.any():
        raise RefplanError(
            f"every imagined run of {horizon} steps left the finite numbers; this model cannot be judged. Use a "
            "shorter horizon, or train it again."
        )
    kept = Rollout(*(None if x is None else np.asarray(x, np.float64)[finite] for x in roll))  # ty: ignore
    std = jnp.asarray(world.scale.std, jnp.float32)
    mixture, member = first_step_density(model, here.belief, take_steps(world.data, cut.row), std)
    density = np.asarray(mixture)[finite], np.asarray(member)[finite]
    truth, valid = truth_of(cut)[finite], np.asarray(cut.valid)[finite]
    start = world.data.observations[cut.row[finite]].astype(np.float64)
    runs = draws * model.members
    return {
        "errors": measure_errors(kept, truth, start, valid, world.scale, density, runs, random),
        "doubt": measure_doubt(kept, truth, valid, world.scale, model.members),
        "returns": _returns(world, here, cut, kept, start, finite),
    }, float(1.0 - finite.mean())


def _returns(
    world: _World, here: Memory, cut: Segments, kept: Rollout, start: np.ndarray, finite: np.ndarray
) -> tuple[ReturnMatch, ...]:
    model, prior, settings = world.model, world.prior, world.settings
    foreign = cut.steps._replace(action=jnp.asarray(np.roll(cut.steps.action, 1, axis=0)))
    shuffled = roll_returns(model, prior, here.belief, here.prior, foreign, **settings)
    realised = real_returns(prior, here.prior, cut.steps, cut.valid, **settings)
    imagined, sampled = (kept.earned, kept.valued), (kept.earned_sampled, kept.valued_sampled)
    found = []
    for with_value in (False, True) if prior is not None else (False,):
        kinds = [np.asarray(x[with_value], np.float64) for x in (imagined, sampled, realised, shuffled)]
        kinds = [*kinds[:2], *(x[finite] for x in kinds[2:])]
        for i, h in enumerate(settings["horizons"]):
            found.append(match_returns(h, with_value, *(x[:, i] for x in kinds), start))
    return tuple(found)


def _plans(
    world: _World, here: Memory, cut: Segments, sizes: tuple[int, int, int], sigma: float
) -> tuple[PlanNoise, ...]:
    """Plans of the first states; without a prior scores are plain sums of rewards, so nothing is discounted."""
    states, plans, repeats = min(sizes[0], len(cut.row)), *sizes[1:]
    model, data, random = world.model, world.data, world.random
    steps, here = part_of(cut.steps, slice(0, states)), _part(here, slice(0, states))
    shape = states, plans, cut.valid.shape[1]
    draws = PlanDraws(
        random.normal(*shape, data.action_dim),
        random.keys(*shape, 2),
        random.integers(model.members, *shape),
        random.normal(states, plans, repeats, shape[2], model.members, data.obs_dim + 1),
    )
    noise = jnp.asarray(sigma * data.actions.std(axis=0))
    bounds = jnp.asarray(data.actions.min(axis=0)), jnp.asarray(data.actions.max(axis=0))
    settings = world.settings if world.prior is not None else {**world.settings, "discount": 1.0}
    scores = score_plans(model, world.prior, here.belief, here.prior, steps, noise, bounds, draws, **settings)
    values = np.asarray(scores, np.float64)
    return tuple(measure_plans(values[..., i], h) for i, h in enumerate(settings["horizons"]))


def _end_rows(data: Dataset, random: Randomness) -> Int[np.ndarray, " rows"]:
    ended = draw_rows(np.flatnonzero(data.terminated), END_ROWS[0], random)
    return np.concatenate([ended, draw_rows(np.flatnonzero(~data.terminated), END_ROWS[1], random)])


def _ends(world: _World, memory: Memory, row: Int[np.ndarray, " rows"]) -> Ends:
    predicted, rule = predict_ends(world.model, memory.belief, take_steps(world.data, row))
    return measure_ends(world.data, row, np.asarray(predicted), np.asarray(rule))


def _latent(world: _World, memory: Memory, first: Int[np.ndarray, " segments"]) -> LatentUse | None:
    model = world.model
    if not isinstance(model, AbstractLatentDynamics) or memory.mu is None or memory.log_var is None:
        return None
    return measure_latent(model, world.data, memory.mu, memory.log_var, first, world.scale.std, world.random)
