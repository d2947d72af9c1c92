"""Videos of a policy, without a screen.

    record (device) -> trajectory (host) -> draw_video.py (its own process) -> frames -> ffmpeg

Training is never touched: drawing that fails raises `RenderUnavailable` here, and no more.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import imageio_ffmpeg
import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from jaxtd3.config.sections import EnvConfig
from jaxtd3.core.types import Agent, Array, BatchEnv, EnvState
from jaxtd3.durable import whole_file
from jaxtd3.envs.batch import batch_env
from jaxtd3.envs.playground.meshes import STANDINS
from jaxtd3.errors import UserError, nearest

FIELDS = ("qpos", "qvel", "mocap_pos", "mocap_quat", "xfrc_applied")
CAMERAS = ("track", "side", "fixed", "front")  # tried in this order where none is asked for
MAX_FPS, SOFTWARE_FPS = 50, 25
SOFTWARE = ("llvmpipe", "softpipe", "swrast", "swr")  # Mesa's renderers on the CPU
GIF_FPS, GIF_WIDTH = 25, 320  # a gif holds whole frames: keep it small
SECONDS = 10.0  # of simulated time, where no number of steps is given
COPIES = 4  # environments run together: the one filmed, and fresh states for when it falls
HINT = "on Debian: apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6"


class RenderUnavailable(UserError):
    """There is nothing to draw with, or nothing to draw."""


# --- what to draw with --------------------------------------------------------------------------


def choose_gl() -> str | None:
    """The first of MuJoCo's back ends that works here; MUJOCO_GL alone is tried if it is set."""
    given = os.environ.get("MUJOCO_GL")
    usual = {"darwin": ("cgl",), "win32": ("wgl",)}.get(sys.platform, ("egl", "osmesa"))
    return next((gl for gl in ((given,) if given else usual) if renderer_name(gl)), None)


