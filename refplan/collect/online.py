"""Online SAC as a source of data: several environments, one compiled call per round, killable at any moment.

Every step is logged on the host; the replay buffer is that log on the device. A checkpoint holds learner and log. The
simulator needs none: to resume, each lane starts its current episode again from its seed and repeats its logged
actions, which brings any deterministic environment back to where it was, bit for bit.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from refplan.collect.lanes import Lanes
from refplan.data.assemble import make_dataset
from refplan.data.dataset import Dataset, Meta
from refplan.data.tasks import Task
from refplan.errors import RefplanError
from refplan.files import load_arrays
from refplan.interrupts import Interrupts
from refplan.logs import CsvLog
from refplan.modules import load_leaves, save_leaves, save_module
from refplan.nn import identity_normaliser
from refplan.priors.actor_critic import in_world_units
from refplan.priors.policy import GaussianPolicy
from refplan.priors.sac import SAC
from refplan.progress import progress
from refplan.settings import differences, settings_of
from refplan.train import own_buffers
from refplan.types import Key, Metrics, Transition


@dataclass(frozen=True)
class OnlineSettings:
    """How an online run is made; the defaults are those of the datasets in use."""

    steps: int
    lanes: int = 8  # environments side by side
    warmup: int = 5000  # first steps with uniformly random actions
    snapshot_every: int = 10_000
    log_every: int = 1000
    sac: SAC = field(default_factory=SAC)

    def __post_init__(self) -> None:
        if self.steps < self.lanes or self.lanes < 1:
            raise RefplanError(f"an online run needs at least one step per lane, got {self.steps} for {self.lanes}.")

    @property
    def rounds(self) -> int:
        """Calls of the simulator; each makes one step in every lane."""
        return self.steps // self.lanes


class OnlineRun:
    """An online SAC run in a folder: trains, snapshots, resumes, and gives its log as a dataset."""

    def __init__(self, task: Task, folder: str | Path, settings: OnlineSettings, *, key: Key):
        self.task, self.folder, self.settings = task, Path(folder), settings
        key_init, self.key_act, self.key_learn, self.key_seed = jr.split(key, 4)
        bounds = jnp.asarray(task.low), jnp.asarray(task.high)
        self.state = own_buffers(settings.sac.create(identity_normaliser(task.obs_dim), *bounds, key_init))
        self.log = _empty_log(task, settings)
        self.round = 0
        self.identity = {"task": task.name, "key": np.asarray(jr.key_data(key)).tolist()} | {
            k: v for k, v in settings_of(settings).items() if k not in ("steps", "log_every")
        }
        self.metrics = CsvLog(self.folder / "metrics.csv")
        self._resume()

    def policy(self) -> GaussianPolicy:
        """The policy as it is now, in the world's units."""
        return in_world_units(self.state.policy, self.state.low, self.state.high)

    def _resume(self) -> None:
        path = self.folder / "checkpoint.safetensors"
        if path.exists():
            arrays, header = load_arrays(path)
            if changed := differences(header["identity"], self.identity):
                raise RefplanError(
                    f"{path}: belongs to a run with other settings ({'; '.join(changed)}). "
                    "Use those settings to resume it, or another output file for the new run."
                )
            self.round = min(int(header["round"]), self.settings.rounds)
            self.state, _ = load_leaves(path, self.state)
            for name in (n for n in arrays if n.startswith("log.")):
                rows = arrays[name][: self.round]
                log = self.log.setdefault(name[4:], np.zeros((self.settings.rounds, *rows.shape[1:]), rows.dtype))
                log[: self.round] = rows
        self.metrics.rewind(self.round * self.settings.lanes)

    def save(self) -> None:
        """Write learner and log; a kill before the rename leaves the previous checkpoint."""
        logs = {f"log.{name}": log[: self.round] for name, log in self.log.items()}
        header = {"round": self.round, "identity": self.identity}
        save_leaves(self.folder / "checkpoint.safetensors", self.state, header, extra=logs)

    def train(self, save_seconds: float = 60.0, show: bool | None = None) -> "OnlineRun":
        """Run to the end, saving now and then and when interrupted."""
        settings = self.settings
        if self.round >= settings.rounds:
            return self
        label = (f"SAC in {self.task.name}", settings.steps, "steps", show, self.round * settings.lanes)
        with Interrupts() as interrupts, progress(*label) as advance:
            lanes = Lanes(self)
            buffer = self._buffer()
            saved, sums, finished = time.monotonic(), [], []
            while self.round < settings.rounds:
                self._snapshot()
                buffer, metrics, returns = lanes.advance(buffer)
                sums.append(metrics)
                finished += returns
                self.round += 1
                reached = self.round * settings.lanes
                if reached % settings.log_every < settings.lanes:
                    words = self._log_row(reached, sums, finished)
                    sums, finished = [], []
                    advance(reached, words)
                last = self.round == settings.rounds
                if interrupts.seen or last or time.monotonic() - saved > save_seconds:
                    self.save()
                    saved = time.monotonic()
                if interrupts.seen and not last:
                    interrupts.leave(f"step {reached} of {settings.steps}", self.folder)
            lanes.close()
        self._snapshot()
        return self

    def _log_row(self, reached: int, metrics: list[Metrics | None], returns: list[float]) -> str:
        learned = [m for m in metrics if m is not None]
        names = ("critic_loss", "q", "actor_loss", "entropy", "alpha")
        row = {n: float(np.mean([float(m[n]) for m in learned])) if learned else 0.0 for n in names}
        row["episode_return"] = float(np.mean(returns)) if returns else 0.0
        row["episodes"] = float(len(returns))
        self.metrics(reached, row)
        return f"return {row['episode_return']:.0f}  q {row['q']:.3g}  alpha {row['alpha']:.2g}"

    def _snapshot(self) -> None:
        settings, reached = self.settings, self.round * self.settings.lanes
        due = reached % settings.snapshot_every < settings.lanes or self.round == settings.rounds
        path = self.snapshot_path(reached)
        if due and not path.exists():
            save_module(path, self.policy(), {"step": reached})

    def snapshot_path(self, step: int) -> Path:
        """Where the policy after `step` steps is kept."""
        return self.folder / "snapshots" / f"policy-{step:08d}.safetensors"

    def snapshots(self) -> dict[int, Path]:
        """All policy snapshots by step."""
        paths = sorted((self.folder / "snapshots").glob("policy-*.safetensors"))
        return {int(path.stem.split("-")[1]): path for path in paths}

    def _buffer(self) -> Transition:
        """The log as rows on the device, in the order they were made; rows not yet made are zero."""
        flat = {name: log.reshape(-1, *log.shape[2:]) for name, log in self.log.items()}
        return Transition(
            jnp.asarray(flat["observations"]),
            jnp.asarray(flat["units"]),
            jnp.asarray(flat["rewards"]),
            jnp.asarray(flat["next_observations"]),
            jnp.asarray(flat["terminated"]),
        )

    def dataset(self, meta: Meta, rounds: int | None = None) -> Dataset:
        """The first `rounds` rounds of the log as episodes, ordered by their last step; cut ones are truncated."""
        count = self.round if rounds is None else min(rounds, self.round)
        log = {name: values[:count] for name, values in self.log.items()}
        log["truncated"] = log["truncated"].copy()
        log["truncated"][-1] |= ~log["terminated"][-1]
        ends = log["terminated"] | log["truncated"]
        pieces = []
        for lane in range(ends.shape[1]):
            last = np.flatnonzero(ends[:, lane])
            first = np.concatenate([[0], last[:-1] + 1])
            pieces += [(b, lane, a) for a, b in zip(first, last, strict=True)]
        order = [(np.arange(a, b + 1), lane) for b, lane, a in sorted(pieces)]
        take = lambda name: np.concatenate([log[name][rows, lane] for rows, lane in order])  # noqa: E731
        states = {n: take(n) for n in ("qpos", "qvel") if n in log}
        columns = [take(n) for n in ("observations", "actions", "rewards", "terminated", "truncated")]
        return make_dataset(*columns, next_observations=take("next_observations"), **states, meta=meta)


def _empty_log(task: Task, settings: OnlineSettings) -> dict[str, np.ndarray]:
    shape = (settings.rounds, settings.lanes)
    vectors = {"observations": task.obs_dim, "next_observations": task.obs_dim}
    vectors |= {"actions": task.action_dim, "units": task.action_dim}
    log: dict[str, np.ndarray] = {name: np.zeros((*shape, dim), np.float32) for name, dim in vectors.items()}
    log["rewards"] = np.zeros(shape, np.float32)
    log |= {name: np.zeros(shape, bool) for name in ("terminated", "truncated")}
    return log
