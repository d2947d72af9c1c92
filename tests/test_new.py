"""`jaxtd3 new`: a package from an MJCF; what is wrong with the MJCF in clear lines."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtd3 import EnvConfig, make_env, preset
from jaxtd3.cli.main import main
from jaxtd3.new.mjcf import Mjcf

QUADRUPED = Path(__file__).parent / "data" / "quadruped" / "quadruped.xml"
T1 = Path("booster_t1") / "scene.xml"
PART = "<body><freejoint name='f'/><geom size='0.1'/><body><joint name='j'/>{}</body></body>"


def mjcf(folder: Path, body: str = "", rest: str = "", head: str = "", name="robot.xml") -> Path:
    """A small MJCF: a ball with one more ball on a hinge."""
    body = body or PART.format("<geom size='0.05' pos='0 0 0.2'/>")
    path = folder / name
    path.write_text(f"<mujoco>{head}<worldbody>{body}</worldbody>{rest}</mujoco>")
    return path


KNEE = "<body><joint name='knee'/><geom size='0.1'/></body>"
FIXED = f"<body name='trunk'><geom size='0.1'/>{KNEE}</body>"
MOTOR = "<actuator><motor name='m' joint='j' ctrlrange='-1 1'/></actuator>"


def new(folder: Path, path: Path, task: str = "stand") -> int:
    return main(["new", str(folder / "made"), "--mjcf", str(path), "--task", task])


def refused(capsys, folder: Path, path: Path, task: str = "stand") -> str:
    """What it says: exit code 2, nothing written."""
    before = sorted(folder.rglob("*"))
    assert new(folder, path, task) == 2
    assert sorted(folder.rglob("*")) == before
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


# --- packages that train ------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["stand", "velocity"])
def test_a_package_from_four_legs(task, tmp_path, capsys):
    assert new(tmp_path, QUADRUPED, task) == 0
    said = capsys.readouterr().out
    for line in ("actuators: 8 of 8 joints", "a free joint: base", "an IMU: gyro", "MJX: runs it"):
        assert line in said
    made = tmp_path / "made"
    assert sorted(p.name for p in made.iterdir()) == ["README.md", "env.py", "model", "test_env.py"]
    name = f"{made / 'env.py'}:{task.capitalize()}"
    env = make_env(EnvConfig(name, num_envs=4))
    assert env.spec.episode_length == 1000
    assert env.spec.extra_size == 3 + 1 + 8
    assert preset(name, profile="cpu").agent.layer_norm
    first = env.init(jax.random.key(0))
    up = np.asarray(first.obs)[:, 3:6]
    np.testing.assert_allclose(np.linalg.norm(up, axis=1), 1, atol=0.06)
    step = jax.jit(env.step)
    for i in range(10):
        first, seen, _ = step(first, jnp.zeros((4, 8)), jax.random.key(i))
    assert not seen.terminated.any()
    assert seen.reward.min() > 0.0


@pytest.mark.slow
def test_the_packages_own_test_passes_and_can_fail(tmp_path):
    assert new(tmp_path, QUADRUPED) == 0
    made = tmp_path / "made"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(made)]
    run = lambda: subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))  # noqa: E731
    done = run()
    assert done.returncode == 0, done.stdout[-3000:]
    text = (made / "env.py").read_text()
    (made / "env.py").write_text(text.replace("s.up[2] < 0.6", "s.up[2] < 1.6"))
    assert run().returncode == 1


def test_feet_swing_by_turns():
    from jaxtd3.new.findings import feet, leans_sideways

    model = Mjcf(QUADRUPED).compile()
    found = feet(model)
    swings = {foot.where[8:-7]: foot.phase for foot in found}
    diagonal = {"front_left": 0.0, "rear_left": 0.5, "front_right": 0.5, "rear_right": 0.0}
    assert swings == diagonal
    assert [foot.ground for foot in found] == pytest.approx([0.025] * 4)  # radius of a foot
    assert not leans_sideways(model)


def test_a_robot_without_feet_follows_commands_too(tmp_path):
    nameless = PART.format("<geom size='0.05' pos='0 0 0.2'/>").replace("'j'", "'j' axis='1 0 0'")
    assert new(tmp_path, mjcf(tmp_path, nameless, MOTOR), "velocity") == 0
    env = make_env(EnvConfig(f"{tmp_path / 'made' / 'env.py'}:Velocity", num_envs=2))
    assert "FEET = []" in (tmp_path / "made" / "env.py").read_text()
    assert env.env.command["left"][1] > 0  # it has a joint that leans sideways
    _, seen, _ = jax.jit(env.step)(
        env.init(jax.random.key(0)), jnp.zeros((2, 1)), jax.random.key(1)
    )
    np.testing.assert_array_equal(seen.terms[:, env.spec.reward_terms.index("steps")], 1.0)


def test_a_package_for_an_arm(tmp_path, capsys):
    arm = """<body name='upper'><joint name='a' axis='0 1 0' range='-1 1'/>
      <geom type='capsule' fromto='0 0 0 0 0 0.3' size='0.02'/>
      <body name='lower' pos='0 0 0.3'><joint name='b' axis='0 1 0' range='-1 1'/>
      <geom type='capsule' fromto='0 0 0 0 0 0.3' size='0.02'/>
      <site name='tip' pos='0 0 0.3'/></body></body>"""
    servos = "<actuator><position joint='a' kp='20'/><position joint='b' kp='20'/></actuator>"
    head = "<compiler angle='radian' autolimits='true'/><option timestep='0.005'/>"
    assert new(tmp_path, mjcf(tmp_path, arm, servos, head), "reach") == 0
    env = make_env(EnvConfig(f"{tmp_path / 'made' / 'env.py'}:Reach", num_envs=16))
    state = env.init(jax.random.key(0))
    command = np.asarray(state.inner.state.info["command"])
    assert np.all(np.abs(command[:, 1]) < 1e-3)  # the arm moves in a plane
    assert np.ptp(command[:, 0]) > 0.1
    _, seen, _ = jax.jit(env.step)(state, jnp.zeros((16, 2)), jax.random.key(1))
    tip = np.asarray(env.env.robot.model.site("tip").pos)
    assert tip[2] == pytest.approx(0.3)
    way = command - np.asarray(seen.final_obs)[:, 3:6] - command  # the hand, with another sign
    np.testing.assert_allclose(seen.terms[:, 0], np.linalg.norm(way, axis=1), atol=1e-5)


def test_a_floor_is_added_where_there_is_none(tmp_path, capsys):
    assert new(tmp_path, mjcf(tmp_path, rest=MOTOR)) == 0
    assert "a floor: missing; scene.xml adds one" in capsys.readouterr().err
    env = make_env(EnvConfig(f"{tmp_path / 'made' / 'env.py'}:Stand", num_envs=1))
    assert env.env.mj_model.geom("floor").type[0] == 0
    assert env.env.action_scale is None


@pytest.mark.parametrize(("folder", "place"), [("my.robot", "my.robot"), ("a b", "'a b'")])
def test_the_readme_names_the_folder_as_it_is(folder, place, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtd3.cli.new.check", lambda folder, task: None)
    assert main(["new", str(tmp_path / folder), "--mjcf", str(mjcf(tmp_path, rest=MOTOR))]) == 0
    text = (tmp_path / folder / "README.md").read_text()
    assert text.startswith(f"# {folder}: stand\n")
    assert f"jaxtd3 envs     --env {place}/env.py:Stand\n" in text
    assert f"jaxtd3 play     runs/{place}\n" in text


def test_names_in_a_model_are_never_code(tmp_path):
    evil = "x&quot;), __import__('os').abort() #'"
    rest = f"{MOTOR}<sensor><gyro name=\"{evil}\" site='i'/></sensor>"
    body = PART.format("<geom size='0.05'/>").replace("<freejoint", "<site name='i'/><freejoint")
    assert new(tmp_path, mjcf(tmp_path, body, rest)) == 0
    tree = ast.parse((tmp_path / "made" / "env.py").read_text())
    calls = [n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and hasattr(n.func, "id")]
    assert "__import__" not in calls


@pytest.mark.slow
def test_t1(meshes, tmp_path, capsys):
    assert new(tmp_path, meshes / T1) == 0
    said = capsys.readouterr().out
    assert "actuators: 23 of 23 joints" in said
    assert "an IMU: angular-velocity" in said
    assert "CYLINDER" in said  # what keeps MJX away
    env = make_env(EnvConfig(f"{tmp_path / 'made' / 'env.py'}:Stand", num_envs=2))
    assert env.spec.action_size == 23


# --- what a model lacks -------------------------------------------------------------------------


def test_what_is_missing_comes_with_the_lines_to_add(tmp_path, capsys):
    said = refused(capsys, tmp_path, mjcf(tmp_path, FIXED))
    assert '<position name="knee" joint="knee" kp="40" dampratio="1"/>' in said
    assert '<body name="trunk" ...>' in said
    assert '<freejoint name="base"/>' in said
    assert '<gyro name="gyro" site="imu"/>' in said
    assert "<key" not in said  # it would be of the wrong length once the rest is there
    assert "error: robot.xml lacks actuators and a free joint: nothing was written" in said


def test_motors_need_a_range(tmp_path, capsys):
    rest = "<actuator><motor name='m' joint='j'/></actuator>"
    said = refused(capsys, tmp_path, mjcf(tmp_path, rest=rest))
    assert "robot.xml lacks control ranges" in said
    assert '<motor name="m" ... ctrlrange="-1 1"' in said


def test_the_lines_to_add_make_it_whole(tmp_path, capsys):
    refused(capsys, tmp_path, mjcf(tmp_path, FIXED))
    body = FIXED.replace("<geom", "<freejoint name='base'/><site name='imu'/><geom", 1)
    rest = """<actuator><position name="knee" joint="knee" kp="40" dampratio="1"/></actuator>
      <sensor><gyro name="gyro" site="imu"/></sensor>"""
    assert new(tmp_path, mjcf(tmp_path, body, rest)) == 0
    (key,) = re.findall("<key .*", capsys.readouterr().err)
    Mjcf(mjcf(tmp_path, body, f"{rest}<keyframe>{key}</keyframe>")).compile()


def test_two_hundred_joints_are_told_to_be_large(tmp_path, capsys):
    chain = "<body name='b'><freejoint/><geom size='0.02'/>"
    for i in range(200):
        chain += f"<body pos='0.01 0 0'><joint name='j{i}'/><geom size='0.01' contype='0'/>"
    chain += "</body>" * 201
    servos = "".join(f"<position joint='j{i}'/>" for i in range(200))
    path = mjcf(tmp_path, chain, f"<actuator>{servos}</actuator>")
    from jaxtd3.new.findings import look

    said = {f.what: f.there for f in look(Mjcf(path).compile(), "stand")}
    assert said["actuators"] == "200 of 200 joints"
    assert said["speed"].startswith("201 joints")
    assert said["speed"].endswith("large, expect long training")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<mujoco><worldbody>", "robot.xml is not well-formed XML: no element found: line 1"),
        ("", "robot.xml is not well-formed XML"),
        ("\x00\x01", "robot.xml is not well-formed XML"),
        ("<robot name='x'/>", "its root is <robot>: convert the URDF to MJCF first"),
        ("<mujoco><worldbdy/></mujoco>", "MuJoCo says: XML Error: Schema violation"),
        ("<mujoco><worldbody><body><geom/></body></worldbody></mujoco>", "MuJoCo says"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><mujoco/>", "declares entities"),
        ("<mujoco><extension><plugin plugin='x'/></extension></mujoco>", "plugins load libraries"),
        ("<mujoco><include file='../out.xml'/></mujoco>", "lies outside the MJCF's folder"),
        ("<mujoco><include file='/etc/passwd'/></mujoco>", "lies outside the MJCF's folder"),
        ("<mujoco><include file='no.xml'/></mujoco>", "no such file no.xml"),
        ("<mujoco><include file='x/../robot.xml'/></mujoco>", "MuJoCo says"),
        ("<mujoco><include/></mujoco>", "no such file"),
        ("<mujoco><asset><mesh file='../../m.stl'/></asset></mujoco>", "lies outside"),
        (
            "<mujoco><compiler meshdir='../x'/><asset><mesh file='m.stl'/></asset></mujoco>",
            "lies outside",
        ),
        ("<mujoco><asset><texture file='link.png'/></asset></mujoco>", "lies outside"),
        ("<mujoco><asset><model name='m' file='m.xml'/></asset></mujoco>", "<model> is refused"),
        ("<mujoco><Include file='../out.xml'/></mujoco>", "not known to be an asset"),
        ("<mujoco><include xmlns='x' file='../out.xml'/></mujoco>", "not known to be an asset"),
        ("<mujoco><include file='ring.xml'/></mujoco>", "ring.xml'> cannot be read: "),
        (f"<mujoco><include file='{'x' * 300}'/></mujoco>", "cannot be read: "),
    ],
)
def test_files_that_are_refused(text, says, tmp_path, capsys):
    folder = tmp_path / "robot"
    folder.mkdir()
    (tmp_path / "out.xml").write_text("<mujoco/>")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "ring.xml").symlink_to("ring.xml")
    (folder / "robot.xml").write_text(text)
    said = refused(capsys, tmp_path, folder / "robot.xml")
    assert says in said
    assert len(said.strip().splitlines()) == 1


def test_entities_do_not_grow_in_another_encoding(tmp_path, capsys):
    ten = lambda name: f"&{name};" * 10  # noqa: E731
    rows = "".join(f"<!ENTITY e{i} '{ten(f'e{i - 1}')}'>" for i in range(1, 12))
    path = tmp_path / "robot.xml"
    text = f"<!DOCTYPE a [<!ENTITY e0 'x'>{rows}]><mujoco model='&e11;'/>"
    path.write_bytes(text.encode("utf-16"))
    assert "robot.xml is not well-formed XML" in refused(capsys, tmp_path, path)


def test_what_is_too_large_for_mujoco_is_one_line(tmp_path, capsys, monkeypatch):
    def too_large(path):
        raise RuntimeError("Caught an unknown exception!")  # as it says when memory ends

    monkeypatch.setattr("mujoco.MjModel.from_xml_path", too_large)
    said = refused(capsys, tmp_path, mjcf(tmp_path))
    assert "robot.xml: MuJoCo says: Caught an unknown exception!" in said


def test_the_compilers_last_word_on_folders_counts(tmp_path):
    """In the order of the document, includes in their places."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "m.obj").write_text("v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 3 2\n")
    mjcf(tmp_path, " ", head="<compiler meshdir='early'/>", name="early.xml")
    head = "<include file='early.xml'/><compiler meshdir='late'/>"
    path = mjcf(tmp_path, " ", "<asset><mesh file='m.obj'/></asset>", head)
    assert "late/m.obj" in map(str, Mjcf(path).files)


