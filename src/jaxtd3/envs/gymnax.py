"""gymnax's environments with continuous actions as `Env`: `jaxtd3.envs.gymnax:Pendulum-v1`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import numpy as np

from jaxtd3.core.types import Array, EnvSpec, EnvStep
from jaxtd3.envs.playground.adapter import cast_like
from jaxtd3.errors import UserError, nearest


class GymnaxState(NamedTuple):
    state: Any
    key: Array  # gymnax wants one for every step


class GymnaxEnv:
    """One environment of gymnax; what ends only because time is up is not called an end."""

    def __init__(self, name: str, episode_length: int | None = None):
        if name not in gymnax.registered_envs:
            raise UserError(nearest("gymnax env", name, gymnax.registered_envs))
        self.inner, self.params = gymnax.make(name)
        space = self.inner.action_space(self.params)
        if not hasattr(space, "high"):
            raise UserError(f"gymnax env {name} has discrete actions: TD3 needs continuous ones")
        shape = tuple(space.shape) or (1,)
        self._shape = tuple(space.shape)
        self.low = np.broadcast_to(np.asarray(space.low, np.float32), shape).ravel()
        self.high = np.broadcast_to(np.asarray(space.high, np.float32), shape).ravel()
        key = jax.random.key(0)
        obs, state = jax.eval_shape(self.inner.reset_env, key, self.params)
        if not hasattr(obs, "shape"):
            raise UserError(f"gymnax env {name} does not observe one array")
        action = jax.ShapeDtypeStruct(self._shape, jnp.float32)
        out = jax.eval_shape(self.inner.step_env, key, state, action, self.params)
        self._type = out[1]
        limit = episode_length or int(self.params.max_steps_in_episode)
        self.spec = EnvSpec(name, int(np.prod(obs.shape)), int(np.prod(shape)), limit)

    def reset(self, key: Array) -> tuple[GymnaxState, Array]:
        key_reset, key = jax.random.split(key)
        obs, state = self.inner.reset_env(key_reset, self.params)
        state = cast_like(state, self._type)
        return GymnaxState(state, key), jnp.ravel(obs).astype(jnp.float32)

    def step(self, state: GymnaxState, action: Array) -> EnvStep:
        key_step, key = jax.random.split(state.key)
        scaled = self.low + (action + 1) / 2 * (self.high - self.low)
        obs, new, reward, over, _ = self.inner.step_env(
            key_step, state.state, scaled.reshape(self._shape), self.params
        )
        if hasattr(self.inner, "is_terminated"):
            over = self.inner.is_terminated(new, self.params)
        else:  # before gymnax 1.0 the time limit was an end like any other
            over = over & (new.time < self.params.max_steps_in_episode)
        new = GymnaxState(cast_like(new, self._type), key)
        reward = jnp.asarray(reward, jnp.float32).reshape(())
        flat = jnp.ravel(obs).astype(jnp.float32)
        return EnvStep(new, flat, reward, jnp.zeros(0), jnp.asarray(over, bool).reshape(()))

    def rekey(self, state: GymnaxState, key: Array) -> GymnaxState:
        return state._replace(key=key)


def __getattr__(name: str) -> Callable[..., GymnaxEnv]:
    if name not in gymnax.registered_envs:
        raise AttributeError(name)
    return partial(GymnaxEnv, name)


def __dir__() -> list[str]:
    return list(gymnax.registered_envs)
