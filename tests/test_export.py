"""The ONNX policy: equal to JAX's, with what a controller must know."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtd3
from jaxtd3.core.types import EnvSpec
from jaxtd3.output import onnx as export
from jaxtd3.output import onnx_layers

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

SPEC = EnvSpec("Toy", obs_size=5, action_size=2, episode_length=10, extra_size=3, dt=0.02)
CFG = jaxtd3.AgentConfig(actor_hidden=32, critic_hidden=32)


def make_state(cfg: jaxtd3.AgentConfig = CFG, spec: EnvSpec = SPEC):
    """An agent with statistics far from 0 and 1, and a last layer that is not tiny."""
    state = jaxtd3.fast_td3(spec, cfg).init(jax.random.key(0))
    stats = state.obs_stats._replace(
        mean=jnp.linspace(-30.0, 30.0, spec.width), var=jnp.linspace(0.01, 9.0, spec.width)
    )
    actor = jax.tree.map(
        lambda x: x + 0.01 * jnp.arange(x.size).reshape(x.shape) / x.size, state.actor
    )
    if "out" in actor:
        actor["out"] = jax.tree.map(lambda x: 20 * x, actor["out"])
    return state.replace(obs_stats=stats, actor=actor)


def run(path, obs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["obs"]
    assert session.get_inputs()[0].shape == ["batch", SPEC.obs_size]
    return session.run(["continuous_actions"], {"obs": obs})[0]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"normalize_obs": False},
        {"compute": "bf16"},
        {"activation": "elu"},
        {"activation": "silu", "layer_norm": True},
        {"network": "simnorm", "simnorm_groups": 3, "simnorm_dim": 4},
        {"network": "simbav2", "actor_blocks": 2},
    ],
)
def test_equals_jax(tmp_path, change):
    cfg = replace(CFG, **change)
    state, path = make_state(cfg), tmp_path / "policy.onnx"
    error = export.export_onnx(SPEC, state, cfg, path)
    assert error < 1e-5
    stats = state.obs_stats
    noise = np.random.default_rng(1).normal(size=(7, SPEC.width))
    obs = np.float32(np.asarray(stats.mean) + noise * np.sqrt(np.asarray(stats.var)))
    got = run(path, obs[:, : SPEC.obs_size])
    expected = jaxtd3.fast_td3(SPEC, replace(cfg, compute="f32")).act(state, jnp.asarray(obs))
    assert got.shape == (7, 2)
    assert np.std(got, axis=0).min() > 0.01  # it does depend on the observation
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert [p.name for p in tmp_path.iterdir()] == ["policy.onnx"]


def test_a_wrong_policy_is_not_written(tmp_path, monkeypatch):
    honest = onnx_layers.dense_layers
    swapped = lambda actor: [(k, b + 0.1) for k, b in honest(actor)]  # noqa: E731
    monkeypatch.setattr(onnx_layers, "dense_layers", swapped)
    with pytest.raises(jaxtd3.UserError, match="nothing written"):
        export.export_onnx(SPEC, make_state(), CFG, tmp_path / "policy.onnx")
    assert not list(tmp_path.iterdir())


def test_metadata(tmp_path):
    env = jaxtd3.make_env(jaxtd3.EnvConfig(name="CartpoleBalance", num_envs=2))
    state = make_state(spec=env.spec)
    export.export_onnx(env, state, CFG, tmp_path / "p.onnx", {"run": "a", "iterations": 7})
    props = {p.key: p.value for p in onnx.load(tmp_path / "p.onnx").metadata_props}
    assert props["env"] == "CartpoleBalance"
    assert props["run"] == "a"
    assert {k: json.loads(v) for k, v in props.items() if k not in ("env", "run")} == {
        "obs_size": 5,
        "history": 1,
        "action_size": 1,
        "dt": 0.01,
        "actuator_names": ["slide"],
        "joint_names": ["slider"],
        "iterations": 7,
    }


def test_metadata_of_a_robot():
    class Robot:
        spec = SPEC
        default_pose = jnp.array([0.5, -0.25])
        action_scale = 0.5

    env = jaxtd3.BatchEnv(SPEC, Robot(), 1, *[None] * 5)
    known = export.describe(env)
    assert known["default_pose"] == [0.5, -0.25]
    assert known["action_scale"] == 0.5


def test_unknown_actor(tmp_path):
    state = make_state()
    state = state.replace(actor={"block0": {}, "out": {}})
    with pytest.raises(jaxtd3.UserError, match="dense layers only"):
        export.export_onnx(SPEC, state, CFG, tmp_path / "p.onnx")


def test_library_missing(tmp_path, monkeypatch):
    honest = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "onnxruntime":
            raise ImportError("no", name=name)
        return honest(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(jaxtd3.UserError, match=r'onnxruntime is missing: .*"jaxtd3\[export\]"'):
        export.export_onnx(SPEC, make_state(), CFG, tmp_path / "p.onnx")
