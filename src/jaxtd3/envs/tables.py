"""What a `MujocoTask` says of itself: tables of one-line functions, numbers, a few methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from jaxtd3.core.types import Array
from jaxtd3.envs.playground.bounds import Bounds, stretch
from jaxtd3.envs.robot import Robot, load_model
from jaxtd3.envs.view import View

Function = Callable[[View], Any]


class TaskTables:
    """The part of a task that its author writes."""

    mjcf: ClassVar[Path | str] = ""
    """The model's file."""
    keyframe: ClassVar[str | None] = None
    """Pose that episodes start from, and that an action of 0 holds (the first; else the zero)."""
    control_dt: ClassVar[float] = 0.02
    """Seconds between actions."""
    sim_dt: ClassVar[float | None] = None
    """Seconds of a physics step (the model's own)."""
    episode_length: ClassVar[int] = 1000
    action_scale: ClassVar[Any] = 0.5
    """Controls are `pose + action_scale * action`, within ctrlrange (one number, or one for every
    actuator); None: actions of -1 and 1 are
    the ends of ctrlrange."""

    observations: ClassVar[Mapping[str, Function]] = {}
    """What the actor sees, in this order: name -> function of the view."""
    privileged: ClassVar[Mapping[str, Function]] = {}
    """What the critic sees besides."""
    observation_noise: ClassVar[Mapping[str, float]] = {}
    """Half width of even noise on an observation."""
    rewards: ClassVar[Mapping[str, tuple[float, Function]]] = {}
    """name -> (weight, function of the view); reward = control_dt * sum(weight * term)."""
    reward_clip: ClassVar[tuple[float, float] | None] = None
    terminations: ClassVar[Mapping[str, Function]] = {}
    """An episode ends when any of these is true."""
    command: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """What the policy is asked to do: name -> least and largest value, drawn evenly."""
    command_every: ClassVar[float] = 0.0
    """Seconds until a new command is drawn, on average (0: one an episode)."""
    command_zero: ClassVar[float] = 0.0
    """Share of the commands that are all zero."""

    reset_joints: ClassVar[float] = 0.1
    """Half width of even noise on the joints at reset, within their limits."""
    reset_velocity: ClassVar[float] = 0.1
    """Half width of even noise on all velocities at reset."""
    randomization: ClassVar[Mapping[str, Callable[[Array, Array], Array]]] = {}
    """With `--randomize`: field of the model -> function(value, key) of its value at a reset."""
    push_speed: ClassVar[float] = 0.0
    """With `--push`: change of the base's velocity over ground, in m/s ..."""
    push_every: ClassVar[float] = 5.0
    """... so many seconds apart, on average."""

    preset: ClassVar[Mapping[str, Any]] = {}
    """Settings of `jaxtd3 train` that suit the task; `{"cpu": {...}}` holds on that profile."""
    metrics: ClassVar[Mapping[str, Any]] = {}
    """Metrics of its own, as in `jaxtd3.envs.metrics`."""

    # --- known once the model is loaded ----------------------------------------------------------

    mj_model: mujoco.MjModel
    robot: Robot
    pose: np.ndarray  # [U] controls that an action of 0 stands for
    low: np.ndarray  # [U] least control, and the largest
    high: np.ndarray
    reach: Bounds | None  # where there is no `action_scale`

    # --- what a subclass may override -----------------------------------------------------------

    def load(self) -> mujoco.MjModel:
        """The model; by default that of `mjcf`."""
        return load_model(Path(self.mjcf), type(self).__name__)

    def start(self, key: Array) -> tuple[Array, Array]:
        """The first (qpos, qvel) of an episode: the start pose, joints and velocities varied."""
        key_joints, key_speed = jax.random.split(key)
        robot, model = self.robot, self.mj_model
        qpos = jnp.asarray(robot.start.qpos, jnp.float32)
        joints = qpos[robot.joint_qpos]
        noise = jax.random.uniform(key_joints, joints.shape, minval=-1.0) * self.reset_joints
        single = np.isin(model.jnt_qposadr, robot.joint_qpos)
        limited = model.jnt_limited[single].astype(bool)
        low = np.where(limited, model.jnt_range[single, 0], -np.inf)
        high = np.where(limited, model.jnt_range[single, 1], np.inf)
        qpos = qpos.at[robot.joint_qpos].set(jnp.clip(joints + noise, low, high))
        qvel = jax.random.uniform(key_speed, (model.nv,), minval=-1.0) * self.reset_velocity
        return qpos, qvel

    def control(self, action: Array) -> Array:
        """What the actuators are given for an action in [-1, 1]: [U]."""
        pose = jnp.asarray(self.pose)
        if self.reach is not None:
            return pose + stretch(self.reach, action)
        return jnp.clip(pose + jnp.asarray(self.action_scale) * action, self.low, self.high)

    def remember(self, s: View) -> dict[str, Array]:
        """What the state keeps for the next step in `s.info`, after each step and reset."""
        return {}
