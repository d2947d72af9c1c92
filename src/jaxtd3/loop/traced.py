"""Settings inside the compiled program: read from a config, put in place in the state.

One way for all that changes them: members of a population, and a run that is resumed with others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxtd3.agent.exploration import NoiseHyper, noise_hyper, with_hyper
from jaxtd3.agent.td3 import Hyper, agent_hyper
from jaxtd3.config.config import Config
from jaxtd3.core.types import Array, EnvSpec, TrainState
from jaxtd3.envs.batch import reward_weights
from jaxtd3.replay.prioritized import PrioritizedState, PriorityHyper, priority_hyper


class Traced(NamedTuple):
    """Every traced setting as an array."""

    agent: Hyper
    weights: Array  # [K] of the reward terms
    noise: NoiseHyper
    priority: PriorityHyper


def traced_values(config: Config, spec: EnvSpec) -> Traced:
    """The traced settings of a config."""
    config = config.resolved()
    return Traced(
        agent=agent_hyper(config.agent),
        weights=reward_weights(spec, config.env.weights),
        noise=NoiseHyper(*(jnp.float32(value) for value in noise_hyper(config.loop))),
        priority=priority_hyper(config.replay),
    )


def retune(state: TrainState, values: Traced) -> TrainState:
    """The state under other traced settings."""
    replay: Any = state.replay
    if isinstance(replay, PrioritizedState):
        replay = replay.replace(hyper=values.priority)
    return state.replace(
        agent=state.agent.replace(hyper=values.agent),
        weights=values.weights,
        noise=with_hyper(state.noise, values.noise),
        replay=replay,
    )
