"""What a robot observes: the name and the place of every part of the flat observation vector.

    observation_layout(env)    ->  (Part("linvel", 0, 3), Part("gyro", 3, 6), ...)

The tables say in which order Playground stacks the parts; their widths follow from the robot, and a
layout whose width is not that of the environment is refused. Environments without a table have no
layout.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from jaxtd3.errors import UserError


class Part(NamedTuple):
    """`observation[start:stop]`, by name."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


OBSERVED = (
    ("linvel", "polar"),
    ("gyro", "axial"),
    ("gravity", "polar"),
    ("command", "command"),
    ("joint_angles", "joints"),
    ("joint_velocities", "joints"),
    ("last_act", "actuators"),
    ("cos_phase", "feet"),
    ("sin_phase", "feet"),
)
PRIVILEGED = (
    ("true_gyro", "axial"),
    ("accelerometer", "polar"),
    ("true_gravity", "polar"),
    ("true_linvel", "polar"),
    ("global_angvel", "axial"),
    ("true_joint_angles", "joints"),
    ("true_joint_velocities", "joints"),
    ("root_height", "scalar"),
    ("actuator_force", "actuators"),
    ("contact", "feet"),
    ("feet_velocities", "feet_polar"),
    ("feet_air_time", "feet"),
)
"""What G1 and T1 observe, in this order, and what kind of thing each part is: polar vectors
(velocities, forces) and axial ones (rotations) have mirror images of their own (`symmetry.py`)."""
TABLES = {"[GT]1Joystick*": (OBSERVED, PRIVILEGED)}
"""Patterns of environment names -> parts of the actor's observation, and of the critic's extra."""


def observation_layout(env: Any, privileged: bool = False) -> tuple[Part, ...] | None:
    """Parts of what the actor of an environment sees; `privileged`: of the whole vector.

    None where the order is not known. An environment of one's own tells it by `layout`.
    """
    own = getattr(env, "layout", None)
    if own is not None:
        return tuple(part for part in own if privileged or part.stop <= env.spec.obs_size)
    table = next((t for pattern, t in TABLES.items() if fnmatchcase(env.spec.name, pattern)), None)
    model = getattr(getattr(env, "unwrapped", None), "mj_model", None)
    if table is None or model is None:
        return None
    joints = model.njnt - 1  # all but the floating base
    sizes = {"scalar": 1, "polar": 3, "axial": 3, "command": 3, "feet": 2, "feet_polar": 6}
    sizes |= {"joints": joints, "actuators": model.nu}
    parts: list[Part] = []
    for part in table:
        for name, kind in part:
            start = parts[-1].stop if parts else 0
            parts.append(Part(name, start, start + sizes[kind]))
        if part is table[0]:
            seen = len(parts)
    for what, found, width in (
        ("actor's", parts[seen - 1].stop, env.spec.obs_size),
        ("whole", parts[-1].stop, env.spec.width),
    ):
        if found != width:
            raise UserError(
                f"{env.spec.name}: the layout's {what} observation has {found} numbers, not {width}"
            )
    return tuple(parts if privileged else parts[:seen])


def describe_layout(env: Any) -> dict[str, str]:
    """Every part of an environment's observation with its slice, as text; empty if not known."""
    parts = observation_layout(env, privileged=True) or ()
    return {part.name: f"{part.start}:{part.stop}" for part in parts}
