"""Settings inside the compiled program: read from a config, put in place in the state.

One way for all that changes them: members of a population, and a run that is resumed with others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtd3.agent.exploration import NoiseHyper, with_hyper
from jaxtd3.agent.td3 import Hyper
from jaxtd3.config.config import Config
from jaxtd3.config.sections import hyper_values
from jaxtd3.core.types import Array, EnvSpec, TrainState
from jaxtd3.envs.batch import reward_weights
from jaxtd3.replay.prioritized import PrioritizedState, PriorityHyper


class Traced(NamedTuple):
    """Every traced setting as an array."""

    agent: Hyper
    weights: Array  # [K] of the reward terms
    noise: NoiseHyper
    priority: PriorityHyper


def traced_values(config: Config, spec: EnvSpec) -> Traced:
    """The traced settings of a config."""
    config = config.resolved()
    values = Traced(
        agent=hyper_values(Hyper, config.agent),
        weights=reward_weights(spec, config.env.weights),
        noise=hyper_values(NoiseHyper, config.loop),
        priority=hyper_values(PriorityHyper, config.replay),
    )
    return jax.tree.map(jnp.float32, values)


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
