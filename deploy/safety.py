"""What is checked at every step, and the exit code of each failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

DONE, FAILED, BAD_INPUT, STALE, NOT_FINITE, LIMIT, JUMP, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130
CODES = {
    DONE: "ended as asked",
    FAILED: "an error that nobody expected",
    BAD_INPUT: "asked wrongly: nothing was driven",
    STALE: "no fresh sensor reading",
    NOT_FINITE: "a sensor or the policy was not finite",
    LIMIT: "a joint beyond its limits, or the robot leaning too far",
    JUMP: "a joint target jumped",
    INTERRUPTED: "interrupted",
}
STALE_AFTER = 0.06
"""Seconds: with a check every 20 ms, damping starts within 100 ms of the last reading."""
BEYOND = 0.1
"""Radians that a joint may be beyond its limits: encoders and stops have some play."""
LEAST_UPRIGHT = 0.5
"""Least cosine of the angle to upright: 60 degrees."""
MOST_JUMP = 1.0
"""Radians that a target may jump in one step, unless the controller jumps as far by itself."""
JUMP_MARGIN = 1.25
"""So many times as far as in its recorded trace a target may jump then."""


class Stop(Exception):
    """Damp now; `code` is the exit code."""

    def __init__(self, code: int, reason: str):
        super().__init__(reason)
        self.code = code


def most_jump(about: Mapping[str, Any]) -> float:
    """Radians that a target may jump in one step under this controller."""
    told = about.get("target_jump")
    known = isinstance(told, (int, float)) and np.isfinite(told) and told > 0
    return max(MOST_JUMP, JUMP_MARGIN * float(told)) if known else MOST_JUMP


def check_sensors(about: Mapping[str, Any], sensors: Any, now: float, stale_after: float) -> None:
    """Raise Stop on a reading that is old, not finite, beyond a limit, or of a fallen robot."""
    if sensors is None:
        raise Stop(STALE, "no sensor reading yet")
    age = now - sensors.time
    if not age <= stale_after:  # NaN too
        raise Stop(STALE, f"the newest sensor reading is {1e3 * age:.0f} ms old")
    for name in about["inputs"]:
        x = sensors.values.get(name)
        if name in ("command", "gait_frequency"):
            continue
        if x is None or np.size(x) != about["inputs"][name]:
            size = 0 if x is None else np.size(x)
            raise Stop(FAILED, f"sensor {name} has {size} numbers, not {about['inputs'][name]}")
        if not np.all(np.isfinite(x)):
            raise Stop(NOT_FINITE, f"sensor {name} is not finite")
    position = np.asarray(sensors.values["joint_positions"])
    over = np.maximum(position - about["joint_high"], about["joint_low"] - position)
    worst = int(np.argmax(over))
    if over[worst] > BEYOND:
        name = about["joint_names"][worst]
        raise Stop(LIMIT, f"{name} is {over[worst]:.2f} rad beyond its limits")
    if "gravity" in sensors.values and -sensors.values["gravity"][2] < LEAST_UPRIGHT:
        raise Stop(LIMIT, "the robot leans too far")


def check_targets(
    about: Mapping[str, Any], targets: np.ndarray, before: np.ndarray, most_jump: float
) -> np.ndarray:
    """Targets within the servos' range [J]; raise Stop where they are not finite, or jump."""
    if not np.all(np.isfinite(targets)):
        raise Stop(NOT_FINITE, "the joint targets are not finite")
    targets = np.clip(targets, about["target_low"], about["target_high"])
    jump = np.abs(targets - before)
    worst = int(np.argmax(jump))
    if jump[worst] > most_jump:
        name = about["joint_names"][worst]
        raise Stop(JUMP, f"the target of {name} jumped by {jump[worst]:.2f} rad in one step")
    return targets
