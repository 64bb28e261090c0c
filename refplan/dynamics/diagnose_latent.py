"""Whether a latent is used: how it moves, how wide its posterior is, and what predictions lose without it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from refplan.data.dataset import Dataset
from refplan.dynamics.base import AbstractLatentDynamics
from refplan.dynamics.diagnose_data import Randomness, take_steps
from refplan.dynamics.diagnose_record import LatentUse
from refplan.dynamics.diagnose_rollout import log_density
from refplan.types import Transition

Path = Float[np.ndarray, "episodes time latent"]
Live = Bool[np.ndarray, "episodes time"]


def gaussian_kl(mean: np.ndarray, log_var: np.ndarray, mean_to: np.ndarray | float, log_var_to: np.ndarray | float):
    """KL(N(mean, e^log_var) || N(mean_to, e^log_var_to)) in nats, summed over the last axis."""
    scaled = np.exp(log_var - log_var_to) + (mean - mean_to) ** 2 * np.exp(-log_var_to)
    return 0.5 * (scaled - 1.0 + log_var_to - log_var).sum(axis=-1)


def measure_latent(
    model: AbstractLatentDynamics,
    data: Dataset,
    mu: Float[Array, "time episodes latent"],
    log_var: Float[Array, "time episodes latent"],
    row: Int[np.ndarray, " segments"],
    scale: Float[np.ndarray, " outputs"],
    random: Randomness,
) -> LatentUse:
    """Posteriors along all episodes, and the one-step NLL at `row` under true, foreign and no latents."""
    means, log_vars = (np.swapaxes(np.asarray(x, np.float64), 0, 1) for x in (mu, log_var))
    live = np.arange(means.shape[1])[None] < data.lengths[:, None]
    between = gaussian_kl(means[:, 1:], log_vars[:, 1:], means[:, :-1], log_vars[:, :-1])[live[:, 1:]]
    averages = np.where(live[..., None], means, 0.0).sum(axis=1) / data.lengths[:, None]
    movement, distance, settled = _settling(means, live)
    nll = _nll_by_latent(model, data, means, log_vars, row, scale, random)
    return LatentUse(
        kl_previous=float(between.mean()) if len(between) else float("nan"),
        kl_first=float(gaussian_kl(means[:, 0], log_vars[:, 0], 0.0, 0.0).mean()),
        kl_standard=float(gaussian_kl(means, log_vars, 0.0, 0.0)[live].mean()),
        posterior_std=float(np.exp(0.5 * log_vars[live]).mean()),
        means_std=float(means[live].std(axis=0).mean()),
        episode_std=float(averages.std(axis=0).mean()) if len(averages) > 1 else float("nan"),
        **nll,
        settled_after=settled,
        movement=movement,
        distance=distance,
    )


def _settling(means: Path, live: Live) -> tuple[np.ndarray, np.ndarray, int]:
    """(movement per step, distance from the mean of the episode's second half, steps until 90 % of the way is gone)."""
    lengths = live.sum(axis=1)
    late = live & (np.arange(live.shape[1])[None] >= (lengths // 2)[:, None])
    goal = np.where(late[..., None], means, 0.0).sum(axis=1) / late.sum(axis=1)[:, None]
    away = np.linalg.norm(means - goal[:, None], axis=2)
    moved = np.linalg.norm(np.diff(means, axis=1), axis=2)
    distance, movement = _mean_over_episodes(away, live), _mean_over_episodes(moved, live[:, 1:])
    level = away[late].mean()
    close = distance <= level + 0.1 * max(distance[0] - level, 0.0)
    settled = 0 if distance[0] <= level else int(np.argmax(close))
    return movement, distance, settled


def _mean_over_episodes(x: Float[np.ndarray, "episodes time"], live: Live) -> Float[np.ndarray, " time"]:
    return np.where(live, x, 0.0).sum(axis=0) / live.sum(axis=0)


def _nll_by_latent(
    model: AbstractLatentDynamics,
    data: Dataset,
    means: Path,
    log_vars: Path,
    row: Int[np.ndarray, " segments"],
    scale: Float[np.ndarray, " outputs"],
    random: Randomness,
) -> dict[str, float]:
    """The same steps decoded under different latents."""
    episode = np.searchsorted(data.starts, row, side="right") - 1
    here = means[episode, row - data.starts[episode]]
    std = np.exp(0.5 * log_vars[episode, row - data.starts[episode]])
    live = np.arange(means.shape[1])[None] < data.lengths[:, None]
    others = random.host.integers(live.sum(), size=len(row))
    latents = {
        "nll_mean": here,
        "nll_sampled": here + std * random.host.standard_normal(here.shape),
        "nll_shuffled": means[live][others],
        "nll_constant": np.broadcast_to(means[live].mean(axis=0), here.shape),
        "nll_zero": np.zeros_like(here),
    }
    stacked = jnp.asarray(np.stack(list(latents.values())), jnp.float32)
    values = _decode_under(model, stacked, take_steps(data, row), jnp.asarray(scale, jnp.float32))
    return {name: float(value) for name, value in zip(latents, values, strict=True)}


@eqx.filter_jit
def _decode_under(
    model: AbstractLatentDynamics,
    latents: Float[Array, "kinds rows latent"],
    steps: Transition,
    scale: Float[Array, " outputs"],
) -> Float[Array, " kinds"]:
    one = lambda m, step: -jnp.mean(log_density(model, m, step, scale)[1])  # noqa: E731
    return jax.vmap(lambda kind: jnp.mean(jax.vmap(one)(kind, steps)))(latents)
