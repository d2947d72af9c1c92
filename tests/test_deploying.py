"""`export --controller`, `--check` and `robustness`: files, checks, worlds, bad input."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import mujoco
import numpy as np
import pytest

import jaxtd3
from jaxtd3.agent.td3 import fast_td3
from jaxtd3.cli import main as cli
from jaxtd3.deploy import evaluate, package
from jaxtd3.deploy.robot import load_robot, read_sensors
from jaxtd3.deploy.robustness import (
    Episodes,
    Verdict,
    evaluate_worlds,
    sample_starts,
    summarize,
    tracking_error,
)
from jaxtd3.deploy.runtime import load_controller
from jaxtd3.deploy.worlds import WORLDS, World, change_model, choose_worlds, down_in
from jaxtd3.envs.batch import undisturbed
from jaxtd3.run.checkpoint import CheckpointStore
from jaxtd3.run.policy import policy_sha256, save_policy
from test_cli import fails

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
T1 = "T1JoystickFlatTerrain"


def save_random(path: Path, name: str, **changes) -> Path:
    """An untrained policy, with actions that are not tiny."""
    config = jaxtd3.preset(name, profile="cpu").override({"actor_hidden": 32, **changes})
    env = jaxtd3.make_env(config.env)
    state = fast_td3(env.spec, config.agent).init(jax.random.key(0))
    actor = dict(state.actor)
    actor["out"] = jax.tree.map(lambda x: 5 * x, actor["out"])
    save_policy(path, state.replace(actor=actor), config, {"note": "untrained"})
    return path


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_random(tmp_path_factory.mktemp("policy") / "t1.npz", T1)


@pytest.fixture(scope="module")
def exported(policy, tmp_path_factory) -> Path:
    """A controller with its files, not to be changed."""
    out = tmp_path_factory.mktemp("exported") / "controller.onnx"
    argv = ["export", str(policy), "--controller", "--with-model", "--out", str(out)]
    assert cli.main(argv) == 0
    return out


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return load_robot(T1).mj_model


@pytest.fixture
def copied(exported, tmp_path) -> Path:
    """The same files, to be changed."""
    for path in exported.parent.iterdir():
        shutil.copy(path, tmp_path)
    return tmp_path / exported.name


def change(path: Path, edit) -> None:
    """Edit the metadata of an ONNX file."""
    file = onnx.load(path)
    texts = {p.key: p.value for p in file.metadata_props}
    edit(texts)
    onnx.helper.set_model_props(file, texts)
    onnx.save(file, path)


# --- what is written ----------------------------------------------------------------------------


def test_files_and_metadata(exported, model):
    names = {path.name for path in exported.parent.iterdir()}
    assert names == {"controller.onnx", "controller.trace.npz", "deploy.yaml", "robot.xml"}
    about = load_controller(exported).about
    assert about["joint_names"] == [model.joint(i).name for i in range(1, model.njnt)]
    assert about["kp"] == model.actuator_gainprm[:, 0].tolist()
    assert about["kd"] == model.dof_damping[6:].tolist()
    assert min(about["kd"]) > 0
    assert about["control_rate"] == 50
    assert about["robot"] == "Booster T1"
    assert about["licence"] == "Apache-2.0"
    assert about["command"]["low"] == [-1.0, -0.8, -1.0]
    assert about["observation"][0] == {"name": "linvel", "start": 0, "stop": 3}
    assert about["observation"][-1] == {"name": "sin_phase", "start": 83, "stop": 85}
    assert about["note"] == "untrained"
    trace = np.load(exported.parent / "controller.trace.npz")
    targets = np.clip(trace["out.joint_targets"], about["target_low"], about["target_high"])
    assert np.abs(np.diff(targets, axis=0)).max() <= about["target_jump"] + 1e-3 < 3
    np.testing.assert_allclose(about["default_pose"], model.key("home").qpos[7:], atol=1e-6)


def test_the_yaml_says_the_same(exported):
    yaml = pytest.importorskip("yaml")
    text = (exported.parent / "deploy.yaml").read_text()
    assert yaml.safe_load(text) == load_controller(exported).about


def test_the_written_model_steps_as_the_training_model(exported, model):
    written = mujoco.MjModel.from_xml_path(str(exported.parent / "robot.xml"))
    assert written.nmesh == 0
    assert "booster_t1 (Apache-2.0" in (exported.parent / "robot.xml").read_text()
    ends = []
    for m in (model, written):
        data = mujoco.MjData(m)
        mujoco.mj_resetDataKeyframe(m, data, m.key("home").id)
        data.ctrl[:] = data.qpos[7:] + 0.1
        mujoco.mj_step(m, data, 300)
        ends.append(data.qpos.copy())
    assert np.abs(ends[0][:3] - model.key("home").qpos[:3]).max() > 0.05  # it did move
    np.testing.assert_allclose(*ends, atol=1e-6)


def test_robustness_of_the_run_is_told(tmp_path):
    assert package.read_robustness(tmp_path) is None
    (tmp_path / "robustness.json").write_text(json.dumps({"summary": {"survival": 0.5}}))
    assert package.read_robustness(tmp_path) == {"survival": 0.5}
    (tmp_path / "robustness.json").write_text("[]")
    with pytest.raises(jaxtd3.UserError, match="cannot be read"):
        package.read_robustness(tmp_path)


def test_gravity_from_a_quaternion(exported, model):
    about = load_controller(exported).about
    data, rng = mujoco.MjData(model), np.random.default_rng(0)
    places = package_places(about, model)
    for _ in range(5):
        q = rng.normal(size=4)
        w, x, y, z = q / np.linalg.norm(q)
        data.qpos[3:7] = w, x, y, z
        mujoco.mj_forward(model, data)
        told = [2 * (w * y - x * z), -2 * (y * z + w * x), 2 * (x * x + y * y) - 1]
        np.testing.assert_allclose(read_sensors(places, data)["gravity"], told, atol=1e-6)


def package_places(about, model):
    from jaxtd3.deploy.robot import find_places

    return find_places(about, model)


def try_out(run, *more) -> list[str]:
    """Words of the shortest `jaxtd3 robustness`."""
    return ["robustness", str(run), "--episodes", "1", "--seconds", "0.1", *more]


def test_a_policy_tells_how_it_fared(policy, tmp_path, capsys, monkeypatch):
    """What robustness wrote into the working folder is found by the policy's weights."""
    yaml = pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    export = lambda run, out: cli.main(["export", str(run), "--out", out])  # noqa: E731
    assert export(policy, "p.onnx") == 0
    assert "robustness: not known" in capsys.readouterr().out
    assert cli.main(try_out(policy)) == 0
    summary = json.loads(Path("robustness.json").read_text())["summary"]
    assert summary["policy"] == "t1.npz"
    assert cli.main(["export", str(policy), "--controller", "--out", "c.onnx"]) == 0
    about = load_controller(Path("c.onnx")).about
    assert about["robustness"] == summary
    assert about["policy_sha256"] == summary["policy_sha256"]
    assert yaml.safe_load(Path("deploy.yaml").read_text()) == about
    capsys.readouterr()
    for out in ("copy.npz", "plain.onnx"):  # each says it, and a policy file keeps it
        assert export(policy, out) == 0
        said = capsys.readouterr().out
        assert "robustness: survives 100% of 16 episodes in 16 worlds; worst: " in said
    Path("robustness.json").unlink()
    assert jaxtd3.load("copy.npz").robustness == summary
    assert export("copy.npz", "p.onnx") == 0
    assert "survives 100%" in capsys.readouterr().out
    # a controller's own trial is of its policy too, and another folder's file is found beside it
    assert cli.main(try_out("c.onnx", "--worlds", "nominal")) == 0
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    fared = package.find_robustness(tmp_path / "copy.npz", jaxtd3.load(tmp_path / "copy.npz"))
    assert list(fared["by_world"]) == ["nominal"]


