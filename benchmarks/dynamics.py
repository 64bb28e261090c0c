"""Updates per second of the dynamics models, beside the bare matrix products of the same update."""

from benchmarks.priors import measure
from refplan.data.sources import load
from refplan.dynamics.ensemble import Ensemble


def run() -> list[dict]:
    data = load("halfcheetah-medium-replay-mini")
    return [with_epoch(measure(name, learner, data), learner) for name, learner in learners().items()]


def learners() -> dict:
    return {f"ensemble batch {size}": Ensemble(batch_size=size) for size in (256, 1024)}


def with_epoch(row: dict, learner) -> dict:
    """Seconds for one pass over 100k transitions."""
    return {**row, "epoch_100k_s": row["ms"] / 1e3 * 100_000 / learner.batch_size}
