"""One environment stepped by the wall clock, under a policy and a person's commands.

A step is the training environment's own, so what the policy observes and what it is rewarded for
are those of training. Three things differ: the command is the person's, a push is added to the
base's velocity when asked for (as Playground's own pushes are), and there is no time limit.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from jaxtd3.core.types import Array, BatchEnv
from jaxtd3.envs.batch import reward_weights
from jaxtd3.envs.playground.layout import Part, observation_layout
from jaxtd3.envs.playground.meshes import STANDINS
from jaxtd3.errors import UserError
from jaxtd3.output.video import model_of
from jaxtd3.thirdparty import attribute

AXES = ("forward", "left", "turn")
LATE = 0.25  # seconds behind the clock after which lost time is let go
SPEEDS = (0.05, 1.0)
MOST_PUSH = 3.0  # m/s
STILL = 0.01  # a shorter command means standing, as in Playground
Act = Callable[[Array, Array], Array]
"""act(obs [D], key) -> action [U]"""


class Controls(NamedTuple):
    """What a person has asked for."""

    command: tuple[float, ...] | None  # None: the environment takes none
    paused: bool = False
    speed: float = 1.0


class Session:
    """The live environment: `run` steps it; other threads ask (`control`) and look (`state`)."""

    def __init__(
        self,
        env: BatchEnv,
        act: Act,
        seed: int = 0,
        weights: Mapping[str, float] | None = None,
        about: Mapping[str, Any] | None = None,
    ):
        model = model_of(env)
        if model is None:
            raise UserError(f"{env.spec.name} has no MuJoCo model to show")
        self.spec, self.model, self.about = env.spec, model, dict(about or {})
        meshes = getattr(env.env, "meshes", None)
        self.standins = meshes is not None and meshes.kind == STANDINS  # nothing to show of them
        self.data = mujoco.MjData(model)
        own = reward_weights(env.spec, weights or {})
        self.weights = np.asarray(own) * env.spec.reward_scale / env.spec.dt  # a term's reward / s
        self.layout = observation_layout(env.env) or (Part("observation", 0, env.spec.obs_size),)
        self._reset, self._step = make_steps(env, act, own)
        self._inner: Any = None
        self._obs: Any = None
        self._key = jax.random.key(seed)
        self._rng = np.random.default_rng(seed)
        self.ranges = command_ranges(env, self._first())
        self.controls = Controls(tuple(0.0 for _ in self.ranges) if self.ranges else None)
        self.floating = bool(model.njnt and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE)
        self.changed = threading.Condition()
        self._push, self._wants_reset = np.zeros(2, np.float32), False
        self.steps = self.falls = 0
        self._shown: dict[str, Any] = {}
        self.pace = Pace(self.spec.dt)
        self.ended = False
        self._warm()

    # --- asked by other threads -----------------------------------------------------------------

    def control(self, asked: Any) -> dict[str, Any]:
        """Do what a request asks for; a mistake in any of it changes nothing."""
        if not isinstance(asked, Mapping) or not asked:
            raise UserError("a request names what it asks for, such as {'pause': true}")
        known = ("command", "pause", "speed", "push", "reset")
        for name in asked:
            if name not in known:
                raise UserError(f"unknown request {name!r}: known are {', '.join(known)}")
        controls = self.controls
        if "command" in asked:
            controls = controls._replace(command=self._command(asked["command"]))
        if "pause" in asked:
            controls = controls._replace(paused=truth("pause", asked["pause"]))
        if "speed" in asked:
            speed = numbers("speed", [asked["speed"]], 1)[0]
            controls = controls._replace(speed=float(np.clip(speed, *SPEEDS)))
        push = self._pushed(asked["push"]) if "push" in asked else np.zeros(2, np.float32)
        reset = "reset" in asked and truth("reset", asked["reset"])
        with self.changed:
            self.controls = controls
            self._push = self._push + push
            self._wants_reset |= reset
            self.changed.notify_all()
        return {"command": controls.command, "paused": controls.paused, "speed": controls.speed}

    def _command(self, given: Any) -> tuple[float, ...]:
        if not self.ranges:
            raise UserError(f"{self.spec.name} takes no command")
        asked = numbers("command", given, len(self.ranges))
        return tuple(
            float(np.clip(x, low, high)) for x, (low, high) in zip(asked, self.ranges, strict=True)
        )

    def _pushed(self, given: Any) -> np.ndarray:
        """A change of velocity over ground [2]: as given, or so strong in a random direction."""
        if not self.floating:
            raise UserError(f"{self.spec.name} has no floating base to push")
        if isinstance(given, int | float) and not isinstance(given, bool):
            angle = self._rng.uniform(0, 2 * np.pi)
            given = [given * np.cos(angle), given * np.sin(angle)]
        push = np.array(numbers("push", given, 2), np.float32)
        if np.linalg.norm(push) > MOST_PUSH:
            raise UserError(f"a push is at most {MOST_PUSH:g} m/s")
        return push

    def state(self) -> dict[str, Any]:
        """All that can be told, as JSON."""
        shown, controls = self._shown, self.controls
        obs = shown["obs"]
        seen = next((p for p in self.layout if p.name == "command"), None)
        return {
            **self.about,
            "env": self.spec.name,
            "command": controls.command,
            "seen": None if seen is None else listed(obs[seen.start : seen.stop]),
            "ranges": self.ranges,
            "paused": controls.paused,
            "speed": controls.speed,
            "steps": self.steps,
            "seconds": self.steps * self.spec.dt,
            "falls": self.falls,
            "position": listed(shown["qpos"][:3]) if self.floating else None,
            "velocity": listed(shown["qvel"][:3]) if self.floating else None,
            "reward": float(shown["reward"]) / self.spec.dt,
            "terms": self.terms(),
            "observation": {p.name: listed(obs[p.start : p.stop]) for p in self.layout},
            "real_time": self.pace.rate(),
        }

    def terms(self) -> dict[str, float]:
        """Reward per second of each term that has a weight."""
        names, terms = self.spec.reward_terms, listed(self._shown["terms"])
        weighted = zip(names, terms, self.weights, strict=False)
        return {name: term for name, term, weight in weighted if weight}

    def frame(self) -> dict[str, Any]:
        """What the page draws after every step."""
        shown = self._shown
        return {
            "step": self.steps,
            "poses": np.round(shown["poses"], 4).ravel().tolist(),
            "terms": listed(shown["terms"]),
            "reward": float(shown["reward"]) / self.spec.dt,
            "obs": listed(shown["obs"][: self.spec.obs_size]),
            "command": self.controls.command,
            "paused": self.controls.paused,
            "speed": self.controls.speed,
            "falls": self.falls,
            "seconds": self.steps * self.spec.dt,
            "real_time": self.pace.rate(),
        }

    # --- the loop -------------------------------------------------------------------------------

    def run(self, seconds: float = math.inf, after: Callable[[], bool] | None = None) -> None:
        """Step in real time for so long, or until `after`, called after every step, is false."""
        begin = time.monotonic()
        self.pace.start()
        while not self.ended and time.monotonic() - begin < seconds:
            if self.controls.paused and not self._wants_reset:
                with self.changed:
                    self.changed.wait(0.05)
                self.pace.start()
            else:
                self.advance()
                with self.changed:
                    self.changed.notify_all()
                left = max(0.0, seconds - (time.monotonic() - begin))
                self.pace.wait(self.controls.speed, left)
            if after is not None and not after():
                break
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def advance(self) -> None:
        """One control step, or the reset that was asked for."""
        with self.changed:
            push, reset = self._push, self._wants_reset
            self._push, self._wants_reset = np.zeros(2, np.float32), False
        if reset:
            self._restart()
            return
        command = self.controls.command
        self._key, key = jax.random.split(self._key)
        given = np.asarray(command or (), np.float32)
        inner, obs, shown = self._step(self._inner, self._obs, given, push, key)
        shown = jax.device_get(shown)
        self.steps += 1
        if shown["over"]:
            self.falls += 1
            self._restart(shown)
            return
        self._inner, self._obs = inner, obs
        self._show(shown)

    def _first(self) -> Any:
        self._key, key = jax.random.split(self._key)
        self._inner, self._obs = self._reset(key)
        return self._inner

    def _restart(self, last: Mapping[str, Any] | None = None) -> None:
        inner = self._first()
        data = jax.device_get(visible(inner))
        blank = {"reward": np.float32(0), "terms": np.zeros(len(self.weights), np.float32)}
        first = {name: (last or blank)[name] for name in blank}
        self._show({**first, **data, "obs": np.asarray(self._obs)})

    def _show(self, shown: dict[str, Any]) -> None:
        """Take over what a step left, with the places of all bodies: [bodies, 7]."""
        data = self.data
        for name in ("qpos", "mocap_pos", "mocap_quat"):
            if shown.get(name) is not None:
                getattr(data, name)[:] = shown[name]
        mujoco.mj_kinematics(self.model, data)
        mujoco.mj_comPos(self.model, data)  # what a window's camera follows
        mujoco.mj_camlight(self.model, data)
        shown["poses"] = np.concatenate([data.xpos, data.xquat], axis=1)
        shown["terms"] = shown["terms"] * self.weights
        self._shown = shown

    def _warm(self) -> None:
        """Compile before the clock starts."""
        self._restart()
        self.advance()
        self._restart()
        self.steps = self.falls = 0


class Pace:
    """Keeps steps to the wall clock, and measures how well."""

    def __init__(self, dt: float):
        self.dt = dt
        self._due = 0.0
        self.real = self.simulated = 0.0
        self._last = 0.0
        self.busy: list[float] = []  # seconds that steps took

    def start(self) -> None:
        self._due = self._last = time.monotonic()

    def wait(self, speed: float, most: float = math.inf) -> None:
        """Sleep until the next step is due at `speed`."""
        now = time.monotonic()
        self.busy.append(now - self._last)
        self._due += self.dt / speed
        if now < self._due:
            time.sleep(min(self._due - now, most))
        elif now - self._due > LATE:
            self._due = now
        end = time.monotonic()
        self.simulated += self.dt
        self.real += (end - self._last) * speed
        self._last = end

    def rate(self) -> float:
        """Simulated time over the time that it should have taken: 1 is real time."""
        return self.simulated / self.real if self.real else 1.0

    def describe(self) -> str:
        if not self.busy:
            return "no step was taken"
        median, late = np.percentile(self.busy, [50, 99])
        return (
            f"{self.simulated:.1f} s simulated at {self.rate():.3f} x real time, "
            f"a step takes {1e3 * median:.1f} ms (99 %: {1e3 * late:.1f}) of {1e3 * self.dt:g}"
        )


# --- compiled -----------------------------------------------------------------------------------


def visible(inner: Any) -> dict[str, Array]:
    """What of an environment's state is shown."""
    names = ("qpos", "qvel", "mocap_pos", "mocap_quat")
    found = {name: getattr(inner.state.data, name) for name in names}
    return {name: x for name, x in found.items() if x is not None}


