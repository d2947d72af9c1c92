"""Worlds that differ from the training environment, and how a simulation is put into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

from jaxtd3.errors import UserError, nearest


@dataclass(frozen=True)
class World:
    """One way in which the world is not as in training; factors of 1 and zeros change nothing."""

    name: str
    delay: float = 0.0
    """Seconds from a decision to the motors."""
    friction: float = 1.0
    """Factor on all sliding friction of contacts."""
    mass: float = 1.0
    """Factor on all masses and inertias."""
    gains: float = 1.0
    """Factor on the motors' stiffness and damping."""
    noise: float = 0.0
    """Factor on the noise that the environment adds to observations in training."""
    push: float = 0.0
    """Change of the base's velocity in m/s, in a random direction, every `push_every` seconds."""
    push_every: float = 2.5
    slope: float = 0.0
    """Slope of the ground in degrees; robots start in all directions."""


WORLDS = (
    World("nominal"),
    World("delay 10 ms", delay=0.010),
    World("delay 20 ms", delay=0.020),
    World("delay 40 ms", delay=0.040),
    World("friction x 0.4", friction=0.4),
    World("friction x 0.7", friction=0.7),
    World("friction x 1.6", friction=1.6),
    World("mass - 20 %", mass=0.8),
    World("mass + 20 %", mass=1.2),
    World("gains - 20 %", gains=0.8),
    World("gains + 20 %", gains=1.2),
    World("noise", noise=1.0),
    World("pushes 0.5 m/s", push=0.5),
    World("pushes 1 m/s", push=1.0),
    World("slope 5 deg", slope=5.0),
    World("all of it", 0.020, 0.7, 1.1, 0.9, 1.0, 0.5, slope=3.0),
)
"""Sixteen worlds: with sixteen episodes in each, 256 simulations at once."""


def choose_worlds(text: str | None) -> tuple[World, ...]:
    """The worlds named in "nominal,noise"; without a text, all."""
    if text is None:
        return WORLDS
    known, found = {world.name: world for world in WORLDS}, []
    for given in (part.strip() for part in text.split(",")):
        if given not in known:
            raise UserError(nearest("world", given, known))
        found.append(known[given])
    if len({world.name for world in found}) < len(found):
        raise UserError(f"--worlds {text} names a world twice")
    return tuple(found)


def change_model(batch: Any, model: mujoco.MjModel, worlds: Sequence[World]) -> None:
    """Give every simulation of a `mujoco.batch.Batch` the physics of its world: worlds [N]."""

    def factors(name: str, rank: int) -> np.ndarray:
        values = np.array([getattr(world, name) for world in worlds])
        return values.reshape(-1, *(1,) * rank)

    friction, gains = factors("friction", 2), factors("gains", 2)
    if model.npair:
        batch.expand("pair_friction")[:, :, :2] *= friction
    batch.expand("geom_friction")[:, :, :1] *= friction
    batch.expand("body_mass")[...] *= factors("mass", 1)
    batch.expand("body_inertia")[...] *= factors("mass", 2)
    batch.expand("actuator_gainprm")[:, :, :1] *= gains
    batch.expand("actuator_biasprm")[:, :, 1:3] *= gains
    batch.expand("dof_damping")[:, 6:] *= gains[:, 0]
    batch.expand("opt.gravity")[...] = np.linalg.norm(model.opt.gravity) * down_in(worlds)
    batch.set_const()


def down_in(worlds: Sequence[World]) -> np.ndarray:
    """Where gravity points: [N, 3]. The ground stays level and gravity leans: the same physics."""
    slope = np.radians([world.slope for world in worlds])
    return np.stack([-np.sin(slope), np.zeros(len(worlds)), -np.cos(slope)], axis=1)
