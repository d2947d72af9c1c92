"""`jaxtd3 play`: the page's requests, who is answered, and what a browser shows."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from pathlib import Path

import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from jaxtd3.cli.main import main
from jaxtd3.cli.play import robot, same_joints
from jaxtd3.config.config import Config
from jaxtd3.config.sections import EnvConfig
from jaxtd3.envs import make_env
from jaxtd3.envs.playground.layout import Part, describe_layout, observation_layout
from jaxtd3.errors import UserError
from jaxtd3.play.scene import VERTEX, box, coarse_meshes, corner_normals, pack_scene, round_shape
from jaxtd3.play.server import Server, is_loopback, page_text
from jaxtd3.play.session import Controls, Pace, Session
from jaxtd3.play.window import KEYS, columns, follow, press, texts

T1 = "T1JoystickFlatTerrain"


@pytest.fixture(scope="module")
def session():
    env = make_env(EnvConfig(T1, num_envs=1, impl="native", physics_threads=1))
    zero = lambda obs, key: jnp.zeros(env.spec.action_size)  # noqa: E731
    session = Session(env, zero, weights={"alive": 4.0}, about={"agent": "zero actions"})
    session.layout_all = observation_layout(env.env, privileged=True)
    session.text = describe_layout(env.env)
    return session


@pytest.fixture(scope="module")
def server(session):
    """A server whose session runs slowly, so that nothing falls meanwhile."""
    server = Server(port=0)
    server.start(session)
    thread = threading.Thread(target=session.run, args=(300.0,), daemon=True)
    thread.start()
    yield server
    session.ended = True
    thread.join()
    server.stop()


def get(server, path, headers=None):
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers or {})
    with urllib.request.urlopen(request, timeout=20) as reply:
        return reply.read()


def ask(server, what, headers=None, path="/control"):
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}",
        data=what if isinstance(what, bytes) else json.dumps(what).encode(),
        headers={"Content-Type": "application/json", **(headers or {})},
    )
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.load(reply)


def refused(call, *args, **kwargs):
    with pytest.raises(urllib.error.HTTPError) as caught:
        call(*args, **kwargs)
    return caught.value.code, json.loads(caught.value.read())["error"]


def until(check, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = check()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("nothing came of it")


def state(server):
    return json.loads(get(server, "/state"))


# --- the session --------------------------------------------------------------------------------


def test_layout_has_the_width_of_what_is_observed(session):
    assert session.layout[0] == Part("linvel", 0, 3)
    assert session.layout[-1].stop == session.spec.obs_size == 85
    assert session.layout_all[-1].stop == session.spec.width
    assert session.text["joint_velocities"] == "35:58"
    names = [part.name for part in session.layout_all]
    assert len(set(names)) == len(names)


def test_layout_of_another_width_is_refused(session):
    class Fake:
        spec = session.spec.__class__(T1, 84, 23, 1000)

        class unwrapped:
            mj_model = session.model

    with pytest.raises(UserError, match="85 numbers, not 84"):
        observation_layout(Fake)


def test_envs_prints_the_layout(capsys):
    assert main(["envs", "--env", T1]) == 0
    assert "gyro=3:6, gravity=6:9, command=9:12" in capsys.readouterr().out


def test_the_command_is_what_the_policy_sees_one_step_later(session):
    session.control({"command": [0.25, -0.5, 0.75]})
    session.advance()
    np.testing.assert_allclose(session.state()["seen"], [0.25, -0.5, 0.75], atol=1e-4)
    session.control({"command": [9, -9, 9]})  # no further than training went
    assert session.controls.command == (1.0, -0.8, 1.0)
    session.control({"command": [0, 0, 0]})


def test_the_reward_is_the_sum_of_its_terms_under_the_runs_weights(session):
    session.control({"reset": True})
    session.advance()
    session.advance()
    told = session.state()
    assert told["terms"]["alive"] == pytest.approx(4.0)  # the environment's own weight is 0.25
    assert told["reward"] == pytest.approx(sum(told["terms"].values()), abs=0.01)


def test_a_push_moves_the_robot(session):
    session.control({"reset": True})
    session.advance()
    session.advance()
    before = np.array(session.state()["velocity"])
    session.control({"push": [2.0, 0.0]})
    session.advance()
    moved = np.array(session.state()["velocity"]) - before
    assert moved[0] > 0.8
    assert abs(moved[1]) < 0.5


def test_walking_off_starts_the_gait_with_the_feet_apart(session):
    phase = lambda: np.asarray(session._inner.state.info["phase"])  # noqa: E731
    session.control({"reset": True, "command": [0, 0, 0]})
    for _ in range(3):
        session.advance()
    assert phase()[0] == phase()[1]
    session.control({"command": [0.5, 0, 0]})
    session.advance()
    assert abs(abs(phase()[0] - phase()[1]) - np.pi) < 1e-3
    session.control({"command": [0, 0, 0]})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "names what it asks for"),
        ([], "names what it asks for"),
        ({"jump": 1}, "unknown request 'jump'"),
        ({"command": [1, 2]}, "3 finite numbers"),
        ({"command": [1, 2, float("nan")]}, "3 finite numbers"),
        ({"command": "abc"}, "3 finite numbers"),
        ({"push": [9, 9]}, "at most 3 m/s"),
        ({"push": True}, "2 finite numbers"),
        ({"pause": 1}, "true or false"),
        ({"speed": None}, "1 finite numbers"),
    ],
)
def test_requests_that_are_refused(session, asked, said):
    before = session.controls
    with pytest.raises(UserError, match=said):
        session.control(asked)
    assert session.controls == before


CODES = {key.name: key.code for key in KEYS}


def test_keys_of_the_window(session):
    for name in ("up", "left", "6", "6", "7"):
        press(session, CODES[name])
    np.testing.assert_allclose(session.controls.command, [0.1, 0.1, 0.1])
    press(session, CODES["enter"])
    assert session.controls.command == (0, 0, 0)
    press(session, CODES["space"])
    assert session.controls.paused
    press(session, CODES["space"])
    press(session, ord("~"))
    press(session, CODES["8"])
    press(session, CODES["8"])
    assert session.controls.speed == 0.25
    for _ in range(3):
        press(session, CODES["9"])
    assert session.controls.speed == 1.0  # never faster than the clock


def test_keys_mean_nothing_where_there_is_no_command_and_no_base():
    asked = []
    arm = types.SimpleNamespace(controls=Controls(None), floating=False, control=asked.append)
    for key in KEYS:
        press(arm, key.code)
    assert asked == [{"reset": True}, {"pause": True}, {"speed": 0.5}, {"speed": 2.0}]


def test_no_key_of_the_window_is_a_shortcut_of_the_viewer():
    shortcuts = {row[2] for row in (*mujoco.mjRNDSTRING, *mujoco.mjVISSTRING)}
    assert {"W", "S", "A", "D", "Q", "E", "X", "P", "R"} <= shortcuts
    own = set("012345[]-=")  # groups of shapes, cameras, its own clock
    assert not {chr(key.code) for key in KEYS if key.code < 128} & (shortcuts | own)
    assert not {key.code for key in KEYS} & {256, 258, 259, 266, *range(290, 302)}
    assert len({key.code for key in KEYS}) == len(KEYS)


def test_every_key_of_the_window_is_told():
    page = (Path(__file__).parent.parent / "docs" / "watch.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    told = {name for names, _ in rows for name in names.split(", ")}
    assert {key.name for key in KEYS} <= told


BALL = "<mujoco><worldbody><body><freejoint/><geom size='.1'/></body></worldbody></mujoco>"


def test_the_camera_of_the_window_follows():
    model = mujoco.MjModel.from_xml_string(BALL)
    live = types.SimpleNamespace(model=model, data=mujoco.MjData(model), weights=np.ones(1))
    camera, scene = mujoco.MjvCamera(), mujoco.MjvScene(model, 10)
    follow(camera, model, live.data)
    option, all_of_it = mujoco.MjvOption(), mujoco.mjtCatBit.mjCAT_ALL
    for x in (0.0, 3.0):
        Session._show(live, {"qpos": np.array([x, 2, 1, 1, 0, 0, 0]), "terms": np.zeros(1)})
        for _ in range(3):
            mujoco.mjv_updateScene(model, live.data, option, None, camera, all_of_it, scene)
        np.testing.assert_allclose(camera.lookat, [x, 2, 1], atol=1e-6)


def test_texts_of_the_window():
    state = {"reward": 1.0, "falls": 2, "speed": 0.5, "command": (0.1, 0.0, 0.0)}
    state |= {"terms": {"alive": 1.0, "energy": -0.25}, "observation": {"gyro": [0.1] * 9}}
    terms, seen, now = texts(state)
    assert terms[2:] == ("alive\nenergy\n", "1.00\n-0.25\n")
    assert seen[2:] == ("gyro\n", f"{' '.join(['0.10'] * 6)} ...\n")
    assert now[3] == "1.00\n2.00\n0.50\n0.10 0.00 0.00\n"
    names, values = columns((f"term number {i}", float(i)) for i in range(100))
    assert len(names) < mujoco.mjMAXOVERLAY
    assert names.count("\n") == values.count("\n") > 20


def test_a_fall_begins_anew(session):
    falls = session.falls
    for _ in range(5):
        session.control({"push": [3.0, 0.0]})
        for _ in range(60):
            session.advance()
            if session.falls > falls:
                assert session.state()["position"][2] > 0.5
                return
    raise AssertionError("it never fell")


def test_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("jaxtd3.play.session.time.monotonic", lambda: now[0])
    slept = []
    monkeypatch.setattr(
        "jaxtd3.play.session.time.sleep",
        lambda s: (slept.append(s), now.__setitem__(0, now[0] + s)),
    )
    pace = Pace(0.02)
    assert pace.describe() == "no step was taken"
    pace.start()
    for _ in range(10):
        now[0] += 0.005
        pace.wait(1.0)
    assert pace.rate() == pytest.approx(1.0)
    np.testing.assert_allclose(slept, 0.015, atol=1e-9)
    now[0] += 5.0  # a step that takes long is not caught up with
    pace.wait(1.0)
    now[0] += 0.005
    pace.wait(1.0)
    assert slept[-1] == pytest.approx(0.015)
    assert pace.rate() < 0.1
    slow = Pace(0.02)
    slow.start()
    slow.wait(0.5)
    assert slept[-1] == pytest.approx(0.04)
    assert slow.rate() == pytest.approx(1.0)


# --- the scene ----------------------------------------------------------------------------------


def read_scene(data):
    length = struct.unpack("<I", data[:4])[0]
    return json.loads(data[4 : 4 + length]), np.frombuffer(data[4 + length :], VERTEX)


def test_the_scene_has_every_body_and_a_floor(session):
    head, vertices = read_scene(pack_scene(session.model, shapes=True))
    assert len(head["bodies"]) == session.model.nbody
    assert sum(body["count"] for body in head["bodies"]) == len(vertices)
    assert head["floor"] == 0.0
    assert session.model.body(head["root"]).name == session.model.body(1).name
    assert np.all(np.isfinite(vertices["position"]))
    length = np.linalg.norm(vertices["normal"][:, :3].astype(float), axis=1)
    assert np.all(np.abs(length - 127) < 2.5)


def test_shapes_are_what_mujoco_says():
    xml = """<mujoco><asset><hfield name="h" nrow="3" ncol="4" size="2 1 .5 .1"/>
      <mesh name="m" vertex="0 0 0  .1 0 0  0 .1 0  0 0 .1"/></asset><worldbody>
      <geom type="plane" size="1 1 1"/><geom type="hfield" hfield="h"/><body><freejoint/>
      <geom type="box" size=".1 .2 .3"/><geom type="sphere" size=".1"/>
      <geom type="capsule" size=".1 .3"/><geom type="cylinder" size=".1 .3"/>
      <geom type="ellipsoid" size=".1 .2 .3"/><geom type="mesh" mesh="m"/></body>
      </worldbody></mujoco>"""
    model = mujoco.MjModel.from_xml_string(xml)
    head, vertices = read_scene(pack_scene(model))
    body = vertices[head["bodies"][1]["first"] :]["position"]
    np.testing.assert_allclose(np.abs(body[:36]).max(axis=0), [0.1, 0.2, 0.3], atol=1e-6)
    ground = vertices[: head["bodies"][0]["count"]]["position"]
    np.testing.assert_allclose(np.ptp(ground, axis=0)[:2], [4, 2], atol=1e-6)
    assert np.abs(body[:, 2]).max() == pytest.approx(0.4, abs=1e-3)  # the capsule's end


def test_faces_look_outwards():
    for shape in (box(np.array([1.0, 2, 3])), round_shape(np.ones(3), 0.5)):
        middle = shape.vertices[shape.faces].reshape(-1, 3)
        assert np.all(np.sum(corner_normals(shape) * middle, axis=1) > 0)


def test_large_meshes_become_coarser(session):
    whole = sum(len(m.faces) for m in coarse_meshes(session.model, most=10**9).values())
    assert whole == session.model.nmeshface
    most = max(whole // 2, 200)
    assert sum(len(m.faces) for m in coarse_meshes(session.model, most).values()) <= most


# --- over HTTP ----------------------------------------------------------------------------------


def test_the_page_is_one_file(server):
    page = get(server, "/").decode()
    assert "makeView" in page
    assert "/* page.js */" not in page
    assert "http" not in page.replace("http-equiv", ""), "nothing is fetched from elsewhere"
    assert page.encode() == page_text()


def test_a_command_is_read_back(server):
    ask(server, {"pause": False, "speed": 1.0})
    assert ask(server, {"command": [0.5, 0.0, -0.25]})["command"] == [0.5, 0.0, -0.25]
    seen = until(lambda: (s := state(server))["seen"] == [0.5, 0.0, -0.25] and s)
    assert seen["command"] == [0.5, 0.0, -0.25]
    assert seen["env"] == T1
    assert set(seen["terms"]) >= {"alive", "tracking_lin_vel"}
    assert len(seen["observation"]["joint_angles"]) == 23
    ask(server, {"command": [0, 0, 0]})


def test_pause_and_slow_motion(server):
    ask(server, {"pause": True})
    until(lambda: state(server)["paused"])
    time.sleep(0.2)
    first = state(server)["steps"]
    time.sleep(0.3)
    assert state(server)["steps"] == first
    assert ask(server, {"pause": False, "speed": 0.0})["speed"] == 0.05
    until(lambda: state(server)["steps"] > first)  # how fast: `test_the_clock`
    ask(server, {"speed": 1})


def test_frames_are_streamed(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/frames", timeout=20) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        lines = [reply.readline().decode().strip() for _ in range(6)]
    assert lines[0] == "event: about"
    assert json.loads(lines[1].removeprefix("data: "))["env"] == T1
    assert lines[3] == "event: frame"
    frame = json.loads(lines[4].removeprefix("data: "))
    assert len(frame["poses"]) == 7 * server.session.model.nbody
    assert len(frame["obs"]) == 85
    until(lambda: server.streams == 0)


@pytest.mark.parametrize("path", ["/etc/passwd", "/../server.py", "/page/page.js", "/control"])
def test_no_file_is_served(server, path):
    assert refused(get, server, path)[0] == 404


def test_other_hosts_and_sites_are_refused(server):
    assert refused(get, server, "/state", {"Host": "evil.example"})[0] == 403
    assert refused(get, server, "/state", {"Host": f"evil.example:{server.port}"})[0] == 403
    assert refused(ask, server, {"reset": True}, {"Origin": "http://evil.example"})[0] == 403
    local = f"http://127.0.0.1:{server.port}"
    assert ask(server, {"pause": False}, {"Origin": local})["paused"] is False
    assert get(server, "/state", {"Host": f"localhost:{server.port}"})


def test_bad_requests(server):
    assert refused(ask, server, {"reset": True}, {"Content-Type": "text/plain"})[0] == 415
    assert refused(ask, server, b"{" * 3000) == (400, "this is not JSON")
    assert refused(ask, server, b" " * 5000)[0] == 413
    assert refused(ask, server, {"fly": 1})[0] == 400
    assert refused(ask, server, {"pause": True}, path="/state")[0] == 404
    assert state(server)["paused"] is False


def test_another_address_needs_the_token(session):
    server = Server("0.0.0.0", 0)
    server.start(session)
    try:
        assert len(server.token) >= 20
        assert server.token in server.url
        for path in ("/", "/state", "/scene", "/frames", "/state?token=", "/state?token=wrong"):
            assert refused(get, server, path)[0] == 403
        assert refused(ask, server, {"reset": True})[0] == 403
        good = f"token={server.token}"
        assert json.loads(get(server, f"/state?{good}"))["env"] == T1
        assert b"canvas" in get(server, f"/?{good}")
        ask(server, {"pause": False}, path=f"/control?{good}")
    finally:
        server.stop()


def test_what_is_loopback():
    assert all(is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "::", "example.com"))


# --- the command --------------------------------------------------------------------------------


def line(capsys):
    err = capsys.readouterr().err.strip()
    assert "\n" not in err
    assert "Traceback" not in err
    return err


def test_a_port_in_use_is_told_in_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["play", "--env", T1, "--port", str(port)]) == 2
    assert f"port {port} is in use" in line(capsys)


def untrained_policy(path: Path, env: str) -> Path:
    import jax

    from jaxtd3.agent.td3 import fast_td3
    from jaxtd3.config.config import config_from_dict
    from jaxtd3.run.policy import save_policy

    config = config_from_dict(Config().to_dict(), "test").override({"name": env})
    agent = fast_td3(make_env(EnvConfig(env, num_envs=1, impl="native")).spec, config.agent)
    save_policy(path, agent.init(jax.random.key(0)), config, {})
    return path


def test_mistakes_are_told_in_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    foreign = tmp_path / "foreign.npz"
    np.savez(foreign, x=np.zeros(3))
    text = tmp_path / "notes.npz"
    text.write_text("hello")
    empty = tmp_path / "run"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps(Config().to_dict()))
    policy = untrained_policy(tmp_path / "cart.npz", "CartpoleBalance")
    cases = [
        ([], "nothing to play"),
        (["--env", "T1JoystickFlatTerain"], "did you mean 'T1JoystickFlatTerrain'"),
        (["--env", T1, "--agent", "zeros"], "did you mean 'zero'"),
        (["--env", "Pendulum"], "no MuJoCo model"),
        (["--env", T1, "--port", "70000"], "between 0 and 65535"),
        (["--env", T1, "--seconds", "0"], "not above 0"),
        (["--env", T1, "--seconds", "soon"], "seconds"),
        (["--env", T1, "--seed", "-1"], "negative"),
        (["--env", T1, "--host", "203.0.113.1"], "cannot listen"),
        (["--env", T1, "--window"], "DISPLAY is not set"),
        (["--env", T1, "--window", "--port", "1"], "opens no port"),
        ([str(foreign)], "is no policy of jaxtd3"),
        ([str(text)], "is no policy of jaxtd3"),
        ([str(tmp_path / "nowhere")], "nowhere"),
        ([str(empty)], "checkpoint"),
        ([str(policy), "--agent", "zero"], "without a policy"),
        ([str(policy), "--env", T1], f"trained in CartpoleBalance: it cannot drive {T1}"),
    ]
    for argv, said in cases:
        free = (
            [] if any("--port" in word or "--window" in word for word in argv) else ["--port", "0"]
        )
        assert main(["play", *argv, *free]) == 2, argv
        assert said in line(capsys), argv


def test_one_robot_on_two_grounds():
    assert robot("G1JoystickFlatTerrain") == robot("G1JoystickRoughTerrain")
    assert robot("G1JoystickFlatTerrain") != robot(T1)


STAND = """
import jax.numpy as jnp
import mujoco
from jaxtd3 import EnvSpec, EnvStep