def test_physics_that_blows_up_is_told(tmp_path, monkeypatch):
    from jaxtd3.new.findings import speed

    monkeypatch.chdir(tmp_path)
    model = Mjcf(mjcf(tmp_path, rest=MOTOR)).compile()
    assert speed(model).there
    model.opt.timestep = 1e9
    found = speed(model)
    assert found.what == "steady physics"
    assert "The simulation is unstable" in found.advice
    assert not (tmp_path / "MUJOCO_LOG.TXT").exists()


def test_includes_in_a_ring_end(tmp_path):
    mjcf(tmp_path, rest="<include file='robot.xml'/>", name="other.xml")
    path = mjcf(tmp_path, rest="<include file='other.xml'/>")
    assert len(Mjcf(path).files) == 2


def test_bad_arguments(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    for given, says in (
        (["new", "a"], "--mjcf is missing"),
        (["new", "a", "--mjcf", "no.xml"], "no such MJCF: no.xml"),
        (["new", "full", "--mjcf", str(QUADRUPED)], "full is there already"),
        (["new", "no/a", "--mjcf", str(QUADRUPED)], "no is not a folder"),
        (["new", "a", "--mjcf", str(QUADRUPED), "--task", "stnd"], "did you mean 'stand'"),
    ):
        assert main(given) == 2
        assert says in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]
