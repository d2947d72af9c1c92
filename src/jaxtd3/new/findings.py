"""What a task needs of a model: what is there, what is missing, and the lines that would add it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import mujoco
import numpy as np

from jaxtd3.envs.robot import Robot, find_pose

FLOATING = ("stand", "velocity")
"""Tasks of robots that stand on the ground."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for."""

    what: str
    there: str = ""
    """What was found; empty: it is missing."""
    needed: bool = False
    """Without it there is no package."""
    advice: str = ""
    """What happens without it."""
    lines: str = ""
    """What to add to the MJCF."""


def look(model: mujoco.MjModel, task: str) -> list[Finding]:
    """All findings about a model for a task."""
    found = [actuators(model)]
    if task in FLOATING:
        found += [free_joint(model), floor(model), imu(model)]
    elif np.any(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE):
        found.append(Finding("a fixed base", needed=True, advice="reach wants no free joint"))
    whole = all(f.there or not f.needed for f in found)
    return [*found, keyframe(model, whole), control_ranges(model), speed(model)]


def name_of(model: mujoco.MjModel, kind: mujoco.mjtObj, index: int) -> str:
    return mujoco.mj_id2name(model, kind, index) or ""


def single_joints(model: mujoco.MjModel) -> list[str]:
    """Names of the hinges and slides; `?` for one without a name."""
    kinds = (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE))
    joints = [i for i in range(model.njnt) if model.jnt_type[i] in kinds]
    return [name_of(model, mujoco.mjtObj.mjOBJ_JOINT, i) or "?" for i in joints]


def actuators(model: mujoco.MjModel) -> Finding:
    joints = single_joints(model)
    rows = [f'  <position name="{j}" joint="{j}" kp="40" dampratio="1"/>' for j in joints[:40]]
    return Finding(
        "actuators",
        f"{model.nu} of {len(joints)} joints" if model.nu else "",
        needed=True,
        lines="\n".join(["<actuator>", *rows, "</actuator>"]),
    )


def root_body(model: mujoco.MjModel) -> str:
    """The body that a free joint belongs in: the first child of the world."""
    return name_of(model, mujoco.mjtObj.mjOBJ_BODY, 1) if model.nbody > 1 else ""


def free_joint(model: mujoco.MjModel) -> Finding:
    free = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)
    name = name_of(model, mujoco.mjtObj.mjOBJ_JOINT, int(free[0])) if free.size else ""
    return Finding(
        "a free joint",
        (name or "without a name") if free.size else "",
        needed=True,
        lines=f'<body name="{root_body(model)}" ...>\n  <freejoint name="base"/>',
    )


def floor(model: mujoco.MjModel) -> Finding:
    kinds = (int(mujoco.mjtGeom.mjGEOM_PLANE), int(mujoco.mjtGeom.mjGEOM_HFIELD))
    found = [
        i for i in range(model.ngeom) if model.geom_bodyid[i] == 0 and model.geom_type[i] in kinds
    ]
    name = name_of(model, mujoco.mjtObj.mjOBJ_GEOM, found[0]) if found else ""
    return Finding(
        "a floor",
        (name or "without a name") if found else "",
        advice="scene.xml adds one",
        lines='<geom name="floor" type="plane" size="0 0 0.05"/>',
    )


class Foot(NamedTuple):
    """What touches the ground at the end of a leg."""

    where: str
    """Its place as a task's function reads it: `s.geom('left_foot')`."""
    ground: float
    """How high that place is while the foot is on the ground."""
    phase: float
    """When in a stride it swings: legs of a side by turns, and against the other side."""


def feet(model: mujoco.MjModel) -> list[Foot]:
    """Ends of the base's limbs that reach as low as any, from the front, the left side first."""
    robot = Robot(model)
    data = robot.start
    mujoco.mj_kinematics(model, data)
    base = model.jnt_bodyid[robot.base]
    ends = set(np.flatnonzero(model.body_rootid == model.body_rootid[base])) - {base}
    ends -= set(model.body_parentid)
    lowest = {body: low for body in ends if (low := lowest_geom(model, data, int(body)))}
    ground = min((z for _, z in lowest.values()), default=0.0)
    reach = 0.1 * (data.xpos[base][2] - ground)
    found: list[tuple[bool, float, str, float]] = []
    for body, (geom, z) in lowest.items():
        geom_name = name_of(model, mujoco.mjtObj.mjOBJ_GEOM, geom)
        name = geom_name or name_of(model, mujoco.mjtObj.mjOBJ_BODY, int(body))
        if z > ground + reach or not name:
            continue
        x, y, height = data.geom_xpos[geom] if geom_name else data.xpos[body]
        where = f"s.geom({name!r})" if geom_name else f"s.body({name!r})"
        found.append((bool(y < 0), -float(x), where, float(height) - z))
    found.sort()
    left = sum(not right for right, *_ in found)
    return [
        Foot(where, height, 0.5 * ((i - left + 1 if right else i) % 2))
        for i, (right, _, where, height) in enumerate(found)
    ]