@functools.cache
def renderer_name(gl: str) -> str | None:
    """What draws behind a back end (as "llvmpipe"), found out in another process; None: nothing."""
    try:
        done = subprocess.run(_command(), env=_env(gl), capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() or None if not done.returncode else None


def in_software(gl: str) -> bool:
    """True where the CPU draws, which takes long."""
    return (renderer_name(gl) or "").lower().startswith(SOFTWARE)


def _command(*args: str) -> list[str]:
    # -P: the script's own folder, with its types.py, must not come before the standard library
    return [sys.executable, "-P", str(Path(__file__).with_name("draw_video.py")), *args]


def _env(gl: str) -> dict[str, str]:
    env = {**os.environ, "MUJOCO_GL": gl}
    if gl in ("egl", "osmesa"):
        env["PYOPENGL_PLATFORM"] = gl
    return env


def require_gl() -> str:
    """As `choose_gl`, but raise where nothing works."""
    gl = choose_gl()
    if gl is None:
        given = os.environ.get("MUJOCO_GL")
        what = f"MUJOCO_GL={given} does not work here" if given else "neither EGL nor OSMesa works"
        raise RenderUnavailable(f"no video: {what} ({HINT})")
    return gl


# --- what to draw -------------------------------------------------------------------------------


def model_of(env: BatchEnv) -> mujoco.MjModel | None:
    """The MuJoCo model of an environment that has one."""
    return getattr(env.env, "mj_model", None)


def trajectory_fields(inner: Any) -> dict[str, Array]:
    """What decides a picture of one state; a field that physics does not carry never changes."""
    found = {name: getattr(inner.state.data, name) for name in FIELDS}
    return {name: x for name, x in found.items() if x is not None}


def record(
    env: BatchEnv,
    agent: Agent,
    agent_state: Any,
    key: Array,
    steps: int,
    keep: Callable[[Any], Any],
    command: Sequence[float] | None = None,
    several: bool = False,
) -> Any:
    """`keep(state)` of one environment at every step of the deterministic policy, on the host:
    [steps, ..]; `several`: of many policies, [P, steps, ..], all from the same first state.

    An environment that ends goes on from a fresh state. `command` (3 numbers) is held throughout.
    """
    if steps < 1:
        raise UserError(f"steps={steps} is below 1")
    few = batch_env(env.env, EnvConfig(num_envs=COPIES, episode_length=env.spec.episode_length))
    key_init, key_run = jax.random.split(key)
    start = few.init(key_init)
    pin = _pin_command(env.spec.name, start, command)
    agent_state = jax.device_get(agent_state)  # free of the devices that training placed it on

    def run(agent_state: Any, state: EnvState, key: Array) -> Any:
        def step(state: EnvState, key: Array) -> tuple[EnvState, Any]:
            state = pin(state)
            shown = jax.tree.map(lambda x: x[0], keep(state.inner))
            state, *_ = few.step(state, agent.act(agent_state, state.obs), key)
            return state, shown

        return jax.lax.scan(step, state, jax.random.split(key, steps))[1]

    run_all = jax.vmap(run, (0, None, None)) if several else run
    return jax.device_get(jax.jit(run_all)(agent_state, start, key_run))


def _pin_command(name: str, start: EnvState, command: Sequence[float] | None):
    """A function that sets the command of every environment."""
    if command is None:
        return lambda state: state
    info = getattr(getattr(start.inner, "state", None), "info", {})
    if "command" not in info:
        raise UserError(f"{name} takes no command")
    wanted = np.asarray(command, np.float32)
    if wanted.shape != info["command"].shape[1:] or not np.all(np.isfinite(wanted)):
        size = info["command"].shape[-1]
        raise UserError(f"a command of {name} is {size} finite numbers, not {list(command)}")

    def pin(state: EnvState) -> EnvState:
        inner = state.inner.state
        old = inner.info["command"]
        held = jnp.broadcast_to(jnp.asarray(wanted, old.dtype), old.shape)
        inner = inner.replace(info={**inner.info, "command": held})
        return state.replace(inner=state.inner._replace(state=inner))

    return pin


def find_camera(model: mujoco.MjModel, camera: str | int | None) -> int:
    """Index of a camera by name or index; -1 is a free one.

    By default the first of CAMERAS that the model has, else one that follows the robot.
    """
    names = [model.camera(i).name for i in range(model.ncam)]
    if camera is None:
        following = np.flatnonzero(model.cam_mode == mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM)
        usual = [names.index(name) for name in CAMERAS if name in names]
        return int(next(iter([*usual, *following]), -1))
    if camera in names:
        return names.index(camera)
    with contextlib.suppress(ValueError):
        if -1 <= int(camera) < model.ncam:
            return int(camera)
    if not names:
        raise UserError(f"unknown camera {camera!r}: the model has none (-1: a free one)")
    raise UserError(nearest("camera", str(camera), names))


# --- drawing ------------------------------------------------------------------------------------


def draw_frames(
    model: mujoco.MjModel,
    trajectory: dict[str, np.ndarray],
    camera: int = -1,
    height: int = 480,
    width: int = 640,
    shapes: bool = False,
) -> Iterator[np.ndarray]:
    """Pictures [H, W, 3] of a trajectory, drawn by another process while they are consumed."""
    gl, count = require_gl(), len(trajectory["qpos"])
    job = {"camera": camera, "height": height, "width": width, "shapes": shapes}
    job["fast"] = in_software(gl)
    with tempfile.TemporaryDirectory(prefix="jaxtd3-draw-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        mujoco.mj_saveModel(model, str(folder / "model.mjb"))
        np.savez(folder / "trajectory.npz", **trajectory)  # type: ignore[arg-type]
        errors = folder / "stderr"
        with errors.open("wb") as stderr:
            child = subprocess.Popen(
                _command(name), env=_env(gl), cwd=name, stdout=subprocess.PIPE, stderr=stderr
            )
        watch = threading.Timer(120 + 2.0 * count, child.kill)  # a driver may hang
        watch.start()
        try:
            for _ in range(count):
                frame = child.stdout.read(height * width * 3)  # type: ignore[union-attr]
                if len(frame) < height * width * 3:
                    child.wait()
                    raise RenderUnavailable(f"drawing with {gl} failed: {_last_line(errors)}")
                yield np.frombuffer(frame, np.uint8).reshape(height, width, 3)
        finally:
            watch.cancel()
            child.kill()
            child.stdout.close()  # type: ignore[union-attr]
            child.wait()


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "the process died"


class Film(NamedTuple):
    """Pictures [H, W, 3], drawn as they are consumed."""

    frames: Iterable[np.ndarray]
    fps: float


def films(
    env: BatchEnv,
    agent: Agent,
    agent_state: Any,
    key: Array,
    steps: int | None = None,
    command: Sequence[float] | None = None,
    camera: str | int | None = None,
    height: int = 480,
    width: int = 640,
    several: bool = False,
) -> list[Film]:
    """`steps` (default: ten seconds) of a policy, or of `several`, in real time."""
    spec, model, draw = env.spec, model_of(env), getattr(env.env, "draw", None)
    if model is None and draw is None:
        raise RenderUnavailable(
            f"no video: {spec.name} has no MuJoCo model and no method draw(state) -> [H, W, 3]"
        )
    steps = steps or max(1, min(spec.episode_length, round(SECONDS / spec.dt)))
    keep, most = (lambda inner: inner), MAX_FPS
    if draw is None:
        keep, index = trajectory_fields, find_camera(model, camera)
        most = SOFTWARE_FPS if in_software(require_gl()) else MAX_FPS
        shapes = getattr(getattr(env.env, "meshes", None), "kind", "") == STANDINS
    skip, fps = real_time(spec.dt, most)
    states = record(env, agent, agent_state, key, steps, keep, command, several)

    def film(states: Any) -> Film:
        if draw is None:
            shown = {name: x[::skip] for name, x in states.items()}
            return Film(draw_frames(model, shown, index, height, width, shapes), fps)
        each = (jax.tree.map(lambda x, i=i: x[i], states) for i in range(0, steps, skip))
        return Film((np.asarray(draw(state)) for state in each), fps)

    if not several:
        return [film(states)]
    count = len(jax.tree.leaves(states)[0])
    return [film(jax.tree.map(lambda x, i=i: x[i], states)) for i in range(count)]


def render_video(
    env: BatchEnv, agent: Agent, agent_state: Any, key: Array, out: Path | str, **how: Any
) -> Path:
    """Film a policy, as `films` does; the path really written."""
    path = check_path(out)
    (film,) = films(env, agent, agent_state, key, **how)
    return write_video(film.frames, path, film.fps)


def real_time(dt: float, most: int) -> tuple[int, float]:
    """(skip, fps): every `skip`-th step is a frame, so that at most `most` are shown a second."""
    skip = max(1, math.ceil(1 / dt / most - 1e-6))
    return skip, 1 / (dt * skip)


# --- video files --------------------------------------------------------------------------------


def check_path(path: Path | str) -> Path:
    """Refuse what is neither mp4 nor gif, or stands in no folder."""
    path = Path(path)
    if path.suffix.lower() not in (".mp4", ".gif"):
        raise UserError(f"{path.name}: a video is .mp4 or .gif")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is not a folder")
    return path


def write_video(frames: Iterable[np.ndarray], path: Path | str, fps: float) -> Path:
    """mp4 by ffmpeg; gif where that is asked for or there is no ffmpeg. The path really written."""
    path, write = check_path(path), _write_mp4
    if path.suffix.lower() == ".gif" or find_ffmpeg() is None:
        path, write = path.with_suffix(".gif"), _write_gif
    with whole_file(path) as part:  # half a video never bears the name of a whole one
        write(iter(frames), part, fps)
    return path


def find_ffmpeg() -> str | None:
    """The program that imageio-ffmpeg brings along, or the system's."""
    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError:
        return None


def _write_mp4(frames: Iterator[np.ndarray], path: Path, fps: float) -> None:
    first = next(frames)
    height, width, _ = first.shape
    even = "pad=ceil(iw/2)*2:ceil(ih/2)*2"  # yuv420p halves both sides
    os.environ.setdefault("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", "1")  # else it forks JAX's threads
    writer = imageio_ffmpeg.write_frames(
        path,
        (width, height),
        fps=fps,
        codec="libx264",
        quality=None,
        macro_block_size=1,
        ffmpeg_log_level="quiet",
        output_params=f"-vf {even} -crf 23 -movflags +faststart -f mp4".split(),
    )
    writer.send(None)  # starts it
    count = 0
    try:
        for frame in itertools.chain([first], frames):
            writer.send(np.ascontiguousarray(frame, np.uint8))
            count += 1
    except OSError as error:
        raise RenderUnavailable(f"ffmpeg failed: {str(error).splitlines()[0]}") from error
    finally:
        writer.close()
    try:
        written, _ = imageio_ffmpeg.count_frames_and_secs(path)  # the writer asks no exit code
    except RuntimeError:
        written = 0
    if written != count:
        raise RenderUnavailable(f"ffmpeg failed: {written} of {count} pictures were written")


def _write_gif(frames: Iterator[np.ndarray], path: Path, fps: float) -> None:
    from PIL import Image

    skip, fps = real_time(1 / fps, GIF_FPS)

    def pictures() -> Iterator[Image.Image]:
        for frame in itertools.islice(frames, 0, None, skip):
            picture = Image.fromarray(np.ascontiguousarray(frame, np.uint8))
            picture.thumbnail((GIF_WIDTH, GIF_WIDTH))
            yield picture

    images = pictures()
    next(images).save(
        path,
        format="GIF",
        save_all=True,
        append_images=images,
        duration=round(1000 / fps),
        loop=0,
    )
