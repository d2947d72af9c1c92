"""Actions that reach every joint's limits: what -1 and 1 mean, joint by joint.

An environment of Playground sends `default_pose + action_scale * action` to its motors, the same
scale for all joints: some limits are out of reach, others are far overshot. With `limits`, -1 and 1
are the lower and the upper limit of each joint, and 0 is the default pose as before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import mujoco
import numpy as np

from jaxtd3.core.types import Array
from jaxtd3.errors import UserError
from jaxtd3.thirdparty import attribute


class Bounds(NamedTuple):
    """How far an action reaches, in units of the environment's own action."""

    down: np.ndarray  # [U] what an action of -1 stands for, times -1
    up: np.ndarray  # [U] what an action of 1 stands for


def joint_bounds(name: str, env: Any) -> Bounds:
    """The distance from the default pose to the limits of the joints that are driven."""
    model: mujoco.MjModel = env.mj_model
    pose = attribute(env, "_default_pose", None)
    scale = attribute(env, "_config").get("action_scale")
    position = np.all(model.actuator_biastype == mujoco.mjtBias.mjBIAS_AFFINE)
    if pose is None or scale is None or not position:
        raise UserError(f"{name} has no default pose to measure from: action_bounds=scale only")
    joints = model.actuator_trnid[:, 0]
    if not np.all(model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT):
        raise UserError(f"{name} has motors that drive no joint: action_bounds=scale only")
    free = [model.joint(j).name for j in joints if not model.jnt_limited[j]]
    if free:
        raise UserError(f"{name}: joint {free[0]} has no limits: action_bounds=scale only")
    low, high = model.jnt_range[joints].T
    pose = np.asarray(pose, float)
    down, up = (pose - low) / np.asarray(scale), (high - pose) / np.asarray(scale)
    if np.any(down < 0) or np.any(up < 0):
        raise UserError(f"{name}: the default pose is beyond a joint's limits")
    return Bounds(down.astype(np.float32), up.astype(np.float32))


def stretch(bounds: Bounds, action: Array) -> Array:
    """What the environment is given for an action [.., U] in [-1, 1]."""
    shape = (1,) * (action.ndim - 1) + (-1,)
    up, down = (jnp.asarray(x).reshape(shape) for x in (bounds.up, bounds.down))
    return jnp.where(action > 0, up * action, down * action)
