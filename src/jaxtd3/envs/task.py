"""Your robot and task: an `MjModel` and one-line functions of its state, as an `Env`.

    class Stand(MujocoTask):
        mjcf = Path(__file__).with_name("robot.xml")
        observations = {"gyro": lambda s: s.sensor("gyro"), "joints": lambda s: s.pose_error}
        rewards = {"upright": (1.0, lambda s: s.up[2]), "effort": (-1e-3, lambda s: sq(s.torques))}
        terminations = {"fallen": lambda s: s.up[2] < 0.5}

`jaxtd3 train --env file.py:Stand` trains it; `--reward effort=-0.01`, sweeps and relabelling work
because the raw terms are kept apart from their weights. `s` is a `View`. Physics is native (C
MuJoCo) on a CPU, MJX where it is asked for (`--impl jax`) and the model allows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct
from mujoco import mjx

from jaxtd3.config.sections import EnvConfig
from jaxtd3.core.tracing import record
from jaxtd3.core.types import Array, EnvSpec, EnvStep
from jaxtd3.envs.batch import choose_impl, disturbances
from jaxtd3.envs.physics.contract import Physics
from jaxtd3.envs.physics.fields import NotReturned, find_used
from jaxtd3.envs.physics.mjx import MjxPhysics
from jaxtd3.envs.physics.native import NativePhysics, share_of_cores
from jaxtd3.envs.playground.adapter import (
    cast_like,
    on_own_device,
    raw_key,
    same_types,
    structure_text,
)
from jaxtd3.envs.playground.bounds import Bounds, joint_bounds, stretch
from jaxtd3.envs.playground.layout import Part
from jaxtd3.envs.robot import Robot, control_limits, find_pose, set_timestep
from jaxtd3.envs.tables import TaskTables
from jaxtd3.envs.view import View, near, sq
from jaxtd3.errors import UserError

__all__ = ["MujocoTask", "View", "near", "sq"]


class Inner(struct.PyTreeNode):
    """The state of one environment."""

    data: Any  # mjx.Data, with the fields that are used
    info: dict[str, Array]  # rng [2], command [C], last_action [U], and what `remember` adds


class TaskState(NamedTuple):
    """`state.data` and `state.info`: where filming, play and metrics look (see `types.Env`)."""

    state: Inner
    model: tuple[Array, ...]  # randomised fields of the physics model, if any


class MujocoTask(TaskTables):
    """A task on a MuJoCo model: a subclass fills in the tables of `TaskTables`."""

    # --- made once ------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, cfg: EnvConfig, devices: int = 1) -> MujocoTask:
        """The task under the settings of a run, for `devices` that step side by side here."""
        return cls(cfg, devices)

    def __init__(self, cfg: EnvConfig | None = None, devices: int = 1):
        cfg = cfg or EnvConfig(num_envs=1)
        self.name = type(self).__name__
        self._check_tables()
        self.mj_model = model = self.load()
        if not model.nu:
            raise UserError(f"{self.name}: the model has no actuators")
        self.substeps = set_timestep(model, self.name, self.control_dt, cfg.sim_dt or self.sim_dt)
        self.robot = Robot(model, self.keyframe)
        self.default_pose = self.pose = find_pose(self.robot)
        self.low, self.high = control_limits(model)
        self.reach = self._reach()
        self.bounds = self._bounds(cfg)
        self._push = self._push_chance(cfg)
        if cfg.randomize and not self.randomization:
            raise UserError(f"{self.name} has no randomization to switch on")
        self._varied = tuple(self.randomization) if cfg.randomize else ()
        self._load_physics(cfg, devices)
        self._recorded_reset, self._recorded_step = record(self._reset), record(self._step)
        self._type, self.layout = self._inspect()
        self.spec = self._make_spec()

    @property
    def command_ranges(self) -> list[tuple[float, float]]:
        """Least and largest value of every part of the command."""
        return [(float(low), float(high)) for low, high in self.command.values()]

    def _check_tables(self) -> None:
        for table in ("observations", "rewards"):
            if not getattr(self, table):
                raise UserError(f"{self.name} has no {table}")
        for name, term in self.rewards.items():
            if not (isinstance(term, tuple) and len(term) == 2 and callable(term[1])):
                raise UserError(f"{self.name}: reward {name!r} is not (weight, function)")
        unknown = set(self.observation_noise) - set(self.observations)
        if unknown:
            raise UserError(f"{self.name}: observation_noise of unknown {sorted(unknown)[0]!r}")

    def _reach(self) -> Bounds | None:
        """How far actions reach where there is no `action_scale`."""
        if self.action_scale is not None:
            return None
        free = [i for i in range(self.mj_model.nu) if not np.isfinite(self.low[i])]
        if free:
            name = self.mj_model.actuator(free[0]).name or f"number {free[0]}"
            raise UserError(f"{self.name}: actuator {name} has no ctrlrange: set action_scale")
        down, up = self.pose - self.low, self.high - self.pose
        return Bounds(down.astype(np.float32), up.astype(np.float32))

    def _bounds(self, cfg: EnvConfig) -> Bounds | None:
        if cfg.action_bounds != "limits" or self.reach is not None:
            return None
        robot = {"_default_pose": self.pose, "_config": {"action_scale": self.action_scale}}
        return joint_bounds(self.name, SimpleNamespace(mj_model=self.mj_model, **robot))

    def _push_chance(self, cfg: EnvConfig) -> float:
        """Chance of a push in a step."""
        if not cfg.push:
            return 0.0
        if not self.push_speed or self.robot.base is None:
            raise UserError(f"{self.name} has no pushes to switch on")
        return min(1.0, self.control_dt / self.push_every)

    def _load_physics(self, cfg: EnvConfig, devices: int) -> None:
        impl = choose_impl(cfg.impl)
        if impl == "native" and jax.default_backend() != "cpu":
            raise UserError("native physics runs on a CPU: use --impl warp or --impl jax")
        put = "cpp" if impl == "native" else impl
        with on_own_device():
            try:
                self._model = mjx.put_model(self.mj_model, impl=put)
                self._blank = mjx.make_data(self.mj_model, impl=put)
            except (NotImplementedError, ValueError) as error:
                hint = "; --impl native runs it" if impl == "jax" else ""
                raise UserError(f"{self.name} on {impl}: {error}{hint}") from error
        self.physics: Physics = MjxPhysics(self._model) if impl != "native" else self._native(cfg)
        if isinstance(self.physics, NativePhysics):
            self.physics.threads = cfg.physics_threads or share_of_cores(devices)

    def _native(self, cfg: EnvConfig) -> NativePhysics:
        """C MuJoCo, asked for the fields that this task uses and no others."""
        mjcf = getattr(self, "mjcf", None)
        physics = NativePhysics(
            self.mj_model,
            self._blank,
            self._varied,
            label=disturbances(cfg),
            make_spec=partial(mujoco.MjSpec.from_file, str(mjcf)) if mjcf else None,
        )
        key = jax.random.PRNGKey(0)

        def reset(physics: Physics, key: Array) -> tuple[Any, Any]:
            inner, model, *rest = self._reset_on(physics, key)
            return inner.data, (inner.info, model, rest)

        def step(physics: Physics, args: Any) -> tuple[Any, Any]:
            data, (info, model), action = args
            inner, *rest = self._step_on(physics, Inner(data, info), model, action)
            return inner.data, (inner.info, rest)

        action = jax.ShapeDtypeStruct((self.mj_model.nu,), jnp.float32)
        try:
            data, (info, model, _) = jax.eval_shape(lambda key: reset(physics, key), key)
            used = find_used(physics, step, (data, (info, model), action), reset, key)
        except (NotReturned, AttributeError) as error:
            if isinstance(error, AttributeError) and not (
                isinstance(error.obj, mjx.Data) and hasattr(mujoco.MjData, str(error.name))
            ):
                raise  # a slip in the task
            hint = "--impl jax runs it"
            raise UserError(f"{self.name} on native physics: {error}; {hint}") from error
        physics.narrow(used)
        return physics

    def _inspect(self) -> tuple[Any, tuple[Part, ...]]:
        """The type of the state, and the place of every observation."""
        first, model, _ = jax.eval_shape(self._recorded_reset, jax.random.PRNGKey(0))
        action = jax.ShapeDtypeStruct((self.mj_model.nu,), jnp.float32)
        then, *_ = jax.eval_shape(self._recorded_step, first, model, action)
        if structure_text(first) != structure_text(then) or not same_types(first, then):
            raise UserError(f"{self.name}: reset and step return states of different types")
        parts: list[Part] = []
        for name, width in self._widths.items():
            start = parts[-1].stop if parts else 0
            parts.append(Part(name, start, start + width))
        return then, tuple(parts)

    def _make_spec(self) -> EnvSpec:
        seen = self.layout[len(self.observations) - 1].stop
        return EnvSpec(
            name=self.name,
            obs_size=seen,
            extra_size=self.layout[-1].stop - seen,
            action_size=self.mj_model.nu,
            episode_length=self.episode_length,
            dt=self.control_dt,
            reward_terms=tuple(self.rewards),
            default_weights=tuple(float(weight) for weight, _ in self.rewards.values()),
            reward_scale=self.control_dt,
            reward_clip=self.reward_clip,
        )

    # --- Env ------------------------------------------------------------------------------------

    def reset(self, key: Array) -> tuple[TaskState, Array]:
        inner, model, obs = self._recorded_reset(raw_key(key))
        return TaskState(cast_like(inner, self._type), model), obs

    def step(self, state: TaskState, action: Array) -> EnvStep:
        if self.bounds is not None:
            action = stretch(self.bounds, action)
        inner, obs, terms, over = self._recorded_step(state.state, state.model, action)
        weights = jnp.array(self.spec.default_weights, jnp.float32)
        state = TaskState(cast_like(inner, self._type), state.model)
        return EnvStep(state, obs, self.spec.combine(terms, weights), terms, over)

    def rekey(self, state: TaskState, key: Array) -> TaskState:
        """Give a copied state random numbers of its own."""
        info = {**state.state.info, "rng": raw_key(key)}
        return state._replace(state=state.state.replace(info=info))

    def view(self, state: TaskState) -> View:
        """What the task's functions see of a state, for metrics and tests."""
        return View(self.robot, state.state.data, state.state.info, state.state.info["last_action"])

    # --- traced ---------------------------------------------------------------------------------

    def _reset(self, key: Array) -> Any:
        inner, *rest = self._reset_on(self.physics, key)
        return inner.replace(data=self.physics.carry(inner.data)), *rest

    def _step(self, inner: Inner, model: tuple[Array, ...], action: Array) -> Any:
        inner, *rest = self._step_on(self.physics, inner, model, action)
        return inner.replace(data=self.physics.carry(inner.data)), *rest

    def _reset_on(self, physics: Physics, key: Array) -> Any:
        """(Inner, randomised fields, obs [D])."""
        key, key_start, key_model, key_command, key_noise = jax.random.split(key, 5)
        model = tuple(
            jnp.asarray(self.randomization[name](getattr(self._model, name), k), jnp.float32)
            for name, k in zip(self._varied, jax.random.split(key_model, 64), strict=False)
        )
        with tracing():
            qpos, qvel = self.start(key_start)
            found = {"qpos": qpos, "qvel": qvel, "ctrl": self.pose, "act": self.robot.start.act}
            found = {name: jnp.asarray(x, jnp.float32) for name, x in found.items()}
            data = physics.forward(self._changed(model), self._blank.replace(**found))
            last = jnp.zeros(self.mj_model.nu)
            info = {"rng": raw_key(key), "last_action": last}
            if self.command:
                info["command"] = self._sample_command(key_command)
            info |= self.remember(View(self.robot, data, info, last))
            obs = self._observe(View(self.robot, data, info, last), key_noise)
        return Inner(data, info), model, obs

    def _step_on(self, physics: Physics, inner: Inner, model: Any, action: Array) -> Any:
        """(Inner, obs [D], terms [K], terminated)."""
        key, key_push, key_command, key_noise = jax.random.split(inner.info["rng"], 4)
        with tracing():
            data = self._pushed(inner.data, key_push)
            data = physics.step(self._changed(model), data, self.control(action), self.substeps)
            s = View(self.robot, data, inner.info, action)
            terms = jnp.stack([scalar(f"reward {k}", f(s)) for k, (_, f) in self.rewards.items()])
            over = jnp.zeros((), bool)
            for name, function in self.terminations.items():
                over |= scalar(f"termination {name}", function(s)).astype(bool)
            info = {**inner.info, "rng": key, **self.remember(s), "last_action": action}
            if self.command:  # a new one is seen before it is rewarded
                info["command"] = self._next_command(info["command"], key_command)
            obs = self._observe(View(self.robot, data, info, action), key_noise)
        return Inner(data, info), obs, terms, over

    def _changed(self, values: tuple[Array, ...]) -> Any:
        """The physics model with its randomised fields."""
        new = dict(zip(self._varied, values, strict=True))
        return self._model.replace(**new) if new else self._model

    def _observe(self, s: View, key: Array) -> Array:
        """[actor part | privileged part]: [D]."""
        parts, self._widths = [], {}
        keys = jax.random.split(key, max(1, len(self.observations)))
        tables = (*self.observations.items(), *self.privileged.items())
        for i, (name, function) in enumerate(tables):
            x = jnp.ravel(jnp.asarray(function(s), jnp.float32))
            width = self.observation_noise.get(name, 0.0)
            if width and i < len(self.observations):
                x += width * jax.random.uniform(keys[i], x.shape, minval=-1.0)
            self._widths[name] = x.size
            parts.append(x)
        return jnp.concatenate(parts)

    def _sample_command(self, key: Array) -> Array:
        """[C]."""
        low, high = np.array(self.command_ranges, np.float32).reshape(-1, 2).T
        key_value, key_zero = jax.random.split(key)
        drawn = low + (high - low) * jax.random.uniform(key_value, low.shape)
        return jnp.where(jax.random.bernoulli(key_zero, self.command_zero), 0.0, drawn)

    def _next_command(self, command: Array, key: Array) -> Array:
        if not self.command_every:
            return command
        key_when, key_new = jax.random.split(key)
        due = jax.random.bernoulli(key_when, min(1.0, self.control_dt / self.command_every))
        return jnp.where(due, self._sample_command(key_new), command)

    def _pushed(self, data: Any, key: Array) -> Any:
        if not self._push:
            return data
        key_when, key_where = jax.random.split(key)
        angle = jax.random.uniform(key_where, maxval=2 * jnp.pi)
        push = self.push_speed * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
        push = jnp.where(jax.random.bernoulli(key_when, self._push), push, 0.0)
        start = self.robot.base_qvel
        return data.replace(qvel=data.qvel.at[start : start + 2].add(push))


# --- small --------------------------------------------------------------------------------------


def scalar(what: str, x: Any) -> Array:
    """One number, or a line that says how many there are."""
    x = jnp.asarray(x)
    if x.size != 1:
        raise UserError(f"{what} returns an array of shape {x.shape}, not one number")
    return x.reshape(()).astype(jnp.float32)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Full precision: TF32 breaks contacts."""
    with (
        on_own_device(),
        jax.default_matmul_precision("highest"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield
