"""What a controller must know of a robot, read from Playground's environment and its MuJoCo model.

    about = describe_robot("G1JoystickFlatTerrain", load_robot("G1JoystickFlatTerrain"))

`about` is plain JSON. It goes into the controller's metadata, and all that runs a controller
(`trace.py`, `robustness.py`, `deploy/`) reads it from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import mujoco
import numpy as np

from jaxtd3.errors import UserError
from jaxtd3.thirdparty import attribute

STILL = 0.01
"""A shorter command means standing."""
AXES = ("forward m/s", "left m/s", "turn rad/s")
GRAVITY = (
    "unit vector of gravity in the frame of the IMU, (0, 0, -1) when upright; from the IMU's "
    "orientation (w, x, y, z) in the world: (2(wy - xz), -2(yz + wx), 2(x^2 + y^2) - 1)"
)


class Kind(NamedTuple):
    """What Playground's source says of a robot and its model does not."""

    robot: str
    keyframe: str  # the default pose
    site: str  # of the IMU
    gyro: str  # names of sensors
    linvel: str
    up: str  # the axis whose third part falls below 0 when the robot falls
    contacts: tuple[str, ...]  # contact sensors that end an episode
    gait: tuple[float, float]  # Hz, drawn at every reset
    stands: bool  # whether the gait's clock stops at a command of 0
    licence: str


KINDS = {
    "G1Joystick*": Kind(
        robot="Unitree G1",
        keyframe="knees_bent",
        site="imu_in_pelvis",
        gyro="gyro_pelvis",
        linvel="local_linvel_pelvis",
        up="upvector_torso",
        contacts=(
            "right_foot_left_foot_found",
            "left_foot_right_shin_found",
            "right_foot_left_shin_found",
        ),
        gait=(1.25, 1.5),
        stands=False,
        licence="robot model: MuJoCo Menagerie's unitree_g1 (BSD-3-Clause, Unitree Robotics), "
        "as changed by MuJoCo Playground (Apache-2.0)",
    ),
    "T1Joystick*": Kind(
        robot="Booster T1",
        keyframe="home",
        site="imu",
        gyro="gyro",
        linvel="local_linvel",
        up="upvector",
        contacts=(),
        gait=(1.25, 1.75),
        stands=True,
        licence="robot model: MuJoCo Menagerie's booster_t1 (Apache-2.0, Booster Robotics), "
        "as changed by MuJoCo Playground (Apache-2.0)",
    ),
}
"""Patterns of environment names -> robots that a controller can be written for."""


def kind_of(env_name: str) -> Kind:
    """The robot of an environment, or one line that says why no controller can be written."""
    for pattern, kind in KINDS.items():
        if fnmatchcase(env_name, pattern):
            return kind
    known = " and ".join(KINDS)
    raise UserError(
        f"no controller can be written for {env_name}: its observation is not known sensor by "
        f"sensor, as that of {known} is"
    )


def has_controller(env_name: str) -> bool:
    """Whether a controller can be written for the robot of an environment."""
    return any(fnmatchcase(env_name, pattern) for pattern in KINDS)


def load_robot(env_name: str) -> Any:
    """Playground's environment, for its model and settings alone: nothing of it is traced."""
    from mujoco_playground import registry

    from jaxtd3.envs.playground.adapter import on_own_device, playground_names
    from jaxtd3.envs.playground.meshes import menagerie_for

    kind_of(env_name)
    if env_name not in playground_names():
        raise UserError(f"Playground has no environment {env_name}")
    config = registry.get_default_config(env_name)
    with menagerie_for(env_name), on_own_device():
        return registry.load(env_name, config=config, config_overrides={"impl": "cpp"})


