"""The whole controller as one ONNX graph: sensors and state in, joint targets and new state out.

Inputs and outputs have a batch axis first. The state goes in as `NAME` and comes out as
`new_NAME`; `action` and `observation` come out as well, for whoever wants to look.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtd3.config.sections import AgentConfig
from jaxtd3.core.types import EnvSpec
from jaxtd3.deploy.controller import RAW, first_state, input_sizes, observation_size
from jaxtd3.envs.playground.bounds import Bounds
from jaxtd3.output.onnx import IR, OPSET, _libraries
from jaxtd3.output.onnx_layers import Graph, write_actor

TARGETS, ACTION, OBSERVATION = "joint_targets", "action", "observation"
f32 = np.float32


def build_controller(
    about: Mapping[str, Any],
    spec: EnvSpec,
    agent_state: Any,
    cfg: AgentConfig,
    bounds: Bounds | None = None,
) -> bytes:
    """The controller that `about` describes, with its metadata, as the bytes of an ONNX file."""
    onnx, _ = _libraries()
    helper, float_ = onnx.helper, onnx.TensorProto.FLOAT
    graph = Graph(onnx, "")
    observation = write_observation(graph, about)
    new_history = write_window(graph, about, observation)
    write_policy(graph, about, spec, agent_state, cfg, bounds)
    pose = np.asarray(about["default_pose"], f32)
    graph.add("Add", graph.add("Mul", ACTION, f32(about["action_scale"])), pose, name=TARGETS)
    write_state(graph, about)

    value = helper.make_tensor_value_info
    joints = len(about["joint_names"])
    state = {name: x.shape[1:] for name, x in first_state(about).items()}
    ins = {name: (size,) for name, size in input_sizes(about).items()} | state
    outs = {TARGETS: (joints,), ACTION: (joints,), OBSERVATION: (observation_size(about),)}
    outs |= {f"new_{name}": shape for name, shape in state.items()}
    assert bool(new_history) == ("history" in state)
    ends = [
        [value(name, float_, ["batch", *shape]) for name, shape in side.items()]
        for side in (ins, outs)
    ]
    made = helper.make_graph(graph.nodes, "controller", *ends, graph.weights)
    opset = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(made, opset_imports=opset, ir_version=IR, producer_name="jaxtd3")
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()}
    helper.set_model_props(model, texts)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def write_observation(graph: Graph, about: Mapping[str, Any]) -> str:
    """`controller.observe`: [B, D]."""
    pose = np.asarray(about["default_pose"], f32)
    made = {
        "joint_angles": lambda: graph.add("Sub", RAW["joint_angles"], pose),
        "last_act": lambda: graph.add("Gather", "actions", np.array(0), axis=1),
        "cos_phase": lambda: graph.add("Cos", "phase"),
        "sin_phase": lambda: graph.add("Sin", "phase"),
    }
    names = [part["name"] for part in about["observation"]]
    parts = [made[n]() if n in made else RAW[n] for n in names]
    return graph.add("Concat", *parts, name=OBSERVATION, axis=1)


def write_window(graph: Graph, about: Mapping[str, Any], observation: str) -> str | None:
    """`controller.window`, flat [B, K * D]; the name of the new history, if there is one."""
    history, size = int(about["history"]), observation_size(about)
    if history == 1:
        return None
    newest = graph.add("Unsqueeze", observation, np.array([1]))
    started = graph.add("Greater", graph.add("Unsqueeze", "started", np.array([2])), f32(0))
    older = graph.add("Where", started, "history", newest)
    stacked = graph.add("Concat", older, newest, axis=1)
    kept = np.arange(1, history)
    new = graph.add("Gather", stacked, kept, name="new_history", axis=1)
    graph.add("Reshape", stacked, np.array([-1, history * size]))
    return new


def write_policy(
    graph: Graph,
    about: Mapping[str, Any],
    spec: EnvSpec,
    agent_state: Any,
    cfg: AgentConfig,
    bounds: Bounds | None,
) -> None:
    """The normaliser, the actor, and what its actions stand for: [B, U]."""
    if cfg.normalize_obs:
        stats = agent_state.obs_stats[:2]
        mean, var = (np.asarray(spec.actor_obs(spec.repeated(x)), f32) for x in stats)
        graph.then("Sub", mean)
        graph.then("Div", np.sqrt(var) + f32(0.01))
    write_actor(graph, agent_state.actor, cfg)
    if bounds is None:
        graph.then("Tanh", name=ACTION)
        return
    action = graph.then("Tanh")
    above = graph.add("Mul", graph.add("Relu", action), bounds.up)
    below = graph.add("Mul", graph.add("Relu", graph.add("Neg", action)), bounds.down)
    graph.add("Sub", above, below, name=ACTION)


def write_state(graph: Graph, about: Mapping[str, Any]) -> None:
    """`controller.advance`; the history is written with the window."""
    before = graph.add("Gather", "actions", np.array([1]), axis=1)
    newest = graph.add("Unsqueeze", ACTION, np.array([1]))
    graph.add("Concat", before, newest, name="new_actions", axis=1)

    step = graph.add("Mul", "gait_frequency", f32(2 * math.pi * about["dt"]))
    turned = graph.add("Add", graph.add("Add", "phase", step), f32(math.pi))
    phase = graph.add("Sub", graph.add("Mod", turned, f32(2 * math.pi), fmod=1), f32(math.pi))
    gait = about["gait"]
    if gait["stands"]:
        length = graph.add("ReduceL2", "command", axes=[1], keepdims=1)
        walks = graph.add("Greater", length, f32(gait["still"]))
        phase = graph.add("Where", walks, phase, f32(math.pi))
    started = graph.add("Greater", "started", f32(0))
    graph.add("Where", started, phase, "phase", name="new_phase")
    graph.add("Max", "started", f32(1), name="new_started")