def test_another_policys_robustness_is_left_out(policy, tmp_path, capsys, monkeypatch):
    """Its file may have the same name."""
    monkeypatch.chdir(tmp_path)
    trained = jaxtd3.load(policy)
    summary = {"policy": "t1.npz", "policy_sha256": policy_sha256(trained.state, T1)}
    Path("robustness.json").write_text(json.dumps({"summary": summary}))
    assert package.find_robustness(policy, trained) == summary
    other = trained.state.replace(actor=jax.tree.map(lambda x: 2 * x, trained.state.actor))
    capsys.readouterr()
    assert package.find_robustness(policy, trained._replace(state=other)) is None
    said = capsys.readouterr().out
    assert said == "robustness.json is of t1.npz, not of this t1.npz: left out\n"
    told = trained._replace(state=other, robustness={"survival": 0.5})
    assert package.find_robustness(policy, told) == {"survival": 0.5}


def test_a_shipped_policy_tells_how_it_fared(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(try_out("t1-flat", "--worlds", "nominal")) == 0
    capsys.readouterr()
    assert cli.main(["export", "t1-flat", "--controller"]) == 0
    assert "robustness: survives 100% of 1 episodes in 1 worlds" in capsys.readouterr().out
    assert "robustness" in load_controller(Path("controller.onnx")).about


def test_a_run_tells_how_it_fared(policy, tmp_path, capsys, monkeypatch):
    """Of the same checkpoint, and an exported policy file carries it on."""
    trained, run = jaxtd3.load(policy), tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(trained.config.to_dict()))
    store = CheckpointStore(run)
    store.save({"agent": trained.state}, iteration=7, meta={})
    store.wait()
    monkeypatch.chdir(tmp_path)
    assert cli.main(try_out("run", "--worlds", "nominal")) == 0
    assert not Path("robustness.json").exists()
    assert cli.main(["export", "run", "--out", "walk.npz"]) == 0
    summary = json.loads((run / "robustness.json").read_text())["summary"]
    assert summary["policy"] == "checkpoint 000000007"
    walk = jaxtd3.load("walk.npz")
    assert walk.robustness == summary
    (run / "robustness.json").rename("robustness.json")
    assert package.find_robustness(Path("walk.npz"), walk._replace(robustness=None)) == summary
    Path("robustness.json").rename(run / "robustness.json")
    later = trained.state.replace(actor=jax.tree.map(lambda x: 2 * x, trained.state.actor))
    store.save({"agent": later}, iteration=8, meta={})
    store.wait()
    capsys.readouterr()
    assert cli.main(["export", "run", "--out", "walk.npz"]) == 0
    said = capsys.readouterr().out
    assert "is of checkpoint 000000007, not of this checkpoint 000000008: left out" in said
    assert jaxtd3.load("walk.npz").robustness is None


