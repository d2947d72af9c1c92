"""Exploration noise: how far each environment strays from the policy.

A `Noise` is three functions; a new schedule is a new function that returns one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtd3.types import Array, Noise


class NoiseState(NamedTuple):
    sigma: Array  # [E]
    sigma_min: Array  # []
    sigma_max: Array  # []


def _gaussian(state: NoiseState, action: Array, key: Array) -> Array:
    """clip(action + sigma_e * N(0, 1), -1, 1): [E, U]."""
    noise = jax.random.normal(key, action.shape, action.dtype)
    return jnp.clip(action + state.sigma[:, None] * noise, -1.0, 1.0)


def mixed_noise(sigma_min: float, sigma_max: float) -> Noise:
    """FastTD3's: sigma ~ U(sigma_min, sigma_max) per environment, drawn anew when it is done."""

    def draw(key: Array, low: Array, high: Array, num_envs: int) -> Array:
        return low + (high - low) * jax.random.uniform(key, (num_envs,))

    def init(key: Array, num_envs: int) -> NoiseState:
        low, high = jnp.float32(sigma_min), jnp.float32(sigma_max)
        return NoiseState(draw(key, low, high, num_envs), low, high)

    def redraw(state: NoiseState, done: Array, key: Array) -> NoiseState:
        fresh = draw(key, state.sigma_min, state.sigma_max, done.shape[0])
        return state._replace(sigma=jnp.where(done, fresh, state.sigma))

    return Noise(init, _gaussian, redraw)


def constant_noise(sigma: float) -> Noise:
    """The same sigma everywhere, always."""

    def init(key: Array, num_envs: int) -> NoiseState:
        del key
        value = jnp.float32(sigma)
        return NoiseState(jnp.full((num_envs,), value), value, value)

    def redraw(state: NoiseState, done: Array, key: Array) -> NoiseState:
        del done, key
        return state

    return Noise(init, _gaussian, redraw)
