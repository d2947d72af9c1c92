"""Parts of the observation that the actor does not see: order, names, mirror, controller."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtd3
from jaxtd3.cli.main import main
from jaxtd3.envs.hidden import HiddenEnv
from jaxtd3.envs.playground.layout import observation_layout
from jaxtd3.envs.playground.mirror import mirror_of, read_mirror, reflect
from jaxtd3.errors import UserError
from jaxtd3.run.policy import save_policy

T1 = "T1JoystickFlatTerrain"


@functools.cache
def robot():
    return jaxtd3.make_env(jaxtd3.EnvConfig(T1, num_envs=2, physics_threads=1)).env


@functools.cache
def blind():
    return HiddenEnv(robot(), ("linvel", "gravity"))


def test_hidden_parts_follow_the_visible_ones():
    whole, part = robot().spec, blind().spec
    assert (part.obs_size, part.width) == (whole.obs_size - 6, whole.width)
    names = [p.name for p in observation_layout(blind())]
    assert names == [
        p.name for p in observation_layout(robot()) if p.name not in ("linvel", "gravity")
    ]
    named = [p.name for p in observation_layout(blind(), privileged=True)]
    assert named[len(names) : len(names) + 2] == ["linvel", "gravity"]

    state, obs = jax.jit(robot().reset)(jax.random.key(0))
    _, seen = jax.jit(blind().reset)(jax.random.key(0))
    for p in observation_layout(blind(), privileged=True):
        own = next(q for q in observation_layout(robot(), privileged=True) if q.name == p.name)
        np.testing.assert_array_equal(seen[p.start : p.stop], obs[own.start : own.stop])
    action = jnp.full(part.action_size, 0.1)
    out, ours = jax.jit(robot().step)(state, action), jax.jit(blind().step)(state, action)
    np.testing.assert_array_equal(ours.obs, out.obs[np.asarray(part.order)])
    assert float(ours.reward) == float(out.reward)


def test_the_actor_does_not_see_them_and_the_critic_does():
    spec = blind().spec
    cfg = jaxtd3.AgentConfig(actor_hidden=16, critic_hidden=16)
    agent = jaxtd3.fast_td3(spec, cfg)
    state = agent.init(jax.random.key(0))
    obs = jax.random.normal(jax.random.key(1), (3, spec.width))
    other = obs.at[:, spec.obs_size :].add(5.0)
    np.testing.assert_array_equal(agent.act(state, obs), agent.act(state, other))
    assert spec.critic_obs(obs).shape[-1] == spec.width


def test_the_mirror_image_follows_the_order():
    whole, part = read_mirror(robot()), mirror_of(blind())
    x = np.random.default_rng(0).normal(size=(4, robot().spec.width)).astype(np.float32)
    order = np.asarray(blind().spec.order)
    np.testing.assert_array_equal(
        reflect(part.obs, jnp.asarray(x[:, order])), reflect(whole.obs, jnp.asarray(x))[:, order]
    )
    assert part.labels[blind().spec.obs_size] == "linvel"


@pytest.mark.parametrize(
    ("env", "names", "said"),
    [
        (T1, "linvl", "did you mean 'linvel'"),
        (T1, "true_linvel", "unknown part of the observation"),
        ("CartpoleBalance", "linvel", "have no names to hide by"),
        (T1, "linvel,linvel", "name each part once"),
        (T1, ",", "name each part once"),
    ],
)
def test_what_cannot_be_hidden_is_refused(env, names, said, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["train", "--env", env, "--actor-hides", names, "--run-dir", str(run)]
    assert main(words) == 2
    err = capsys.readouterr().err.strip()
    assert said in err
    assert "Traceback" not in err
    assert not run.exists()


def test_nothing_is_left():
    everything = tuple(p.name for p in observation_layout(robot()))
    with pytest.raises(UserError, match="nothing is left"):
        HiddenEnv(robot(), everything)


def test_a_controller_without_what_is_hidden(tmp_path, capsys):
    config = jaxtd3.preset(T1, profile="cpu", actor_hides="linvel", actor_hidden=16)
    env = jaxtd3.make_env(config.env)
    agent = jaxtd3.fast_td3(env.spec, config.agent)
    policy = tmp_path / "blind.npz"
    save_policy(policy, agent.init(jax.random.key(0)), config, {})
    out = tmp_path / "controller.onnx"
    assert main(["export", str(policy), "--controller", "--out", str(out)]) == 0
    assert main(["export", "--check", str(out)]) == 0
    import onnx

    about = {p.key: p.value for p in onnx.load(out).metadata_props}
    assert json.loads(about["hidden"]) == ["linvel"]
    assert "linvel" not in [i.name for i in onnx.load(out).graph.input]
    capsys.readouterr()
