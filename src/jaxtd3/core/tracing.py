"""How functions are traced: recorded once and replayed, batched as one flat batch, compiled soon.

`record`: Python that is slow to trace runs once; what it did is replayed wherever it is called.
`flat_vmap`: a `vmap` that stays one batch under further vmaps, so a population shares its physics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtd3.core.types import Array


def record(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, whose Python runs once for arguments of the same structure and types.

    Later calls replay the operations that the first one recorded as one call in the program. `jit`
    alone would trace anew under every mesh; a record made outside of any mesh serves under all,
    one made under a mesh serves there alone. JAX's own cache of batched calls goes by the record.
    """
    records: dict[Any, tuple[Any, Any]] = {}

    def replay(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        types = structure, tuple((x.shape, x.dtype) for x in leaves)
        mesh = jax.sharding.get_abstract_mesh()
        found = records.get((types, None)) or records.get((types, mesh))
        if found is None:
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
            once = jax.jit(lambda *args: function(*args))  # new, so that `jit` remembers nothing
            closed, out = jax.make_jaxpr(once, return_shape=True)(*like)
            found = closed, jax.tree.structure(out)
            # what closes over values of a program being traced is of no use to another
            if not any(isinstance(x, jax.core.Tracer) for x in closed.consts):
                records[types, None if mesh.empty else mesh] = found
        closed, out_structure = found
        return jax.tree.unflatten(
            out_structure, jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)
        )

    return replay


SOON: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def compile_soon(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`function` for arguments like these, compiled in a third of the time: for few calls."""
    options = SOON if jax.default_backend() == "cpu" else None
    return jax.jit(function).lower(*args).compile(compiler_options=options)


def flat_vmap(function: Callable[..., Any], single: Any = None) -> Callable[..., Any]:
    """`jax.vmap(function)`; a further vmap over P calls it with `[P * E, ...]`, not `[P, E, ...]`.

    Physics engines know one batch axis (Warp) or are fastest with one (MJX); so P members of E
    environments become P * E environments here, and only here. `single`: shapes of the arguments
    of ONE call, where some of their leaves have no environment axis (Warp shares some buffers).
    """
    once = record(jax.vmap(function))
    batched = jax.custom_batching.custom_vmap(once)

    @batched.def_vmap
    def rule(members: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
        args = spread(args, tuple(in_batched), members)
        member = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), args)
        one = single or jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), member)

        def join(x: Array, one: Any) -> Array:
            shared = x.ndim - 1 == one.ndim
            return x[0] if shared else x.reshape(-1, *x.shape[2:])

        def part(x: Array, alone: Any) -> Array:
            return x if x.shape == alone.shape else x.reshape(members, *alone.shape)

        # What is as large as one member's own serves all members, and has no axis for them.
        alone = jax.eval_shape(once, *member)
        out = batched(*jax.tree.map(join, args, one))
        own = jax.tree.map(lambda x, alone: x.shape != alone.shape, out, alone)
        return jax.tree.map(part, out, alone), own

    return batched


def spread(tree: Any, has_axis: Any, size: int) -> Any:
    """All leaves with a leading axis of `size`: those without one are repeated along it."""

    def one(x: Array, there: bool) -> Array:
        return x if there else jnp.broadcast_to(x, (size, *x.shape))

    return jax.tree.map(one, tree, has_axis)
