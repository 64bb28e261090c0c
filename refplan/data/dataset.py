"""`Dataset`: logged experience with its episodes, its flags and where it came from.

Arrays live on the host as NumPy; `Dataset.device()` gives the same rows as JAX arrays, from which the samplers in
`refplan.data.sampling` draw inside compiled loops.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.random as jr
import numpy as np
from jaxtyping import Bool, Float, Int

from refplan.errors import RefplanError
from refplan.nn import Normaliser, fit_normaliser
from refplan.types import Key, Transition

if TYPE_CHECKING:
    from refplan.data.tasks import Task


@dataclass(frozen=True)
class Meta:
    """Where a dataset came from and what its scores mean."""

    name: str = "unnamed"
    env_id: str | None = None
    flavour: str = "v5"  # physics the data was made with: "v5" (current) or "d4rl"
    recipe: str = ""
    ref_min: float | None = None
    ref_max: float | None = None
    ref_source: str = ""
    source: str = ""
    checksum: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    action_low: tuple[float, ...] | None = None  # the action box, where the source states it
    action_high: tuple[float, ...] | None = None


_NOT_ROWS = ("starts", "meta", "sequential")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows of experience, episodes one after another.

    `next_observations` is the true successor on every row, terminal rows included. `terminated` means the world ended;
    `truncated` means only the recording did. `starts` holds the first row of each episode. `sequential` is false after
    a split by transition: the rows are then a bag, and windows cannot be cut from it.
    """

    observations: Float[np.ndarray, "rows obs"]
    actions: Float[np.ndarray, "rows act"]
    rewards: Float[np.ndarray, " rows"]
    next_observations: Float[np.ndarray, "rows obs"]
    terminated: Bool[np.ndarray, " rows"]
    truncated: Bool[np.ndarray, " rows"]
    starts: Int[np.ndarray, " episodes"]
    meta: Meta = Meta()
    qpos: Float[np.ndarray, "rows nq"] | None = None
    qvel: Float[np.ndarray, "rows nv"] | None = None
    known_next: Bool[np.ndarray, " rows"] | None = None  # None: every successor is known
    sequential: bool = True

    def __post_init__(self) -> None:
        rows = len(self.observations)
        for name in ("actions", "rewards", "next_observations", "terminated", "truncated"):
            if len(getattr(self, name)) != rows:
                raise RefplanError(
                    f"dataset '{self.meta.name}': {name} has {len(getattr(self, name))} rows, observations {rows}. "
                    "Every array needs one row per step."
                )
        if rows == 0:
            raise RefplanError(f"dataset '{self.meta.name}': it is empty.")

    def __len__(self) -> int:
        return len(self.observations)

    def __repr__(self) -> str:
        return (
            f"Dataset({self.meta.name}: {len(self)} transitions, {self.episodes} episodes, "
            f"obs {self.obs_dim}, actions {self.action_dim})"
        )

    @property
    def obs_dim(self) -> int:
        """Size of an observation."""
        return self.observations.shape[1]

    @property
    def action_dim(self) -> int:
        """Size of an action."""
        return self.actions.shape[1]

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return len(self.starts)

    @cached_property
    def ends(self) -> Int[np.ndarray, " episodes"]:
        """One past the last row of each episode."""
        return np.append(self.starts[1:], len(self)).astype(np.int64)

    @cached_property
    def lengths(self) -> Int[np.ndarray, " episodes"]:
        """Steps in each episode."""
        return self.ends - self.starts

    @cached_property
    def returns(self) -> Float[np.ndarray, " episodes"]:
        """Undiscounted return of each episode."""
        self._need_sequence("episode returns")
        return np.add.reduceat(self.rewards.astype(np.float64), self.starts)

    @cached_property
    def fingerprint(self) -> str:
        """A short digest of all rows and episode bounds, to recognise the same data again."""
        digest = hashlib.blake2b(digest_size=16)
        for name in ("observations", "actions", "rewards", "next_observations", "terminated", "truncated", "starts"):
            digest.update(np.ascontiguousarray(getattr(self, name)).data)
        return digest.hexdigest()

    @cached_property
    def task(self) -> "Task":
        """The task this data belongs to; without an env id, one that knows bounds and sizes but cannot be simulated."""
        from refplan.data.tasks import task_for

        return task_for(self)

    def device(self) -> Transition:
        """All rows as JAX arrays."""
        columns = self.observations, self.actions, self.rewards, self.next_observations, self.terminated
        return Transition(*jax.device_put(columns))

    def normaliser(self) -> Normaliser:
        """Statistics of the observations, to become part of the model trained on them."""
        return fit_normaliser(self.observations)

    def rows(self, index: Int[np.ndarray, " picked"] | slice, **changes: Any) -> "Dataset":
        """The picked rows of every array; the caller says what `starts` becomes."""
        picked: dict[str, Any] = {name: value[index] for name, value in self.arrays().items()}
        return dataclasses.replace(self, **picked, **changes)

    def take_episodes(self, which: Int[np.ndarray, " picked"]) -> "Dataset":
        """Some episodes, in the order given."""
        self._need_sequence("taking episodes")
        which = np.asarray(which, np.int64)
        if len(which) == 0:
            raise RefplanError(f"dataset '{self.meta.name}': no episode was picked.")
        index = np.concatenate([np.arange(self.starts[e], self.ends[e]) for e in which])
        starts = np.concatenate([[0], np.cumsum(self.lengths[which])[:-1]]).astype(np.int64)
        return self.rows(index, starts=starts)

    def split(
        self, fraction: float = 0.95, *, key: Key, by: Literal["episode", "transition"] = "episode"
    ) -> tuple["Dataset", "Dataset"]:
        """(train, held out), with about `fraction` of the episodes or of the transitions in the first.

        Sequence models need `by="episode"`. For models of single transitions `by="transition"` is safer: one odd
        held-out episode otherwise decides early stopping.
        """
        if not 0.0 < fraction < 1.0:
            raise RefplanError(f"split fraction must lie strictly between 0 and 1, got {fraction}.")
        if by == "transition":
            return self._split_rows(fraction, key)
        if by != "episode":
            raise RefplanError(f"split by '{by}' is unknown; use by='episode' or by='transition'.")
        if self.episodes < 2:
            raise RefplanError(f"dataset '{self.meta.name}' has one episode; it can only be split by='transition'.")
        order = np.asarray(jr.permutation(key, self.episodes))
        cut = min(max(round(fraction * self.episodes), 1), self.episodes - 1)
        return self.take_episodes(np.sort(order[:cut])), self.take_episodes(np.sort(order[cut:]))

    def _split_rows(self, fraction: float, key: Key) -> tuple["Dataset", "Dataset"]:
        order = np.asarray(jr.permutation(key, len(self)))
        cut = min(max(round(fraction * len(self)), 1), len(self) - 1)
        return self._bag(np.sort(order[:cut])), self._bag(np.sort(order[cut:]))

    def _bag(self, index: Int[np.ndarray, " picked"]) -> "Dataset":
        return self.rows(index, starts=np.zeros(1, np.int64), sequential=False)

    def subsample(self, transitions: int, *, key: Key) -> "Dataset":
        """Whole episodes drawn without replacement until `transitions` rows; the last one is cut and marked truncated.

        Section RQ3 and appendix C of the paper.
        """
        if not 0 < transitions <= len(self):
            raise RefplanError(
                f"dataset '{self.meta.name}' has {len(self)} transitions; cannot subsample {transitions} of them."
            )
        order = np.asarray(jr.permutation(key, self.episodes))
        count = int(np.searchsorted(np.cumsum(self.lengths[order]), transitions)) + 1
        picked = self.take_episodes(order[:count])
        if len(picked) == transitions:
            return picked
        cut = picked.rows(slice(0, transitions), starts=picked.starts)
        terminated, truncated = cut.terminated.copy(), cut.truncated.copy()
        terminated[-1], truncated[-1] = False, True
        return dataclasses.replace(cut, terminated=terminated, truncated=truncated)

    def complete(self) -> "Dataset":
        """The rows whose successor is known: what a dynamics model may learn from."""
        if self.known_next is None or self.known_next.all():
            return self
        arrays, starts = drop_ends(self.arrays(), self.starts, ~self.known_next, self.meta.name)
        return dataclasses.replace(self, **{**arrays, "known_next": None}, starts=starts)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that hold one row per step, by name, without the absent ones."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NOT_ROWS}
        return {name: value for name, value in values.items() if value is not None}

    def replace_meta(self, **changes: Any) -> "Dataset":
        """The same rows under other metadata."""
        return dataclasses.replace(self, meta=dataclasses.replace(self.meta, **changes))

    def _need_sequence(self, what: str) -> None:
        if not self.sequential:
            raise RefplanError(
                f"dataset '{self.meta.name}' was split by transition, so its rows are no longer episodes; "
                f"{what} needs a split by='episode'."
            )


def drop_ends(
    arrays: dict[str, np.ndarray],
    starts: Int[np.ndarray, " episodes"],
    drop: Bool[np.ndarray, " rows"],
    name: str,
) -> tuple[dict[str, np.ndarray], Int[np.ndarray, " left"]]:
    """Drop flagged rows, each the last of its episode; the row before becomes a truncated end. Empties `arrays`."""
    if not drop.any():
        return arrays, starts
    keep = np.flatnonzero(~drop)
    if len(keep) == 0:
        raise RefplanError(
            f"dataset '{name}': no row has a known successor. Store next_observations, or final_observations "
            "(one row per episode)."
        )
    ends = np.append(starts[1:], len(drop))
    dropped = drop[ends - 1]
    truncated = arrays["truncated"].copy()
    truncated[(ends - 2)[dropped & (ends - starts > 1)]] = True
    arrays["truncated"] = truncated
    lengths = ends - starts - dropped
    lengths = lengths[lengths > 0]
    kept = {key: arrays.pop(key)[keep] for key in list(arrays)}
    return kept, np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
