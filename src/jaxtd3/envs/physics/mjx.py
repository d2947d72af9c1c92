"""MJX: physics traced into the program, by JAX operations or Warp kernels."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxtd3.core.tracing import record, spread
from jaxtd3.core.types import Array
from jaxtd3.thirdparty import private, replaced

Impl = private("mjx_impl")
_plain_step, _plain_forward = private("env_step"), private("mjx_forward")


class MjxPhysics:
    """MJX's own step; `forward`, most of the Python of reset and step, is traced once."""

    def __init__(self, model: Any):
        self.name = str(model.impl.value)
        self._model = model
        self._shared = even_vmap(record(partial(_plain_forward, model)))

    def __str__(self) -> str:
        return f"{self.name}, MJX {importlib.metadata.version('mujoco-mjx')}"

    def step(self, model: Any, data: Any, ctrl: Array, substeps: int = 1) -> Any:
        with replaced("mjx_forward", self.forward):
            return _plain_step(model, data, ctrl, substeps)

    def forward(self, model: Any, data: Any) -> Any:
        # Warp batches in its own way; a randomised model is another one for every environment.
        if model is self._model and model.impl == Impl.JAX:
            return self._shared(data)
        return _plain_forward(model, data)

    def carry(self, data: Any) -> Any:
        return data


def even_vmap(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which a vmap batches over every argument, whichever of them have the axis.

    So one record of the batched function serves all that call it in batches of one size.
    """
    single = jax.custom_batching.custom_vmap(function)
    batched = record(jax.vmap(function))

    @single.def_vmap
    def rule(size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
        out = batched(*spread(args, tuple(in_batched), size))
        return out, jax.tree.map(lambda _: True, out)

    return single
