"""deploy/: the rate is kept, and every failure ends in damping with its exit code."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from test_deploying import change, exported, policy, put  # noqa: F401 - fixtures

pytest.importorskip("onnxruntime")
FOLDER = Path(__file__).parent.parent / "deploy"
JOINTS = 4


@pytest.fixture(scope="module", autouse=True)
def on_path():
    """The program's modules are found beside it, as when it is started."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def start(*argv) -> list[str]:
    return [sys.executable, str(FOLDER / "run.py"), *map(str, argv)]


def run(*argv) -> tuple[int, str]:
    done = subprocess.run(start(*argv), capture_output=True, text=True, timeout=200)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


# --- against MuJoCo -----------------------------------------------------------------------------


def rate_of(said: str) -> float:
    return float(re.search(r"steps at ([\d.]+) Hz", said)[1])


def hang(controller, seconds, *more):
    """An untrained robot would fall at once: it stays on the gantry."""
    model = controller.parent / "robot.xml"
    return run(controller, "--model", model, "--hang", "--seconds", seconds, *more)


def test_the_rate_is_kept(exported):  # noqa: F811
    """Within a twentieth; within a hundredth in the slow test."""
    rates = []
    while not rates or (abs(rates[-1] / 50 - 1) > 0.05 and len(rates) < 3):  # a busy machine
        code, said = hang(exported, 2, "--ramp", "0.2")
        assert code == 0, said
        assert "damping" in said
        rates.append(rate_of(said))
    assert abs(rates[-1] / 50 - 1) <= 0.05, rates


@pytest.mark.slow
def test_the_rate_is_kept_for_a_minute(exported):  # noqa: F811
    code, said = hang(exported, 60, "--command", "0.5", "0", "0")
    assert code == 0, said
    assert abs(rate_of(said) / 50 - 1) < 0.01, said


def test_a_killed_sensor_feed_damps_within_100_ms(exported):  # noqa: F811
    took = []
    while not took or (took[-1] > 100 and len(took) < 3):  # a busy machine may be late once
        code, said = hang(exported, 5, "--ramp", "0.5", "--rehearse", "stale")
        assert code == 3, said
        took.append(int(re.search(r"damping, (\d+) ms after the last", said)[1]))
    assert took[-1] <= 100, took


def test_nan_from_the_policy_damps(exported):  # noqa: F811
    code, said = hang(exported, 5, "--ramp", "0.5", "--rehearse", "nan")
    assert code == 4, said
    assert "damping" in said
    assert "exit code 4" in said


def test_a_fall_damps(exported):  # noqa: F811
    code, said = run(
        exported, "--model", exported.parent / "robot.xml", "--ramp", "0.5", "--seconds", "10"
    )
    assert code == 5, said
    assert "leans too far" in said


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_damps(exported, sent):  # noqa: F811
    argv = start(exported, "--model", exported.parent / "robot.xml", "--hang", "--seconds", "60")
    ignored = signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # as a shell's background jobs inherit it
    try:
        program = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ})
    finally:
        signal.signal(signal.SIGINT, ignored)
    try:
        assert program.stdout.readline()  # it has begun
        time.sleep(1)
        program.send_signal(sent)
        said, _ = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == 130, said
    assert "damping" in said


def test_its_controller_answers_as_recorded(exported):  # noqa: F811
    from policy_runtime import Controller

    controller = Controller(str(exported))
    with np.load(exported.parent / "controller.trace.npz") as file:
        trace = dict(file)
    sensors = [name for name in controller.about["inputs"] if name not in ("command",)]
    for i in range(100):  # walking, then standing; the gait's new start is the program's own
        given = {name: trace[f"in.{name}"][i] for name in sensors}
        targets = controller.step(given, trace["in.command"][i])
        np.testing.assert_allclose(targets, trace["out.joint_targets"][i], atol=1e-5)
    before = controller.state["phase"].copy()
    np.testing.assert_allclose(before, np.pi, atol=1e-6)
    controller.step(given, np.array([0.5, 0, 0]))
    assert abs(abs(np.diff(controller.state["phase"])) - np.pi) < 1e-5


def test_no_jax_and_no_jaxtd3():
    code = "import sys, run; print([m for m in sys.modules if m.split('.')[0] in ('jax','jaxtd3')])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


# --- with a robot of four functions -------------------------------------------------------------

ABOUT = {
    "dt": 0.02,
    "kp": [10.0] * JOINTS,
    "kd": [1.0] * JOINTS,
    "default_pose": [0.1] * JOINTS,
    "joint_names": list("abcd"),
    "joint_low": [-1.0] * JOINTS,
    "joint_high": [1.0] * JOINTS,
    "target_low": [-1.0] * JOINTS,
    "target_high": [1.0] * JOINTS,
    "inputs": {
        "gravity": 3,
        "joint_positions": JOINTS,
        "joint_velocities": JOINTS,
        "command": 3,
        "gait_frequency": 1,
    },
}


class FakeRobot:
    """Measures what it is told to; `wrong` changes the readings after some of them."""

    def __init__(self, wrong=None, after=20):
        self.wrong, self.after, self.calls, self.reads = wrong, after, [], 0

    def connect(self, about):
        self.calls.append("connect")

    def read_sensors(self):
        from robot_api import Sensors

        self.reads += 1
        values = {
            "gravity": np.array([0.0, 0.0, -1.0]),
            "joint_positions": np.zeros(JOINTS),
            "joint_velocities": np.zeros(JOINTS),
        }
        now = time.monotonic()
        if self.wrong is not None and self.reads > self.after:
            now = self.wrong(values, now)
        return Sensors(now, values)

    def write_targets(self, targets, kp, kd):
        self.calls.append(np.array(targets))

    def damp(self, kd):
        self.calls.append("damp")


class FakeController:
    about = ABOUT

    def __init__(self, answer=lambda i: np.full(JOINTS, 0.1)):
        self.answer, self.count = answer, 0

    def reset(self):
        self.count = 0

    def step(self, sensors, command):
        self.count += 1
        return self.answer(self.count)


def drive(robot, controller, **more):
    import run as program

    return program.drive(robot, controller, (0, 0, 0), seconds=0.3, ramp=0.1, **more)


def test_stands_up_along_a_ramp_and_ends_in_damping():
    robot = FakeRobot()
    report = drive(robot, FakeController())
    assert report.code == 0
    assert robot.calls[0] == "connect"
    ramp = np.array(robot.calls[1:6])
    np.testing.assert_allclose(ramp[:, 0], [0.02, 0.04, 0.06, 0.08, 0.1])
    assert 2 <= len(report.ticks) <= 16  # a missed step is not made up for
    assert robot.calls[-1] == "damp"


def old(values, now):
    return now - 0.2


def poison(values, now):
    values["joint_velocities"][2] = np.nan
    return now


def overturn(values, now):
    values["gravity"] = np.array([1.0, 0.0, 0.0])
    return now


def overstretch(values, now):
    values["joint_positions"][1] = 1.2
    return now


def shorten(values, now):
    values["joint_positions"] = np.zeros(2)
    return now


def burn(values, now):
    raise OSError("the cable is out")


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        (old, 3, "ms old"),
        (poison, 4, "sensor joint_velocities is not finite"),
        (overturn, 5, "leans too far"),
        (overstretch, 5, "b is 0.20 rad beyond its limits"),
        (shorten, 1, "sensor joint_positions has 2 numbers, not 4"),
        (burn, 1, "OSError: the cable is out"),
    ],
)
@pytest.mark.parametrize("after", [0, 3, 12])  # at once, on the ramp, and under the policy
def test_bad_readings_damp(wrong, code, said, after):
    robot = FakeRobot(wrong, after)
    report = drive(robot, FakeController())
    assert (report.code, robot.calls[-1]) == (code, "damp")
    assert said in report.reason
    assert robot.reads == after + 1  # nothing was read, so nothing driven, after the bad one


def blank(values, now):
    values["joint_positions"][1] = np.nan
    return now


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        (blank, 4, "sensor joint_positions is not finite"),
        (lambda values, now: now - 5, 3, "ms old"),
        (lambda values, now: np.nan, 3, "nan ms old"),
        (shorten, 1, "sensor joint_positions has 2 numbers, not 4"),
        (overturn, 5, "leans too far"),
    ],
)
def test_a_bad_first_reading_damps(wrong, code, said):
    """However good the next ones are: the ramp would begin from it."""
    robot = FakeRobot()
    robot.wrong = lambda values, now: wrong(values, now) if robot.reads == 1 else now
    robot.after = 0
    report = drive(robot, FakeController())
    assert (report.code, robot.calls) == (code, ["connect", "damp"])
    assert said in report.reason


def test_targets_of_the_ramp_are_checked():
    def sent(change, **more):
        robot, controller = FakeRobot(), FakeController()
        controller.about = {**ABOUT, **change}
        code = drive(robot, controller, **more).code
        return code, [call[0] for call in robot.calls if isinstance(call, np.ndarray)]

    assert sent({"default_pose": [np.nan] * JOINTS}) == (4, [])
    assert sent({}, most_jump=0.01) == (6, [])
    code, targets = sent({"target_high": [0.05] * JOINTS})
    assert code == 0
    np.testing.assert_allclose(targets[:5], [0.02, 0.04, 0.05, 0.05, 0.05])


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (lambda i: np.full(JOINTS, np.nan if i == 5 else 0.1), 4, "joint targets are not finite"),
        (lambda i: np.full(JOINTS, 0.9 if i == 5 else 0.1), 6, "jumped by 0.80 rad"),
    ],
)
def test_bad_targets_damp_before_they_are_sent(answer, code, said):
    robot, controller = FakeRobot(), FakeController(answer)
    report = drive(robot, controller, most_jump=0.5)
    assert (report.code, robot.calls[-1], controller.count) == (code, "damp", 5)
    assert said in report.reason
    sent = [call for call in robot.calls if isinstance(call, np.ndarray)]
    assert np.max(sent) <= 0.1 + 1e-9


def test_a_policy_that_jumps_far_in_its_trace_may_do_so():
    import safety

    assert safety.most_jump({"target_jump": 0.2}) == safety.MOST_JUMP  # of the ramp too
    assert safety.most_jump({"target_jump": 1.6}) == pytest.approx(2.0)
    for told in ({}, {"target_jump": "far"}, {"target_jump": 0}, {"target_jump": float("nan")}):
        assert safety.most_jump(told) == safety.MOST_JUMP


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t1-flat", "g1-flat"])
def test_the_shipped_policies_walk_as_the_page_says(name, tmp_path):
    """The commands of docs/deploy.md as they stand there."""
    cli = [sys.executable, "-m", "jaxtd3", "export"]
    subprocess.run([*cli, name, "--controller", "--with-model"], cwd=tmp_path, check=True)
    subprocess.run([*cli, "--check", "controller.onnx"], cwd=tmp_path, check=True)
    controller, model = tmp_path / "controller.onnx", tmp_path / "robot.xml"
    code, said = run(controller, "--model", model, "--command", "0.5", "0", "0", "--seconds", "10")
    assert code == 0, said


def test_targets_are_kept_within_the_servos_range():
    robot = FakeRobot()
    report = drive(robot, FakeController(lambda i: np.full(JOINTS, 0.1 + 0.1 * i)))
    sent = [call for call in robot.calls if isinstance(call, np.ndarray)]
    assert np.max(sent) == 1.0
    assert report.clipped > 0


@pytest.mark.parametrize("error", [OSError("busy"), KeyboardInterrupt()])
def test_damping_is_tried_again(error):
    robot, tries = FakeRobot(), []

    def damp(kd):
        tries.append(kd)
        if len(tries) == 1:
            raise error

    robot.damp = damp
    report = drive(robot, FakeController())
    assert (report.code, len(tries)) == (1, 2)
    assert "damping failed" in report.reason


def test_no_first_reading_damps(monkeypatch):
    import run as program

    monkeypatch.setattr(program, "FIRST_WAIT", 0.05)
    robot = FakeRobot()
    monkeypatch.setattr(robot, "read_sensors", lambda: None)
    report = drive(robot, FakeController())
    assert (report.code, robot.calls) == (3, ["connect", "damp"])


# --- a robot of one's own -----------------------------------------------------------------------