def describe_robot(env_name: str, env: Any) -> dict[str, Any]:
    """All that a controller must know of the robot of an unwrapped environment, as plain JSON.

    Vectors have one number per joint, in the order of `joint_names`: [J].
    """
    kind, model, config = kind_of(env_name), env.mj_model, attribute(env, "_config")
    joints = check_joints(env_name, model)
    dofs = model.jnt_dofadr[joints]
    frequency = sum(kind.gait) / 2
    return {
        "env": env_name,
        "robot": kind.robot,
        "dt": float(env.dt),
        "control_rate": 1 / float(env.dt),
        "physics_dt": float(model.opt.timestep),
        "joint_names": [model.joint(j).name for j in joints],
        "default_pose": listed(attribute(env, "_default_pose")),
        "action_scale": float(config.action_scale),
        "kp": listed(model.actuator_gainprm[:, 0]),
        # a servo's own damping is in its bias; G1 and T1 have theirs on the joints instead
        "kd": listed(model.dof_damping[dofs] - model.actuator_biasprm[:, 2]),
        "joint_low": listed(model.jnt_range[joints, 0]),
        "joint_high": listed(model.jnt_range[joints, 1]),
        "target_low": listed(model.actuator_ctrlrange[:, 0]),
        "target_high": listed(model.actuator_ctrlrange[:, 1]),
        "torque_limit": listed(model.jnt_actfrcrange[joints, 1]),
        "command": {
            "names": list(AXES),
            "low": [float(config[n][0]) for n in ("lin_vel_x", "lin_vel_y", "ang_vel_yaw")],
            "high": [float(config[n][1]) for n in ("lin_vel_x", "lin_vel_y", "ang_vel_yaw")],
        },
        "gait": {
            "start": [0.0, math.pi],
            "frequency": frequency,
            "frequency_low": kind.gait[0],
            "frequency_high": kind.gait[1],
            "stands": kind.stands,
            "still": STILL,
        },
        "sensors": {
            "site": kind.site,
            "gyro": kind.gyro,
            "linvel": kind.linvel,
            "gravity": GRAVITY,
        },
        "falls": {"up": kind.up, "contacts": list(kind.contacts)},
        "keyframe": kind.keyframe,
        "noise": {k: float(v) for k, v in config.noise_config.scales.items()},
        "robot_licence": kind.licence,
    }


def check_joints(env_name: str, model: mujoco.MjModel) -> np.ndarray:
    """Ids of the driven joints [J]: every joint but the floating base, in the order of qpos."""
    servo = np.all(model.actuator_biastype == mujoco.mjtBias.mjBIAS_AFFINE)
    joints = model.actuator_trnid[:, 0]
    in_order = np.array_equal(joints, np.arange(1, model.njnt))
    floating = model.njnt > 0 and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
    if not (servo and in_order and floating):
        raise UserError(f"no controller can be written for {env_name}: not one servo per joint")
    return joints


def listed(x: Any) -> list[float]:
    """Numbers as JSON keeps them, single precision without its tail: 0.1, not 0.10000000149."""
    return [float(str(v)) for v in np.asarray(x)]


# --- reading sensors ----------------------------------------------------------------------------


class Places(NamedTuple):
    """Where a model keeps what a controller reads."""

    gyro: slice
    linvel: slice
    up: slice
    contacts: tuple[int, ...]
    site: int


def find_places(about: Mapping[str, Any], model: mujoco.MjModel) -> Places:
    """The sensors' places in `sensordata`, and the site of the IMU."""

    def place(name: str) -> slice:
        sensor = model.sensor(name)
        return slice(int(sensor.adr[0]), int(sensor.adr[0] + sensor.dim[0]))

    sensors, falls = about["sensors"], about["falls"]
    try:
        return Places(
            gyro=place(sensors["gyro"]),
            linvel=place(sensors["linvel"]),
            up=place(falls["up"]),
            contacts=tuple(place(name).start for name in falls["contacts"]),
            site=model.site(sensors["site"]).id,
        )
    except KeyError as error:
        raise UserError(f"the model is not of {about['robot']}: {error.args[0]}") from error


def read_sensors(places: Places, data: Any, down: Any = (0.0, 0.0, -1.0)) -> dict[str, np.ndarray]:
    """What the robot measures, of `MjData` or of arrays with leading axes [..]: each [.., size].

    `down` [.., 3]: where gravity points, for ground that slopes.
    """
    xmat = np.asarray(data.site_xmat)[..., places.site, :]
    xmat = xmat.reshape(*xmat.shape[:-1], 3, 3)
    gravity = np.einsum("...ij,...i->...j", xmat, np.broadcast_to(down, xmat.shape[:-1]))
    found = {
        "linvel": np.asarray(data.sensordata)[..., places.linvel],
        "gyro": np.asarray(data.sensordata)[..., places.gyro],
        "gravity": gravity,
        "joint_positions": np.asarray(data.qpos)[..., 7:],
        "joint_velocities": np.asarray(data.qvel)[..., 6:],
    }
    return {name: np.array(x, np.float32) for name, x in found.items()}


def fallen(places: Places, data: Any, down: Any = (0.0, 0.0, -1.0)) -> np.ndarray:
    """Whether the environment would end the episode: [..] bool."""
    sensordata = np.asarray(data.sensordata)
    up = sensordata[..., places.up]
    over = np.sum(up * -np.broadcast_to(down, up.shape), axis=-1) < 0.0
    for contact in places.contacts:
        over = over | (sensordata[..., contact] > 0)
    for x in (data.qpos, data.qvel):
        over = over | np.isnan(np.asarray(x)).any(axis=-1)
    return over
