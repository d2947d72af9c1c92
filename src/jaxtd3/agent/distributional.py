"""C51: a value as a categorical distribution over fixed atoms. Everything here is for ONE example.

`z` are the atoms `[A]`, equally spaced; `p` a distribution over them `[A]`. Callers `jax.vmap`.
Bellemare, Dabney & Munos (2017), https://arxiv.org/abs/1707.06887.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxtd3.core.types import Array


def support(v_min: Array | float, v_max: Array | float, num_atoms: int) -> Array:
    """The atoms z_i = v_min + i * (v_max - v_min) / (A - 1): [A]."""
    return jnp.linspace(v_min, v_max, num_atoms, dtype=jnp.float32)


def bellman_atoms(z: Array, reward: Array, discount: Array) -> Array:
    """Where each atom lands: clip(r + discount * z, z_0, z_{A-1}): [A]."""
    chex.assert_rank([z, reward, discount], [1, 0, 0])
    return jnp.clip(reward + discount * z, z[0], z[-1])


def project_scatter(z: Array, moved: Array, p: Array) -> Array:
    """Distribution `p` on the atoms `moved`, split linearly between neighbours of `z`: [A].

    Two scatter-adds: the fast way on a CPU.
    """
    chex.assert_rank([z, moved, p], 1)
    top = z.shape[0] - 1
    b = jnp.clip((moved - z[0]) / (z[1] - z[0]), 0.0, top)
    low = jnp.floor(b).astype(jnp.int32)
    up = jnp.minimum(low + 1, top)
    frac = b - low
    return jnp.zeros_like(p).at[low].add(p * (1 - frac)).at[up].add(p * frac)


def project_dense(z: Array, moved: Array, p: Array) -> Array:
    """The same projection as a triangular kernel: m_i = sum_j p_j * max(0, 1 - |b_j - i|).

    Costs A^2 multiplications and no scatter: the fast way on a GPU, where atomic adds collide.
    """
    chex.assert_rank([z, moved, p], 1)
    top = z.shape[0] - 1
    b = jnp.clip((moved - z[0]) / (z[1] - z[0]), 0.0, top)
    i = jnp.arange(z.shape[0], dtype=b.dtype)
    kernel = jnp.maximum(0.0, 1.0 - jnp.abs(b[None, :] - i[:, None]))  # [A, A]
    return jnp.sum(kernel * p[None, :], axis=1)


def project(z: Array, moved: Array, p: Array) -> Array:
    """`project_scatter` or `project_dense`, chosen when the program is lowered for its platform."""
    return jax.lax.platform_dependent(z, moved, p, cpu=project_scatter, default=project_dense)


def cross_entropy(target: Array, logits: Array) -> Array:
    """-sum(target * log softmax(logits)): []."""
    chex.assert_rank([target, logits], 1)
    return -jnp.sum(target * jax.nn.log_softmax(logits))
