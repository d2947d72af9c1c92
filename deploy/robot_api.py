"""The one place where a robot is plugged in: four functions.

A real robot is a class with these four methods, written with the robot maker's SDK, in a file of
your own in the working folder (or in an installed package), and run with

    python deploy/run.py controller.onnx --robot my_robot:MyRobot

`mujoco_robot.py` is an example of one. Vectors have one number per joint, in the order of
`about["joint_names"]`, in SI units: reorder here if your SDK counts joints otherwise.
Nothing in this folder has been tried on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

FUNCTIONS = ("connect", "read_sensors", "write_targets", "damp")


class Sensors(NamedTuple):
    """The newest measurements."""

    time: float  # time.monotonic() when they were measured, not when they were asked for
    values: Mapping[str, np.ndarray]
    """By the names of the controller's inputs: gyro [3] rad/s in the frame of the IMU, gravity [3]
    (see `gravity_of`), joint_positions [J] rad, joint_velocities [J] rad/s, and linvel [3] m/s in
    the frame of the IMU if the controller has that input: robots have no sensor for it."""


class Robot(Protocol):
    """What `run.py` asks of a robot."""

    def connect(self, about: Mapping[str, Any]) -> None:
        """Open the connection; no joint may be driven yet. `about` is the controller's metadata."""

    def read_sensors(self) -> Sensors | None:
        """The newest measurements, at once: never wait for new ones. None before the first."""

    def write_targets(self, targets: np.ndarray, kp: np.ndarray, kd: np.ndarray) -> None:
        """Servo the joints: torque = kp * (target - position) - kd * velocity, all [J]."""

    def damp(self, kd: np.ndarray) -> None:
        """Let the joints sink: torque = -kd * velocity. May be called at any time, even before
        anything was measured, and again; it must not raise and must not wait."""


def gravity_of(quaternion: np.ndarray) -> np.ndarray:
    """The controller's `gravity` [3] from the IMU's orientation (w, x, y, z) in the world."""
    w, x, y, z = np.asarray(quaternion, float) / np.linalg.norm(quaternion)
    return np.array([2 * (w * y - x * z), -2 * (y * z + w * x), 2 * (x * x + y * y) - 1])
