"""The controller file against the training environment, in plain C MuJoCo."""

from __future__ import annotations

import functools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from mujoco_playground import registry

import jaxtd3
from jaxtd3.agent.td3 import fast_td3
from jaxtd3.core.types import EnvSpec
from jaxtd3.deploy.controller import describe_controller
from jaxtd3.deploy.controller_onnx import build_controller
from jaxtd3.deploy.robot import describe_robot, fallen, find_places, load_robot, read_sensors
from jaxtd3.deploy.runtime import Controller
from jaxtd3.envs.playground.adapter import load_playground
from jaxtd3.envs.registry import observed

pytest.importorskip("onnxruntime")
G1, T1 = "G1JoystickFlatTerrain", "T1JoystickFlatTerrain"
CFG = jaxtd3.AgentConfig(actor_hidden=64, critic_hidden=32, layer_norm=True)
HIDDEN = ("linvel",)


@functools.cache
def quiet_env(name, bounds="scale"):
    """The training environment without observation noise."""
    config = registry.get_default_config(name)
    config.noise_config.level = 0.0
    with mock.patch.object(registry, "get_default_config", return_value=config):
        return load_playground(
            jaxtd3.EnvConfig(name=name, impl="native", physics_threads=1, action_bounds=bounds)
        )


@functools.cache
def robot(name):
    return load_robot(name)


def random_agent(spec, cfg=CFG):
    """An untrained policy whose actions are not small, with statistics that are not 0 and 1."""
    state = fast_td3(spec, cfg).init(jax.random.key(3))
    keys = jax.random.split(jax.random.key(4), 2)
    stats = state.obs_stats._replace(
        mean=0.1 * jax.random.normal(keys[0], (spec.frame_width,)),
        var=jax.random.uniform(keys[1], (spec.frame_width,), minval=0.5, maxval=4.0),
    )
    actor = dict(state.actor)
    actor["out"] = jax.tree.map(lambda x: 10 * x, actor["out"])
    return state.replace(obs_stats=stats, actor=actor)


def seen_by_actor(env, hidden, history):
    """As `--actor-hides` and `--history` make it of an environment."""
    cfg = jaxtd3.EnvConfig(env.spec.name, actor_hides=",".join(hidden), history=history)
    return observed(env, cfg)


@pytest.mark.parametrize(
    ("name", "bounds", "hidden", "history"),
    [
        (G1, "scale", (), 1),
        (T1, "limits", HIDDEN, 3),
        pytest.param(T1, "scale", (), 1, marks=pytest.mark.slow),
        pytest.param(G1, "limits", HIDDEN, 3, marks=pytest.mark.slow),
    ],
)
def test_the_controller_acts_as_the_policy_in_training(name, bounds, hidden, history):
    """1000 steps: the controller drives plain C MuJoCo by its own state and the sensors of MjData;
    the training environment takes the same actions from the same positions and velocities, and
    observes, keeps its gait's clock and notes actions by itself. (Left to themselves, two
    simulations part: rounding differs, and contacts let differences grow.)"""
    env = seen_by_actor(quiet_env(name, bounds), hidden, history)
    spec = env.spec
    agent_state = random_agent(spec)
    about = describe_controller(
        describe_robot(name, env.unwrapped), spec, env.bounds, hidden, history
    )
    controller = Controller(
        build_controller(about, spec, jax.device_get(agent_state), CFG, env.bounds)
    )
    agent, step = fast_td3(spec, CFG), jax.jit(env.step)
    policy = jax.jit(lambda obs: agent.act(agent_state, obs[None])[0])

    model = env.unwrapped.mj_model
    data, places = mujoco.MjData(model), find_places(about, model)
    inner, obs = jax.jit(env.reset)(jax.random.key(0))
    first = inner.state
    data.qpos[:], data.qvel[:] = first.data.qpos, first.data.qvel
    data.ctrl[:] = first.data.qpos[7:]
    mujoco.mj_forward(model, data)
    frequency = np.asarray(first.info["phase_dt"]) / (2 * math.pi * env.spec.dt)
    frequency = frequency.reshape(1, 1).astype(np.float32)
    seen_command = np.asarray(first.info["command"])
    commands = [[0.5, 0, 0], [0, 0, 0], [0.0, -0.3, 0.8], [-0.6, 0.2, 0.0]]

    state, errors, actions, falls = controller.start(), [], [], []
    for i in range(1000):
        sensors = {k: x[None] for k, x in read_sensors(places, data).items()}
        inputs = {**sensors, "command": seen_command[None], "gait_frequency": frequency}
        out, state = controller.step(inputs, state)
        action = policy(obs)
        reach = [np.abs(about[k]) / about["action_scale"] for k in ("action_low", "action_high")]
        given = out["action"][0]  # in the environment's own units
        given = np.where(given > 0, given / reach[1], given / reach[0]).astype(np.float32)
        errors.append(np.abs(given - action).max())
        actions.append(given)

        command = jnp.asarray(commands[i // 130 % len(commands)], jnp.float32)
        upright(model, data, first)  # before both take their step
        here = inner.state
        held = {"qpos": data.qpos, "qvel": data.qvel, "qacc_warmstart": data.qacc_warmstart}
        for x in held.values():
            x[:] = x.astype(np.float32)  # what the environment keeps of a state
        held = {k: jnp.asarray(x, jnp.float32) for k, x in held.items()}
        held = {k: x for k, x in held.items() if getattr(here.data, k) is not None}
        info = {**here.info, "command": command}
        inner = inner._replace(state=here.replace(data=here.data.replace(**held), info=info))
        data.ctrl[:] = out["joint_targets"][0]
        mujoco.mj_step(model, data, env.unwrapped.n_substeps)
        after = step(inner, given)
        inner, obs, seen_command = after.state, after.obs, np.asarray(command)
        falls.append(bool(after.terminated))
        assert bool(fallen(places, data)) == falls[-1]
    assert 0 < sum(falls) < 1000
    assert np.std(actions, axis=0).min() > 0.005
    assert max(errors) < 1e-4, (int(np.argmax(errors)), max(errors))


def upright(model, data, first):
    """Put a robot that fell back on its feet; its controller goes on."""
    w, x, y, z = data.qpos[3:7]
    if 1 - 2 * (x * x + y * y) < -0.3:  # well after the environment calls it a fall
        mujoco.mj_resetData(model, data)
        data.qpos[:] = first.data.qpos
        mujoco.mj_forward(model, data)


@pytest.mark.parametrize("name", [G1, T1])
def test_falls_are_the_environments(name):
    """In any pose: lying, standing, legs crossed."""
    env = robot(name)
    model, about = env.mj_model, describe_robot(name, env)
    data, places = mujoco.MjData(model), find_places(about, model)
    rng, seen = np.random.default_rng(0), []
    for i in range(200):
        data.qpos[:] = model.key(about["keyframe"]).qpos
        data.qpos[7:] = rng.uniform(*model.jnt_range[1:].T)
        if i % 2:
            data.qpos[3:7] = rng.normal(size=4)
        mujoco.mj_forward(model, data)
        over = bool(env._get_termination(data))
        seen.append((over, bool(data.sensordata[places.up][2] < 0)))
        assert bool(fallen(places, data)) == over
    assert {(False, False), (True, True)} <= set(seen)
    assert ((True, False) in seen) == (name == G1)  # its legs may not touch


def test_bad_poses_are_falls():
    env = robot(T1)
    about = describe_robot(T1, env)
    data, places = mujoco.MjData(env.mj_model), find_places(about, env.mj_model)
    mujoco.mj_forward(env.mj_model, data)
    assert not fallen(places, data)
    data.qvel[3] = np.nan
    assert fallen(places, data)


def test_what_is_no_controller_is_refused():
    about = describe_robot(T1, robot(T1))
    spec = EnvSpec(T1, 85, 23, 1000, dt=0.02)
    with pytest.raises(jaxtd3.UserError, match="did you mean 'linvel'"):
        describe_controller(about, spec, hidden=("linvell",))
    with pytest.raises(jaxtd3.UserError, match="3 x 85 observed numbers are not the 85"):
        describe_controller(about, spec, history=3)
    known = describe_controller(about, spec)
    state = random_agent(spec).replace(actor={"block0": {}, "out": {}})
    with pytest.raises(jaxtd3.UserError, match="dense layers only"):
        build_controller(known, spec, jax.device_get(state), CFG)
    with pytest.raises(jaxtd3.UserError, match="no controller can be written for Go1"):
        load_robot("Go1JoystickFlatTerrain")


@pytest.mark.parametrize("name", [G1, T1])
def test_the_gait_is_drawn_from_the_range_that_is_told(name):
    env = quiet_env(name)
    info = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 200))[0].state.info
    found = np.asarray(info["phase_dt"]) / (2 * math.pi * env.spec.dt)
    gait = describe_robot(name, env.unwrapped)["gait"]
    assert found.min() >= gait["frequency_low"] - 1e-5
    assert found.max() <= gait["frequency_high"] + 1e-5
    assert np.ptp(found) > 0.9 * (gait["frequency_high"] - gait["frequency_low"])
    np.testing.assert_allclose(info["phase"], np.tile(gait["start"], (200, 1)), rtol=1e-6)
