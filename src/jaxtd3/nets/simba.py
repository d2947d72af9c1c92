"""SimbaV2: hidden states on the unit sphere, learned scales, residuals by interpolation.

https://arxiv.org/abs/2502.15280; sizes and initial values as FastTD3 uses it.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxtd3.core.types import Array
from jaxtd3.nets.dense import Dense

SHIFT = 3.0  # the constant input beside the observation: keeps its length when normalised
EXPANSION = 4
EPS = 1e-8


def unit(x: Array) -> Array:
    """x / (|x| + eps) along the last axis."""
    return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + EPS)


def unit_columns(params: Any) -> Any:
    """Every dense kernel with columns of length 1: SimbaV2's projection after a step."""

    def one(path: Any, x: Array) -> Array:
        return unit(x.T).T if path[-1].key == "kernel" else x

    return jax.tree_util.tree_map_with_path(one, params)


class Scale(nn.Module):
    """x * s * (start / scale), where s is learned and starts at `scale`: so x * start at first."""

    start: float = 1.0
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        s = self.param("scale", nn.initializers.constant(self.scale), x.shape[-1:])
        return x * (s * (self.start / self.scale)).reshape(*[1] * (x.ndim - 1), -1)


def dense(features: int, dtype: Any, name: str) -> Dense:
    """A layer without bias, orthogonal at first."""
    init = nn.initializers.orthogonal()
    return Dense(features, dtype, use_bias=False, kernel_init=init, name=name)


class Block(nn.Module):
    """Residual by learned interpolation: unit(x + alpha * (f(x) - x))."""

    hidden: int
    alpha: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size = (2 / self.hidden / EXPANSION) ** 0.5
        y = dense(self.hidden * EXPANSION, self.dtype, "up")(x).astype(jnp.float32)
        y = nn.relu(Scale(size, size, name="scale")(y)) + EPS
        y = unit(dense(self.hidden, self.dtype, "down")(y).astype(jnp.float32))
        return unit(x + Scale(self.alpha, self.hidden**-0.5, name="alpha")(y - x))


class Encoder(nn.Module):
    """Input to the sphere, then `blocks` residual blocks on it."""

    hidden: int
    blocks: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size = (2 / self.hidden) ** 0.5
        x = unit(jnp.concatenate([x, jnp.full((*x.shape[:-1], 1), SHIFT)], axis=-1))
        x = dense(self.hidden, self.dtype, "embed")(x).astype(jnp.float32)
        x = unit(Scale(size, size, name="scale")(x))
        for i in range(self.blocks):
            x = Block(self.hidden, 1 / (self.blocks + 1), self.dtype, name=f"block{i}")(x)
        return x


class Head(nn.Module):
    """dense, scale, dense + bias."""

    outputs: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = dense(x.shape[-1], self.dtype, "dense")(x).astype(jnp.float32)
        x = dense(self.outputs, self.dtype, "out")(Scale(name="scale")(x)).astype(jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.outputs,))
        return x + bias.reshape(*[1] * (x.ndim - 1), -1)


class SimbaActor(nn.Module):
    """obs -> sphere -> blocks -> action, tanh."""

    action_size: int
    hidden: int = 256
    blocks: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        x = Encoder(self.hidden, self.blocks, self.dtype, name="encoder")(obs)
        return jnp.tanh(Head(self.action_size, self.dtype, name="head")(x))


class SimbaCritic(nn.Module):
    """(critic_obs, action) -> sphere -> blocks -> outputs."""

    outputs: int
    hidden: int = 512
    blocks: int = 2
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, obs: Array, action: Array) -> Array:
        x = jnp.concatenate([obs, action], axis=-1)
        x = Encoder(self.hidden, self.blocks, self.dtype, name="encoder")(x)
        return Head(self.outputs, self.dtype, name="head")(x)