MINE = """
import time
from pathlib import Path

import numpy as np
from robot_api import Sensors


class Mine:
    def __init__(self):
        self.done = []

    def connect(self, about):
        self.note("connect")
        self.pose = np.array(about["default_pose"])

    def read_sensors(self):
        x, still, up = self.pose, 0 * self.pose, np.array([0.0, 0.0, -1.0])
        values = {"gyro": 0 * up, "linvel": 0 * up, "gravity": up}
        values |= {"joint_positions": x, "joint_velocities": still}
        return Sensors(time.monotonic(), values)

    def write_targets(self, targets, kp, kd):
        self.note("write")

    def damp(self, kd):
        self.note("damp")

    def note(self, what):
        self.done.append(what)
        Path("done").write_text(" ".join(self.done))


class Undamped(Mine):
    damp = None


class Broken(Mine):
    def __init__(self):
        raise OSError("no such\\nport")


class Quits(Mine):
    def __init__(self):
        raise SystemExit(0)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A working folder with robots, one of them in a file that is no Python."""
    (tmp_path / "my_robot.py").write_text(MINE)
    (tmp_path / "typo.py").write_text("class Mine:\n    def connect(self, about:\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_robot_of_ones_own(exported, own):  # noqa: F811
    argv = ["--ramp", "0.1", "--seconds", "0.1", "--max-jump", "100"]
    code, said = run(exported, "--robot", "my_robot:Mine", *argv)
    assert code == 0, said
    done = (own / "done").read_text().split()
    assert done[0] == "connect"
    assert done[-1] == "damp"
    assert set(done[1:-1]) == {"write"}
    assert len(done) > 8


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_robot:Undamped", "has no damp: see robot_api.py"),
        ("my_robot:Broken", "OSError: no such port"),
        ("my_robot:Quits", "SystemExit: 0"),
        ("my_robot:Yours", "no attribute 'Yours'"),
        ("my_robot", "is not module:Class"),
        ("typo:Mine", "SyntaxError"),
    ],
)
def test_a_robot_that_cannot_be_made(name, said, exported, own):  # noqa: F811
    code, line = run(exported, "--robot", name)
    assert (code, line.count("\n")) == (2, 1), line
    assert f"--robot {name}" in line
    assert said in line
    assert not (own / "done").exists()  # it was never connected


# --- bad input ----------------------------------------------------------------------------------


def test_a_controller_that_lacks_metadata_is_refused(exported, tmp_path):  # noqa: F811
    from policy_runtime import NEEDED, BadInput, Controller

    cut = tmp_path / "cut.onnx"

    def write(edit):
        shutil.copy(exported, cut)
        change(cut, edit)

    for name in NEEDED:
        write(lambda texts, name=name: texts.pop(name))
        with pytest.raises(BadInput, match=f"cut.onnx: its metadata has no {name}"):
            Controller(str(cut))
    for edit in (put("gait", {}), put("state", [])):
        write(edit)
        with pytest.raises(BadInput, match="gait or state cannot be read"):
            Controller(str(cut))
    write(lambda texts: texts.pop("gait"))
    code, line = run(cut, "--model", exported.parent / "robot.xml")
    assert (code, line.count("\n")) == (2, 1), line
    assert "its metadata has no gait" in line


def test_bad_input(exported, tmp_path):  # noqa: F811
    model = exported.parent / "robot.xml"
    (tmp_path / "ball.xml").write_text("<mujoco/>")
    (tmp_path / "broken.xml").write_text("<mujoco")
    for argv, said in [
        (["no.onnx", "--model", model], "no.onnx is no ONNX file"),
        ([model, "--model", model], "is no ONNX file"),
        ([exported], "name one robot"),
        ([exported, "--model", model, "--robot", "a:B"], "name one robot"),
        ([exported, "--model", "no.xml"], "no.xml is no file"),
        ([exported, "--model", tmp_path / "broken.xml"], "is no MuJoCo model"),
        ([exported, "--model", tmp_path / "ball.xml"], "the model is not of Booster T1"),
        ([exported, "--robot", "no_such:Robot"], "--robot no_such:Robot"),
        ([exported, "--model", model, "--command", "5", "0", "0"], "trained from -1 to 1"),
        ([exported, "--model", model, "--command", "nan", "0", "0"], "forward m/s is nan"),
        ([exported, "--model", model, "--seconds", "0"], "--seconds 0 is not above 0"),
        ([exported, "--model", model, "--ramp", "-1"], "--ramp -1 is not above 0"),
        ([exported, "--model", model, "--max-jump", "inf"], "--max-jump inf is not above 0"),
        ([exported, "--model", model, "--command", "0.5"], "--command: expected 3 arguments"),
        ([exported, "--model", model, "--rehearse", "fall"], "--rehearse: invalid choice"),
        ([], "required: controller"),
    ]:
        code, line = run(*argv)
        assert code == 2, argv
        assert said in line, (argv, line)
        assert line.count("\n") == 1, line