XML = "<mujoco><worldbody><body><joint name='{}'/><geom size='.1'/></body></worldbody></mujoco>"


class Stand:
    spec = EnvSpec("Stand", obs_size=1, action_size=1, episode_length=20)
    mj_model = mujoco.MjModel.from_xml_string(XML.format("knee"))

    def reset(self, key):
        return jnp.zeros(1), jnp.zeros(1)

    def step(self, x, action):
        return EnvStep(x, x, x[0], jnp.zeros(0), x[0] > 1)
"""


def test_classes_of_one_name_are_not_one_robot(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, text in (
        ("quad", STAND),
        ("copy", STAND),
        ("t1", STAND.replace("knee", "waist")),
        ("arm", STAND.replace("action_size=1", "action_size=2")),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text(text)
    quad = "quad/env.py:Stand"
    assert same_joints(quad, f"{tmp_path}/quad/env.py:Stand")
    assert same_joints(quad, "copy/env.py:Stand")
    assert same_joints("gone/env.py:Stand", "t1/env.py:Stand")  # it moved: told by its sizes
    policy = untrained_policy(tmp_path / "stand.npz", quad)
    for folder in ("t1", "arm"):
        other = f"{folder}/env.py:Stand"
        assert main(["play", str(policy), "--env", other, "--port", "0"]) == 2
        assert f"trained in {quad}: it cannot drive {other}" in line(capsys)


def test_a_policy_is_played_to_the_end(capsys, tmp_path):
    policy = untrained_policy(tmp_path / "cart.npz", "CartpoleBalance")
    assert main(["play", str(policy), "--port", "0", "--seconds", "0.5"]) == 0
    first, last = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("CartpoleBalance, cart.npz (cart.npz): http://127.0.0.1:")
    assert "x real time" in last


@pytest.mark.slow
def test_g1_keeps_real_time_for_a_minute():
    """With a watcher, as a browser would be: needs two cores that nobody else uses."""
    command = [sys.executable, "-m", "jaxtd3", "play", "--env", "G1JoystickFlatTerrain"]
    command += ["--port", "0", "--seconds", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        address = re.search(r"http://\S+", program.stdout.readline())[0]
        frames = 0
        with urllib.request.urlopen(address + "frames", timeout=60) as stream:
            for line in stream:
                frames += line.startswith(b"event: frame")
                if line.startswith(b"event: end"):
                    break
        said = program.stdout.read()
    print(said, f"{frames / 60:.1f} frames a second arrived")
    assert program.returncode == 0
    assert float(re.search(r"at ([\d.]+) x real time", said)[1]) > 0.98, said
    assert frames / 60 > 45, frames


# --- in a browser -------------------------------------------------------------------------------

FLAGS = (
    "--headless --no-sandbox --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --use-gl=angle --use-angle=swiftshader "
    "--enable-unsafe-swiftshader --window-size=900,700"
)


class Browser:
    """Headless Chromium, spoken to by the WebDriver protocol."""

    def __init__(self, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        chrome = {"args": [*FLAGS.split(), f"--user-data-dir={folder}"]}
        if shutil.which("chromium"):
            chrome["binary"] = shutil.which("chromium")
        asked = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": chrome}}}
        until(lambda: self.awake(port))
        self.base += "/session/" + self.call("/session", asked)["sessionId"]

    @staticmethod
    def awake(port: int) -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    def call(self, path, body=None, method=None):
        request = urllib.request.Request(
            self.base + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=90) as reply:
            return json.load(reply)["value"]

    def run(self, script):
        return self.call("/execute/sync", {"script": script, "args": []})

    def close(self):
        try:
            self.call("", method="DELETE")
        finally:
            self.driver.terminate()
            self.driver.wait()


@pytest.fixture
def browser(tmp_path):
    if not (shutil.which("chromedriver") and shutil.which("chromium")):
        pytest.skip("no Chromium here")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


def test_the_page_shows_the_robot_and_steers_it(server, browser):
    from PIL import Image

    ask(server, {"pause": False, "reset": True, "command": [0, 0, 0], "speed": 0.2})
    browser.call("/url", {"url": f"http://localhost:{server.port}/"})
    until(lambda: browser.run("return window.played && window.played.frames > 3"), 60)
    assert browser.run("return document.getElementById('notice').textContent") == ""
    assert browser.run("return document.getElementById('env').textContent") == T1
    terms = np.array(server.session.spec.reward_terms)
    told = browser.run(
        "return Array.from(document.querySelectorAll('.term .name'), (x) => x.title)"
    )
    assert told == list(terms[server.session.weights != 0])
    unweighted = browser.run("return document.getElementById('unweighted').textContent")
    assert unweighted == f"weight 0: {', '.join(terms[server.session.weights == 0])}"
    keys = "return Array.from(document.querySelectorAll('kbd'), (x) => x.textContent).join(' ')"
    assert browser.run(keys) == "W S A D Q E X P R space F drag wheel H"
    assert browser.run("return document.querySelectorAll('.part').length") == 9

    key = "dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}));"
    browser.run(key % "h")  # folds the list of keys, which stands to the left of the robot
    ask(server, {"pause": True})
    picture = Image.open(io.BytesIO(base64.b64decode(browser.call("/screenshot")))).convert("L")
    shades = np.asarray(picture, float)[:480, :560]
    unlike = np.abs(shades - np.median(shades, axis=1, keepdims=True)) > 30  # nor sky nor floor
    assert np.mean(unlike[:, 180:380]) > 0.01, "there is no robot"
    assert np.mean(unlike[:, :100]) < 0.001
    ask(server, {"pause": False})

    slide = "const s = document.getElementById('command-0'); s.value = 0.6;"
    browser.run(slide + "s.dispatchEvent(new Event('input'));")
    until(lambda: state(server)["seen"] == [0.6, 0.0, 0.0])
    browser.run(key % "q" + key % "e" + key % "a")
    until(lambda: state(server)["command"] == [0.6, 0.1, 0.0])
    browser.run("document.getElementById('stop').click()")
    until(lambda: state(server)["command"] == [0, 0, 0])
    browser.run("document.getElementById('pause').click()")
    until(lambda: state(server)["paused"])
    before = state(server)["velocity"]
    browser.run("document.getElementById('push').click()")
    ask(server, {"pause": False})
    moved = lambda: np.linalg.norm(np.subtract(state(server)["velocity"], before)[:2])  # noqa: E731
    until(lambda: moved() > 0.3)
