"""What the one-line functions of a `MujocoTask` see: one environment at one moment.

    "gyro":    lambda s: s.sensor("gyro")
    "upright": lambda s: s.up[2]
    "height":  lambda s: s.height

All of it is read from public fields of `mjx.Data`, so it means the same on every physics back end;
what no function reads is neither computed nor carried.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from jaxtd3.core.types import Array
from jaxtd3.envs.robot import Robot, find_id
from jaxtd3.errors import UserError


def rotate_back(quat: Array, v: Array) -> Array:
    """A world vector in the frame that `quat` turned: [3]."""
    w, u = quat[0], -quat[1:]
    return v + 2 * jnp.cross(u, jnp.cross(u, v) + w * v)


class View:
    """One environment at one moment, under names that a task's functions use."""

    def __init__(self, robot: Robot, data: Any, info: Mapping[str, Array], action: Array):
        self.robot, self.data, self.info, self.action = robot, data, info, action

    # --- by name --------------------------------------------------------------------------------

    def sensor(self, name: str) -> Array:
        """The reading of a sensor: [dim]."""
        model = self.robot.model
        index = find_id(model, "sensor", name)
        start = int(model.sensor_adr[index])
        return self.data.sensordata[start : start + int(model.sensor_dim[index])]

    def site(self, name: str) -> Array:
        """Where a site is in the world: [3]."""
        return self.data.site_xpos[find_id(self.robot.model, "site", name)]

    def body(self, name: str) -> Array:
        """Where a body's frame is in the world: [3]."""
        return self.data.xpos[find_id(self.robot.model, "body", name)]

    def geom(self, name: str) -> Array:
        """Where the middle of a geom is in the world: [3]."""
        return self.data.geom_xpos[find_id(self.robot.model, "geom", name)]

    # --- the joints -----------------------------------------------------------------------------

    @property
    def joints(self) -> Array:
        """Positions of all hinges and slides, in the model's order: [J]."""
        return self.data.qpos[self.robot.joint_qpos]

    @property
    def joint_velocities(self) -> Array:
        """[J]."""
        return self.data.qvel[self.robot.joint_qvel]

    @property
    def pose_error(self) -> Array:
        """Joints less what they are in the start pose: [J]."""
        return self.joints - jnp.asarray(self.robot.start_joints)

    @property
    def torques(self) -> Array:
        """Forces of the actuators: [U]."""
        return self.data.actuator_force

    @property
    def previous(self) -> Array:
        """The action before this one; zeros at the first step: [U]."""
        return self.info["last_action"]

    # --- the floating base ----------------------------------------------------------------------

    @cached_property
    def _quat(self) -> Array:
        start = self.robot.base_qpos
        return self.data.qpos[start + 3 : start + 7]

    @property
    def height(self) -> Array:
        """Of the floating base over the world's origin: []."""
        return self.data.qpos[self.robot.base_qpos + 2]

    @property
    def up(self) -> Array:
        """The world's vertical as the base sees it, (0, 0, 1) when upright: [3]."""
        return rotate_back(self._quat, jnp.array([0.0, 0.0, 1.0]))

    @property
    def velocity(self) -> Array:
        """Linear velocity of the base in its own frame: [3]."""
        start = self.robot.base_qvel
        return rotate_back(self._quat, self.data.qvel[start : start + 3])

    @property
    def turning(self) -> Array:
        """Angular velocity of the base in its own frame: [3]."""
        start = self.robot.base_qvel
        return self.data.qvel[start + 3 : start + 6]

    @property
    def command(self) -> Array:
        """What the policy is asked to do, in the order of the task's `command`: [C]."""
        if "command" not in self.info:
            raise UserError("the task has no command")
        return self.info["command"]


# --- for one-line functions ---------------------------------------------------------------------


def sq(x: Array) -> Array:
    """Sum of squares: []."""
    return jnp.sum(jnp.square(x))


def near(x: Any, width: float) -> Array:
    """exp(-|x|^2 / width^2): 1 at zero, 0.37 at `width`."""
    return jnp.exp(-jnp.sum(jnp.square(jnp.asarray(x))) / width**2)
