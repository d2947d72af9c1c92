"""The controller file in onnxruntime: metadata and one step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime

FORMAT, VERSION = "jaxtd3 controller", 1
NEEDED = (
    "robot",
    "dt",
    "physics_dt",
    "joint_names",
    "joint_low",
    "joint_high",
    "target_low",
    "target_high",
    "default_pose",
    "kp",
    "kd",
    "inputs",
    "state",
    "gait",
    "command",
    "sensors",
    "keyframe",
)
"""Metadata without which a controller cannot be run."""


class BadInput(Exception):
    """Something that was asked for cannot be: shown as one line, exit code 2."""


class Controller:
    """`about`: the metadata; `step`: sensors [..] in, joint targets [J] out; keeps its state."""

    def __init__(self, path: str):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # a small network: threads would only add jitter
        try:
            self.session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's own kinds of error are private
            raise BadInput(f"{path} is no ONNX file that can be read") from error
        texts = self.session.get_modelmeta().custom_metadata_map
        if texts.get("format") != FORMAT:
            raise BadInput(f"{path} is no controller: write one with jaxtd3 export --controller")
        self.about: dict[str, Any] = dict(texts)
        for name, text in texts.items():
            with contextlib.suppress(ValueError):  # what is no JSON is text
                self.about[name] = json.loads(text)
        if self.about.get("format_version") != VERSION:
            raise BadInput(f"{path} has format version {self.about.get('format_version')}")
        for name in NEEDED:
            if name not in self.about:
                raise BadInput(f"{path}: its metadata has no {name}")
        self.outputs = [output.name for output in self.session.get_outputs()]
        try:
            self.frequency = float(self.about["gait"]["frequency"])
            self.reset()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"{path}: its gait or state cannot be read: {error!r}") from error

    def reset(self) -> None:
        """The state before the first step."""
        self.state = {
            name: np.zeros((1, *shape), np.float32) for name, shape in self.about["state"].items()
        }
        self.restart_gait()

    def restart_gait(self) -> None:
        """The feet half a turn apart, as at the start of an episode in training."""
        self.state["phase"] = np.array([self.about["gait"]["start"]], np.float32)

    def step(self, sensors: Mapping[str, np.ndarray], command: np.ndarray) -> np.ndarray:
        """Joint targets [J] for one set of measurements."""
        gait, phase = self.about["gait"], self.state["phase"][0]
        walks = np.linalg.norm(command) > gait["still"]
        if gait["stands"] and walks and abs(phase[0] - phase[1]) < 1e-3:
            self.restart_gait()  # standing stopped the clock with both feet at one phase
        given = {**sensors, "command": command, "gait_frequency": [self.frequency]}
        feed = {n: np.asarray(given[n], np.float32).reshape(1, -1) for n in self.about["inputs"]}
        found = self.session.run(self.outputs, feed | self.state)
        out = dict(zip(self.outputs, found, strict=True))
        self.state = {name: out[f"new_{name}"] for name in self.state}
        return out["joint_targets"][0]
