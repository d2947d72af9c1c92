"""`--env file.py:Class`: found, trained, resumed, filmed; every mistake one line, exit code 2."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxtd3
from jaxtd3 import EnvConfig, UserError, make_env, preset
from jaxtd3.cli.main import main
from jaxtd3.envs import registry, source
from jaxtd3.run.load import load as load_trained
from jaxtd3.run.load import trained_env
from jaxtd3.run.policy import save_policy

DATA = Path(__file__).parent / "data" / "quadruped"

GOOD = """
    import jax, jax.numpy as jnp
    from jaxtd3 import EnvSpec, EnvStep


    class Walk:
        spec = EnvSpec("Walk", obs_size=1, action_size=1, episode_length=20)
        preset = {"num_envs": 8, "gamma": 0.5, "cpu": {"num_envs": 16}}

        def reset(self, key):
            x = jax.random.uniform(key)
            return x, x[None]

        def step(self, x, action):
            x = jnp.clip(x + 0.1 * action[0], -1.0, 1.0)
            return EnvStep(x, x[None], x, jnp.zeros(0), x < -0.9)
    """


def write(folder: Path, text: str = GOOD, name: str = "mine.py", **swaps: str) -> Path:
    path = folder / name
    text = textwrap.dedent(text)
    for old, new in swaps.items():
        assert SWAPS[old] in text
        text = text.replace(SWAPS[old], new)
    path.write_text(text)
    return path


SWAPS = {
    "spec": 'EnvSpec("Walk", obs_size=1, action_size=1, episode_length=20)',
    "first": "return x, x[None]",
    "then": "return EnvStep(x, x[None], x, jnp.zeros(0), x < -0.9)",
    "move": "x = jnp.clip(x + 0.1 * action[0], -1.0, 1.0)",
    "step": "def step(self, x, action):",
    "preset": 'preset = {"num_envs": 8, "gamma": 0.5, "cpu": {"num_envs": 16}}',
}


@pytest.fixture(scope="module")
def robot(tmp_path_factory) -> Path:
    """A copy of the tests' robot, so that its file may be changed."""
    folder = tmp_path_factory.mktemp("robot") / "quadruped"
    shutil.copytree(DATA, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "env.py"


@pytest.fixture(scope="module")
def trained(robot, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    flags = ["--run-dir", str(run), "--no-video", "--quiet"]
    assert main(["train", "--env", f"{robot}:Walk", *flags]) == 0
    return run


# --- finding them -------------------------------------------------------------------------------


def test_a_file_and_its_preset(tmp_path):
    name = f"{write(tmp_path)}:Walk"
    env = make_env(EnvConfig(name, num_envs=4))
    assert env.spec.name == "Walk"
    cfg = preset(name, profile="cpu")
    assert (cfg.env.num_envs, cfg.agent.gamma) == (16, 0.5)
    assert preset(name, profile="gpu").env.num_envs == 8
    assert preset(name, profile="cpu", num_envs=2).env.num_envs == 2
    assert len(cfg.env.source_sha256) == 64


def test_the_name_of_a_file_matches_no_row(tmp_path):
    path = write(
        tmp_path, GOOD.replace('        preset = {"num_envs"', '        other = {"num_envs"')
    )
    folder = tmp_path / "Go1stuff"
    folder.mkdir()
    shutil.copy(path, folder / "Cheetah.py")
    plain = preset(f"{path}:Walk", profile="cpu")
    odd = preset(f"{folder / 'Cheetah.py'}:Walk", profile="cpu")
    assert odd.override({"env.name": "x"}) == plain.override({"env.name": "x"})


def install(folder: Path, package: str, point: str) -> None:
    """What pip leaves of a package with one entry point."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[jaxtd3.envs]\n{point}\n")


def test_a_module_and_an_entry_point(tmp_path, monkeypatch):
    write(tmp_path, name="mine_installed.py")
    install(tmp_path, "mine", "Walker = mine_installed:Walk")
    monkeypatch.syspath_prepend(tmp_path)
    assert make_env(EnvConfig("mine_installed:Walk", num_envs=2)).spec.name == "Walk"
    assert "Walker" in registry.env_names()
    assert make_env(EnvConfig("Walker", num_envs=2)).spec.name == "Walk"
    assert preset("Walker", profile="cpu").agent.gamma == 0.5


def test_a_broken_entry_point_does_not_break_the_list(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_env.py").write_text("1 / 0\n")
    install(tmp_path, "broken", "Broken = broken_env:Walk")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["envs"]) == 0
    assert "broken_env.py:1: ZeroDivisionError" in capsys.readouterr().out
    assert main(["train", "--env", "Broken"]) == 2
    assert "broken_env.py:1: ZeroDivisionError" in capsys.readouterr().err


def test_what_stands_beside_a_file_can_be_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it.py").write_text("LENGTH = 33\n")
    text = textwrap.dedent(GOOD).replace("episode_length=20", "episode_length=LENGTH")
    path = tmp_path / "user.py"
    path.write_text("from beside_it import LENGTH\n" + text)
    assert make_env(EnvConfig(f"{path}:Walk", num_envs=2)).spec.episode_length == 33


def test_a_changed_file_is_read_again(tmp_path, monkeypatch):
    """Within a second, and of the same size: Python's bytecode files could not tell."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = write(tmp_path)
    name = f"{path}:Walk"
    before = preset(name, profile="cpu").env.source_sha256
    path.write_text(path.read_text().replace("episode_length=20", "episode_length=21"))
    assert make_env(EnvConfig(name, num_envs=2)).spec.episode_length == 21
    assert preset(name, profile="cpu").env.source_sha256 != before
    assert not (tmp_path / "__pycache__").exists()


def test_the_digest_covers_the_mjcf(robot):
    found = source.find(f"{robot}:Stand")
    before = source.source_sha256(found)
    xml = robot.with_name("quadruped.xml")
    text = xml.read_text()
    try:
        xml.write_text(text.replace('kp="40"', 'kp="41"'))
        assert source.source_sha256(found) != before
    finally:
        xml.write_text(text)


def test_the_digest_covers_all_that_the_mjcf_names(tmp_path):
    folder = tmp_path / "model"
    (folder / "assets").mkdir(parents=True)
    files = {
        "scene.xml": "<mujoco><include file='robot.xml'/></mujoco>",
        "robot.xml": "<mujoco><compiler meshdir='assets'/><include file='arm.xml'/>"
        "<asset><mesh file='leg.stl'/></asset></mujoco>",
        "arm.xml": "<mujoco><include file='scene.xml'/></mujoco>",
        "assets/leg.stl": "a mesh",
    }
    for name, text in files.items():
        (folder / name).write_text(text)

    def digest(folder: Path) -> str:
        task = SimpleNamespace(mjcf=str(folder / "scene.xml"))
        return source.source_sha256(source.Found(sys, task, None))

    before = digest(folder)
    (folder / "notes.txt").write_text("not of the model")
    assert digest(folder) == before
    for name, text in files.items():
        (folder / name).write_text(f"{text} ")
        assert digest(folder) != before, name
        (folder / name).write_text(text)
    assert digest(folder) == before
    assert digest(folder.rename(tmp_path / "moved")) == before


def untrained(folder: Path, name: str) -> Path:
    """A policy file of an environment that is named as from the working folder."""
    config = preset(name, profile="cpu", actor_hidden=8, critic_hidden=8)
    agent = jaxtd3.fast_td3(make_env(EnvConfig(name, num_envs=1)).spec, config.agent)
    path = folder / "policy.npz"
    save_policy(path, agent.init(jax.random.key(0)), config, {})
    return path


def test_a_relative_reference_is_found_above_the_run(tmp_path, monkeypatch):
    """From any folder, and after all of it was moved."""
    project = tmp_path / "project"
    (project / "quad").mkdir(parents=True)
    write(project / "quad")
    run = project / "runs" / "one"
    run.mkdir(parents=True)
    monkeypatch.chdir(project)
    policy = untrained(project / "runs", "quad/mine.py:Walk")
    preset("quad/mine.py:Walk", profile="cpu").save(run / "config.json")
    assert trained_env(run) == "quad/mine.py:Walk"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    project = project.rename(tmp_path / "moved")
    for given in (project / "runs" / "one", Path("../moved/runs/one")):
        assert trained_env(given) == f"{project}/quad/mine.py:Walk"
    trained = load_trained(project / "runs" / policy.name)
    assert trained.config.env.name == f"{project}/quad/mine.py:Walk"
    assert trained.act(np.zeros(1)).shape == (1,)


def test_where_a_relative_reference_is_not_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "shared" / "mine" / "run"
    run.mkdir(parents=True)
    write(run)
    assert source.located("mine.py:Walk", run) == "mine.py:Walk"  # a run brings no code
    write(tmp_path / "shared")
    found = f"{tmp_path / 'shared' / 'mine.py'}:Walk"
    assert source.located("mine.py:Walk", run) == found
    (tmp_path / "shared").chmod(0o777)  # anybody may have put it there
    assert source.located("mine.py:Walk", run) == "mine.py:Walk"
    for same in ("Cheetah", "package.mine:Walk", f"{tmp_path}/mine.py:Walk"):
        assert source.located(same, run) == same


def test_all_that_use_a_policy_tell_of_changed_code(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path)
    policy = str(untrained(tmp_path, f"{path}:Walk"))
    commands = (
        ["evaluate", policy, "--episodes", "1", "--impl", "native,jax"],
        ["render", policy],  # refused later: there is nothing to show
        ["export", policy, "--out", "again.npz"],
        ["play", policy, "--port", "0"],  # as well
    )
    said = "changed since: the code of"
    main(commands[2])
    assert said not in capsys.readouterr().err
    path.write_text(path.read_text() + "# another day\n")
    for command in commands:
        main(command)
        assert capsys.readouterr().err.count(said) == 1, command


PLAYGROUND = """
    import functools
    from mujoco_playground import dm_control_suite
    from mujoco_playground._src.dm_control_suite import cartpole


    class MyCartpole(cartpole.Balance):
        pass


    def config():
        changed = cartpole.default_config()
        changed.episode_length = 77
        return changed


    dm_control_suite.register_environment(
        "TestsCartpole", functools.partial(MyCartpole, swing_up=False, sparse=False), config
    )
    """


def test_playground_environments_of_ones_own(tmp_path):
    path = write(tmp_path, PLAYGROUND, "registers.py")
    for name in ("TestsCartpole", "MyCartpole"):
        env = make_env(EnvConfig(f"{path}:{name}", num_envs=2))
        assert env.spec.name == "TestsCartpole"
        assert env.spec.episode_length == 77
    assert preset(f"{path}:TestsCartpole", profile="cpu").agent.v_max == 100.0  # dm_control's row
    assert make_env(EnvConfig("TestsCartpole", num_envs=2)).spec.episode_length == 77
    with pytest.raises(UserError, match="did you mean 'TestsCartpole'"):
        make_env(EnvConfig(f"{path}:TestCartpol", num_envs=2))


WITHIN = {
    "branch": "return jax.lax.cond(state.done > 2, super().step, super().step, state, a)",
    "loop": "return jax.lax.fori_loop(0, 2, lambda _, s: cartpole.Balance.step(self, s, a), state)",
}


@pytest.mark.parametrize("within", WITHIN)
def test_physics_within_a_loop_or_branch_is_for_mjx(within, tmp_path):
    text = PLAYGROUND.replace("TestsCartpole", f"Tests{within}")
    text = text.replace("pass", f"def step(self, state, a):\n            {WITHIN[within]}")
    path = write(tmp_path, text.replace("import functools", "import functools, jax"), "within.py")
    cfg = EnvConfig(f"{path}:Tests{within}", num_envs=2, impl="jax")
    assert make_env(cfg).spec.name == f"Tests{within}"
    with pytest.raises(UserError, match="a loop or branch of its own; --impl jax runs it"):
        make_env(replace(cfg, impl="native"))


SHORT = (
    "--iterations 4 --num-envs 4 --length 16 --batch-size 8 --critic-updates 1 --policy-updates 1 "
    "--warmup 8 --critic-hidden 16 --actor-hidden 16 --log-every 4 --eval-every 0 "
    "--eval-episodes 2 --checkpoint-every 0 --no-video --quiet"
)


@pytest.mark.slow
def test_playground_environments_of_ones_own_train(tmp_path):
    name = f"{write(tmp_path, PLAYGROUND, 'registers.py')}:TestsCartpole"
    run = tmp_path / "run"
    flags = ["--impl", "native", "--run-dir", str(run), *SHORT.split()]
    assert main(["train", "--env", name, *flags]) == 0
    assert json.loads((run / "config.json").read_text())["env"]["name"] == name
    summary = json.loads((run / "summary.json").read_text())
    assert summary["iterations"] == 4
    # the length that the file registers, not the 1000 steps of the class it stands on
    assert summary["final_length"] == 77


@pytest.mark.slow
def test_locomotion_of_ones_own_trains_and_resumes(tmp_path):
    text = PLAYGROUND.replace("TestsCartpole", "TestsWalker").replace("MyCartpole", "MyWalker")
    text = text.replace("dm_control_suite.register", "locomotion.register")
    text = text.replace("playground import dm_control_suite", "playground import locomotion")
    name = f"{write(tmp_path, text, 'walks.py')}:TestsWalker"
    assert registry.suite_of(name) == "locomotion"
    run = tmp_path / "run"
    flags = ["--run-dir", str(run), "--no-video", "--quiet"]
    assert main(["train", "--env", name, "--impl", "native", *SHORT.split(), *flags]) == 0
    assert main(["train", "--resume", "--iterations", "8", *flags]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["env"], summary["iterations"]) == (name, 8)
    assert summary["final_length"] == 77


# --- mistakes -----------------------------------------------------------------------------------


def refused(capsys, tmp_path, monkeypatch, env: str) -> str:
    """What `jaxtd3 train` says of an environment: one line, exit code 2, nothing written."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    capsys.readouterr()
    assert main(["train", "--env", env, "--run-dir", str(run), "--quiet"]) == 2
    said = capsys.readouterr()
    assert not run.exists()
    assert "Traceback" not in said.err
    lines = [line for line in said.err.splitlines() if line]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ("nowhere.py:Walk", "nowhere.py: No such file or directory"),
        ("mine.py:Wlk", "mine.py: unknown environment 'Wlk': did you mean 'Walk'?"),
        ("mine.py:", "write file.py:Class"),
        ("mine.py", "write file.py:Class"),
        ("folder.py:Walk", "folder.py: Is a directory"),
        ("nul.py:Walk", "nul.py: source code string cannot contain null bytes"),
        ("no.such.module:Walk", "no module 'no.such.module'"),
        ("mine.py:jax", "is not a class or a function"),
        (".:Walk", "no module '.'"),
    ],
)
def test_references_that_name_nothing(env, says, capsys, tmp_path, monkeypatch):
    write(tmp_path)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "nul.py").write_text("\0")
    assert says in refused(capsys, tmp_path, monkeypatch, env)


@pytest.mark.parametrize(
    ("swaps", "says"),
    [
        ({"spec": "EnvSpec('Walk'"}, "mine.py:7: '(' was never closed"),
        ({"spec": "EnvSpc()"}, "mine.py:7: NameError: name 'EnvSpc' is not defined"),
        ({"spec": "None"}, "mine.py:6: Walk.spec is no jaxtd3.EnvSpec"),
        ({"spec": "EnvSpec('W', 1, 1, -3)"}, "mine.py:6: spec: episode_length=-3 is not a whole"),
        ({"step": "def stp(self, x, action):"}, "mine.py:6: Walk has no method step"),
        ({"first": "return x, x"}, "mine.py:10: reset: the observation has shape (), not (1,)"),
        (
            {"first": "return x, x[None].astype(int)"},
            "mine.py:10: reset: the observation is of int",
        ),
        ({"first": "return x"}, "mine.py:10: reset(key) does not return (state, obs)"),
        ({"first": "return x, x[None] / 0 * 0"}, "mine.py:10: reset: obs[0] is not finite (nan)"),
        (
            {"then": "return EnvStep(x, x[None], x[None], jnp.zeros(0), x < -0.9)"},
            "mine.py:14: step: the reward has shape (1,), not ()",
        ),
        (
            {"then": "return EnvStep(x, x[None], x, jnp.zeros(2), x < -0.9)"},
            "mine.py:14: step: the reward terms has shape (2,), not (0,)",
        ),
        (
            {"then": "return EnvStep((x, x), x[None], x, jnp.zeros(0), x < -0.9)"},
            "mine.py:14: reset and step return states of different structure",
        ),
        (
            {"then": "return EnvStep(x, x[None], x, jnp.zeros(0), 1.0 * (x < -0.9))"},
            "mine.py:14: step: terminated is of float32, not bool",
        ),
        ({"then": "return x"}, "mine.py:14: step(state, action) does not return a jaxtd3.EnvStep"),
        ({"move": "x = x if action[0] > 0 else -x"}, "mine.py:15: TracerBoolConversionError"),
        ({"move": "x = x + float(action[0])"}, "mine.py:15: ConcretizationTypeError"),
        ({"move": "raise RuntimeError('oh')"}, "mine.py:15: RuntimeError: oh"),
        ({"move": "import sys; sys.exit(3)"}, "mine.py:15: SystemExit: 3"),
        ({"preset": "preset = 3"}, "mine.py:6: preset is not a dict of settings"),
        ({"preset": "preset = {'cpu': {'gama': 1}}"}, "mine.py:6: unknown setting 'gama'"),
        ({"preset": "preset = {'gamma': '1'}"}, "mine.py:6: preset: gamma='1' is not a float"),
        ({"preset": "preset = {'num_envs': 0}"}, "mine.py:6: num_envs=0 is below 1"),
    ],
)
def test_files_with_mistakes(swaps, says, capsys, tmp_path, monkeypatch):
    write(tmp_path, **swaps)
    assert says in refused(capsys, tmp_path, monkeypatch, "mine.py:Walk")


def test_mistakes_in_a_task_name_the_line(robot, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "bad"
    shutil.copytree(robot.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path, good = folder / "env.py", robot.read_text()
    number = 1 + next(i for i, s in enumerate(good.splitlines()) if 's.sensor("gyro")' in s)
    for new, says in (
        ('s.sensor("gyr")', f"env.py:{number}: unknown sensor 'gyr': did you mean 'gyro'?"),
        ("s.up / (s.up[0] * 0)", "reset: observation gyro is not finite"),
        ("1.0 if s.up[0] > 0 else 0.0", f"env.py:{number}: TracerBoolConversionError"),
    ):
        path.write_text(good.replace('s.sensor("gyro")', new))
        assert says in refused(capsys, tmp_path, monkeypatch, f"{path}:Stand")
    path.write_text(good.replace('"gamma": 0.9', '"gama": 0.9'))
    assert "gama" in refused(capsys, tmp_path, monkeypatch, f"{path}:Stand")


# --- all that a run can do ----------------------------------------------------------------------


def test_a_run_keeps_the_name_and_the_digest(trained, robot):
    config = json.loads((trained / "config.json").read_text())
    assert config["env"]["name"] == f"{robot}:Walk"
    assert config["env"]["impl"] == "native"
    found = source.find(f"{robot}:Walk")
    assert config["env"]["source_sha256"] == source.source_sha256(found)


@pytest.mark.slow
def test_resume_is_exact_and_tells_of_changed_code(robot, trained, tmp_path, capsys):
    """Stopped in the middle and resumed, a run ends where it would have: a task is pure."""
    run, env = tmp_path / "run", ["--env", f"{robot}:Walk", "--no-video"]
    assert main(["train", *env, "--run-dir", str(run), "--iterations", "10"]) == 0
    capsys.readouterr()
    whole = json.loads((trained / "summary.json").read_text())
    text = robot.read_text()
    try:
        robot.write_text(text + "# another day\n")
        more = ["--resume", "--iterations", "20", "--run-dir", str(run), "--no-video"]
        assert main(["train", *more]) == 0
    finally:
        robot.write_text(text)
    said = capsys.readouterr().out
    assert said.count("changed since: the code of") == 1
    half = json.loads((run / "summary.json").read_text())
    assert half["params_sha256"] == whole["params_sha256"]


def test_evaluate_export_and_metadata(trained, tmp_path, capsys):
    onnx = pytest.importorskip("onnx")
    assert main(["evaluate", str(trained), "--episodes", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["impl"] == "native"
    assert found["term/upright"] > 0.5
    out = tmp_path / "policy.onnx"
    assert main(["export", str(trained), "--out", str(out)]) == 0
    props = {p.key: p.value for p in onnx.load(str(out)).metadata_props}
    assert json.loads(props["joint_names"])[0] == "front_left_hip"
    assert json.loads(props["action_scale"]) == 0.5
    np.testing.assert_allclose(json.loads(props["default_pose"]), [0.65, -1.3] * 4, rtol=1e-6)


def test_play_gives_the_command(trained):
    from jaxtd3.cli.main import Play
    from jaxtd3.cli.play import make_session

    session = make_session(Play(run=trained))
    assert session.ranges == [(-0.5, 1.0), (-0.2, 0.2), (-1.0, 1.0)]
    session.control({"command": [0.5, 0.1, -0.5]})
    session.advance()
    assert session.controls.command == (0.5, 0.1, -0.5)
    shown = session.state()
    assert set(shown["terms"]) == {"upright", "effort", "action_rate", "speed", "foot"}
    assert shown["position"][2] > 0.2
    assert len(shown["observation"]["gyro"]) == 3


def test_filming(trained, tmp_path):
    from jaxtd3.output import video as render

    config, env, agent, state, *_ = load_trained(trained)
    model = render.model_of(env)
    assert model is not None
    keep = render.trajectory_fields
    found = render.record(env, agent, state, jax.random.key(0), 5, keep, command=(0.5, 0, 0))
    assert found["qpos"].shape == (5, 15)
    if render.choose_gl() is None:
        pytest.skip("nothing to draw with")
    out = render.render_video(
        env, agent, state, jax.random.key(0), tmp_path / "v.gif", steps=3, height=60, width=80
    )
    assert out.stat().st_size > 500


@pytest.mark.slow
def test_a_sweep_of_weights_is_one_program(robot, tmp_path):
    run = tmp_path / "sweep"
    grid = ["--grid", "action_rate=-0.01,-0.1,-1"]
    flags = ["--run-dir", str(run), "--no-video", "--quiet"]
    assert main(["sweep", "--env", f"{robot}:Walk", *grid, *flags]) == 0
    results = json.loads((run / "results.json").read_text())
    assert len(results["members"]) == 3
    assert (run / "report.html").stat().st_size > 1000


@pytest.mark.slow
def test_two_fake_devices(robot, tmp_path):
    """In a process of its own, because JAX counts its devices once."""
    import os
    import subprocess

    run = tmp_path / "run"
    command = [sys.executable, "-m", "jaxtd3.train", "--env", f"{robot}:Walk", "--devices", "2"]
    command += ["--run-dir", str(run), "--no-video", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((run / "summary.json").read_text())
    assert len(summary["devices"]) == 2
    assert summary["status"] == "completed"


def test_envs_describes_it(robot, capsys):
    assert main(["envs", "--env", f"{robot}:Walk", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert row["physics"] == "native"
    assert row["reward_terms"]["speed"] == 1.0
    assert row["layout"]["gyro"] == "0:3"


def test_a_mistake_in_a_helper_beside_the_file_is_told_of_the_helper(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "helper_beside.py").write_text("def move(x):\n    return x.nonsense\n")
    write(tmp_path, move="from helper_beside import move; x = move(x)")
    said = refused(capsys, tmp_path, monkeypatch, "mine.py:Walk")
    assert "mine.py:15: AttributeError" in said
    (tmp_path / "mine.py").write_text("import helper_beside2\n")
    (tmp_path / "helper_beside2.py").write_text("\n1 / 0\n")
    assert "mine.py:1: ZeroDivisionError" in refused(capsys, tmp_path, monkeypatch, "mine.py:Walk")
