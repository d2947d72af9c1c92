"""A recorded trace: what a controller was given and what it answered, step by step.

It is recorded with the JAX policy and the NumPy observation of `controller.py`, not with the ONNX
file, so that agreeing with it means something. The file is NumPy's `.npz`, without pickles:

    in.NAME [T, size]      inputs that are no state
    state.NAME [T, ..]     state before each step
    out.NAME [T, ..]       joint_targets, action, observation
    new.NAME [T, ..]       state after each step
    joint_names [J], robot, env   text
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import mujoco
import numpy as np

from jaxtd3.deploy.controller import advance, first_state, observe, window
from jaxtd3.deploy.controller_onnx import ACTION, OBSERVATION, TARGETS
from jaxtd3.deploy.robot import fallen, find_places, read_sensors
from jaxtd3.deploy.runtime import Controller
from jaxtd3.durable import whole_file
from jaxtd3.errors import UserError

STEPS = 200
TOLERANCE = 1e-4
COMMANDS = ((0.5, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.2, -0.5), (-0.4, -0.2, 0.3))
"""Commands of the trace's four quarters; one of them is to stand."""
MOST = 64 << 20  # bytes of a file that is taken for a trace
Act = Callable[[np.ndarray], np.ndarray]
"""act(window [B, K * D]) -> action [B, U] in the environment's own units"""
Trace = dict[str, np.ndarray]


def record_trace(
    about: Mapping[str, Any], model: mujoco.MjModel, act: Act, steps: int = STEPS
) -> Trace:
    """Drive the robot in C MuJoCo by `act`, and write down every step; a fall puts it back."""
    places, data = find_places(about, model), mujoco.MjData(model)
    substeps = round(about["dt"] / about["physics_dt"])
    key = model.key(about["keyframe"]).id
    pose, scale = (np.asarray(about[k], np.float32) for k in ("default_pose", "action_scale"))
    frequency = np.full((1, 1), about["gait"]["frequency"], np.float32)
    put_back(model, data, key)
    state, rows = first_state(about), []
    for i in range(steps):
        command = np.array([COMMANDS[i * len(COMMANDS) // steps]], np.float32)
        sensors = {name: x[None] for name, x in read_sensors(places, data).items()}
        inputs = sensors | {"command": command, "gait_frequency": frequency}
        obs = observe(about, inputs, state)
        action = act(window(about, obs, state).reshape(1, -1)).astype(np.float32)
        targets = pose + scale * action
        new = advance(about, state, obs, action, command, frequency)
        row = {f"in.{name}": inputs[name] for name in about["inputs"]}
        row |= {f"state.{name}": x for name, x in state.items()}
        row |= {f"out.{TARGETS}": targets, f"out.{ACTION}": action, f"out.{OBSERVATION}": obs}
        rows.append(row | {f"new.{name}": x for name, x in new.items()})
        data.ctrl[:] = targets[0]
        mujoco.mj_step(model, data, substeps)
        if fallen(places, data):
            put_back(model, data, key)
        state = new
    trace = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    trace |= {name: np.array(about[name]) for name in ("joint_names", "robot", "env")}
    return trace


def largest_jump(about: Mapping[str, Any], trace: Mapping[str, np.ndarray]) -> float:
    """Radians that the target of a servo moves in one step at most, from the default pose on."""
    targets = np.concatenate([[about["default_pose"]], trace[f"out.{TARGETS}"]])
    kept = np.clip(targets, about["target_low"], about["target_high"])
    return round(float(np.max(np.abs(np.diff(kept, axis=0)))), 3)


def put_back(model: mujoco.MjModel, data: mujoco.MjData, key: int) -> None:
    mujoco.mj_resetDataKeyframe(model, data, key)
    mujoco.mj_forward(model, data)


def replay_error(controller: Controller, trace: Trace) -> float:
    """The largest difference from a trace: each step by itself, and the state carried on."""
    group = lambda head: {  # noqa: E731
        name.removeprefix(head): x for name, x in trace.items() if name.startswith(head)
    }
    inputs, states, outs, news = (group(head) for head in ("in.", "state.", "out.", "new."))
    got, new = controller.step(inputs, states)
    pairs = [(got[name], x) for name, x in outs.items()] + [(new[n], x) for n, x in news.items()]
    state = {name: x[:1] for name, x in states.items()}
    for i in range(len(inputs["command"])):
        got, state = controller.step({name: x[i : i + 1] for name, x in inputs.items()}, state)
        pairs.append((got[TARGETS], outs[TARGETS][i : i + 1]))
    errors = [np.max(np.abs(a - b)) if np.shape(a) == np.shape(b) else np.inf for a, b in pairs]
    return float(np.max(errors))  # NaN stays NaN


def save_trace(path: Path, trace: Trace) -> None:
    with whole_file(path) as part, open(part, "wb") as file:
        np.savez_compressed(file, **trace)  # type: ignore[arg-type]


def load_trace(path: Path, controller: Controller) -> Trace:
    """A trace that fits a controller; anything else is refused with one line."""
    try:
        if path.stat().st_size > MOST:
            raise UserError(f"{path} is too large for a trace")
        with np.load(path, allow_pickle=False) as file:
            trace = {name: file[name] for name in file.files}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, EOFError, BadZipFile) as error:
        raise UserError(f"{path} is no trace: {error}") from error
    about = controller.about
    needed = {f"in.{n}": (size,) for n, size in about["inputs"].items()}
    for head in ("state", "new"):
        needed |= {f"{head}.{n}": tuple(shape) for n, shape in about["state"].items()}
    joints = len(about["joint_names"])
    needed |= {f"out.{TARGETS}": (joints,), f"out.{ACTION}": (joints,)}
    steps = len(trace["in.command"]) if np.ndim(trace.get("in.command", 0)) else 0
    for name, shape in needed.items():
        if name not in trace or trace[name].shape != (steps, *shape) or not steps:
            raise UserError(f"{path} is no trace of this controller: {name}")
    return trace
