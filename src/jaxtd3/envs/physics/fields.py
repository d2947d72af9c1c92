"""Which fields of `mjx.Data` an environment really uses, found from one trace of its functions.

A step is traced with everything that physics returns as a fresh input and everything that physics
is given as an output. What the other outputs do not depend on need not be computed, copied or
carried from step to step (`native.Used`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import mujoco
import numpy as np
from jax.extend.core import get_opaque_trace_state

from jaxtd3.envs.physics.native import GIVEN, UNSURE, NativePhysics, Used
from jaxtd3.thirdparty import private


class NotReturned(ValueError):
    """An environment reads what C MuJoCo does not compute for it."""


class CalledWithin(ValueError):
    """Physics stands in a loop or branch of the environment's own, which cannot be cut out."""


class Probe:
    """Physics that notes what it is given and, once asked in the trace that it was made in, returns
    what it was told to."""

    def __init__(self, inputs: Sequence[str], results: Sequence[dict[str, Any]] | None = None):
        self.inputs, self.results, self.trace = inputs, results, get_opaque_trace_state()
        self.kinds: list[str] = []
        self.given: list[dict[str, Any]] = []

    def step(self, model: Any, data: Any, ctrl: Any, substeps: int = 1) -> Any:
        return self._call("step", data.replace(ctrl=ctrl))

    def forward(self, model: Any, data: Any) -> Any:
        return self._call("forward", data)

    def _call(self, kind: str, data: Any) -> Any:
        index = len(self.kinds)
        self.kinds.append(kind)
        self.given.append({name: getattr(data, name) for name in self.inputs})
        if self.results is None:
            return data
        if get_opaque_trace_state() != self.trace:
            raise CalledWithin("it steps its physics in a loop or branch of its own")
        return data.replace(**self.results[index])


Function = Callable[[Any, Any], tuple[Any, Any]]
"""function(physics, arguments) -> (data it returns, all else it returns)"""


class Trace:
    """One function of an environment, with physics cut out."""

    def __init__(self, physics: NativePhysics, function: Function, args: Any):
        count = Probe(physics.inputs)
        jax.eval_shape(lambda args: function(count, args)[1], args)
        self.kinds = count.kinds
        self.names = tuple(physics.types)

        def cut(args: Any, results: list[dict[str, Any]]) -> Any:
            probe = Probe(physics.inputs, results)
            data, rest = function(probe, args)
            kept = {name: getattr(data, name) for name in physics.types}
            return {"data": kept, "given": probe.given, "rest": rest}

        results = [dict(physics.types) for _ in self.kinds]
        self.closed, out = jax.make_jaxpr(cut, return_shape=True)(args, results)
        self.outputs = [path for path, _ in jax.tree_util.tree_leaves_with_path(out)]
        inputs = jax.tree_util.tree_leaves_with_path((args, results))
        self.inputs = [path for path, _ in inputs]

    def needed(self, wanted: Callable[[tuple], bool]) -> tuple[Any, list[tuple]]:
        """The program that computes the `wanted` outputs, and the inputs that it needs."""
        jaxpr, used = private("dce_jaxpr")(
            self.closed.jaxpr, [wanted(names_of(path)) for path in self.outputs]
        )
        return jaxpr, [names_of(p) for p, u in zip(self.inputs, used, strict=True) if u]

    def variable(self, side: str, path: tuple) -> Any:
        """The variable of an output or an input."""
        paths = self.outputs if side == "out" else self.inputs
        variables = self.closed.jaxpr.outvars if side == "out" else self.closed.jaxpr.invars
        return variables[[names_of(p) for p in paths].index(path)]


def names_of(path: tuple) -> tuple:
    """A tree path as plain names and numbers."""
    keys = ("key", "name", "idx")
    return tuple(next(getattr(k, a) for a in keys if hasattr(k, a)) for k in path)


def find_used(
    physics: NativePhysics, step: Function, step_args: Any, reset: Function, reset_args: Any
) -> Used:
    """What is used of `mjx.Data`; `step_args` is (data, anything else).

    Raises `CalledWithin` and `NotReturned`.
    """
    first, then = Trace(physics, reset, reset_args), Trace(physics, step, step_args)
    constant = tuple(name for name in GIVEN if is_constant(physics, first, then, name))
    reads = find_reads(first, then, constant)
    if reads.intersection(constant):  # the environment shows it, so it has to be there
        constant = tuple(name for name in constant if name not in reads)
        reads = find_reads(first, then, constant)
    unsure = sorted(reads.intersection(UNSURE))
    if unsure:
        raise NotReturned(f"reads {', '.join(unsure)}, which MuJoCo computes for sensors alone")
    return Used(tuple(sorted(reads)), constant)


def find_reads(first: Trace, then: Trace, constant: tuple[str, ...]) -> set[str]:
    """The fields that a reset and all steps after it depend on, with `constant` never passed."""

    def wanted(live: frozenset[str]) -> Callable[[tuple], bool]:
        def test(path: tuple) -> bool:
            if path[0] == "data":
                return path[1] in live
            return path[0] == "rest" or path[2] not in constant

        return test

    live: frozenset[str] = frozenset()
    while True:
        _, used = then.needed(wanted(live))
        found = live | {path[2] for path in used if path[:2] == (0, 0)}
        if found == live:
            break
        live = found
    reads = set(live)
    for trace in (first, then):
        reads |= {path[2] for path in trace.needed(wanted(live))[1] if path[0] == 1}
    return reads


def is_constant(physics: NativePhysics, first: Trace, then: Trace, name: str) -> bool:
    """True for a part of the state that every reset leaves at MuJoCo's default and no step sets."""
    if name not in physics.inputs:
        return False
    given = then.variable("in", (0, 0, name))
    results = [then.variable("in", (1, i, name)) for i in range(len(then.kinds))]
    passed = [then.variable("out", ("given", i, name)) for i in range(len(then.kinds))]
    if then.variable("out", ("data", name)) not in (given, *results):
        return False
    if any(x not in (given, *results) for x in passed):
        return False
    default = np.asarray(getattr(mujoco.MjData(physics.model), name))
    results = [first.variable("in", (1, i, name)) for i in range(len(first.kinds))]
    for target in (*(("given", i, name) for i in range(len(results))), ("data", name)):
        if first.variable("out", target) in results:  # of a call that was given the default
            continue
        jaxpr, used = first.needed(target.__eq__)
        if used:
            return False
        (value,) = jax.core.eval_jaxpr(jaxpr, first.closed.consts)
        if not np.array_equal(np.asarray(value), default.reshape(value.shape)):
            return False
    return bool(default.size)
