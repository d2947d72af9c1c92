"""A policy as an ONNX file, for a robot's controller: observation in, action out, nothing else.

`continuous_actions = tanh(net((obs - mean) / (std + 0.01)))`: input and output are named as in
Playground's own deployments. The file says in its metadata which joints the actions drive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from jaxtd3.agent.td3 import fast_td3
from jaxtd3.config.sections import AgentConfig
from jaxtd3.core.types import Array, BatchEnv, EnvSpec
from jaxtd3.durable import write_whole
from jaxtd3.envs.playground.bounds import Bounds, stretch
from jaxtd3.errors import UserError
from jaxtd3.output.onnx_layers import Graph, write_actor

INPUT, OUTPUT = "obs", "continuous_actions"
SAMPLES = 1000
TOLERANCE = 1e-4
OPSET, IR = 17, 8  # old enough for the runtimes that robots carry


def export_onnx(
    env_or_spec: BatchEnv | EnvSpec,
    agent_state: Any,
    agent_cfg: AgentConfig,
    out: Path | str,
    metadata: Mapping[str, Any] | None = None,
) -> float:
    """Write the deterministic policy; the largest difference from JAX over 1000 observations.

    `metadata` adds to what the environment tells; values that are not strings become JSON.
    """
    onnx, runtime = _libraries()
    spec = env_or_spec if isinstance(env_or_spec, EnvSpec) else env_or_spec.spec
    out = Path(out)
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is not a folder")
    agent_state = jax.device_get(agent_state)
    bounds = None if isinstance(env_or_spec, EnvSpec) else getattr(env_or_spec.env, "bounds", None)
    model = build(onnx, spec, agent_state, agent_cfg, bounds)
    known = describe(env_or_spec) | dict(metadata or {})
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in known.items()}
    onnx.helper.set_model_props(model, texts)
    onnx.checker.check_model(model, full_check=True)
    error = compare(runtime, model.SerializeToString(), spec, agent_state, agent_cfg, bounds)
    if not error <= TOLERANCE:
        raise UserError(f"the exported policy differs from JAX's by {error:.1e}: nothing written")
    write_whole(out, model.SerializeToString())
    return error


def _libraries() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise UserError(f'{error.name} is missing: pip install "jaxtd3[export]"') from error
    return onnx, onnxruntime


def build(
    onnx: Any, spec: EnvSpec, agent_state: Any, cfg: AgentConfig, bounds: Bounds | None = None
) -> Any:
    """The ONNX model of the actor, normalisation included; `bounds`: what its actions stand for."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = Graph(onnx, INPUT)
    if cfg.normalize_obs:
        stats = agent_state.obs_stats
        mean, var = (np.asarray(spec.actor_obs(spec.repeated(x))) for x in stats[:2])
        graph.then("Sub", mean)
        graph.then("Div", np.sqrt(var) + np.float32(0.01))
    write_actor(graph, agent_state.actor, cfg)
    if bounds is None:
        graph.then("Tanh", name=OUTPUT)
    else:
        action = graph.then("Tanh")
        above = graph.add("Mul", graph.add("Relu", action), bounds.up)
        below = graph.add("Mul", graph.add("Relu", graph.add("Neg", action)), bounds.down)
        graph.add("Sub", above, below, name=OUTPUT)

    ends = [
        helper.make_tensor_value_info(label, kind, ["batch", size])
        for label, size in ((INPUT, spec.obs_size), (OUTPUT, spec.action_size))
    ]
    policy = helper.make_graph(graph.nodes, "policy", ends[:1], ends[1:], graph.weights)
    opset = [helper.make_opsetid("", OPSET)]
    return helper.make_model(policy, opset_imports=opset, ir_version=IR, producer_name="jaxtd3")


def describe(env_or_spec: BatchEnv | EnvSpec) -> dict[str, Any]:
    """What a controller must know: sizes and time step; joints, pose and scale of robots."""
    spec = env_or_spec if isinstance(env_or_spec, EnvSpec) else env_or_spec.spec
    known: dict[str, Any] = {
        "env": spec.name,
        "obs_size": spec.obs_size,
        "history": spec.history,
        "action_size": spec.action_size,
        "dt": spec.dt,
    }
    if isinstance(env_or_spec, EnvSpec):
        return known
    env: Any = env_or_spec.env
    if getattr(env, "mj_model", None) is not None:
        known |= _joints(env.mj_model)
    pose, scale = getattr(env, "default_pose", None), getattr(env, "action_scale", None)
    if pose is not None:
        known["default_pose"] = np.asarray(pose, float).tolist()
    if scale is not None:
        known["action_scale"] = np.asarray(scale, float).tolist()
    return known


def _joints(model: mujoco.MjModel) -> dict[str, list[str]]:
    """Names of the actuators in the order of the actions, and of the joints that they drive."""
    names = {"actuator_names": [model.actuator(i).name for i in range(model.nu)]}
    if np.all(model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT):
        names["joint_names"] = [model.joint(i).name for i in model.actuator_trnid[:, 0]]
    return names


def compare(
    runtime: Any,
    model: bytes,
    spec: EnvSpec,
    agent_state: Any,
    cfg: AgentConfig,
    bounds: Bounds | None = None,
) -> float:
    """Largest |ONNX - JAX| over observations drawn from the run's statistics."""
    agent = fast_td3(spec, replace(cfg, compute="f32"))  # what the parameters mean, unrounded
    stats = agent_state.obs_stats
    noise = np.random.default_rng(0).standard_normal((SAMPLES, spec.width), np.float32)
    mean, var = (np.asarray(spec.repeated(x)) for x in (stats.mean, stats.var))
    obs = np.asarray(mean + np.sqrt(var) * noise, np.float32)

    @jax.jit
    def act(state: Any, obs: Array) -> Array:
        action = agent.act(state, obs)
        return action if bounds is None else stretch(bounds, action)

    with jax.default_matmul_precision("highest"):
        expected = act(agent_state, jnp.asarray(obs))
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (got,) = session.run([OUTPUT], {INPUT: obs[:, : spec.obs_size]})
    return float(np.max(np.abs(got - np.asarray(expected))))
