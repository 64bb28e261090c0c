"""The environments refplan adds: the robots with D4RL's physics, and HalfCheetah in worlds its data never showed (RQ4).

Importing this module imports MuJoCo and registers the ids, so `gymnasium.make("refplan.data.worlds:refplan/
HalfCheetahHill-v1")` works from anywhere. The terrains are those of `learning_to_adapt` (Nagabandi et al., 2019) on
Gymnasium's HalfCheetah-v5, with the milder heights of the RefPlan paper unless `heights="original"`.
"""

import contextlib
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from gymnasium.envs.mujoco.walker2d_v5 import Walker2dEnv
from gymnasium.utils import EzPickle
from jaxtyping import Float

from refplan.data.envs import register_envs
from refplan.errors import RefplanError, unknown_name

register_envs()

COLUMNS = 500  # of the original height field
PITCH = 100.0 / (COLUMNS - 1)  # metres between two columns
EDGE = 50.0  # the original field ends at x = -50 and x = 50
PLATEAU = (-250.0, 950.0)  # what the ground spans with terrain_end="plateau": more than an episode at full speed
UNDER_ROBOT = (-0.8, 1.0)  # the x range a standing cheetah covers
ACTUATORS = 6
VIEW_EXTENT = 8.0  # metres; what MuJoCo computes for the flat world


@contextlib.contextmanager
def without_total_mass_warning() -> Generator[None]:
    """Silence one warning: half_cheetah.xml, which is not ours, uses the deprecated `settotalmass`.

    MuJoCo would print it for every environment made and append it to a MUJOCO_LOG.TXT in the working directory.
    """
    before = mujoco.get_mju_user_warning()

    def handle(message: str) -> None:
        if "settotalmass" not in str(message):
            warnings.warn(str(message), RuntimeWarning, stacklevel=2)

    mujoco.set_mju_user_warning(handle)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*settotalmass.*", category=UserWarning)
            yield
    finally:
        mujoco.set_mju_user_warning(before)


def margins_are_summed() -> bool:
    """Whether this MuJoCo adds the contact margins of two geoms (3.5 and later) instead of taking the larger."""
    major, minor = (int(part) for part in mujoco.__version__.split(".")[:2])
    return (major, minor) >= (3, 5)


class _PaidToTheEnd:
    """The healthy bonus as D4RL's environments paid it: on the terminating step too."""

    @property
    def healthy_reward(self: Any) -> float:
        return float(self.is_healthy or self._terminate_when_unhealthy) * self._healthy_reward


class HopperD4RL(_PaidToTheEnd, HopperEnv):
    """Hopper as D4RL's data was made: contact margins as before MuJoCo 3.5, bonus on the last step."""

    def _initialize_simulation(self) -> tuple[mujoco.MjModel, mujoco.MjData]:
        model, data = super()._initialize_simulation()
        if margins_are_summed():
            model.geom_margin[:] *= 0.5
        return model, data


class Walker2dD4RL(_PaidToTheEnd, Walker2dEnv):
    """Walker2d as D4RL's data was made: right foot friction 0.9 (left 1.9), bonus on the last step."""

    def __init__(self, **kwargs: Any):
        super().__init__(xml_file="walker2d.xml", **kwargs)
        EzPickle.__init__(self, **kwargs)


class HalfCheetahD4RL(HalfCheetahEnv):
    """HalfCheetah as D4RL's data was made: nothing has changed since."""

    def _initialize_simulation(self) -> tuple[mujoco.MjModel, mujoco.MjData]:
        with without_total_mass_warning():
            return super()._initialize_simulation()


class HalfCheetahJoint(HalfCheetahD4RL):
    """HalfCheetah with a disabled joint: one actuator of 1 to 5, drawn at each reset, gets no command.

    The joint stays passive; the control cost is that of the command that arrives. `gains` fixes the factor on each
    command instead of drawing one; `fail_at` is the step from which the factors hold.
    """

    def __init__(self, gains: tuple[float, ...] | None = None, fail_at: int = 0, **kwargs: Any):
        if gains is not None and len(gains) != ACTUATORS:
            raise RefplanError(f"HalfCheetah has {ACTUATORS} actuators, got {len(gains)} gains.")
        self._fixed_gains = None if gains is None else np.array(gains, np.float64)
        self.gains = np.ones(ACTUATORS) if self._fixed_gains is None else self._fixed_gains
        self.fail_at, self._steps = fail_at, 0
        super().__init__(**kwargs)
        EzPickle.__init__(self, gains=gains, fail_at=fail_at, **kwargs)

    def step(self, action: Any) -> Any:
        """HalfCheetah's step with the command that arrives at the joints."""
        if self._steps >= self.fail_at:
            action = weaken(np.asarray(action), self.gains)
        self._steps += 1
        return super().step(action)

    def reset_model(self) -> Any:
        """HalfCheetah's start, then the joint; so both worlds start alike under one seed."""
        obs = super().reset_model()
        self._steps = 0
        if self._fixed_gains is None:
            self.gains = np.ones(ACTUATORS)
            self.gains[self.np_random.integers(1, ACTUATORS)] = 0.0
        return obs

    def _get_reset_info(self) -> dict[str, Any]:
        return {**super()._get_reset_info(), "gains": self.gains.copy()}