def parts_of(name: str, **changes):
    """What a robust evaluation is made from."""
    config = jaxtd3.preset(name, profile="cpu").override({"actor_hidden": 32, **changes})
    env = jaxtd3.make_env(undisturbed(config.env))
    agent = fast_td3(env.spec, config.agent)
    shapes = SimpleNamespace(agent=jax.eval_shape(agent.init, jax.random.key(0)))
    return SimpleNamespace(config=config, eval_env=env, agent=agent, shapes=shapes)


def test_training_is_judged_as_its_controller_would_be(policy, monkeypatch):
    monkeypatch.setattr(evaluate, "WORLDS", WORLDS[-2:])
    monkeypatch.setattr(evaluate, "SECONDS", 0.5)
    parts = parts_of(T1, seed=3)
    told = evaluate.make_robust_evaluate(parts)(jaxtd3.load(policy).state)
    controller, model = package.controller_of(jaxtd3.load(policy)), load_robot(T1).mj_model
    expected = evaluate_worlds(controller, model, WORLDS[-2:], evaluate.EPISODES, 0.5, seed=3)
    assert told == summarize(expected, evaluate.EPISODES, 0.5)


def test_what_cannot_be_judged_is_refused_by_name():
    with pytest.raises(jaxtd3.UserError, match=r"--best robust: no controller .* for Pendulum"):
        evaluate.make_robust_evaluate(parts_of("Pendulum"))


def test_the_score_wants_walking():
    """Falling at once, standing, walking with falls, walking."""
    verdict = lambda survival, error: Verdict("x", survival, 1.0, error, 0.0, 2.0).score  # noqa: E731
    fell, stands, walks, best = verdict(0, 2.0), verdict(1, 2.0), verdict(0.8, 0.6), verdict(1, 0.5)
    assert (fell, stands) == (-1, 0)
    assert fell < stands < walks < best


# --- --check ------------------------------------------------------------------------------------


def checked(path: Path, capsys) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main(["export", "--check", str(path)])
    said = capsys.readouterr()
    assert (said.out + said.err).count("\n") == 1
    return code, said.out + said.err


def test_a_good_controller_passes(exported, capsys):
    code, said = checked(exported, capsys)
    assert (code, "good: Booster T1, 200 recorded steps" in said) == (0, True)


def swap_joints(texts):
    names = json.loads(texts["joint_names"])
    names[3], names[4] = names[4], names[3]
    texts["joint_names"] = json.dumps(names)


def put(name, value):
    return lambda texts: texts.__setitem__(name, json.dumps(value))


