"""One recorded episode: every decision with its reasons, and pictures, in one .npz file.

Nothing is pickled. Of every decision only what the episode explorer shows is kept: the first actions of the plans,
their scores and weights averaged over worlds, the belief.
"""

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from refplan.agent import AbstractAgent, AbstractPrior
from refplan.data.render import Frame
from refplan.data.simulate import AbstractSimulator
from refplan.errors import MissingExtraError, RefplanError
from refplan.evaluation import AbstractWatcher
from refplan.files import atomic_path
from refplan.planners.base import AbstractPlanner
from refplan.types import Key, Obs, State

FORMAT = 1
HEADER = "refplan_recording"  # the name of the JSON header among the arrays; also how a recording is recognised
MOST_PICTURES = 250
MOST_PLANS = 100


class Reasons(NamedTuple):
    """Why an agent did what it did; without a planner (or a Gaussian belief, or a critic) the parts are empty."""

    own: Float[Array, " own"]  # what the prior alone would have done
    proposals: Float[Array, "plan act"]  # first actions
    scores: Float[Array, " plan"]  # averaged over worlds
    weights: Float[Array, " plan"]
    best: Float[Array, " planned"]  # the best score, and the mean of all
    mean: Float[Array, " planned"]
    effective: Float[Array, " planned"]  # 1 / sum w^2, averaged over worlds
    spread: Float[Array, " planned"]  # std over worlds and members of what the best plan earns
    fallback: Bool[Array, " planned"]
    belief_mean: Float[Array, " latent"]
    belief_std: Float[Array, " latent"]
    value: Float[Array, " valued"]  # of the prior's critic


@eqx.filter_jit
def find_reasons(agent: AbstractAgent, state: State, obs: Obs, key: Key) -> Reasons:
    """The reasons of one decision, with the key it was made with."""
    value = agent.value(state, obs)[None] if isinstance(agent, AbstractPrior) else jnp.zeros(0)
    if not isinstance(agent, AbstractPlanner):
        empty = jnp.zeros(0)
        plans, flags = jnp.zeros((0, 0)), jnp.zeros(0, bool)
        return Reasons(empty, plans, *[empty] * 6, flags, empty, empty, value)
    plan, _ = agent.plan(state, obs, key)
    own, _ = agent.prior.act(state.prior, obs, key)
    scores = jnp.mean(plan.scores, axis=0)
    best = jnp.argmax(jnp.where(jnp.isfinite(scores), scores, -jnp.inf))
    weights, heaviest = jax.lax.top_k(jnp.mean(plan.weights, axis=0), min(MOST_PLANS, len(scores)))
    return Reasons(
        own,
        plan.proposals[heaviest, 0],
        scores[heaviest],
        weights,
        scores[best][None],
        jnp.nanmean(jnp.where(jnp.isfinite(scores), scores, jnp.nan))[None],
        jnp.mean(plan.effective_plans)[None],
        jnp.std(plan.returns[:, best])[None],
        plan.fallback[None],
        plan.belief_mean,
        plan.belief_std,
        value,
    )


@dataclass(frozen=True, eq=False)
class Recording:
    """What `load_recording` finds: words about the episode, arrays over its steps, pictures of some of them."""

    about: dict[str, Any]
    arrays: dict[str, np.ndarray]  # actions, rewards and the fields of `Reasons`, stacked over steps
    pictures: list[bytes] = field(default_factory=list)  # WebP
    picture_steps: list[int] = field(default_factory=list)


