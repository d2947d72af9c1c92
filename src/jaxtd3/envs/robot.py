"""What is known of a MuJoCo model once and for all: joints, base, start pose, control limits."""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np

from jaxtd3.errors import UserError, nearest

KINDS = {
    "sensor": mujoco.mjtObj.mjOBJ_SENSOR,
    "site": mujoco.mjtObj.mjOBJ_SITE,
    "body": mujoco.mjtObj.mjOBJ_BODY,
    "geom": mujoco.mjtObj.mjOBJ_GEOM,
    "joint": mujoco.mjtObj.mjOBJ_JOINT,
    "keyframe": mujoco.mjtObj.mjOBJ_KEY,
}
COUNTS = {
    "sensor": "nsensor",
    "site": "nsite",
    "body": "nbody",
    "geom": "ngeom",
    "joint": "njnt",
    "keyframe": "nkey",
}


def find_id(model: mujoco.MjModel, kind: str, name: str) -> int:
    """The index of a named part of the model, or a line with the nearest name."""
    found = mujoco.mj_name2id(model, KINDS[kind], name)
    if found < 0:
        names = [mujoco.mj_id2name(model, KINDS[kind], i) for i in range(size(model, kind))]
        known = [n for n in names if n]
        if not known:
            raise UserError(f"unknown {kind} {name!r}: the model names none")
        raise UserError(nearest(kind, name, known))
    return found


def size(model: mujoco.MjModel, kind: str) -> int:
    """How many parts of a kind the model has."""
    return int(getattr(model, COUNTS[kind]))


class Robot:
    """What is known of a model once and for all: where joints, base and start pose are."""

    def __init__(self, model: mujoco.MjModel, keyframe: str | None = None):
        self.model = model
        free = model.jnt_type == mujoco.mjtJoint.mjJNT_FREE
        single = (model.jnt_type == mujoco.mjtJoint.mjJNT_HINGE) | (
            model.jnt_type == mujoco.mjtJoint.mjJNT_SLIDE
        )
        self.joint_qpos = np.asarray(model.jnt_qposadr[single])
        self.joint_qvel = np.asarray(model.jnt_dofadr[single])
        self.base = int(np.argmax(free)) if free.any() else None
        data = mujoco.MjData(model)
        if keyframe is not None:
            mujoco.mj_resetDataKeyframe(model, data, find_id(model, "keyframe", keyframe))
        elif model.nkey:
            mujoco.mj_resetDataKeyframe(model, data, 0)
        self.start = data
        self.start_joints = np.asarray(data.qpos[self.joint_qpos], np.float32)

    def _base(self) -> int:
        if self.base is None:
            raise UserError("the model has no free joint: it has no base to ask about")
        return self.base

    @property
    def base_qpos(self) -> int:
        return int(self.model.jnt_qposadr[self._base()])

    @property
    def base_qvel(self) -> int:
        return int(self.model.jnt_dofadr[self._base()])


def load_model(path: Path, name: str) -> mujoco.MjModel:
    """The model of an MJCF file."""
    if not path.is_file():
        raise UserError(f"{name}: no such MJCF: {path}")
    try:
        return mujoco.MjModel.from_xml_path(str(path))
    except ValueError as error:
        raise UserError(f"{name}: {path}: {error}") from error


def set_timestep(model: mujoco.MjModel, name: str, control_dt: float, sim_dt: float | None) -> int:
    """Physics steps in a control step."""
    model.opt.timestep = sim_dt or model.opt.timestep
    ratio = control_dt / model.opt.timestep if model.opt.timestep > 0 else 0.0
    if ratio < 0.99 or abs(ratio - round(ratio)) > 1e-6:
        raise UserError(
            f"sim_dt={model.opt.timestep:g} s does not divide {name}'s control step of "
            f"{control_dt:g} s"
        )
    return round(ratio)


def control_limits(model: mujoco.MjModel) -> tuple[np.ndarray, np.ndarray]:
    """Least and largest control, infinite where there is none: [U], [U]."""
    limited = model.actuator_ctrllimited.astype(bool)
    low, high = model.actuator_ctrlrange.T
    low, high = np.where(limited, low, -np.inf), np.where(limited, high, np.inf)
    return low.astype(np.float32), high.astype(np.float32)


def find_pose(robot: Robot) -> np.ndarray:
    """The controls that an action of 0 stands for: the start pose's, within ctrlrange: [U]."""
    model, pose = robot.model, np.array(robot.start.ctrl)
    if not pose.any():  # a keyframe without controls: servos hold the joints where they are
        for i in range(model.nu):
            servo = model.actuator_biasprm[i, 1] == -model.actuator_gainprm[i, 0]
            affine = model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_AFFINE
            if affine and servo and model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT:
                pose[i] = robot.start.qpos[model.jnt_qposadr[model.actuator_trnid[i, 0]]]
    return np.clip(pose, *control_limits(model)).astype(np.float32)