def weaken(action: Float[np.ndarray, "*n act"], gains: Float[np.ndarray, "*n act"]) -> Float[np.ndarray, "*n act"]:
    """The command that arrives, in the precision of the command."""
    return action * gains.astype(action.dtype)


@dataclass(frozen=True)
class Terrain:
    """Ramps (algorithms: learning_to_adapt): from each column on, `width` columns rise by the slope, then flat."""

    columns: tuple[int, ...]
    width: int
    slopes: tuple[float, ...] | None  # None: drawn at each reset
    paper: tuple[float, float]  # range of the height in metres, in the RefPlan paper
    original: tuple[float, float]

    def bends(self, start: float, end: float) -> Float[np.ndarray, " nodes"]:
        """Where the ground may bend, and on in the same steps until both ends are covered, in metres."""
        step, first = self.width * PITCH, column_x(self.columns[0] - 1)
        return first + step * np.arange(np.floor((start - first) / step), np.ceil((end - first) / step) + 1)


def column_x(column: Any) -> Any:
    """Where a column of the original field is, in metres."""
    return -EDGE + PITCH * column


FLAT = (0.0, 0.0)
HEIGHTS = ["paper", "original", "flat"]
SIX_RAMPS = (250, 265, 280, 295, 310, 325)
TERRAINS = {
    "hill": Terrain(SIX_RAMPS, 15, (1.0, -1.0, 0.0, 0.0, 0.0, 0.0), (0.2, 0.2), (0.6, 0.6)),
    "gentle": Terrain(SIX_RAMPS, 15, (1.0,) * 6, (0.2, 0.2), (1.0, 1.0)),
    "steep": Terrain(SIX_RAMPS, 15, (1.0,) * 6, (0.5, 0.5), (4.0, 4.0)),
    "field": Terrain((255, 265, 275, 285, 295, 305), 10, None, (0.05, 0.4), (0.2, 1.0)),
}


def ramps(columns: tuple[int, ...], width: int, slopes: Any) -> Float[np.ndarray, " columns"]:
    """The profile along x, scaled to [0, 1]."""
    row = np.zeros(COLUMNS)
    for column, slope in zip(columns, slopes, strict=True):
        row[column : column + width] += slope * np.arange(1, width + 1)
        row[column + width :] = row[column + width - 1]
    row -= row.min()
    return row / row.max()


def draw_slopes(rng: np.random.Generator, count: int) -> Float[np.ndarray, " count"]:
    """Slopes of the field: U(0.2, 0.6), up or down at random except the first two, which rise."""
    sizes = rng.uniform(0.2, 0.6, count)
    signs = rng.choice([-1.0, 1.0], count)
    signs[:2] = 1.0
    return sizes * signs


