"""Pictures and films of simulations, with settings that are fast without a graphics card."""

import contextlib
import copy
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from refplan.errors import MissingExtraError, RefplanError
from refplan.files import atomic_path

Frame = UInt8[np.ndarray, "height width 3"]


def import_mujoco() -> Any:
    """MuJoCo, ready to draw: on a machine without a display it is told to use EGL unless MUJOCO_GL says otherwise."""
    headless = not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) and sys.platform == "linux"
    choose = headless and not os.environ.get("MUJOCO_GL")
    if choose:
        os.environ["MUJOCO_GL"] = "egl"
    try:
        import mujoco
    except ModuleNotFoundError:
        raise MissingExtraError("mujoco", "mujoco", "drawing a simulation") from None
    if choose:
        # MuJoCo reads the variable once, when first imported, which may have been earlier.
        importlib.reload(sys.modules[mujoco.Renderer.__module__].gl_context)
    return mujoco


class Camera:
    """Draws states of one MuJoCo model; `fast` leaves out shadow, reflection, sky and antialiasing, which on a CPU cost
    more than ten times the rest."""

    def __init__(self, model: Any, width: int = 320, height: int = 240, fast: bool = True):
        self._mujoco, self.model, self._fast = import_mujoco(), model, fast
        if fast:
            model.vis.quality.offsamples = 0
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, width)
        model.vis.global_.offheight = max(model.vis.global_.offheight, height)
        try:
            self._renderer = self._mujoco.Renderer(model, height, width)
        except (RuntimeError, ImportError, AttributeError, self._mujoco.FatalError) as problem:
            raise RefplanError(
                f"no picture can be drawn: MuJoCo found no OpenGL ({problem}). Install EGL (Debian: libegl1, "
                "libgl1-mesa-dri) or set MUJOCO_GL=osmesa and install libosmesa6."
            ) from None

    def frame(self, data: Any, camera: Any = "track") -> Frame:
        """One picture of a state, by default from the camera that follows the robot; `data` is not touched."""
        data = copy.copy(data)
        self._mujoco.mj_forward(self.model, data)  # after a step, positions of bodies lag one substep behind
        self._renderer.update_scene(data, camera=camera)
        for flag in ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX") if self._fast else ():
            self._renderer.scene.flags[getattr(self._mujoco.mjtRndFlag, flag)] = 0
        return self._renderer.render()

    def close(self) -> None:
        """Free the graphics memory."""
        self._renderer.close()


def write_png(path: str | Path, frame: Frame) -> None:
    """Write one picture."""
    with atomic_path(path) as temporary:
        _imageio().imwrite(temporary, frame, extension=".png")


def write_video(path: str | Path, frames: Sequence[Frame], fps: int = 20) -> None:
    """Write a film; the ending of `path` names the format (.mp4, .gif)."""
    path = Path(path)
    if len(frames) == 0:
        raise RefplanError(f"{path}: there is no frame to write.")
    if path.suffix not in (".mp4", ".gif"):
        raise RefplanError(f"{path}: films are written as .mp4 or .gif, not '{path.suffix}'.")
    if len({frame.shape for frame in frames}) > 1:
        raise RefplanError(f"{path}: all frames of a film must have one size.")
    even = [frame[: len(frame) // 2 * 2, : frame.shape[1] // 2 * 2] for frame in frames]  # mp4 needs even sizes
    with atomic_path(path) as temporary:
        if path.suffix == ".gif":
            _imageio().imwrite(temporary, even, extension=".gif", duration=1000 / fps, loop=0)
        else:
            _write_mp4(temporary, even, fps)


def _write_mp4(path: Path, frames: Sequence[Frame], fps: int) -> None:
    try:
        import imageio_ffmpeg
    except ModuleNotFoundError:
        raise MissingExtraError("imageio-ffmpeg", "mujoco", "writing a film") from None
    height, width, _ = frames[0].shape
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-"]
    target = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-f", "mp4", str(path)]
    # Not imageio_ffmpeg.write_frames: it runs Python in a forked child, which JAX's threads do not allow.
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", *source, *target]
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors) as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                for frame in frames:
                    pipe.write(np.ascontiguousarray(frame).data)
        if process.returncode != 0:
            errors.seek(0)
            raise RefplanError(f"ffmpeg could not write the film: {errors.read().decode(errors='replace').strip()}")


def _imageio() -> Any:
    try:
        import imageio.v3
    except ModuleNotFoundError:
        raise MissingExtraError("imageio", "mujoco", "writing pictures") from None
    return imageio.v3


def draw_worlds(path: str | Path) -> None:
    """One picture of the five RQ4 worlds: the robot at its start, and the ground ahead of it in metres."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "plot", "drawing the worlds") from None
    figure = Figure(figsize=(10, 8.6), layout="constrained")
    rows = figure.subplots(5, 2, width_ratios=(1.35, 1))
    for (left, right), world in zip(rows, ("joint", "hill", "gentle", "steep", "field"), strict=True):
        left.imshow(_start_of(world))
        left.set_title(world, loc="left", fontsize=10)
        left.set_axis_off()
        _draw_ground(right, world)
    rows[-1, 1].set_xlabel("x [m]")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=85)


def _start_of(world: str) -> Frame:
    """The robot at its start with the first metres of ground; a limb without drive is red."""
    env: Any = _world_env(world, seed=0)
    if world == "joint":
        limb = env.model.actuator(int(np.argmin(env.gains))).name
        env.model.geom(limb).rgba[:] = (0.9, 0.0, 0.0, 1.0)
    camera = Camera(env.model, 560, 170, fast=False)
    view = import_mujoco().MjvCamera()
    view.lookat[:], view.distance, view.azimuth, view.elevation = (2.1, 0.0, 0.4), 2.7, 90.0, -5.0
    frame = camera.frame(env.data, view)
    camera.close()
    return frame


def _draw_ground(axes: Any, world: str) -> None:
    x = np.linspace(-2.0, 20.0, 500)
    for seed in range(3 if world == "field" else 1):
        env: Any = _world_env(world, seed)
        axes.plot(x, np.zeros_like(x) if world == "joint" else env.elevation(x), linewidth=1.2)
    axes.set_ylim(-0.03, 0.55)
    axes.set_ylabel("height [m]")
    axes.grid(alpha=0.3)


def _world_env(world: str, seed: int) -> Any:
    from refplan.data.tasks import task

    env = task(f"halfcheetah-{world}").make()
    env.reset(seed=seed)
    return env.unwrapped
