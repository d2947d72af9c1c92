"""brax's environments as `Env`: `--env jaxtd3.envs.brax:ant`, `BraxEnv("ant", backend="mjx")`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from brax import envs

from jaxtd3.core.types import Array, EnvSpec, EnvStep
from jaxtd3.envs.playground.adapter import cast_like, raw_key
from jaxtd3.errors import UserError, nearest
from jaxtd3.thirdparty import private


class BraxEnv:
    """One environment of brax, without its wrappers: time limit and resets are ours."""

    def __init__(self, name: str, episode_length: int = 1000, **options: Any):
        if name not in private("brax_envs"):
            raise UserError(nearest("brax env", name, private("brax_envs")))
        self.inner = envs.get_environment(name, **options)
        first = jax.eval_shape(self._reset, jax.random.PRNGKey(0))
        action = jax.ShapeDtypeStruct((self.inner.action_size,), jnp.float32)
        self._type = jax.eval_shape(self._step, first, action)
        if not isinstance(first.obs, jax.ShapeDtypeStruct) or first.obs.ndim != 1:
            raise UserError(f"brax env {name} does not observe one vector")
        self.spec = EnvSpec(
            name=name,
            obs_size=first.obs.shape[0],
            action_size=self.inner.action_size,
            episode_length=episode_length,
            dt=float(self.inner.dt) if hasattr(self.inner, "sys") else 1.0,
        )

    def _reset(self, key: Array) -> Any:
        with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
            return self.inner.reset(key)

    def _step(self, state: Any, action: Array) -> Any:
        with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
            return self.inner.step(state, action)

    def reset(self, key: Array) -> tuple[Any, Array]:
        state = cast_like(self._reset(raw_key(key)), self._type)
        return state, jnp.asarray(state.obs, jnp.float32)

    def step(self, state: Any, action: Array) -> EnvStep:
        new = cast_like(self._step(state, action), self._type)
        reward = jnp.asarray(new.reward, jnp.float32)
        obs = jnp.asarray(new.obs, jnp.float32)
        return EnvStep(new, obs, reward, jnp.zeros(0), new.done.astype(bool))


def __getattr__(name: str) -> Callable[..., BraxEnv]:
    if name not in private("brax_envs"):
        raise AttributeError(name)
    return partial(BraxEnv, name)


def __dir__() -> list[str]:
    return list(private("brax_envs"))
