"""Run a controller at its rate: stand up, follow a command, end in damping. No JAX is needed.

    python deploy/run.py controller.onnx --model robot.xml --seconds 60 --command 0.5 0 0
    python deploy/run.py controller.onnx --robot my_robot:MyRobot --command 0 0 0

The first drives C MuJoCo as if it were the robot. The second drives what your four functions drive
(`robot_api.py`). Exit codes are in `safety.py`. Nothing here has been tried on hardware.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import safety
from mujoco_robot import MujocoRobot
from policy_runtime import BadInput, Controller
from robot_api import FUNCTIONS, Robot

FIRST_WAIT = 2.0  # seconds that the first sensor reading may take


@dataclass
class Report:
    """What a run was like."""

    code: int = safety.DONE
    reason: str = ""
    ticks: list[float] = field(default_factory=list)  # when each step of the policy began
    busy: list[float] = field(default_factory=list)  # seconds that each took
    clipped: int = 0  # steps with a target beyond a servo's range
    damped_after: float | None = None  # seconds from the last sensor reading to damping

    def rate(self) -> float:
        """Steps per second."""
        span = self.ticks[-1] - self.ticks[0] if len(self.ticks) > 1 else 0.0
        return (len(self.ticks) - 1) / span if span else 0.0

    def lines(self, dt: float) -> list[str]:
        found = []
        if len(self.ticks) > 1:
            gaps = np.diff(self.ticks)
            late = int(np.sum(gaps > 1.5 * dt))
            found.append(
                f"{len(self.ticks)} steps at {self.rate():.2f} Hz (asked: {1 / dt:.2f}); a gap is "
                f"{1e3 * np.median(gaps):.1f} ms, at most {1e3 * gaps.max():.1f}; {late} late; "
                f"a step takes {1e3 * np.median(self.busy):.2f} ms"
            )
        if self.clipped:
            found.append(f"{self.clipped} steps had a target beyond a servo's range: clipped")
        after = ""
        if self.damped_after is not None:
            after = f", {1e3 * self.damped_after:.0f} ms after the last sensor reading"
        found.append(f"damping{after}: {self.reason or safety.CODES[self.code]}")
        return found


class Pace:
    """Sleeps to absolute times, so that errors of one step do not add up."""

    def __init__(self, dt: float):
        self.dt, self.due = dt, time.monotonic()

    def wait(self) -> float:
        """Until the next step is due; when it began."""
        left = self.due - time.monotonic()
        if left > 0:
            time.sleep(left)
        now = time.monotonic()
        self.due = max(self.due + self.dt, now)  # a step that is missed is not made up for
        return now


def drive(
    robot: Robot,
    controller: Any,
    command: Sequence[float],
    seconds: float,
    ramp: float = 2.0,
    most_jump: float = safety.MOST_JUMP,
    stale_after: float = safety.STALE_AFTER,
    each_step: Callable[[float], None] | None = None,
) -> Report:
    """Stand up in `ramp` seconds, run the policy for `seconds`, and end in damping, always."""
    about, report = controller.about, Report()
    kp, kd, pose = (np.asarray(about[name]) for name in ("kp", "kd", "default_pose"))
    asked = np.asarray(command, np.float32)
    last = None
    try:
        robot.connect(about)
        print(
            f"{1 / about['dt']:g} Hz: {ramp:g} s of standing up, then the policy; "
            f"a target may jump by {most_jump:.2f} rad a step",
            flush=True,
        )
        last = wait_for_sensors(robot)
        safety.check_sensors(about, last, time.monotonic(), stale_after)
        start = targets = np.asarray(last.values["joint_positions"], float)
        pace = Pace(about["dt"])
        steps = max(1, round(ramp / about["dt"]))
        for i in range(steps):
            now = pace.wait()
            last = robot.read_sensors() or last
            safety.check_sensors(about, last, now, stale_after)
            wanted = start + (pose - start) * (i + 1) / steps
            targets = safety.check_targets(about, wanted, targets, most_jump)
            robot.write_targets(targets, kp, kd)
        controller.reset()
        begin = pace.due
        while pace.due - begin < seconds:
            now = pace.wait()
            report.ticks.append(now)
            if each_step is not None:
                each_step(now - begin)
            last = robot.read_sensors() or last
            safety.check_sensors(about, last, now, stale_after)
            wanted = controller.step(last.values, asked)
            kept = safety.check_targets(about, wanted, targets, most_jump)
            report.clipped += bool(np.any(np.abs(kept - wanted) > 1e-6))
            robot.write_targets(kept, kp, kd)
            targets = kept
            report.busy.append(time.monotonic() - now)
    except safety.Stop as stop:
        report.code, report.reason = stop.code, str(stop)
    except KeyboardInterrupt:
        report.code = safety.INTERRUPTED
    except BadInput:
        raise
    except Exception as error:
        report.code, report.reason = safety.FAILED, f"{type(error).__name__}: {error}"
    finally:
        damp_for_sure(robot, kd, report)
        if last is not None:
            report.damped_after = time.monotonic() - last.time
    return report


def damp_for_sure(robot: Robot, kd: np.ndarray, report: Report) -> None:
    """Damp, even if the first try fails or is interrupted."""
    for _ in range(3):
        try:
            robot.damp(kd)
            return
        except BaseException as error:  # a second Ctrl-C must not leave the motors on
            report.code = report.code or safety.FAILED
            report.reason += f" (damping failed: {type(error).__name__}: {error})"


def wait_for_sensors(robot: Robot) -> Any:
    """The first reading."""
    end = time.monotonic() + FIRST_WAIT
    while time.monotonic() < end:
        sensors = robot.read_sensors()
        if sensors is not None:
            return sensors
        time.sleep(0.005)
    raise safety.Stop(safety.STALE, f"no sensor reading within {FIRST_WAIT:g} s")


# --- the command line ---------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other mistake."""
        raise BadInput(message)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Run a controller at its rate; without --robot, C MuJoCo is the robot.",
        epilog="exit codes: " + "; ".join(f"{k} {v}" for k, v in safety.CODES.items()),
    )
    parser.add_argument("controller", help="written by jaxtd3 export --controller")
    parser.add_argument("--model", help="MuJoCo model (robot.xml of --with-model)")
    parser.add_argument("--robot", help="module:Class with the four functions of robot_api.py")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the policy (60)")
    parser.add_argument("--command", type=float, nargs=3, default=(0.0, 0.0, 0.0), metavar="X")
    parser.add_argument("--ramp", type=float, default=2.0, help="seconds of standing up (2)")
    parser.add_argument(
        "--max-jump",
        type=float,
        help=f"rad a target may jump in a step ({safety.MOST_JUMP:g}, or {safety.JUMP_MARGIN:g} "
        "times the largest jump of the recorded trace)",
    )
    parser.add_argument("--hang", action="store_true", help="MuJoCo: never let off the gantry")
    parser.add_argument(
        "--rehearse",
        choices=("stale", "nan"),
        help="MuJoCo: cut the sensors, or let the policy answer NaN, after one second",
    )
    return parser.parse_args(argv)


