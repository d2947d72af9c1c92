"""Actor and critics as flax.linen modules; parameters are plain pytrees.

FastTD3's layers: ReLU, no normalisation, every weight and bias drawn from U(+-1/sqrt(fan_in)); the
actor's last layer starts near zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxtd3.types import Array


def uniform_fan_in(fan_in: int) -> Callable[..., Array]:
    """Initialiser U(-1/sqrt(fan_in), 1/sqrt(fan_in)), for kernels and biases alike."""
    bound = fan_in**-0.5

    def init(key: Array, shape: Any, dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Linear(nn.Module):
    """y = x W + b, initialised as above."""

    features: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = uniform_fan_in(x.shape[-1])
        return nn.Dense(
            self.features, dtype=self.dtype, kernel_init=init, bias_init=init, name="dense"
        )(x)


class Actor(nn.Module):
    """obs -> h -> h/2 -> h/4 -> action, tanh."""

    action_size: int
    hidden: int = 512
    dtype: Any = jnp.float32
    last_std: float = 0.01

    @nn.compact
    def __call__(self, obs: Array) -> Array:
        x = obs
        for i in range(3):
            x = nn.relu(Linear(self.hidden // 2**i, self.dtype, name=f"layer{i}")(x))
        x = nn.Dense(
            self.action_size,
            dtype=self.dtype,
            kernel_init=nn.initializers.normal(self.last_std),
            name="out",
        )(x)
        return jnp.tanh(x.astype(jnp.float32))


class Critic(nn.Module):
    """(critic_obs, action) -> h -> h/2 -> h/4 -> logits over the atoms."""

    num_atoms: int
    hidden: int = 1024
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, obs: Array, action: Array) -> Array:
        x = jnp.concatenate([obs, action], axis=-1)
        for i in range(3):
            x = nn.relu(Linear(self.hidden // 2**i, self.dtype, name=f"layer{i}")(x))
        return Linear(self.num_atoms, self.dtype, name="out")(x).astype(jnp.float32)


class Ensemble(nn.Module):
    """N critics of their own parameters: logits [N, .., atoms].

    Separate modules, not one batched matrix product: XLA's CPU back end runs the latter far slower.
    """

    make: Callable[..., nn.Module]
    size: int = 2

    @nn.compact
    def __call__(self, obs: Array, action: Array) -> Array:
        return jnp.stack([self.make(name=f"q{i}")(obs, action) for i in range(self.size)])