def shift_pose(texts):
    texts["default_pose"] = json.dumps([x + 0.01 for x in json.loads(texts["default_pose"])])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (swap_joints, "joint_names[3] is"),
        (shift_pose, "default_pose[0] is"),
        (put("kd", [0.0] * 23), "kd[0] is 0.0, not 2.0"),
        (put("kp", [1.0]), "kp has 1 entries, not 23"),
        (put("dt", 0.01), "dt is 0.01"),
        (put("action_scale", 0.5), "action_scale is 0.5, not 1.0"),
        (put("action_high", [0.0] * 23), "beyond action_low and action_high"),
        (put("inputs", {"gyro": 3}), "inputs"),
        (put("target_jump", 0.0), "target_jump is 0.0, not"),
    ],
)
def test_wrong_metadata_fails(edit, said, copied, capsys):
    change(copied, edit)
    code, line = checked(copied, capsys)
    assert code == 1
    assert said in line


def test_a_wrong_joint_order_fails_even_if_the_trace_tells_the_same(copied, capsys):
    change(copied, swap_joints)
    path = copied.parent / "controller.trace.npz"
    with np.load(path) as file:
        trace = dict(file)
    trace["joint_names"][[3, 4]] = trace["joint_names"][[4, 3]]
    np.savez(path, **trace)
    code, line = checked(copied, capsys)
    assert (code, "joint_names[3] is" in line) == (1, True)


def test_wrong_weights_fail(copied, capsys):
    file = onnx.load(copied)
    kernel = [w for w in file.graph.initializer if len(w.dims) == 2][-1]
    value = 1.2 * onnx.numpy_helper.to_array(kernel)
    kernel.CopyFrom(onnx.numpy_helper.from_array(value, kernel.name))
    onnx.save(file, copied)
    code, line = checked(copied, capsys)
    assert (code, "differs from its trace" in line) == (1, True)


def test_a_controller_that_differs_is_not_written(policy, tmp_path, capsys, monkeypatch):
    from jaxtd3.deploy import trace

    honest = trace.advance
    monkeypatch.setattr(
        trace, "advance", lambda about, *a: honest({**about, "dt": 2 * about["dt"]}, *a)
    )
    monkeypatch.chdir(tmp_path)
    assert "nothing written" in fails(["export", str(policy), "--controller"], capsys)


# --- worlds -------------------------------------------------------------------------------------


def simulate(controller, model, world, starts, steps):
    """One delayed episode by a plain loop over mj_step: the last positions."""
    about = controller.about
    data, places = mujoco.MjData(model), package_places(about, model)
    data.qpos[:], data.qvel[:] = starts.qpos[0], starts.qvel[0]
    mujoco.mj_forward(model, data)
    state, substeps = controller.start(), 10
    due = [starts.qpos[0, 7:].copy() for _ in range(round(world.delay / 0.002))]
    for _ in range(steps):
        sensors = {k: x[None] for k, x in read_sensors(places, data).items()}
        sensors["command"] = starts.command[:1].astype(np.float32)
        sensors["gait_frequency"] = starts.frequency[:1].astype(np.float32)
        out, state = controller.step(sensors, state)
        for _ in range(substeps):
            due.append(out["joint_targets"][0])
            data.ctrl[:] = due.pop(0)
            mujoco.mj_step(model, data)
    return data.qpos


@pytest.mark.parametrize("delay", [0.0, 0.010, 0.020, 0.040])
def test_a_delay_is_as_long_as_said(delay, exported, model):
    controller = load_controller(exported)
    starts, world = sample_starts(controller.about, model, 1, 5), World("x", delay=delay)
    group = Episodes(controller, model, [world, WORLDS[-1]], tile(starts, 2), seed=0, threads=1)
    for _ in range(20):
        group.step()
    expected = simulate(controller, model, world, starts, 20)
    np.testing.assert_allclose(group.data.qpos[0], expected, atol=1e-6)
    other = simulate(controller, model, World("y", delay=delay + 0.002), starts, 20)
    assert np.abs(other - expected).max() > 1e-4  # the test can tell


def tile(starts, count):
    return type(starts)(*(np.tile(x, (count, 1)) for x in starts))


PAIRED = """
<mujoco>
  <worldbody>
    <geom name="floor" type="plane" size="1 1 1"/>
    <body pos="0 0 1">
      <freejoint/>
      <geom name="trunk" size="0.1"/>
      <body>
        <joint name="knee" axis="0 1 0" damping="1"/>
        <geom name="foot" size="0.1" pos="0 0 -0.3"/>
      </body>
    </body>
  </worldbody>
  <contact>
    <pair geom1="foot" geom2="floor" friction="0.6 0.5 0.01 0.002 0.001"/>
    <pair geom1="trunk" geom2="floor" friction="0.9 0.9 0.02 0.003 0.003"/>
  </contact>
  <actuator><position joint="knee" kp="10"/></actuator>
</mujoco>
"""
"""A robot whose feet touch the ground by contact pairs, as G1's do; T1 has none."""