def check(args: argparse.Namespace, about: Any) -> None:
    """Refuse what cannot be driven before anything is connected."""
    if (args.model is None) == (args.robot is None):
        raise BadInput("name one robot: --model robot.xml or --robot module:Class")
    if args.robot is not None and (args.hang or args.rehearse):
        raise BadInput("--hang and --rehearse are for MuJoCo's robot: leave them away")
    for name in ("seconds", "ramp", "max_jump"):
        given = getattr(args, name)
        if given is not None and not 0 < given < float("inf"):
            raise BadInput(f"--{name.replace('_', '-')} {given:g} is not above 0")
    trained = about["command"]
    for x, name, low, high in zip(
        args.command, trained["names"], trained["low"], trained["high"], strict=True
    ):
        if not low <= x <= high:
            raise BadInput(f"the command's {name} is {x:g}: trained from {low:g} to {high:g}")


def load_robot(text: str) -> Robot:
    """The robot of `module:Class`; the module may be a file in the working folder."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise BadInput(f"--robot {text} is not module:Class")
    try:
        sys.path.insert(0, os.getcwd())
        robot = getattr(importlib.import_module(module), name)()
        missing = [f for f in FUNCTIONS if not callable(getattr(robot, f, None))]
    except (Exception, SystemExit) as error:  # the module is anybody's
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(f"--robot {text}: {why}") from error
    if missing:
        raise BadInput(f"--robot {text} has no {', '.join(missing)}: see robot_api.py")
    return robot


def rehearsal(args: argparse.Namespace, robot: Any, controller: Any) -> Callable[[float], None]:
    """Make the asked failure happen after one second."""

    def each_step(elapsed: float) -> None:
        if elapsed > 1.0 and args.rehearse == "stale":
            robot.feed = False
        if elapsed > 1.0 and args.rehearse == "nan":
            controller.state["actions"] = np.full_like(controller.state["actions"], np.nan)

    return each_step


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    # A service manager's stop damps too; so does Ctrl-C for what a shell started in the background.
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, interrupt)
    try:
        args = parse(argv)
        controller = Controller(args.controller)
        check(args, controller.about)
        hang = float("inf") if args.hang else args.ramp
        robot: Any = load_robot(args.robot) if args.robot else MujocoRobot(args.model, hang)
        each_step = rehearsal(args, robot, controller)
        told = safety.most_jump(controller.about)
        report = drive(
            robot,
            controller,
            args.command,
            args.seconds,
            args.ramp,
            told if args.max_jump is None else args.max_jump,
            each_step=each_step,
        )
    except BadInput as error:
        print(f"run.py: error: {error}", file=sys.stderr)
        return safety.BAD_INPUT
    print("\n".join(report.lines(controller.about["dt"])))
    if isinstance(robot, MujocoRobot):
        robot.close()
        if robot.lost:
            print(f"the simulation fell behind real time by {robot.lost:.2f} s")
    print(f"exit code {report.code}: {safety.CODES[report.code]}")
    return report.code


if __name__ == "__main__":
    sys.exit(main())
