"""Controls that arrive late, as on a robot: an episode's delay is the same throughout.

A delay of a part of a control step is a mixture of two controls, in the shares of the step in which
each of them would drive the motors: servos then get the same mean target.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtd3.core.types import Array
from jaxtd3.envs.physics.contract import Physics
from jaxtd3.errors import UserError


class Late(NamedTuple):
    """What of an episode's past is still on its way to the motors."""

    delay: Array  # in control steps: []
    sent: Array  # controls, the newest first: [L, U]


def sample_late(key: Array, most: float, dt: float, ctrl: Array) -> Late:
    """An episode's delay, of `most` seconds at most; `ctrl [U]` is what was sent before it."""
    steps = most / dt
    delay = jax.random.uniform(key, maxval=steps)
    return Late(delay, jnp.tile(jnp.asarray(ctrl, jnp.float32), (math.ceil(steps), 1)))


def arriving(late: Late, ctrl: Array) -> Array:
    """What drives the motors during this step, `ctrl` being sent at its start: [U]."""
    known = jnp.concatenate([ctrl[None], late.sent])  # [L + 1, U] by age
    shares = jnp.maximum(0.0, 1.0 - jnp.abs(jnp.arange(known.shape[0]) - late.delay))
    return shares @ known


class LatePhysics:
    """A back end for one step of an environment whose controls are late; `after`: what is left."""

    def __init__(self, physics: Physics, late: Late, name: str):
        self.name, self._physics, self._late, self._of = physics.name, physics, late, name
        self._after: Late | None = None

    def step(self, model: Any, data: Any, ctrl: Array, substeps: int = 1) -> Any:
        if self._after is not None:
            raise UserError(f"{self._of} steps its physics twice: its actions cannot be delayed")
        late = self._late
        sent = jnp.concatenate([ctrl[None], late.sent[:-1]]).astype(late.sent.dtype)
        self._after = late._replace(sent=sent)
        return self._physics.step(model, data, arriving(late, ctrl), substeps)

    def forward(self, model: Any, data: Any) -> Any:
        return self._physics.forward(model, data)

    def carry(self, data: Any) -> Any:
        return self._physics.carry(data)

    @property
    def after(self) -> Late:
        if self._after is None:
            raise UserError(f"{self._of} does not step its physics: its actions cannot be delayed")
        return self._after
