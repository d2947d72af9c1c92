"""Python that is slow to trace, run once: what it did is replayed wherever it is called again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


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
