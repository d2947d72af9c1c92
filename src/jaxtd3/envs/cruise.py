"""A point mass that follows a commanded speed: rewards are linear, and the best policy is known.

    v' = v + dt * (a - v),   a in [-1, 1],   command c in [-0.8, 0.8], constant in an episode

Holding speed v costs the action a = v. Under weights `tracking` w > 0 and `energy` -e <= 0 the best
speed to hold is v = c * g w / (g w + e), where g <= 1 is what a push now is worth in later speed:
the larger the share of energy in the reward, the further the point lags behind its command. So a
sweep over the weights has a known ranking by tracking error, whatever the rewards say.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtd3.core.types import Array, EnvSpec, EnvStep
from jaxtd3.envs.metrics import Metric, MetricStep

REACH = 0.8  # largest commanded speed


class CruiseState(NamedTuple):
    position: Array  # []
    velocity: Array  # []
    command: Array  # []


def tracking_error(env: Cruise, step: MetricStep) -> Array:
    return jnp.abs(step.after.velocity - step.before.command)


def energy_per_metre(env: Cruise, step: MetricStep) -> tuple[Array, Array]:
    moved = jnp.abs(step.after.position - step.before.position)
    return env.spec.dt * jnp.square(step.action[0]), moved


class Cruise:
    """Follow a commanded speed. Reward terms: tracking, energy, and a constant bonus."""

    spec = EnvSpec(
        name="Cruise",
        obs_size=2,
        action_size=1,
        episode_length=100,
        dt=0.1,
        reward_terms=("tracking", "energy", "alive"),
        default_weights=(1.0, -0.1, 0.0),
    )
    metrics: ClassVar[dict[str, Metric]] = {
        "tracking_error": Metric(tracking_error, unit="m/s"),
        "energy_per_metre": Metric(energy_per_metre, unit="J/m"),
    }

    def reset(self, key: Array) -> tuple[CruiseState, Array]:
        command = jax.random.uniform(key, minval=-REACH, maxval=REACH)
        state = CruiseState(jnp.zeros(()), jnp.zeros(()), command)
        return state, self.observe(state)

    def observe(self, state: CruiseState) -> Array:
        return jnp.stack([state.velocity, state.command])

    def step(self, state: CruiseState, action: Array) -> EnvStep:
        dt, push = self.spec.dt, action[0]
        velocity = state.velocity + dt * (push - state.velocity)
        state = CruiseState(state.position + dt * velocity, velocity, state.command)
        error = velocity - state.command
        terms = jnp.stack([1.0 - error**2, push**2, jnp.ones(())])
        reward = jnp.sum(terms * jnp.array(self.spec.default_weights))
        return EnvStep(state, self.observe(state), reward, terms, jnp.zeros((), bool))

    def draw(self, state: CruiseState) -> np.ndarray:
        """A dot on a track; its speed in blue above, the commanded one in orange: [H, W, 3]."""
        picture = np.full((120, 240, 3), 243, np.uint8)
        picture[58:62] = 200
        centre = int(120 + 24 * state.position) % 240
        picture[50:70, max(centre - 8, 0) : centre + 8] = (31, 41, 51)
        for top, speed, colour in (
            (20, state.velocity, (37, 99, 201)),
            (90, state.command, (217, 115, 13)),
        ):
            left, right = sorted((120, int(120 + 110 * np.clip(speed, -1, 1))))
            picture[top : top + 10, left : right + 1] = colour
        return picture
