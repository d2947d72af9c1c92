"""Steps of parameters: AdamW with traced rates, cosine schedules, Polyak averages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from jaxtd3.core.types import Array


def cosine(start: Array, end: Array, fraction: Array) -> Array:
    """From `start` to `end` along half a cosine, as `fraction` goes from 0 to 1."""
    return end + (start - end) * 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(fraction, 0.0, 1.0)))


def adamw(max_grad_norm: float) -> optax.GradientTransformation:
    """Adam's direction; learning rate and decay are applied by `step_params`, being traced."""
    clip = [optax.clip_by_global_norm(max_grad_norm)] if max_grad_norm > 0 else []
    return optax.chain(*clip, optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8))


def as_vector(tree: Any) -> Array:
    """All leaves, one after the other: [P]."""
    return ravel_pytree(tree)[0]


def step_params(opt, grads: Array, opt_state: Any, params: Array, lr: Array, decay: Array):
    """theta <- theta - lr * (adam(g) + decay * theta), of all parameters as one vector [P]."""
    direction, opt_state = opt.update(grads, opt_state, params)
    return params - lr * (direction + decay * params), opt_state


def polyak(target: Any, params: Any, tau: Array) -> Any:
    """target <- target + tau * (params - target), leaf by leaf."""
    return jax.tree.map(lambda t, p: t + tau * (p - t), target, params)


def select(ok: Array, new: Any, old: Any) -> Any:
    """`new` where `ok`, else `old`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def all_finite(tree: Any) -> Array:
    """True if every number of the tree is finite: []."""
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]).all()
