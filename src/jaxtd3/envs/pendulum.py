"""An inverted pendulum in 40 lines: the example of an environment of one's own."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtd3.core.types import Array, EnvSpec, EnvStep


class PendulumState(NamedTuple):
    angle: Array  # [] rad, 0 is upright
    velocity: Array  # [] rad/s


class Pendulum:
    """Swing up and hold a rod with a weak motor. Reward terms: upright, small velocity, effort."""

    spec = EnvSpec(
        name="Pendulum",
        obs_size=3,
        action_size=1,
        episode_length=200,
        dt=0.05,
        reward_terms=("angle", "velocity", "effort"),
        default_weights=(-1.0, -0.1, -0.004),
    )

    def reset(self, key: Array) -> tuple[PendulumState, Array]:
        key_angle, key_velocity = jax.random.split(key)
        state = PendulumState(
            jax.random.uniform(key_angle, minval=-jnp.pi, maxval=jnp.pi),
            jax.random.uniform(key_velocity, minval=-1.0, maxval=1.0),
        )
        return state, self.observe(state)

    def observe(self, state: PendulumState) -> Array:
        return jnp.stack([jnp.cos(state.angle), jnp.sin(state.angle), state.velocity / 8])

    def step(self, state: PendulumState, action: Array) -> EnvStep:
        torque = 2.0 * action[0]
        angle = jnp.arctan2(jnp.sin(state.angle), jnp.cos(state.angle))
        terms = jnp.stack([angle**2, state.velocity**2, torque**2])
        velocity = state.velocity + self.spec.dt * (15.0 * jnp.sin(angle) + 3.0 * torque)
        velocity = jnp.clip(velocity, -8.0, 8.0)
        state = PendulumState(angle + self.spec.dt * velocity, velocity)
        reward = jnp.sum(terms * jnp.array(self.spec.default_weights))
        return EnvStep(state, self.observe(state), reward, terms, jnp.zeros((), bool))
