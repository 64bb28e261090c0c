"""`fit`: one compiled loop that trains any learner, and picks up exactly where a kill left it.

A learner is hyper-parameters; what it learns is a state that goes in and out. The randomness of update `i` is a pure
function of the key and `i`, and checkpoints hold the state and `i`, so a resumed run repeats an uninterrupted one bit
for bit.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Int

from refplan.data.dataset import Dataset
from refplan.errors import RefplanError
from refplan.files import read_header
from refplan.interrupts import Interrupts
from refplan.learner import (
    AbstractLearner,
    AbstractReviewingLearner,
    AbstractStagedLearner,
    AbstractWatchedLearner,
    check_sizes,
)
from refplan.logs import AbstractLog, CsvLog, Row
from refplan.modules import load_leaves, save_leaves
from refplan.progress import progress
from refplan.settings import differences, settings_of
from refplan.types import Key, Metrics, State

Log = Callable[[int, Row], None]


class Diverged(RefplanError):
    """A metric became NaN or infinite, or a watched learner saw that its values mean nothing any more."""


def fit(
    learner: AbstractLearner,
    data: Dataset,
    held: Dataset | None = None,
    *,
    key: Key,
    steps: int | None = None,
    every: int | None = None,
    folder: str | Path | None = None,
    logs: Sequence[AbstractLog | Log] = (),
    save_seconds: float = 30.0,
    show: bool | None = None,
) -> Any:
    """Train for `steps` updates and return the learner's result.

    Metrics are averaged over chunks of `every` (1000) updates and given to each of `logs`. With a `folder` they also go
    to `metrics.csv`, and `checkpoint.safetensors` is renewed at least every `save_seconds`: run the same call again
    after a kill and it continues. A learner that reviews itself knows how long to train and what to hold out when the
    caller does not say, and may stop earlier. The stages of a staged learner follow each other, each in a folder of its
    own; `steps` and `every` then speak of the first.
    """
    check_sizes(learner)
    key_fit, key_held, key_next = jr.split(key, 3)
    if isinstance(learner, AbstractReviewingLearner):
        usual_every, usual_steps = learner.schedule(data)
        every, steps = every or usual_every, steps or usual_steps
        if held is None:
            data, held = learner.hold_out(data, key_held)
    if steps is None:
        raise RefplanError(f"how long should {type(learner).__name__} train? Give steps=... to fit.")
    folder = None if folder is None else Path(folder)
    run = _Run(learner, data, steps, key_fit, every or 1000, folder, logs, save_seconds)
    result = _train(run, held, show)
    if not isinstance(learner, AbstractStagedLearner):
        return result
    following = learner.following(result)
    folder = None if folder is None else folder / type(following).__name__.lower()
    return fit(following, data, held, key=key_next, folder=folder, logs=logs, save_seconds=save_seconds, show=show)


def _train(run: "_Run", held: Dataset | None, show: bool | None) -> Any:
    """Chunk after chunk until the end, an interrupt, or a review that has seen enough."""
    learner, steps = run.learner, run.steps
    source = learner.prepare(run.data)
    held_source = None if held is None else learner.prepare(held)
    label = f"fit {type(learner).__name__}"
    with Interrupts() as interrupts, progress(label, steps, "updates", show, run.step) as advance:
        advance(run.step, "compiling")
        while run.step < steps and not run.finished():
            row = run.chunk(source, held_source)
            advance(run.step, _words(row))
            run.save(force=interrupts.seen or run.step >= steps or run.finished())
            if interrupts.seen and run.step < steps:
                run.close()
                interrupts.leave(f"update {run.step} of {steps}", run.checkpoint and run.checkpoint.parent)
    run.close()
    return learner.result(run.state)


class _Run:
    """The moving parts of one `fit`: state, step, logs and checkpoint."""

    def __init__(
        self,
        learner: AbstractLearner,
        data: Dataset,
        steps: int,
        key: Key,
        every: int,
        folder: Path | None,
        logs: Sequence[AbstractLog | Log],
        save_seconds: float,
    ):
        if steps < 1 or every < 1:
            raise RefplanError(f"steps and every must be at least 1, got steps={steps}, every={every}.")
        self.learner, self.data, self.steps, self.every = learner, data, steps, every
        self.save_seconds = save_seconds
        key_init, self.key = jr.split(key)
        self.state = own_buffers(eqx.filter_jit(learner.init)(data, key_init))
        self.step, self.saved_step, self.saved_at = 0, 0, time.monotonic()
        self.begun, self.seconds_before = time.monotonic(), 0.0
        self.checkpoint = None if folder is None else folder / "checkpoint.safetensors"
        self.logs = [*logs, *([] if folder is None else [CsvLog(folder / "metrics.csv")])]
        self.identity = {
            "learner": type(learner).__name__,
            "settings": settings_of(learner),
            "every": every,
            "data": data.fingerprint,
            "key": np.asarray(jr.key_data(key)).tolist(),
        }
        self._resume()

    def _resume(self) -> None:
        if self.checkpoint is not None and self.checkpoint.exists():
            self.state, header = load_leaves(self.checkpoint, self.state)
            changed = differences(header.get("identity", {}), self.identity)
            if changed:
                raise RefplanError(
                    f"{self.checkpoint}: belongs to a run with other settings ({'; '.join(changed)}). "
                    "Use those settings to resume it, or another folder for the new run."
                )
            self.step = self.saved_step = int(header["step"])
            self.seconds_before = float(header["wall_s"])
        for log in self.logs:
            if isinstance(log, AbstractLog):
                log.rewind(self.step)

    def chunk(self, source: Any, held: Any) -> Row:
        """Run up to `every` updates, then review; returns and logs the averaged metrics."""
        count = min(self.every, self.steps - self.step)
        fixed = (self.learner, source, self.key)
        self.state, metrics = _updates(fixed, self.state, jnp.asarray(self.step), jnp.asarray(count))
        self.step += count
        if isinstance(self.learner, AbstractReviewingLearner):
            fixed = (self.learner, source, self.key, held)
            self.state, more = _review(fixed, self.state, jnp.asarray(self.step))
            metrics = {**metrics, **more}
        row = {name: float(value) for name, value in metrics.items()}
        self._check_finite(row)
        for log in self.logs:
            log(self.step, row)
        self._check_sane(row)
        return row

    def _check_finite(self, row: Row) -> None:
        bad = [name for name, value in row.items() if not np.isfinite(value)]
        if bad:
            raise Diverged(
                f"{self.identity['learner']} diverged: {', '.join(bad)} not finite before update {self.step}. "
                "Try a smaller learning rate, or check the data with: refplan data check"
            )

    def _check_sane(self, row: Row) -> None:
        trouble = self.learner.trouble(row) if isinstance(self.learner, AbstractWatchedLearner) else ""
        if trouble:
            self.close()
            raise Diverged(f"{self.identity['learner']} diverged before update {self.step}: {trouble}")

    def finished(self) -> bool:
        """Whether a review asked to stop."""
        return isinstance(self.learner, AbstractReviewingLearner) and bool(self.learner.finished(self.state))

    def save(self, force: bool) -> None:
        """Renew the checkpoint when it is old enough."""
        due = force or time.monotonic() - self.saved_at >= self.save_seconds
        if self.checkpoint is None or not due or self.saved_step == self.step:
            return
        wall = self.seconds_before + time.monotonic() - self.begun
        save_leaves(self.checkpoint, self.state, {"step": self.step, "wall_s": wall, "identity": self.identity})
        self.saved_step, self.saved_at = self.step, time.monotonic()

    def close(self) -> None:
        """Flush the logs this run opened."""
        for log in self.logs:
            if isinstance(log, AbstractLog):
                log.close()


def training_seconds(folder: str | Path) -> float:
    """How long the training in a folder took, all its sittings together."""
    checkpoints = Path(folder).rglob("checkpoint.safetensors")  # further stages have folders of their own inside
    return float(sum(read_header(checkpoint)["wall_s"] for checkpoint in checkpoints))


@eqx.filter_jit
def own_buffers(state: State) -> State:
    """Copy every array, so that no two leaves share a buffer and all can be donated; plain numbers become arrays."""

    def own(x: Any) -> Any:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jr.clone(x)
        return jnp.array(x, jnp.result_type(x), copy=True) if isinstance(x, jax.Array | np.ndarray | float | int) else x

    return jax.tree.map(own, state)


@eqx.filter_jit(donate="all-except-first")
def _updates(
    fixed: tuple[AbstractLearner, Any, Key], state: State, first: Int[Array, ""], count: Int[Array, ""]
) -> tuple[State, Metrics]:
    """`count` updates in one compiled loop; a traced count, so a short last chunk does not compile again."""
    learner, source, key = fixed
    dynamic, static = eqx.partition(state, eqx.is_array)

    def one(dynamic: State, number: Int[Array, ""]) -> tuple[State, Metrics]:
        key_batch, key_update = jr.split(jr.fold_in(key, number))
        current = eqx.combine(dynamic, static)
        new, metrics = learner.update(current, learner.batch(source, current, key_batch), key_update)
        return eqx.filter(new, eqx.is_array), metrics

    def body(number: Int[Array, ""], carry: tuple[State, Metrics]) -> tuple[State, Metrics]:
        new, metrics = traced(carry[0], first + number)
        return new, jax.tree.map(jnp.add, carry[1], metrics)

    traced: Any = eqx.filter_closure_convert(one, dynamic, first)  # once, for the metrics' shapes and for the loop
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), traced.out_struct[1])
    dynamic, totals = jax.lax.fori_loop(0, count, body, (dynamic, zeros))
    return eqx.combine(dynamic, static), jax.tree.map(lambda total: total / count, totals)


@eqx.filter_jit(donate="all-except-first")
def _review(
    fixed: tuple[AbstractReviewingLearner, Any, Key, Any], state: State, step: Int[Array, ""]
) -> tuple[State, Metrics]:
    learner, source, key, held = fixed
    # Folded twice: an update splits its folded key, so no key is used for both.
    return learner.review(state, source, held, jr.fold_in(jr.fold_in(key, step), 1))


def _words(row: Row) -> str:
    return "  ".join(f"{name} {value:.3g}" for name, value in list(row.items())[:4])
