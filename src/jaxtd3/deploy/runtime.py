"""A controller in onnxruntime: what a robot's computer would do, without JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtd3.deploy.controller import FORMAT, VERSION, State, first_state
from jaxtd3.errors import UserError
from jaxtd3.output.onnx import _libraries

TEXTS = (
    "format",
    "licence",
    "env",
    "robot",
    "keyframe",
    "robot_licence",
    "source",
    "policy_sha256",
    "algo",
    "note",
    "jaxtd3_version",
)
"""Metadata that is text as it stands; all else is JSON."""

NEEDED = (
    "env",
    "robot",
    "dt",
    "physics_dt",
    "joint_names",
    "default_pose",
    "action_scale",
    "observation",
    "history",
    "hidden",
    "inputs",
    "state",
    "gait",
    "command",
    "sensors",
    "falls",
    "keyframe",
    "noise",
)
"""Metadata without which a controller cannot be run."""


class Controller:
    """One controller: `about`, its metadata, and `step`, for any number of robots at once."""

    def __init__(self, content: bytes, where: str = "the controller"):
        _, runtime = _libraries()
        self.content = content
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1  # threads of its own would fight with the physics'
        try:
            self.session = runtime.InferenceSession(
                content, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's own kinds of error are private
            raise UserError(f"{where} is no ONNX file that onnxruntime reads") from error
        self.about = read_about(self.session.get_modelmeta().custom_metadata_map, where)
        self.outputs = [output.name for output in self.session.get_outputs()]

    def start(self, batch: int = 1) -> State:
        return first_state(self.about, batch)

    def step(self, inputs: Mapping[str, np.ndarray], state: State) -> tuple[dict[str, Any], State]:
        """All outputs by name, and the new state; every array has a batch axis first."""
        feed = {name: inputs[name] for name in self.about["inputs"]} | state
        out = dict(zip(self.outputs, self.session.run(self.outputs, feed), strict=True))
        return out, {name: out[f"new_{name}"] for name in state}


def read_about(texts: Mapping[str, str], where: str) -> dict[str, Any]:
    """A controller's metadata; anything else is refused with one line."""
    if texts.get("format") != FORMAT:
        raise UserError(f"{where} is no controller: write one with jaxtd3 export --controller")
    try:
        about = {k: v if k in TEXTS else json.loads(v) for k, v in texts.items()}
    except ValueError as error:
        raise UserError(f"{where}: its metadata cannot be read: {error}") from error
    if about.get("format_version") != VERSION:
        found = about.get("format_version")
        raise UserError(f"{where} has format version {found}: this jaxtd3 reads {VERSION}")
    for name in NEEDED:
        if name not in about:
            raise UserError(f"{where}: its metadata has no {name}")
    return about


def load_controller(path: Path) -> Controller:
    """The controller in a file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return Controller(content, str(path))