def lowest_geom(model: mujoco.MjModel, data: mujoco.MjData, body: int) -> tuple[int, float] | None:
    """The geom of a body that reaches lowest, of those that collide, and how low."""
    start = model.body_geomadr[body]
    found: list[tuple[float, int]] = []
    for geom in range(start, start + model.body_geomnum[body]):
        if model.geom_contype[geom] or model.geom_conaffinity[geom]:
            down = data.geom_xmat[geom].reshape(3, 3)[2]
            middle, half = model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
            below = min(float(np.abs(down) @ half), float(model.geom_rbound[geom]))
            found.append((float(data.geom_xpos[geom][2] + down @ middle) - below, geom))
    return (min(found)[1], min(found)[0]) if found else None


def leans_sideways(model: mujoco.MjModel) -> bool:
    """True where a joint turns about the length of the robot, as stepping sideways needs."""
    data = Robot(model).start
    mujoco.mj_kinematics(model, data)
    hinges = model.jnt_type == mujoco.mjtJoint.mjJNT_HINGE
    return bool(np.any(np.abs(data.xaxis[hinges, 0]) > 0.5))


def sensor_of(model: mujoco.MjModel, kind: mujoco.mjtSensor) -> str:
    """The first named sensor of a kind, or nothing."""
    found = np.flatnonzero(model.sensor_type == kind)
    names = [name_of(model, mujoco.mjtObj.mjOBJ_SENSOR, int(i)) for i in found]
    return next((name for name in names if name), "")


def imu(model: mujoco.MjModel) -> Finding:
    return Finding(
        "an IMU",
        sensor_of(model, mujoco.mjtSensor.mjSENS_GYRO),
        advice="the base's true turning rate is observed instead",
        lines=f'<body name="{root_body(model)}" ...>\n  <site name="imu"/>\n'
        '<sensor>\n  <gyro name="gyro" site="imu"/>\n</sensor>',
    )


def keyframe(model: mujoco.MjModel, whole: bool = True) -> Finding:
    """Its line waits until the model is whole: joints and actuators give it its length."""
    name = name_of(model, mujoco.mjtObj.mjOBJ_KEY, 0) if model.nkey else ""
    numbers = lambda x: " ".join(f"{v:.4g}" for v in x)  # noqa: E731
    pose = find_pose(Robot(model)) if model.nu else np.zeros(0)
    line = f'<key name="home" qpos="{numbers(model.qpos0)}" ctrl="{numbers(pose)}"/>'
    return Finding(
        "a keyframe",
        (name or "without a name") if model.nkey else "",
        advice="episodes start from the zero pose",
        lines=f"<keyframe>\n  {line}\n</keyframe>" if whole else "",
    )


def is_servo(model: mujoco.MjModel) -> bool:
    """True where all actuators hold positions."""
    return bool(np.all(model.actuator_biastype == mujoco.mjtBias.mjBIAS_AFFINE))


def control_ranges(model: mujoco.MjModel) -> Finding:
    """Motors need ranges, so that actions of -1 and 1 mean something."""
    free = np.flatnonzero(~model.actuator_ctrllimited.astype(bool))
    if is_servo(model) or not free.size:
        return Finding("control ranges", "servos" if is_servo(model) else f"{model.nu}")
    name = name_of(model, mujoco.mjtObj.mjOBJ_ACTUATOR, int(free[0]))
    line = f'<motor name="{name}" ... ctrlrange="-1 1" gear="..."/>'
    return Finding("control ranges", needed=True, lines=line)


def speed(model: mujoco.MjModel, seconds: float = 0.2) -> Finding:
    """How fast one core steps it, so that nobody waits for a model that is too large."""
    warnings: list[str] = []
    mujoco.set_mju_user_warning(warnings.append)  # MuJoCo's own way leaves a file behind
    try:
        data = mujoco.MjData(model)
        if model.nkey:
            mujoco.mj_resetDataKeyframe(model, data, 0)
        begin, steps = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds and not warnings:
            mujoco.mj_step(model, data)
            steps += 1
    finally:
        mujoco.set_mju_user_warning(None)
    if warnings:
        return Finding("steady physics", advice=f"MuJoCo says: {warnings[0]}")
    rate = steps / (time.perf_counter() - begin)
    large = ": large, expect long training" if model.nv > 60 else ""
    return Finding("speed", f"{model.njnt} joints, {rate:,.0f} physics steps/s on a core{large}")
