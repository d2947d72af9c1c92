"""MuJoCo's own viewer in a window, where there is a display."""

from __future__ import annotations

import os
import sys

from jaxtd3.errors import UserError
from jaxtd3.play.session import Session

# key -> (part of the command, sign); the same keys as on the page
STEERING = {"W": (0, 1), "S": (0, -1), "A": (1, 1), "D": (1, -1), "Q": (2, 1), "E": (2, -1)}
KEYS = "W S forward and back, A D sideways, Q E turn, X stop, P push, R reset, space pause"
NUDGE = 0.1


def require_display() -> None:
    """Refuse a window where none can be opened."""
    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        raise UserError(
            "--window needs a display (DISPLAY is not set): leave it away to use a browser"
        )


def press(session: Session, key: str) -> None:
    """What a key asks for."""
    command = session.controls.command
    if key in STEERING and command is not None:
        part, sign = STEERING[key]
        if part < len(command):
            new = [x + sign * NUDGE * (i == part) for i, x in enumerate(command)]
            session.control({"command": new})
    elif key == "X" and command is not None:
        session.control({"command": [0.0] * len(command)})
    elif key == "P" and session.floating:
        session.control({"push": 1.0})
    elif key == "R":
        session.control({"reset": True})
    elif key == " ":
        session.control({"pause": not session.controls.paused})


def run_window(session: Session, seconds: float) -> None:
    """Show the session in a window until it is closed."""
    import mujoco.viewer

    data = session.data
    pressed = lambda code: press(session, chr(code) if code < 128 else "")  # noqa: E731
    with mujoco.viewer.launch_passive(
        session.model, data, key_callback=pressed, show_left_ui=False, show_right_ui=False
    ) as viewer:
        free = mujoco.mjtJoint.mjJNT_FREE
        if session.floating and session.model.jnt_type[0] == free:
            viewer.cam.type = mujoco.mjtCamera.mjCAMERA_TRACKING
            viewer.cam.trackbodyid = int(session.model.jnt_bodyid[0])

        def shown() -> bool:
            viewer.sync()
            return viewer.is_running()

        session.run(seconds, shown)