class HalfCheetahTerrain(HalfCheetahEnv):
    """HalfCheetah-v5 on a height field.

    `heights` is "paper" (RefPlan's), "original" or "flat": no hill at all, which shows what the height field alone
    does. `terrain_end="plateau"` continues the last height for as long as a cheetah can run in an episode; `"edge"`
    ends the ground at x = 50 as in the original, where the robot falls and keeps earning. The start is raised by the
    highest ground under the robot, so that first observations resemble the flat world's; `torso_z` places the torso's
    zero literally at that height instead (the original used 1.0, HalfCheetah has 0.7).

    MuJoCo touches a height field cell by cell, and a foot that sinks in where two cells meet also gets a push sideways,
    even on level ground. So the field has nodes only where the ground may bend, every two or three metres; with
    `"edge"` it has the original's columns, a fifth of a metre apart, and a fast robot stumbles over their seams.
    """

    world = ""

    def __init__(
        self,
        heights: str = "paper",
        terrain_end: str = "plateau",
        torso_z: float | None = None,
        **kwargs: Any,
    ):
        if heights not in HEIGHTS:
            raise unknown_name("heights", heights, HEIGHTS)
        if terrain_end not in ("plateau", "edge"):
            raise unknown_name("terrain_end", terrain_end, ["plateau", "edge"])
        self.terrain = TERRAINS[self.world]
        self.height_range = FLAT if heights == "flat" else getattr(self.terrain, heights)
        self._nodes = self.terrain.bends(*PLATEAU) if terrain_end == "plateau" else column_x(np.arange(COLUMNS))
        self._torso_z = torso_z
        self.profile = np.zeros(COLUMNS)  # metres
        super().__init__(**kwargs)
        EzPickle.__init__(self, heights=heights, terrain_end=terrain_end, torso_z=torso_z, **kwargs)
        if self.terrain.slopes is not None:
            self._lay(self.terrain.slopes, self.height_range[0])

    def _initialize_simulation(self) -> tuple[mujoco.MjModel, mujoco.MjData]:
        columns, length = len(self._nodes), self._nodes[-1] - self._nodes[0]
        with without_total_mass_warning():
            spec = mujoco.MjSpec.from_file(self.fullpath)
            # Two rows are enough, nothing varies along y: more rows only make more contacts and half the speed.
            size = [length / 2, 5.0, self.height_range[1] or 1.0, 0.1]  # MuJoCo wants a height above zero
            spec.add_hfield(name="terrain", nrow=2, ncol=columns, size=size, userdata=np.zeros(2 * columns))
            floor = spec.geom("floor")
            floor.type, floor.hfieldname = mujoco.mjtGeom.mjGEOM_HFIELD, "terrain"
            floor.pos = [(self._nodes[0] + self._nodes[-1]) / 2, 0.0, 0.0]
            spec.material("MatPlane").texrepeat = [0.75 * length, 7.5]  # squares as large as on the flat floor
            if self._torso_z is not None:
                spec.body("torso").pos[2] = self._torso_z
            model = spec.compile()
        # A kilometre of ground would push the renderer's near plane past the robot.
        model.stat.extent, model.stat.center[:] = VIEW_EXTENT, 0.0
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, self.width)
        model.vis.global_.offheight = max(model.vis.global_.offheight, self.height)
        return model, mujoco.MjData(model)

    def _lay(self, slopes: Any, height: float) -> None:
        """Write a terrain into the model (and to the graphics card, if a viewer is open)."""
        self.profile = height * ramps(self.terrain.columns, self.terrain.width, slopes)
        # Compiling scaled the field by the largest height there can be, from which MuJoCo's bounding boxes come.
        row = self.elevation(self._nodes) / self.model.hfield_size[0, 2]
        self.model.hfield_data[:] = np.tile(row, 2)
        for viewer in self.mujoco_renderer._viewers.values():
            viewer.make_context_current()
            mujoco.mjr_uploadHField(self.model, viewer.con, 0)

    def elevation(self, x: Float[np.ndarray, " points"]) -> Float[np.ndarray, " points"]:
        """Height of the ground at x, in metres."""
        return np.interp(x, column_x(np.arange(COLUMNS)), self.profile)

    def reset_model(self) -> Any:
        """HalfCheetah's start noise, then the terrain, then the start height."""
        noise = self._reset_noise_scale
        qpos = self.init_qpos + self.np_random.uniform(low=-noise, high=noise, size=self.model.nq)
        qvel = self.init_qvel + noise * self.np_random.standard_normal(self.model.nv)
        if self.terrain.slopes is None:
            height = self.np_random.uniform(*self.height_range)
            self._lay(draw_slopes(self.np_random, len(self.terrain.columns)), height)
        if self._torso_z is None:
            qpos[1] += self.elevation(np.linspace(*UNDER_ROBOT, 100)).max()
        self.set_state(qpos, qvel)
        return self._get_obs()


class HalfCheetahHill(HalfCheetahTerrain):
    """Three metres up, three down."""

    world = "hill"


class HalfCheetahGentle(HalfCheetahTerrain):
    """A gentle slope of 18 metres, then a plateau."""

    world = "gentle"


class HalfCheetahSteep(HalfCheetahTerrain):
    """The same slope, steeper."""

    world = "steep"


class HalfCheetahField(HalfCheetahTerrain):
    """Six random ramps, drawn at each reset."""

    world = "field"
