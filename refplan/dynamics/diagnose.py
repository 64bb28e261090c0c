"""`diagnose`: can this model of the world be planned with?

A model is run along logged actions from logged states, with the belief the agent would have had there, and compared
with what really came. Nothing is simulated, so it works on any data, also on data from another world.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Int

from refplan.agent import AbstractPrior
from refplan.data.dataset import Dataset
from refplan.data.sampling import take_rows
from refplan.dynamics.base import AbstractDynamics, AbstractLatentDynamics
from refplan.dynamics.diagnose_data import (
    Memory,
    Scale,
    Segments,
    cut_segments,
    data_scale,
    draw_rows,
    eligible_rows,
    prepare_data,
    remember,
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
from refplan.dynamics.diagnose_plans import score_plans
from refplan.dynamics.diagnose_record import Diagnosis, Ends, PlanNoise, ReturnMatch
from refplan.dynamics.diagnose_rollout import (
    Rollout,
    count_draws,
    first_step_density,
    predict_ends,
    real_returns,
    roll_returns,
    roll_segments,
)
from refplan.errors import RefplanError
from refplan.types import Key, Transition

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
    particles: int = 64,
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
    _check_sizes(model, data)
    keys = jr.split(key, 9)
    data = prepare_data(data, horizon, episodes, keys[0])
    rows, scale = data.device(), data_scale(data)
    first = draw_rows(eligible_rows(data, horizon), segments, keys[1])
    ends = _end_rows(data, keys[2])
    memory = remember(model, prior, data, np.concatenate([first, ends]), keys[3])
    here, at_ends = _part(memory, slice(0, len(first))), _part(memory, slice(len(first), None))
    cut = cut_segments(data, rows, first, horizon)
    horizons = tuple(sorted({h for h in HORIZONS if h <= horizon} | {horizon}))
    settings: dict[str, Any] = {"horizons": horizons, "discount": discount}
    roll = roll_segments(
        model, prior, here.belief, here.prior, cut.steps, keys[4], draws=count_draws(model, particles), **settings
    )
    finite = np.logical_and.reduce([np.isfinite(x).reshape(len(first), -1).all(axis=1) for x in roll if x is not None])
    judged = _judge(model, prior, data, here, cut, roll, scale, finite, settings)
    some = slice(0, states)
    return Diagnosis(
        data=data.meta.name,
        transitions=len(data),
        episodes=data.episodes,
        segments=len(first),
        members=model.members,
        horizon=horizon,
        diverged=float(1.0 - finite.mean()),
        **judged,
        plans=_plans(model, prior, data, _part(here, some), cut, some, sigma, keys[5], plans, repeats, settings),
        ends=_ends(model, data, at_ends, ends, rows),
        latent=_latent(model, data, memory, rows, first, scale, keys[6]),
    )


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
    belief, prior = jax.tree.map(lambda x: x[which], (memory.belief, memory.prior))
    return memory._replace(belief=belief, prior=prior)


def _judge(
    model: AbstractDynamics,
    prior: AbstractPrior | None,
    data: Dataset,
    here: Memory,
    cut: Segments,
    roll: Rollout,
    scale: Scale,
    finite: np.ndarray,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Errors, doubt and returns of the segments that stayed finite."""
    if not finite.any():
        raise RefplanError(
            f"every imagined run of {cut.steps.reward.shape[1]} steps left the finite numbers; this model cannot be "
            "judged. Use a shorter horizon, or train it again."
        )
    std = jnp.asarray(scale.std, jnp.float32)
    density = first_step_density(model, here.belief, jax.tree.map(lambda x: x[:, 0], cut.steps), std)
    density = tuple(np.asarray(x)[finite] for x in density)
    truth, valid = truth_of(cut)[finite], np.asarray(cut.valid)[finite]
    start = data.observations[cut.row[finite]].astype(np.float64)
    kept = Rollout(*(None if x is None else np.asarray(x, np.float64)[finite] for x in roll))  # ty: ignore
    return {
        "errors": measure_errors(kept, truth, start, valid, scale, density),
        "doubt": measure_doubt(kept, truth, valid, scale, model.members),
        "returns": _returns(model, prior, here, cut, kept, start, finite, settings),
    }


def _returns(
    model: AbstractDynamics,
    prior: AbstractPrior | None,
    here: Memory,
    cut: Segments,
    kept: Rollout,
    start: np.ndarray,
    finite: np.ndarray,
    settings: dict[str, Any],
) -> tuple[ReturnMatch, ...]:
    foreign = cut.steps._replace(action=jnp.roll(cut.steps.action, 1, axis=0))
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
    model: AbstractDynamics,
    prior: AbstractPrior | None,
    data: Dataset,
    here: Memory,
    cut: Segments,
    some: slice,
    sigma: float,
    key: Key,
    plans: int,
    repeats: int,
    settings: dict[str, Any],
) -> tuple[PlanNoise, ...]:
    """The first states' plans; without a prior scores are plain sums of rewards, so nothing is discounted."""
    noise = jnp.asarray(sigma * data.actions.std(axis=0), jnp.float32)
    bounds = jnp.asarray(data.actions.min(axis=0)), jnp.asarray(data.actions.max(axis=0))
    steps = jax.tree.map(lambda x: x[some], cut.steps)
    settings = {**settings, "discount": settings["discount"] if prior is not None else 1.0}
    sampled, mean = score_plans(
        model, prior, here.belief, here.prior, steps, noise, bounds, key, plans=plans, repeats=repeats, **settings
    )
    sampled, mean = np.asarray(sampled, np.float64), np.asarray(mean, np.float64)
    return tuple(measure_plans(sampled[..., i], mean[..., i], h) for i, h in enumerate(settings["horizons"]))


def _end_rows(data: Dataset, key: Key) -> Int[np.ndarray, " rows"]:
    key_ended, key_other = jr.split(key)
    ended = draw_rows(np.flatnonzero(data.terminated), END_ROWS[0], key_ended)
    return np.concatenate([ended, draw_rows(np.flatnonzero(~data.terminated), END_ROWS[1], key_other)])


def _ends(
    model: AbstractDynamics, data: Dataset, memory: Memory, row: Int[np.ndarray, " rows"], rows: Transition
) -> Ends:
    predicted, rule = predict_ends(model, memory.belief, take_rows(rows, jnp.asarray(row)))
    return measure_ends(data, row, np.asarray(predicted), np.asarray(rule))


def _latent(
    model: AbstractDynamics,
    data: Dataset,
    memory: Memory,
    rows: Transition,
    first: Int[np.ndarray, " segments"],
    scale: Scale,
    key: Key,
):
    if not isinstance(model, AbstractLatentDynamics) or memory.mu is None or memory.log_var is None:
        return None
    return measure_latent(model, data, memory.mu, memory.log_var, rows, first, scale.std, key)
