"""`vmap` that stays one flat batch under further vmaps: a population shares one physics batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtd3.record import record
from jaxtd3.types import Array


def flat_vmap(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.vmap(function)`; a further vmap over P calls it with `[P * E, ...]`, not `[P, E, ...]`.

    Physics engines know one batch axis (Warp) or are fastest with one (MJX); so P members of E
    environments become P * E environments here, and only here.
    """
    batched = jax.custom_batching.custom_vmap(record(jax.vmap(function)))

    @batched.def_vmap
    def rule(members: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
        args = spread(args, tuple(in_batched), members)
        envs = jax.tree.leaves(args[-1])[0].shape[1]  # keys or actions

        def join(x: Array) -> Array:  # leaves without an environment axis are shared by all
            return x.reshape(members * envs, *x.shape[2:]) if x.shape[1:2] == (envs,) else x[0]

        def part(x: Array) -> Array:
            if x.shape[:1] != (members * envs,):
                return jnp.broadcast_to(x, (members, *x.shape))
            return x.reshape(members, envs, *x.shape[1:])

        out = jax.tree.map(part, batched(*jax.tree.map(join, args)))
        return out, jax.tree.map(lambda _: True, out)

    return batched


def spread(tree: Any, has_axis: Any, size: int) -> Any:
    """All leaves with a leading axis of `size`: those without one are repeated along it."""

    def one(x: Array, there: bool) -> Array:
        return x if there else jnp.broadcast_to(x, (size, *x.shape))

    return jax.tree.map(one, tree, has_axis)
