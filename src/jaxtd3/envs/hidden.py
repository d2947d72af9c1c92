"""What the robot cannot measure: named parts of the observation that the actor does not see.

They move to the privileged part, which the critic sees in training and nobody needs afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxtd3.core.types import Array, EnvStep
from jaxtd3.envs.playground.layout import Part, observation_layout
from jaxtd3.errors import UserError, nearest


def hidden_names(text: str) -> tuple[str, ...]:
    """('linvel', 'gyro') of 'linvel,gyro'."""
    names = tuple(name.strip() for name in text.split(",")) if text.strip() else ()
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"--actor-hides {text}: name each part once, such as linvel,gyro")
    return names


class HiddenEnv:
    """`env`, whose observation is [visible parts | hidden parts | privileged part]."""

    def __init__(self, env: Any, names: tuple[str, ...]):
        spec = env.spec
        layout = observation_layout(env, privileged=True)
        if layout is None:
            raise UserError(f"{spec.name}: the parts of its observation have no names to hide by")
        seen = [part for part in layout if part.stop <= spec.obs_size]
        for name in names:
            if name not in [part.name for part in seen]:
                raise UserError(nearest("part of the observation", name, [p.name for p in seen]))
        visible = [part for part in seen if part.name not in names]
        if not visible:
            raise UserError(f"{spec.name}: nothing is left for the actor to see")
        moved = [part for part in seen if part.name in names]
        parts = [*visible, *moved, *layout[len(seen) :]]
        self.whole = env
        self.layout = in_order(parts)
        self._order = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        size = sum(part.size for part in visible)
        self.spec = replace(
            spec,
            obs_size=size,
            extra_size=spec.width - size,
            order=tuple(int(i) for i in self._order),
        )

    def reset(self, key: Array) -> tuple[Any, Array]:
        state, obs = self.whole.reset(key)
        return state, obs[self._order]

    def step(self, state: Any, action: Array) -> EnvStep:
        out = self.whole.step(state, action)
        return out._replace(obs=out.obs[self._order])

    def __getattr__(self, name: str) -> Any:
        """Everything else is the environment's own."""
        if name == "whole":  # not made yet
            raise AttributeError(name)
        return getattr(self.whole, name)


def in_order(parts: list[Part]) -> tuple[Part, ...]:
    """The parts as they follow each other now."""
    placed: list[Part] = []
    for part in parts:
        start = placed[-1].stop if placed else 0
        placed.append(Part(part.name, start, start + part.size))
    return tuple(placed)
