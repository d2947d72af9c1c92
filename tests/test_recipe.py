"""`--recipe`: stages in one folder, resumed at any moment with the same bits; delayed actions."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtd3
from jaxtd3.cli import main as cli
from jaxtd3.cli import recipe
from jaxtd3.cli.main import Train
from jaxtd3.config.presets import RECIPES, Stage
from jaxtd3.envs.batch import undisturbed
from jaxtd3.envs.physics.late import Late, LatePhysics, arriving
from jaxtd3.output.logs import read_rows
from jaxtd3.run import artifacts, session
from test_cli import fails
from test_trainer import TINY

T1 = "T1JoystickRoughTerrain"
SMALL = (
    Stage("flat", "at first", 0.5, {"warmup": 4}),
    Stage("all", "then", 0.5, {"gamma": 0.9, "actor_lr": 1e-4}),
)


# --- the plan -----------------------------------------------------------------------------------


def test_the_stages_of_a_humanoid(tmp_path):
    args = Train(env=T1, profile="cpu")
    given = {"iterations": 1000, "action_delay": 0.02, "log_every": 50}
    first, last = (recipe.plan_stage(args, given, "deploy", i, tmp_path) for i in (0, 1))
    assert (first.config.env.name, last.config.env.name) == ("T1JoystickFlatTerrain", T1)
    assert (first.folder, last.folder) == (tmp_path / "flat", tmp_path)
    assert (first.config.run.iterations, last.config.run.iterations) == (600, 400)
    quiet, hard = first.config.env, last.config.env
    assert (quiet.randomize, quiet.push, quiet.action_delay) == (False, False, 0.02)  # as asked
    assert (hard.randomize, hard.push, hard.action_delay) == (True, True, 0.02)
    assert (quiet.sim_dt, hard.sim_dt) == (0.004, None)  # a randomised robot needs its own step
    assert jaxtd3.preset(T1, profile="cpu", randomize=True, sim_dt=0.004).env.sim_dt == 0.004
    assert last.config.agent.actor_lr < first.config.agent.actor_lr
    assert last.config.env.weights == first.config.env.weights
    preset = jaxtd3.preset(T1, profile="cpu")
    by_preset = recipe.plan_stage(args, {}, "deploy", 1, tmp_path).config
    assert by_preset.run.iterations == pytest.approx(0.4 * preset.run.iterations, abs=50)
    assert by_preset.env.action_delay == RECIPES["deploy"][1].changes["action_delay"]
    assert not list(tmp_path.iterdir())


# --- runs ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small(monkeypatch, bare_ends):
    """Two stages that any environment has."""
    monkeypatch.setitem(RECIPES, "small", SMALL)


def train(run_dir, *more) -> dict:
    assert cli.main(["train", "--run-dir", str(run_dir), *more]) == 0
    path = run_dir / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


START = [*TINY, "--recipe", "small", "--iterations", "80", "--eval-every", "20"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A recipe that nothing interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "small", SMALL)
        patch.setattr(artifacts, "make_report", lambda run_dir: None)
        run_dir = tmp_path_factory.mktemp("recipe") / "run"
        return run_dir, train(run_dir, *START)


def test_the_second_stage_has_the_first_ones_weights(whole):
    run_dir, summary = whole
    first = json.loads((run_dir / "flat" / "summary.json").read_text())
    assert (first["status"], first["iterations"]) == ("completed", 40)
    assert (summary["status"], summary["iterations"]) == ("completed", 40)
    assert summary["first_return"] == first["best_return"]  # the same episodes
    configs = [json.loads((d / "config.json").read_text()) for d in (run_dir / "flat", run_dir)]
    assert [c["agent"]["gamma"] for c in configs] == [0.99, 0.9]
    assert jaxtd3.load(run_dir).config.agent.gamma == 0.9  # every command takes the folder
    assert read_rows(run_dir / "metrics.jsonl")[-1]["iteration"] == 40


def interrupt_at(monkeypatch, iteration, gamma):
    """As Ctrl-C would, in the stage of that gamma."""
    over = session.Session.over

    def stopped(self, stop):
        here = self.config.agent.gamma == gamma and self.iteration >= iteration
        return "interrupted" if here else over(self, stop)

    monkeypatch.setattr(session.Session, "over", stopped)


@pytest.mark.parametrize(
    ("iteration", "gamma"), [(20, 0.99), pytest.param(20, 0.9, marks=pytest.mark.slow)]
)
def test_an_interrupted_recipe_goes_on_with_the_same_bits(
    whole, iteration, gamma, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        interrupt_at(patch, iteration, gamma)
        train(tmp_path / "run", *START)
    assert (tmp_path / "run" / "config.json").exists() == (gamma == 0.9)
    summary = train(tmp_path / "run", "--resume", "--no-video", "--quiet")
    assert summary["state_sha256"] == whole[1]["state_sha256"]


def test_a_recipe_killed_between_its_stages_goes_on(whole, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole[0], run_dir)
    for path in run_dir.iterdir():
        if path.name != "flat" and not path.name.startswith("stage-"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = (run_dir / "flat" / "summary.json").stat().st_mtime_ns
    summary = train(run_dir, "--resume", *START)
    assert summary["state_sha256"] == whole[1]["state_sha256"]
    assert (run_dir / "flat" / "summary.json").stat().st_mtime_ns == before


def test_bad_input(whole, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole[0] / "flat", tmp_path / "plain")
    cart = "train --env CartpoleBalance --profile cpu --recipe deploy"
    for line, said in [
        ("train --env Pendulum --recipe deplyo", "did you mean 'deploy'?"),
        ("train --env Pendulum --recipe deploy --init-from x", "leave --init-from away"),
        ("train --env Pendulum --recipe deploy --resume-from x", "leave --resume-from away"),
        ("train --env Pendulum --recipe deploy --resume", "--resume needs --run-dir"),
        ("train --env Pendulum --profile cpu --recipe deploy", "no delay of actions"),
        ("train --env Pendulum --profile cpu --action-delay 0.02", "no delay of actions"),
        ("train --env Pendulum --profile cpu --action-delay -1", "action_delay=-1.0"),
        ("train --env Pendulum --profile cpu --best robst", "did you mean 'robust'?"),
        ("train --recipe deploy", "--env is missing"),
        ("train --recipe deploy --env Pendulumm", "did you mean 'Pendulum'?"),
        ("train --recipe deploy --resume --run-dir plain", "was not begun with --recipe"),
        (f"train --env Pendulum --recipe deploy --run-dir {whole[0]}", "is not empty"),
        (cart, "has no pushes"),
        ("sweep --env Pendulum --profile cpu --best robust --grid angle=1,2", "--best return"),
        ("train --env Pendulum --profile cpu --best robust", "--best robust: no controller"),
    ]:
        assert said in fails(line.split(), capsys), line


# --- delayed actions ----------------------------------------------------------------------------


def test_a_delay_is_a_mixture_of_neighbours():
    ages = jnp.array([[0.0], [10.0], [20.0]])  # by age in control steps
    for delay, arrives in ((0.0, 0.0), (0.25, 2.5), (1.0, 10.0), (1.5, 15.0), (2.0, 20.0)):
        late = Late(jnp.float32(delay), ages[1:])
        np.testing.assert_allclose(arriving(late, ages[0]), [arrives], atol=1e-6)


def test_physics_is_stepped_once_per_action():
    late = Late(jnp.float32(1.0), jnp.array([[1.0], [2.0]]))
    inner = SimpleNamespace(name="fake", step=lambda model, data, ctrl, substeps: ctrl)
    physics = LatePhysics(inner, late, "Robot")
    with pytest.raises(jaxtd3.UserError, match="Robot does not step its physics"):
        _ = physics.after
    np.testing.assert_allclose(physics.step(None, None, jnp.array([5.0])), [1.0])
    np.testing.assert_allclose(physics.after.sent, [[5.0], [1.0]])
    with pytest.raises(jaxtd3.UserError, match="Robot steps its physics twice"):
        physics.step(None, None, jnp.array([5.0]))


def test_a_delayed_environment_does_what_it_was_told_before():
    """With a delay of one step, the physics of step t + 1 is that of step t without a delay."""
    make = lambda delay: jaxtd3.make_env(  # noqa: E731
        jaxtd3.preset("CartpoleBalance", profile="cpu", num_envs=1, action_delay=delay).env
    )
    prompt, delayed = make(0.0).env, make(0.02).env
    state, obs = delayed.reset(jax.random.key(1))
    assert 0 <= state.late.delay <= 0.02 / delayed.spec.dt
    state = state._replace(late=state.late._replace(delay=jnp.float32(1.0)))
    plain = state._replace(late=None)
    actions = [jnp.array([x]) for x in (0.9, -0.5, 0.7, 0.2)]
    step, plain_step = jax.jit(delayed.step), jax.jit(prompt.step)
    for now, before in zip(actions, [jnp.zeros(1), *actions], strict=False):
        late, expected = step(state, now), plain_step(plain, before)
        np.testing.assert_allclose(late.obs, expected.obs, atol=1e-6)
        assert np.abs(late.obs - plain_step(plain, now).obs).max() > 1e-5  # the test can tell
        state, plain = late.state, expected.state


def test_evaluation_has_no_delay():
    config = jaxtd3.preset("CartpoleBalance", profile="cpu", action_delay=0.02)
    assert undisturbed(config.env).action_delay == 0
