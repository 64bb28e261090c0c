"""Pictures: drawn for real, then looked at by number."""

import subprocess
import sys

import numpy as np
import pytest

from refplan.data import render
from refplan.data.render import draw_worlds, write_png, write_video
from refplan.data.simulate import make_simulator
from refplan.data.tasks import task
from refplan.errors import MissingExtraError, RefplanError


@pytest.fixture(autouse=True, scope="module")
def _can_draw():
    simulator = make_simulator(task("halfcheetah"), 1)
    simulator.reset([0])
    try:
        simulator.frame(0)
    except RefplanError as problem:
        pytest.skip(f"no OpenGL here: {problem}")


@pytest.mark.parametrize("name", ["hopper", "halfcheetah-field"])
def test_both_simulators_show_the_same_picture(name):
    found = task(name)
    frames = []
    for batched in (True, False):
        simulator = make_simulator(found, 2, batched=batched)
        simulator.reset([1, 2])
        simulator.step(np.ones((2, found.action_dim), np.float32))
        frames.append([simulator.frame(0), simulator.frame(1)])
        simulator.close()
    assert frames[0][0].shape == (240, 320, 3) and frames[0][0].dtype == np.uint8 and frames[0][0].std() > 10
    for batch, loop in zip(*frames, strict=True):
        assert np.mean(np.any(batch != loop, axis=-1)) < 0.005  # but for a few pixels on edges
    assert np.any(frames[0][0] != frames[0][1])


def test_a_viewer_shows_the_new_field_after_a_reset():
    """A field is drawn at reset; a picture made later must not show the one before."""
    env, fresh = (task("halfcheetah-field").make(render_mode="rgb_array", camera_name="track") for _ in range(2))
    env.reset(seed=0)
    before = env.render()
    env.reset(seed=4)
    fresh.reset(seed=4)
    after, expected = env.render(), fresh.render()
    assert np.mean(np.any(after != expected, axis=-1)) < 0.005
    assert np.mean(np.any(after != before, axis=-1)) > 0.005
    env.close()
    fresh.close()


def test_files(tmp_path):
    import imageio.v3
    import imageio_ffmpeg

    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 255, (31, 45, 3), np.uint8) for _ in range(5)]
    write_png(tmp_path / "one.png", frames[0])
    np.testing.assert_array_equal(imageio.v3.imread(tmp_path / "one.png"), frames[0])
    write_video(tmp_path / "film.gif", frames)
    assert imageio.v3.imread(tmp_path / "film.gif").shape == (5, 30, 44, 3)
    write_video(tmp_path / "film.mp4", frames)
    decode = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", tmp_path / "film.mp4", "-f", "rawvideo", "-pix_fmt", "gray", "-"]
    shown = subprocess.run(decode, capture_output=True, check=True).stdout
    assert len(shown) == 5 * 30 * 44
    wrong = [frames[0], np.zeros((2, 2, 3), np.uint8)]
    with pytest.raises(RefplanError, match="one size"):
        write_video(tmp_path / "wrong.mp4", wrong)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["film.gif", "film.mp4", "one.png"]
    with pytest.raises(RefplanError, match="no frame"):
        write_video(tmp_path / "none.mp4", [])
    with pytest.raises(RefplanError, match=r"not '\.avi'"):
        write_video(tmp_path / "film.avi", frames)


def test_missing_packages(monkeypatch, tmp_path):
    frame = np.zeros((2, 2, 3), np.uint8)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingExtraError, match="imageio-ffmpeg"):
        write_video(tmp_path / "a.mp4", [frame])
    monkeypatch.setitem(sys.modules, "imageio.v3", None)
    with pytest.raises(MissingExtraError, match="imageio"):
        write_png(tmp_path / "a.png", frame)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match="matplotlib"):
        draw_worlds(tmp_path / "a.png")


def test_a_display_of_the_users_is_left_alone(monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    render.import_mujoco()
    assert "MUJOCO_GL" not in render.os.environ


def test_picture_of_the_worlds(tmp_path):
    draw_worlds(tmp_path / "worlds.png")
    assert 20_000 < (tmp_path / "worlds.png").stat().st_size < 200_000