@pytest.mark.parametrize("pairs", [0, 2])
def test_each_simulation_has_its_own_world(model, pairs):
    if pairs:
        model = mujoco.MjModel.from_xml_string(PAIRED)
    assert model.npair == pairs
    worlds = [World("a"), World("b", friction=0.4, mass=1.2, gains=0.8, slope=5.0)]
    batch = mujoco.batch.Batch(model, 2, 1)
    change_model(batch, model, worlds)
    rows = [("pair_friction", np.s_[:, :2], 0.4), ("pair_friction", np.s_[:, 2:], 1)]
    for name, part, factor in (
        *rows[:pairs],
        ("geom_friction", np.s_[:, 0], 0.4),
        ("geom_friction", np.s_[:, 1:], 1),
        ("body_mass", np.s_[:], 1.2),
        ("body_inertia", np.s_[:], 1.2),
        ("actuator_gainprm", np.s_[:, 0], 0.8),
        ("actuator_biasprm", np.s_[:, 1], 0.8),
        ("dof_damping", np.s_[6:], 0.8),
    ):
        values, own = batch.expand(name), getattr(model, name)
        np.testing.assert_allclose(values[0], own)
        np.testing.assert_allclose(values[1][part], factor * own[part])
    gravity = batch.expand("opt.gravity")
    np.testing.assert_allclose(gravity[0], [0, 0, -9.81])
    np.testing.assert_allclose(gravity[1, 0] / gravity[1, 2], math.tan(math.radians(5)))
    np.testing.assert_allclose(np.linalg.norm(down_in(worlds), axis=1), 1)


def test_pushes_come_when_said(exported, model):
    controller = load_controller(exported)
    worlds = [World("calm"), World("pushed", push=1.0, push_every=0.1)]
    starts = tile(sample_starts(controller.about, model, 1, 0), 2)
    group = Episodes(controller, model, worlds, starts, seed=0, threads=1)
    for _ in range(5):
        group.step()
    np.testing.assert_array_equal(group.data.qvel[0], group.data.qvel[1])
    group.step()
    pushed = group.data.qvel[1, :2] - group.data.qvel[0, :2]
    assert 0.3 < np.linalg.norm(pushed) < 1.5


def test_an_imu_on_a_slope_feels_it(exported, model):
    about = load_controller(exported).about
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, model.key("home").id)
    mujoco.mj_forward(model, data)
    level, sloped = (down_in([World("x", slope=s)])[0] for s in (0.0, 30.0))
    places = package_places(about, model)
    np.testing.assert_allclose(read_sensors(places, data, level)["gravity"], [0, 0, -1], atol=1e-6)
    expected = [-0.5, 0, -math.cos(math.pi / 6)]
    np.testing.assert_allclose(read_sensors(places, data, sloped)["gravity"], expected, atol=1e-6)


def test_worlds_are_judged_alike(exported, model):
    controller = load_controller(exported)
    worlds = (*choose_worlds("nominal,noise"), World("cliff", slope=60.0))
    found = evaluate_worlds(controller, model, worlds, episodes=4, seconds=0.5, threads=1)
    assert [v.world for v in found] == ["nominal", "noise", "cliff"]
    nominal, noise, cliff = found
    assert nominal.survival == 1
    assert nominal.seconds == pytest.approx(0.5)
    assert cliff.survival == 0
    assert cliff.seconds < 0.45
    assert noise.error_lin != nominal.error_lin
    (alone,) = evaluate_worlds(controller, model, worlds[:1], episodes=4, seconds=0.5, threads=2)
    assert alone == nominal  # neither other worlds nor threads matter


def test_who_falls_lies_still_to_the_end(exported, model):
    controller = load_controller(exported)
    (fell,) = evaluate_worlds(controller, model, [World("nominal")], 3, 20.0, threads=1)
    assert fell.survival == 0
    assert fell.seconds < 5
    still = np.linalg.norm(sample_starts(controller.about, model, 3, 0).command[:, :2], axis=1)
    assert fell.error_lin == pytest.approx(still.mean(), rel=0.1)
    assert fell.score == pytest.approx(-1, abs=0.2)