def make_steps(env: BatchEnv, act: Act, weights: Array) -> tuple[Any, Any]:
    """reset(key) -> (state, obs), and step(state, obs, command, push, key) -> the same and more.

    The reward is that of training, under `weights` [K].
    """
    single, spec = env.env, env.spec

    def step(inner: Any, obs: Array, command: Array, push: Array, key: Array) -> Any:
        inner = steered(inner, command, push)
        action = jnp.clip(act(obs, key), -1.0, 1.0)
        out = single.step(inner, action)
        finite = jnp.all(jnp.isfinite(out.obs)) & jnp.all(jnp.isfinite(out.state.state.data.qpos))
        reward = spec.combine(out.terms, weights) if spec.reward_terms else out.reward
        shown = {**visible(out.state), "obs": out.obs, "reward": reward, "terms": out.terms}
        shown["over"] = out.terminated | ~finite
        return out.state, out.obs, shown

    return jax.jit(single.reset), jax.jit(step)


def steered(inner: Any, command: Array, push: Array) -> Any:
    """A state with the person's command and push.

    Playground stops a gait's clock, the same for both feet, while the command is to stand still;
    who walks off again starts it as after a reset, with the feet half a turn apart.
    """
    state = inner.state
    info, data = dict(state.info), state.data
    if command.size:
        old = info["command"]
        walks_off = (jnp.linalg.norm(old) <= STILL) & (jnp.linalg.norm(command) > STILL)
        info["command"] = command.astype(old.dtype)
        if "phase" in info and info["phase"].shape == (2,):
            start = jnp.array([0.0, jnp.pi], info["phase"].dtype)
            together = jnp.abs(info["phase"][0] - info["phase"][1]) < 1e-3
            info["phase"] = jnp.where(walks_off & together, start, info["phase"])
    if data.qvel.shape[0] >= 6:
        data = data.replace(qvel=data.qvel.at[:2].add(push))
    return inner._replace(state=state.replace(info=info, data=data))


