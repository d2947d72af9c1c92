"""Actors as ONNX operations: one writer per kind of network, in `WRITERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxtd3.config.sections import AgentConfig
from jaxtd3.errors import UserError
from jaxtd3.nets.simba import EPS, SHIFT

Params = Mapping[str, Any]


class Graph:
    """Operations in order; `last` is the name of the newest value."""

    def __init__(self, onnx: Any, first: str):
        self.onnx, self.last = onnx, first
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def add(self, op: str, *inputs: Any, name: str = "", **attributes: Any) -> str:
        """One operation on `inputs`, names or constants; the name of what comes out."""
        name = name or f"{op.lower()}{len(self.nodes)}"
        names = [x if isinstance(x, str) else self.constant(x) for x in inputs]
        node = self.onnx.helper.make_node(op, names, [name], name=f"{op}_{name}", **attributes)
        self.nodes.append(node)
        self.last = name
        return name

    def constant(self, value: Any) -> str:
        name = f"constant{len(self.weights)}"
        self.weights.append(self.onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def then(self, op: str, *constants: Any, **attributes: Any) -> str:
        """One operation on the last value."""
        return self.add(op, self.last, *constants, **attributes)


# --- dense layers, SimNorm ----------------------------------------------------------------------


def dense_layers(actor: Params) -> list[tuple[np.ndarray, np.ndarray]]:
    """(kernel [in, out], bias [out]) from first to last, of `mlp.Actor`'s parameters."""
    hidden = sorted(name for name in actor if name.startswith("layer"))
    parts = [*(actor[name].get("dense", {}) for name in hidden)]
    if "simnorm" in actor:
        parts.append(actor["simnorm"]["linear"]["dense"])
    parts.append(actor.get("out", {}))
    if any(set(part) != {"kernel", "bias"} for part in parts):
        raise UserError(f"export knows actors of dense layers only, not one of {sorted(actor)}")
    return [(np.asarray(p["kernel"]), np.asarray(p["bias"])) for p in parts]


def layer_norm(graph: Graph, norm: Params) -> None:
    scale, bias = np.asarray(norm["scale"]), np.asarray(norm["bias"])
    graph.then("LayerNormalization", scale, bias, axis=-1, epsilon=1e-5)


def silu(graph: Graph) -> None:
    x = graph.last
    graph.add("Mul", x, graph.then("Sigmoid"))


ACTIVATIONS: dict[str, Callable[[Graph], Any]] = {
    "relu": lambda graph: graph.then("Relu"),
    "elu": lambda graph: graph.then("Elu"),
    "silu": silu,
}


def write_mlp(graph: Graph, actor: Params, cfg: AgentConfig) -> None:
    """Dense layers, the third of them a SimNorm where the parameters have one."""
    layers = dense_layers(actor)
    for i, (kernel, bias) in enumerate(layers):
        graph.then("Gemm", kernel, bias)
        if "simnorm" in actor and i == len(layers) - 2:
            layer_norm(graph, actor["simnorm"]["norm"])
            graph.then("Reshape", np.array([-1, cfg.simnorm_groups, cfg.simnorm_dim]))
            graph.then("Softmax", axis=-1)
            graph.then("Reshape", np.array([-1, cfg.simnorm_groups * cfg.simnorm_dim]))
        elif i + 1 < len(layers):
            if f"norm{i}" in actor:
                layer_norm(graph, actor[f"norm{i}"])
            ACTIVATIONS[cfg.activation](graph)


# --- SimbaV2 ------------------------------------------------------------------------------------


def unit(graph: Graph) -> str:
    """x / (|x| + eps)."""
    x = graph.last
    graph.then("ReduceL2", axes=[-1], keepdims=1)
    length = graph.then("Add", np.float32(EPS))
    return graph.add("Div", x, length)


def simba_block(graph: Graph, block: Params, alpha: float) -> None:
    x = graph.last
    graph.then("MatMul", np.asarray(block["up"]["kernel"]))
    graph.then("Mul", np.asarray(block["scale"]["scale"]))
    graph.then("Relu")
    graph.then("Add", np.float32(EPS))
    graph.then("MatMul", np.asarray(block["down"]["kernel"]))
    step = graph.add("Sub", unit(graph), x)
    rate = np.asarray(block["alpha"]["scale"])
    step = graph.add("Mul", step, rate * np.float32(alpha * rate.size**0.5))
    graph.add("Add", x, step)
    unit(graph)


def write_simba(graph: Graph, actor: Params, cfg: AgentConfig) -> None:
    """`simba.SimbaActor`, operation by operation."""
    encoder, head = actor["encoder"], actor["head"]
    graph.then("Pad", np.array([0, 0, 0, 1]), np.float32(SHIFT))
    unit(graph)
    graph.then("MatMul", np.asarray(encoder["embed"]["kernel"]))
    graph.then("Mul", np.asarray(encoder["scale"]["scale"]))
    unit(graph)
    for i in range(cfg.actor_blocks):
        simba_block(graph, encoder[f"block{i}"], 1 / (cfg.actor_blocks + 1))
    graph.then("MatMul", np.asarray(head["dense"]["kernel"]))
    graph.then("Mul", np.asarray(head["scale"]["scale"]))
    graph.then("MatMul", np.asarray(head["out"]["kernel"]))
    graph.then("Add", np.asarray(head["bias"]))


WRITERS: dict[str, Callable[[Graph, Params, AgentConfig], None]] = {
    "mlp": write_mlp,
    "simnorm": write_mlp,
    "simbav2": write_simba,
}


def write_actor(graph: Graph, actor: Params, cfg: AgentConfig) -> None:
    """The actor up to its tanh."""
    if cfg.network not in WRITERS:
        raise UserError(f"export knows no actor of the kind {cfg.network!r}")
    WRITERS[cfg.network](graph, actor, cfg)