class Recorder(AbstractWatcher):
    """Watches an evaluation's first episode; `save` writes what it saw.

    Pictures are taken every few steps, so that a whole episode has at most `MOST_PICTURES`. If none can be drawn (no
    OpenGL, an environment without pictures), the recording says why and goes on without.
    """

    def __init__(self, horizon: int, pictures: bool = True):
        self.every = max(1, -(-horizon // MOST_PICTURES))
        self.no_pictures = "" if pictures else "none were asked for"
        self.pictures: list[bytes] = []
        self.picture_steps: list[int] = []
        self.reasons: list[Reasons] = []
        self.steps: list[tuple[np.ndarray, float]] = []
        self.terminated = False
        self.agent: AbstractAgent | None = None

    def before(
        self, agent: AbstractAgent, state: State, obs: Obs, key: Key, step: int, simulator: AbstractSimulator
    ) -> None:
        """Ask the agent for its reasons, and take a picture of what it sees."""
        self.agent = agent
        self.reasons.append(jax.device_get(find_reasons(agent, state, obs, key)))
        if self.no_pictures or step % self.every:
            return
        try:
            self.pictures.append(_squeeze(simulator.frame(0)))
            self.picture_steps.append(step)
        except RefplanError as problem:
            self.no_pictures = str(problem)

    def after(self, action: Float[np.ndarray, " act"], reward: float, terminated: bool) -> None:
        """Note what was done and what it earned."""
        self.steps.append((action, reward))
        self.terminated = terminated

    def save(self, path: str | Path, **about: Any) -> Path:
        """Write the recording; `about` is plain words and numbers (planner, task, seed, settings)."""
        if not self.steps:
            raise RefplanError(f"{path}: no step was recorded.")
        path = Path(path)
        discount = getattr(self.agent, "discount", None)
        header = {
            "format": FORMAT,
            "terminated": self.terminated,
            "no_pictures": self.no_pictures,
            "discount": None if discount is None else float(discount),
            **{side: _bound(self.agent, side) for side in ("low", "high")},
            **about,
        }
        arrays = {
            name: np.stack(column)
            for name, column in zip(Reasons._fields, zip(*self.reasons, strict=True), strict=True)
        }
        arrays |= {name: arrays[name].astype(np.float16) for name in ("proposals", "weights")}  # enough for a picture
        arrays["actions"] = np.stack([action for action, _ in self.steps])
        arrays["rewards"] = np.array([reward for _, reward in self.steps], np.float32)
        arrays["pictures"] = np.frombuffer(b"".join(self.pictures), np.uint8)
        arrays["picture_ends"] = np.cumsum([len(picture) for picture in self.pictures], dtype=np.int64)
        arrays["picture_steps"] = np.array(self.picture_steps, np.int64)
        arrays[HEADER] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        return path


def _bound(agent: AbstractAgent | None, side: str) -> list[float] | None:
    bound = getattr(agent, side, None)
    return None if bound is None else np.asarray(bound, np.float64).ravel().tolist()


def _squeeze(frame: Frame) -> bytes:
    """A picture as WebP: about 4 kB."""
    try:
        import imageio.v3
    except ModuleNotFoundError:
        raise MissingExtraError("imageio", "mujoco", "keeping pictures of an episode") from None
    return imageio.v3.imwrite("<bytes>", frame, extension=".webp", quality=60)


def recording_path(place: str | Path, *words: str) -> Path:
    """`place` itself if it names an .npz file, else a file in its folder `episodes`, named after `words`."""
    place = Path(place)
    if place.suffix == ".npz":
        return place
    name = "-".join("".join(c if c.isalnum() or c in "._-" else "_" for c in word) for word in words)
    return place / "episodes" / f"{name}.npz"


def is_recording(path: str | Path) -> bool:
    """Whether an .npz file is a recording (others hold datasets)."""
    try:
        with zipfile.ZipFile(path) as file:
            return f"{HEADER}.npy" in file.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def load_recording(path: str | Path) -> Recording:
    """Read back what `Recorder.save` wrote; a damaged file is a clear error."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop(HEADER).tobytes())
        pictures, ends = arrays.pop("pictures").tobytes(), arrays.pop("picture_ends").tolist()
        steps = arrays.pop("picture_steps").tolist()
        length = len(arrays["rewards"])
        short = [name for name in (*Reasons._fields, "actions") if len(arrays[name]) != length]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as problem:
        raise RefplanError(f"{path}: not a readable recording ({problem}); record it again.") from None
    if about.get("format", 0) > FORMAT or short or not length or len(ends) != len(steps):
        raise RefplanError(f"{path}: damaged, or recorded by a newer refplan; record it again or upgrade.")
    cut = [pictures[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return Recording(about, arrays, cut, steps)
