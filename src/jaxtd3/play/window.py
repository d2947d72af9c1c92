"""MuJoCo's own viewer in a window, where there is a display."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import mujoco

from jaxtd3.errors import UserError
from jaxtd3.play.session import Session


class Key(NamedTuple):
    """A key of the window, none of the viewer's own shortcuts."""

    code: int  # GLFW's
    name: str
    does: str
    asks: str  # command, stop, push, reset, pause or speed
    part: int = 0  # of the command
    by: float = 0.0


NUDGE = 0.1
KEYS = (
    Key(265, "up", "faster forward", "command", 0, NUDGE),
    Key(264, "down", "faster back", "command", 0, -NUDGE),
    Key(263, "left", "turn left", "command", 2, NUDGE),
    Key(262, "right", "turn right", "command", 2, -NUDGE),
    Key(ord("6"), "6", "to the left", "command", 1, NUDGE),
    Key(ord("7"), "7", "to the right", "command", 1, -NUDGE),
    Key(257, "enter", "stop", "stop"),
    Key(ord("."), ".", "push", "push", by=1.0),
    Key(261, "delete", "begin anew", "reset"),
    Key(ord(" "), "space", "pause", "pause"),
    Key(ord("8"), "8", "slow motion", "speed", by=0.5),
    Key(ord("9"), "9", "faster again", "speed", by=2.0),
)
EVERY = 0.2  # simulated seconds between texts
MOST_SHOWN = 6  # numbers of an observation


def describe_keys() -> str:
    """All keys in one line."""
    return ", ".join(f"{key.name}: {key.does}" for key in KEYS)


def require_display() -> None:
    """Refuse a window where none can be opened."""
    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        raise UserError(
            "--window needs a display (DISPLAY is not set): leave it away to use a browser"
        )


def press(session: Session, code: int) -> None:
    """What a key asks for, by GLFW's code."""
    key = next((key for key in KEYS if key.code == code), None)
    asked = None if key is None else request(session, key)
    if asked is not None:
        session.control(asked)


def request(session: Session, key: Key) -> dict[str, Any] | None:
    """A key as a request to the session; None where it means nothing there."""
    command, paused, speed = session.controls
    if key.asks == "command" and command is not None and key.part < len(command):
        return {"command": [x + key.by * (i == key.part) for i, x in enumerate(command)]}
    if key.asks == "stop" and command is not None:
        return {"command": [0.0] * len(command)}
    if key.asks == "push" and session.floating:
        return {"push": key.by}
    simple = {"reset": True, "pause": not paused, "speed": speed * key.by}
    return {key.asks: simple[key.asks]} if key.asks in simple else None


def follow(camera: mujoco.MjvCamera, model: mujoco.MjModel, data: mujoco.MjData) -> None:
    """Keep a robot with a floating base in sight, from behind and somewhat above."""
    if model.njnt and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE:
        camera.type = mujoco.mjtCamera.mjCAMERA_TRACKING
        camera.trackbodyid = int(model.jnt_bodyid[0])
        camera.lookat[:] = data.subtree_com[camera.trackbodyid]  # at once: it moves there slowly
        camera.distance, camera.azimuth, camera.elevation = 3.0, -40.0, -12.0


def texts(state: Mapping[str, Any]) -> list[tuple[int | None, int, str, str]]:
    """What the page tells, as the viewer's texts: (font, place, names, values)."""
    grid = mujoco.mjtGridPos
    now = {"reward": state["reward"], "falls": state["falls"], "speed": state["speed"]}
    if state["command"] is not None:
        now["command"] = state["command"]
    return [
        (None, grid.mjGRID_TOPLEFT, *columns(state["terms"].items())),
        (None, grid.mjGRID_TOPRIGHT, *columns(state["observation"].items())),
        (None, grid.mjGRID_BOTTOMRIGHT, *columns(now.items())),
    ]


def columns(rows: Iterable[tuple[str, Any]]) -> tuple[str, str]:
    """Names and values below each other, as many as the viewer can show."""
    names, values = "", ""
    for name, value in rows:
        given = value if isinstance(value, list | tuple) else [value]
        text = " ".join(f"{x:.2f}" for x in given[:MOST_SHOWN])
        text += " ..." if len(given) > MOST_SHOWN else ""
        if max(len(names) + len(name), len(values) + len(text)) + 1 >= mujoco.mjMAXOVERLAY:
            break
        names, values = f"{names}{name}\n", f"{values}{text}\n"
    return names, values


def run_window(session: Session, seconds: float) -> None:
    """Show the session in a window until it is closed."""
    import mujoco.viewer

    every = max(1, round(EVERY / session.spec.dt))
    with mujoco.viewer.launch_passive(
        session.model,
        session.data,
        key_callback=lambda code: press(session, code),
        show_left_ui=False,
        show_right_ui=False,
    ) as viewer:
        follow(viewer.cam, session.model, session.data)
        latest = -1  # what the texts are of

        def shown() -> bool:
            nonlocal latest
            viewer.sync()
            if session.steps // every != latest and viewer.is_running():
                latest = session.steps // every
                viewer.set_texts(texts(session.state()))
            return viewer.is_running()

        session.run(seconds, shown)
