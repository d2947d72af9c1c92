"""The actor's last K observations as one: `--history K`.

    observation = [oldest .. newest | privileged part of the newest]

At an episode's start all K are the first one. The window is part of the environment's state, so
whatever acts in it (training, evaluation, play, videos) sees the same; the ring stores the newest
observation alone and gathers windows when it is sampled (`replay/ring.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import struct

from jaxtd3.core.types import Array, EnvSpec, EnvStep
from jaxtd3.envs.playground.layout import Part, observation_layout


class HistoryState(struct.PyTreeNode):
    """An environment's state and what was observed; its other attributes are the state's own."""

    inner: Any
    seen: Array  # [K, F] the actor's part, oldest first

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _replace(self, **changes: Any) -> HistoryState:
        return self.replace(inner=self.inner._replace(**changes))


class HistoryEnv:
    """`env`, whose actor sees its last `history` observations."""

    def __init__(self, env: Any, history: int):
        spec = env.spec
        self.base = env
        self.whole = getattr(env, "whole", env)
        self.spec = replace(spec, obs_size=history * spec.obs_size, history=history)
        self.layout = repeated(observation_layout(env, privileged=True), self.spec)
        if hasattr(env, "rekey"):
            self.rekey = lambda state, key: state.replace(inner=env.rekey(state.inner, key))
        if hasattr(env, "draw"):
            self.draw = lambda state: env.draw(state.inner)

    def reset(self, key: Array) -> tuple[HistoryState, Array]:
        inner, obs = self.base.reset(key)
        first = self.base.spec.actor_obs(obs)
        return self._observed(inner, jnp.tile(first, (self.spec.history, 1)), obs)

    def step(self, state: HistoryState, action: Array) -> EnvStep:
        out = self.base.step(state.inner, action)
        newest = self.base.spec.actor_obs(out.obs)
        seen = jnp.concatenate([state.seen[1:], newest[None]])
        after, obs = self._observed(out.state, seen, out.obs)
        return out._replace(state=after, obs=obs)

    def _observed(self, inner: Any, seen: Array, obs: Array) -> tuple[HistoryState, Array]:
        """The state, and the window with the privileged part."""
        extra = obs[self.base.spec.obs_size :]
        return HistoryState(inner, seen), jnp.concatenate([seen.ravel(), extra])

    def __getattr__(self, name: str) -> Any:
        """Everything else is the environment's own."""
        if name == "base":  # not made yet
            raise AttributeError(name)
        return getattr(self.base, name)


def repeated(layout: tuple[Part, ...] | None, spec: EnvSpec) -> tuple[Part, ...] | None:
    """The parts of a window: those of older observations are named `gyro-1`, `gyro-2`, ..."""
    if layout is None:
        return None

    def moved(part: Part, by: int, age: str = "") -> Part:
        return Part(part.name + age, part.start + by, part.stop + by)

    size, oldest = spec.frame_size, spec.history - 1
    seen = [part for part in layout if part.stop <= size]
    older = [moved(p, (oldest - n) * size, f"-{n}") for n in range(oldest, 0, -1) for p in seen]
    return (*older, *(moved(part, oldest * size) for part in layout))
