"""Videos: what is recorded, which camera, real time, and soft failure."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any, NamedTuple

import imageio_ffmpeg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from PIL import Image

import jaxtd3
from jaxtd3.core.types import Agent, EnvSpec, EnvStep
from jaxtd3.output import video

needs_gl = pytest.mark.skipif(
    video.choose_gl() is None, reason=f"nothing to draw with ({video.HINT})"
)


# A policy that always does what its state says: one compiled program for all of them.
AGENT = Agent(
    init=lambda key: jnp.zeros(1),
    act=lambda state, obs: jnp.broadcast_to(state[None], (obs.shape[0], 1)),
    observe=None,
    update=None,
    discount=None,
)
STILL, RIGHT, LEFT = np.zeros(1, np.float32), np.ones(1, np.float32), -np.ones(1, np.float32)


# --- an environment without MuJoCo: its state counts to three, and shows a command ---------------


@struct.dataclass
class Counter:
    info: dict[str, Any]


class CounterState(NamedTuple):
    state: Counter


class Counting:
    """Ends when it has counted to three; the picture is as bright as the count."""

    spec = EnvSpec("Counting", obs_size=1, action_size=1, episode_length=100, dt=0.01)

    def _make(self, count, command):
        return CounterState(Counter({"count": count, "command": command})), count[None]

    def reset(self, key):
        return self._make(jnp.zeros(()), jnp.zeros(3))

    def step(self, state, action):
        info = state.state.info
        new, obs = self._make(info["count"] + 1, info["command"] + 1)  # it would drift by itself
        done = info["count"] >= 2
        return EnvStep(new, obs, jnp.zeros(()), jnp.zeros(0), done)

    def draw(self, state):
        picture = np.zeros((16, 16, 3), np.uint8)
        picture[..., 0] = 60 * int(state.state.info["count"])
        picture[..., 1] = 60 * int(state.state.info["command"][0])
        return picture


@pytest.fixture(scope="module")
def counting():
    return jaxtd3.batch_env(Counting(), jaxtd3.EnvConfig(num_envs=2))


@pytest.fixture(scope="module")
def cartpole():
    return jaxtd3.make_env(jaxtd3.EnvConfig(name="CartpoleBalance", num_envs=2))


def brightness(path, channel: int) -> list[int]:
    with Image.open(path) as file:
        frames = []
        for i in range(file.n_frames):
            file.seek(i)
            frames.append(int(np.asarray(file.convert("RGB"))[..., channel].mean()))
        return frames


def probe(path) -> tuple[tuple[int, int], float, np.ndarray]:
    """(size, fps, frames) of an mp4."""
    command = [video.find_ffmpeg(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    found = re.search(r"yuv420p.*?(\d+)x(\d+).*?([\d.]+) fps", done.stderr.decode())
    width, height = int(found[1]), int(found[2])
    frames = np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)
    return (width, height), float(found[3]), frames


# --- recording ----------------------------------------------------------------------------------


def test_fallen_goes_on_from_fresh_state(counting):
    keep = lambda inner: inner.state.info["count"]  # noqa: E731
    key = jax.random.key(0)
    counts = video.record(counting, AGENT, STILL, key, 7, keep)
    np.testing.assert_array_equal(counts, [0, 1, 2, 0, 1, 2, 0])


def test_command_is_held(counting):
    keep = lambda inner: inner.state.info["command"]  # noqa: E731
    key = jax.random.key(0)
    held = video.record(counting, AGENT, STILL, key, 5, keep, (1.0, 2.0, 3.0))
    np.testing.assert_array_equal(held, np.tile([1.0, 2.0, 3.0], (5, 1)))


@pytest.mark.parametrize("command", [(1.0,), (1.0, 2.0, float("nan"))])
def test_command_of_wrong_kind(counting, command):
    with pytest.raises(jaxtd3.UserError, match="3 finite numbers"):
        video.record(counting, AGENT, STILL, jax.random.key(0), 5, None, command)


def test_rollout_follows_policy(cartpole):
    key = jax.random.key(0)
    right = video.record(cartpole, AGENT, RIGHT, key, 40, video.trajectory_fields)
    left = video.record(cartpole, AGENT, LEFT, key, 40, video.trajectory_fields)
    shapes = {name: x.shape for name, x in right.items()}
    assert shapes == {"qpos": (40, 2), "qvel": (40, 2)}  # nothing else can change
    np.testing.assert_array_equal(right["qpos"][0], left["qpos"][0])
    assert right["qpos"][-1, 0] > right["qpos"][0, 0] + 0.05
    assert left["qpos"][-1, 0] < left["qpos"][0, 0] - 0.05


def test_all_that_decides_a_picture_is_kept():
    """MJX carries everything; native physics what the environment may change."""

    def kept(name, impl, **changes):
        env = jaxtd3.make_env(jaxtd3.EnvConfig(name=name, impl=impl, num_envs=2, **changes)).env
        state = jax.eval_shape(lambda key: env.reset(key)[0], jax.random.key(0))
        return {name: x.shape for name, x in video.trajectory_fields(state).items()}

    pose = {"qpos": (2,), "qvel": (2,)}
    assert kept("CartpoleBalance", "native") == pose
    assert kept("CartpoleBalance", "jax") == pose | {
        "mocap_pos": (0, 3),
        "mocap_quat": (0, 4),
        "xfrc_applied": (3, 6),
    }
    assert "xfrc_applied" in kept("Go1JoystickFlatTerrain", "native", push=True)


def test_no_command_to_hold(cartpole):
    with pytest.raises(jaxtd3.UserError, match="CartpoleBalance takes no command"):
        video.record(cartpole, AGENT, STILL, jax.random.key(0), 5, None, (1.0, 0.0, 0.0))


def test_no_model_to_draw(tmp_path):
    env = jaxtd3.make_env(jaxtd3.EnvConfig(name="Pendulum", num_envs=2))
    args = env, AGENT, STILL, jax.random.key(0)
    with pytest.raises(video.RenderUnavailable, match=r"Pendulum has no MuJoCo model.*method draw"):
        video.render_video(*args, tmp_path / "x.mp4")
    assert not list(tmp_path.iterdir())


# --- cameras ------------------------------------------------------------------------------------


def test_cameras(cartpole):
    model = cartpole.env.unwrapped.mj_model
    assert video.find_camera(model, None) == video.find_camera(model, "fixed") == 0
    assert video.find_camera(model, "1") == video.find_camera(model, "lookatcart") == 1
    assert video.find_camera(model, -1) == -1
    with pytest.raises(jaxtd3.UserError, match="did you mean 'lookatcart'"):
        video.find_camera(model, "lookatcat")
    with pytest.raises(jaxtd3.UserError, match="unknown camera '2'"):
        video.find_camera(model, 2)


# --- drawing ------------------------------------------------------------------------------------


def test_gl_of_the_user_is_kept(monkeypatch, cartpole, tmp_path):
    before = dict(os.environ)
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    assert video.choose_gl() is None
    with pytest.raises(video.RenderUnavailable, match=r"MUJOCO_GL=nonsense.*libegl1.*libosmesa6"):
        video.render_video(cartpole, AGENT, STILL, None, tmp_path / "x.mp4")
    monkeypatch.undo()
    assert dict(os.environ) == before


def test_crash_of_the_drawing_process_is_soft(monkeypatch, cartpole):
    model = cartpole.env.unwrapped.mj_model
    monkeypatch.setattr(video, "require_gl", lambda: "egl")
    crash = ["python3", "-c", "import os; os.abort()"]
    monkeypatch.setattr(video, "_command", lambda *args: crash)
    with pytest.raises(video.RenderUnavailable, match="the process died"):
        list(video.draw_frames(model, {"qpos": np.zeros((3, 2))}))


@needs_gl
def test_error_of_the_drawing_process_is_told(cartpole):
    model = cartpole.env.unwrapped.mj_model
    with pytest.raises(video.RenderUnavailable, match="could not broadcast"):
        list(video.draw_frames(model, {"qpos": np.zeros((3, 7))}))


@needs_gl
def test_video_of_cartpole(cartpole, tmp_path):
    """dt is 0.01 s: 40 steps are 0.4 s of video, and its frames differ."""
    args = cartpole, AGENT, RIGHT, jax.random.key(0)
    path = video.render_video(*args, tmp_path / "x.mp4", steps=40, height=120, width=161)
    size, fps, frames = probe(path)
    assert path == tmp_path / "x.mp4"
    assert (size, fps, len(frames)) in [((162, 120), 50.0, 20), ((162, 120), 25.0, 10)]
    first, last = frames[0].astype(int), frames[-1].astype(int)
    assert np.abs(first - last).max() > 50
    assert first.std() > 5
    assert [p.name for p in tmp_path.iterdir()] == ["x.mp4"]


@pytest.mark.parametrize(
    ("dt", "most", "skip", "fps"),
    [
        (0.02, 50, 1, 50),
        (0.02, 25, 2, 25),
        (0.01, 50, 2, 50),
        (0.05, 50, 1, 20),
        (0.001, 50, 20, 50),
    ],
)
def test_real_time(dt, most, skip, fps):
    assert video.real_time(dt, most) == (skip, pytest.approx(fps))


def test_own_draw_method(counting, tmp_path):
    args = counting, AGENT, STILL, jax.random.key(0)
    path = video.render_video(*args, tmp_path / "x.gif", steps=6, command=(2.0, 0.0, 0.0))
    # 100 steps a second: a video of 50 frames a second, of which a gif keeps every second one
    assert np.allclose(brightness(path, 0), [0, 60], atol=8)  # steps 0 and 4 (count 1)
    assert np.allclose(brightness(path, 1), [120, 120], atol=8)


# --- files --------------------------------------------------------------------------------------


def stripes(count: int, height: int = 20, width: int = 30):
    for i in range(count):
        frame = np.zeros((height, width, 3), np.uint8)
        frame[:, : 2 * i + 2] = 255
        yield frame


def test_gif_without_ffmpeg(monkeypatch, tmp_path):
    monkeypatch.setattr(video, "find_ffmpeg", lambda: None)
    path = video.write_video(stripes(5), tmp_path / "x.mp4", 20)
    assert path == tmp_path / "x.gif"
    assert len(set(brightness(path, 0))) == 5
    with Image.open(path) as file:
        assert file.info["duration"] == 50


def test_no_half_video(monkeypatch, tmp_path):
    def broken():
        yield from stripes(3)
        raise RuntimeError("stop")

    def half(frames, path, fps):
        path.write_bytes(b"half")
        list(frames)

    for name in ("x.mp4", "x.gif"):
        with pytest.raises(RuntimeError, match="stop"):
            video.write_video(broken(), tmp_path / name, 20)
    monkeypatch.setattr(video, "_write_mp4", half)
    with pytest.raises(RuntimeError, match="stop"):
        video.write_video(broken(), tmp_path / "x.mp4", 20)
    assert not list(tmp_path.iterdir())


def test_ffmpeg_that_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(imageio_ffmpeg._io, "get_ffmpeg_exe", lambda: "false")
    with pytest.raises(video.RenderUnavailable, match="ffmpeg failed"):
        video.write_video(stripes(3), tmp_path / "x.mp4", 20)
    assert not list(tmp_path.iterdir())


def test_bad_path(tmp_path):
    with pytest.raises(jaxtd3.UserError, match=r"mp4 or \.gif"):
        video.write_video(stripes(2), tmp_path / "x.avi", 20)
    with pytest.raises(jaxtd3.UserError, match="not a folder"):
        video.write_video(stripes(2), tmp_path / "none" / "x.mp4", 20)


def test_drawing_process_is_light():
    """It must start in a moment: no JAX, and the standard library before this package's modules."""
    show = "import sys, runpy; runpy.run_path(sys.argv[1]); print('jax' in sys.modules)"
    script = video._command()[2]
    done = subprocess.run(
        [video.sys.executable, "-P", "-c", show, script], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr
