"""Actions in units of the joints' limits."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import jaxtd3
from jaxtd3.envs.playground.adapter import load_playground
from jaxtd3.envs.playground.bounds import Bounds, joint_bounds, stretch
from jaxtd3.errors import UserError
from jaxtd3.output import onnx as export

ARM = """<mujoco><worldbody><body><joint name="a" range="-30 90"{limited}/><geom size="0.1"/>
  </body></worldbody><actuator>{actuator}</actuator></mujoco>"""
POSITION = '<position joint="a" kp="1"/>'


def arm(actuator=POSITION, limited="", pose=(0.0,)):
    model = mujoco.MjModel.from_xml_string(ARM.format(actuator=actuator, limited=limited))
    pose = None if pose is None else jnp.array(pose)
    return SimpleNamespace(mj_model=model, _default_pose=pose, _config={"action_scale": 0.5})


def test_the_whole_range_of_a_joint_and_nothing_else():
    bounds = joint_bounds("Arm", arm())
    reached = 0.5 * stretch(bounds, jnp.array([[-1.0], [0.0], [0.5], [1.0]]))
    np.testing.assert_allclose(reached[:, 0], np.deg2rad([-30, 0, 45, 90]), rtol=1e-6)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (arm(pose=None), "no default pose"),
        (arm(actuator='<motor joint="a"/>'), "no default pose"),
        (arm(limited=' limited="false"'), "joint a has no limits"),
        (arm(pose=(3.0,)), "beyond a joint's limits"),
    ],
)
def test_robots_without_them_are_refused(env, said):
    with pytest.raises(UserError, match=said):
        joint_bounds("Arm", env)


@functools.cache
def limited_t1():
    cfg = jaxtd3.EnvConfig(name="T1JoystickFlatTerrain", impl="native", action_bounds="limits")
    return load_playground(cfg)


def test_a_robot_is_driven_to_its_limits():
    env = limited_t1()
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    out = jax.jit(env.step)(state, jnp.ones(env.spec.action_size))
    targets = out.state.state.info["motor_targets"]
    joints = env.unwrapped.mj_model.actuator_trnid[:, 0]
    np.testing.assert_allclose(targets, env.unwrapped.mj_model.jnt_range[joints, 1], rtol=1e-5)


def test_the_exported_policy_speaks_in_the_robots_own_scale(tmp_path):
    pytest.importorskip("onnxruntime")
    spec = jaxtd3.Pendulum.spec
    cfg = jaxtd3.AgentConfig(actor_hidden=8, critic_hidden=8)
    state = jaxtd3.fast_td3(spec, cfg).init(jax.random.key(0))
    bounds = Bounds(np.array([0.0], np.float32), np.array([3.0], np.float32))
    env = SimpleNamespace(spec=spec, env=SimpleNamespace(bounds=bounds))
    assert export.export_onnx(env, state, cfg, tmp_path / "policy.onnx") < 1e-5