def command_ranges(env: BatchEnv, inner: Any) -> list[tuple[float, float]]:
    """Least and largest value of each part of the command; none where there is no command."""
    info = getattr(getattr(inner, "state", None), "info", {})
    if "command" not in info:
        return []
    size = info["command"].shape[-1]
    if hasattr(env.env, "command_ranges"):
        return list(env.env.command_ranges)
    return configured_ranges(getattr(env.env, "unwrapped", None), size)


def configured_ranges(robot: Any, size: int) -> list[tuple[float, float]]:
    """The ranges that a Playground environment draws its commands from."""
    config = attribute(robot, "_config", {})
    names = ("lin_vel_x", "lin_vel_y", "ang_vel_yaw")
    if size == len(names) and all(name in config for name in names):
        return [(float(config[name][0]), float(config[name][1])) for name in names]
    most = config.get("command_config", {}).get("a", ())
    if len(most) == size:
        return [(-float(x), float(x)) for x in most]
    return [(-1.0, 1.0)] * size


# --- small --------------------------------------------------------------------------------------


def numbers(what: str, given: Any, count: int) -> list[float]:
    """`count` finite numbers, or a UserError."""
    good = isinstance(given, Sequence) and not isinstance(given, str) and len(given) == count
    good = good and all(isinstance(x, int | float) and not isinstance(x, bool) for x in given)
    if not good or not all(math.isfinite(x) for x in given):
        raise UserError(f"{what}: {count} finite numbers are needed, not {str(given)[:60]}")
    return [float(x) for x in given]


def truth(what: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise UserError(f"{what} is true or false, not {str(given)[:60]}")
    return given


def listed(x: Any) -> list[float]:
    return np.round(np.asarray(x, float), 4).tolist()