def test_tracking_error_is_in_the_frame_of_the_robot():
    class Data:
        qpos = np.array([[0, 0, 1, math.cos(math.pi / 4), 0, 0, math.sin(math.pi / 4)]])  # to +y
        qvel = np.array([[0, 0.5, 0, 0, 0, 0.2]])

    np.testing.assert_allclose(
        tracking_error(Data, np.array([[0.5, 0.0, 0.2]])), [[0, 0]], atol=1e-12
    )
    np.testing.assert_allclose(tracking_error(Data, np.zeros((1, 3))), [[0.5, 0.2]])


def test_the_command_writes_a_table_and_files(exported, tmp_path, capsys):
    argv = ["robustness", str(exported), "--episodes", "2", "--seconds", "0.3"]
    argv += ["--out", str(tmp_path)]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert all(world.name in said for world in WORLDS)
    results = json.loads((tmp_path / "robustness.json").read_text())
    assert [row["world"] for row in results["worlds"]] == [world.name for world in WORLDS]
    assert results["summary"]["survival"] == 1
    assert (tmp_path / "robustness.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main([*argv, "--json", "--worlds", "nominal,noise"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["world"] for row in told["worlds"]] == ["nominal", "noise"]


# --- bad input ----------------------------------------------------------------------------------


def test_bad_input(policy, exported, tmp_path, capsys, monkeypatch):
    other = save_random(tmp_path / "pole.npz", "CartpoleBalance")
    (tmp_path / "broken.onnx").write_bytes(b"no such thing")
    (tmp_path / "folder.onnx").mkdir()
    shutil.copy(exported, tmp_path / "lonely.onnx")
    shutil.copy(exported, tmp_path / "cut.onnx")
    shutil.copy(exported, tmp_path / "old.onnx")
    change(tmp_path / "cut.onnx", lambda texts: texts.pop("inputs"))
    change(tmp_path / "old.onnx", put("format_version", 0))
    plain = tmp_path / "plain.onnx"
    assert cli.main(["export", str(policy), "--out", str(plain)]) == 0
    shutil.copy(exported, tmp_path / "junk.onnx")
    (tmp_path / "junk.trace.npz").write_bytes(b"PK")
    monkeypatch.chdir(tmp_path)
    for line, said in [
        ("export", "nothing to export: name a run or a policy"),
        ("export --controller", "nothing to export: name a run or a policy"),
        (f"export {policy} --with-model", "--with-model belongs to --controller"),
        (f"export {policy} --controler", "did you mean '--controller'?"),
        (f"export {policy} --controller --out no/c.onnx", "no is not a folder"),
        (f"export {policy} --controller --out c.npz", "a controller is an .onnx file"),
        (f"export {policy} --controller --out folder.onnx", "folder.onnx is a folder"),
        (f"export {other} --controller", "no controller can be written for CartpoleBalance"),
        (f"export {policy} --check plain.onnx", "leave the rest away"),
        ("export --check no.onnx", "cannot read no.onnx: No such file"),
        ("export --check broken.onnx", "no ONNX file"),
        ("export --check plain.onnx", "plain.onnx is no controller"),
        ("export --check lonely.onnx", "cannot read lonely.trace.npz"),
        ("export --check junk.onnx", "junk.trace.npz is no trace"),
        ("export --check cut.onnx", "its metadata has no inputs"),
        ("export --check old.onnx", "format version 0"),
        (f"robustness {exported} --worlds nominal,nois", "did you mean 'noise'?"),
        (f"robustness {exported} --worlds noise,noise", "names a world twice"),
        (f"robustness {exported} --episodes 0", "--episodes 0 is below 1"),
        (f"robustness {exported} --episodes 99999", "more than 65536 at once"),
        (f"robustness {exported} --seconds 0", "--seconds 0 is not above 0"),
        (f"robustness {exported} --seconds nan", "--seconds nan"),
        (f"robustness {exported} --seed -1", "--seed -1 is negative"),
        (f"robustness {exported} --out nowhere", "nowhere is not a folder"),
        (f"robustness {exported} --best", "--best chooses a run's checkpoint"),
        ("robustness plain.onnx", "plain.onnx is no controller"),
        (f"robustness {other}", "no controller can be written for CartpoleBalance"),
        ("robustness nothing/here", "is not a run"),
        ("robustnes x", "did you mean 'robustness'?"),
    ]:
        assert said in fails(line.split(), capsys), line
