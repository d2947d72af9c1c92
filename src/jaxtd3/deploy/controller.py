"""The controller in NumPy: how observations are made from sensors, and what state that needs.

    obs = observe(about, sensors, state)                     # [B, D], as the environment's
    action = policy(window(about, obs, state))               # [B, U], [B, K * D] in
    targets = default_pose + action_scale * action           # [B, U]
    state = advance(about, state, obs, action, command, gait_frequency)

This is what `controller_onnx.py` writes as a graph; traces are recorded with it. `about` is the
controller's metadata, of which the parts that matter here are

    observation   name, start and stop of every part that the policy observes, without the hidden
    history       K: observations in a window, the oldest first
    action_low, action_high   what the policy's -1 and 1 add to the default pose, in radians

Playground observes before it notes the action and moves the gait's clock, so an observation shows
the action of two steps ago, and the first two show the same phase. `state` keeps to that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtd3.core.types import EnvSpec
from jaxtd3.envs.playground.layout import OBSERVED
from jaxtd3.errors import UserError, nearest

FORMAT, VERSION = "jaxtd3 controller", 1
LICENCE = "Apache-2.0"
RAW = {
    "linvel": "linvel",
    "gyro": "gyro",
    "gravity": "gravity",
    "command": "command",
    "joint_angles": "joint_positions",
    "joint_velocities": "joint_velocities",
}
"""Parts of the observation -> the input that they are made of; the others come from the state."""
State = dict[str, np.ndarray]


def describe_controller(
    robot: Mapping[str, Any],
    spec: EnvSpec,
    bounds: Any = None,
    hidden: Sequence[str] = (),
    history: int = 1,
) -> dict[str, Any]:
    """The metadata of a controller: the robot's, and what its policy observes.

    `hidden`: parts of the environment's observation that the policy does not see; `history`: how
    many observations it sees at once.
    """
    names = [name for name, _ in OBSERVED]
    for name in hidden:
        if name not in names:
            raise UserError(nearest("part of the observation", name, names))
    if history < 1:
        raise UserError(f"history={history} is below 1")
    joints = len(robot["joint_names"])
    sizes = {"polar": 3, "axial": 3, "command": 3, "joints": joints, "actuators": joints, "feet": 2}
    parts, start = [], 0
    for name, size in OBSERVED:
        if name not in hidden:
            parts.append({"name": name, "start": start, "stop": start + sizes[size]})
            start += sizes[size]
    if start * history != spec.obs_size:
        raise UserError(
            f"no controller can be written: {history} x {start} observed numbers are not the "
            f"{spec.obs_size} of the policy"
        )
    about: dict[str, Any] = {"format": FORMAT, "format_version": VERSION, "licence": LICENCE}
    about |= robot
    about |= {"observation": parts, "hidden": list(hidden), "history": history}
    scale = robot["action_scale"]
    for name, way, sign in (("action_low", "down", -1), ("action_high", "up", 1)):
        reach = np.ones(joints) if bounds is None else np.asarray(getattr(bounds, way), float)
        about[name] = [round(sign * float(r) * scale, 7) for r in reach]
    about["inputs"] = input_sizes(about)
    about["state"] = {name: list(x.shape[1:]) for name, x in first_state(about).items()}
    return about


def input_sizes(about: Mapping[str, Any]) -> dict[str, int]:
    """Width of every input that is no state, by name."""
    observed = {part["name"]: part["stop"] - part["start"] for part in about["observation"]}
    sizes = {RAW[name]: size for name, size in observed.items() if name in RAW}
    return sizes | {"command": 3, "gait_frequency": 1}  # the clock reads the command too


def observation_size(about: Mapping[str, Any]) -> int:
    """D: numbers in one observation."""
    return int(about["observation"][-1]["stop"])


def first_state(about: Mapping[str, Any], batch: int = 1) -> State:
    """The state before the first step.

    actions [B, 2, U]: what the environment was given two steps ago and one step ago; phase [B, 2]
    of the feet; started [B, 1]: 0 before the first step, then 1; history [B, K - 1, D], if K > 1.
    """
    joints, older = len(about["joint_names"]), int(about["history"]) - 1
    phase = np.asarray(about["gait"]["start"], np.float32)
    state = {
        "actions": np.zeros((batch, 2, joints), np.float32),
        "phase": np.tile(phase, (batch, 1)),
        "started": np.zeros((batch, 1), np.float32),
    }
    if older:
        state["history"] = np.zeros((batch, older, observation_size(about)), np.float32)
    return state


def observe(
    about: Mapping[str, Any], sensors: Mapping[str, np.ndarray], state: State
) -> np.ndarray:
    """One observation, as the environment makes it without noise: [B, D]."""
    pose = np.asarray(about["default_pose"], np.float32)
    made = {
        "joint_angles": lambda: sensors["joint_positions"] - pose,
        "last_act": lambda: state["actions"][:, 0],
        "cos_phase": lambda: np.cos(state["phase"]),
        "sin_phase": lambda: np.sin(state["phase"]),
    }
    names = [part["name"] for part in about["observation"]]
    parts = [made[n]() if n in made else sensors[RAW[n]] for n in names]
    return np.concatenate(parts, axis=1).astype(np.float32)


def window(about: Mapping[str, Any], obs: np.ndarray, state: State) -> np.ndarray:
    """The last K observations, the oldest first; at the start all are the first: [B, K, D]."""
    if int(about["history"]) == 1:
        return obs[:, None]
    older = np.where(state["started"][:, :, None] > 0, state["history"], obs[:, None])
    return np.concatenate([older, obs[:, None]], axis=1)


def advance(
    about: Mapping[str, Any],
    state: State,
    obs: np.ndarray,
    action: np.ndarray,
    command: np.ndarray,
    gait_frequency: np.ndarray,
) -> State:
    """The state after a step; `action` [B, U] in the environment's own units."""
    gait, f32 = about["gait"], np.float32
    step = f32(2 * math.pi * about["dt"]) * gait_frequency
    phase = np.fmod(state["phase"] + step + f32(math.pi), f32(2 * math.pi)) - f32(math.pi)
    if gait["stands"]:
        walks = np.linalg.norm(command, axis=1, keepdims=True) > gait["still"]
        phase = np.where(walks, phase, f32(math.pi))
    new = {
        "actions": np.stack([state["actions"][:, 1], action], axis=1),
        "phase": np.where(state["started"] > 0, phase, state["phase"]).astype(f32),
        "started": np.ones_like(state["started"]),
    }
    if "history" in state:
        new["history"] = window(about, obs, state)[:, 1:]
    return new
