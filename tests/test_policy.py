"""Policies as small files: what is written acts as before, what is foreign is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtd3
from jaxtd3.cli.main import main
from jaxtd3.envs.metrics import walks
from jaxtd3.errors import UserError
from jaxtd3.run import policy
from jaxtd3.run.load import load as load_trained

README = Path(__file__).parent.parent / "README.md"
SIZES = {"actor_hidden": 8, "critic_hidden": 8, "num_envs": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file, the settings and the agent's state that it was made of."""
    config = jaxtd3.preset("Pendulum", profile="cpu", **SIZES)
    agent = jaxtd3.fast_td3(jaxtd3.Pendulum.spec, config.agent)
    state = agent.init(jax.random.key(3))
    state = state.replace(obs_stats=state.obs_stats._replace(mean=jnp.array([0.1, -0.2, 0.3])))
    path = tmp_path_factory.mktemp("policy") / "swing.npz"
    policy.save_policy(path, state, config, {"note": "made for a test"})
    return path, config, agent, state


def changed(path, out, **arrays):
    """A copy of a policy file with some arrays replaced, or (None) left out."""
    with np.load(path) as file:
        found = {name: file[name] for name in file.files} | arrays
    np.savez(out, **{name: x for name, x in found.items() if x is not None})
    return out


def test_a_saved_policy_acts_as_before(saved):
    path, config, agent, state = saved
    trained = load_trained(path)
    obs = jnp.linspace(-1, 1, 12).reshape(4, 3)
    np.testing.assert_array_equal(trained.agent.act(trained.state, obs), agent.act(state, obs))
    assert trained.config.agent == config.agent
    assert trained.note == "made for a test"
    assert trained.source == "swing.npz"
    assert [p.name for p in path.parent.iterdir()] == ["swing.npz"]  # no part file is left


def test_foreign_and_broken_files_are_refused(saved, tmp_path):
    path, *_ = saved
    kernel = next(name for name in np.load(path).files if name.endswith("kernel"))
    bad = tmp_path / "bad.npz"

    def said(match):
        with pytest.raises(UserError, match=match):
            load_trained(bad)

    bad.write_bytes(path.read_bytes()[:-100])
    said("is no policy of jaxtd3")
    bad.write_bytes(b"not a zip")
    said("is no policy of jaxtd3")
    np.savez(bad, x=np.zeros(3))
    said("is no policy of jaxtd3")
    np.savez(bad, about=np.array(json.dumps({"kind": "another"})))
    said("is no policy of jaxtd3")
    np.savez(bad, about=np.array([{"kind": "pickled"}], dtype=object))
    said("is no policy of jaxtd3")
    changed(path, bad, **{kernel: np.zeros((2, 2), np.float32)})
    said("does not fit its own settings")
    changed(path, bad, **{kernel: None})
    said("does not fit its own settings")
    changed(path, bad, **{kernel: np.load(path)[kernel] * np.nan})
    said("is not finite")


@pytest.mark.parametrize("command", ["evaluate", "play", "render", "export"])
def test_a_file_has_no_best_checkpoint(saved, command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    free = ["--port", "0"] if command == "play" else []
    assert main([command, str(saved[0]), "--best", *free]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith("--best chooses a run's checkpoint: leave it away for a policy file")
    assert "\n" not in said


def test_names_of_shipped_policies(monkeypatch, saved, tmp_path):
    path, *_ = saved
    monkeypatch.setattr(policy, "SHIPPED", path.parent)
    monkeypatch.chdir(tmp_path)
    assert policy.shipped_names() == ("swing",)
    assert load_trained(type(path)("swing")).source == "swing.npz"
    with pytest.raises(UserError, match="did you mean 'swing'"):
        load_trained(type(path)("swin"))


@pytest.mark.parametrize("name", policy.shipped_names())
def test_shipped_policies_are_whole_and_small(name):
    path = policy.SHIPPED / f"{name}.npz"
    assert path.stat().st_size < 2 << 20
    found = policy.read_policy(path)
    assert found.about["note"]
    assert found.about["scores"]["eval/walks"] == 1
    assert found.about["scores"]["eval/falls"] == 0
    assert all(np.isfinite(x).all() for x in found.arrays.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "robot"), [("t1-flat", "T1"), ("g1-flat", "G1")])
def test_the_readme_tells_what_they_do(name, robot, capsys):
    """The command of README's table gives the figures of its row."""
    (row,) = re.findall(rf"^\| {robot} walks.*$", README.read_text(), re.MULTILINE)
    assert main(f"evaluate {name} --episodes 64 --seed 7 --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    for label, value in (("return {}", found["return"]), ("{} m/s", found["tracking_error_lin"])):
        (shown,) = re.findall(label.format(r"([\d.]+)"), row)
        assert abs(float(shown) - value) < 0.02 * value, label
    assert found["falls"] == 0
    assert found["walks"]


def test_the_verdict_walks():
    good = {
        "length": 980.0,
        "tracking_error_lin": 0.2,
        "tracking_error_ang": 0.25,
        "single_support": 0.5,
        "left_steps": 0.5,
    }
    assert walks(good) is True
    for name, value in {
        "length": 900.0,
        "tracking_error_lin": 0.3,
        "tracking_error_ang": 0.4,
        "single_support": 0.1,
        "left_steps": 0.9,
    }.items():
        assert walks(good | {name: value}) is False
    assert walks({"length": 1000.0}) is None
