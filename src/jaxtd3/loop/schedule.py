"""The course of the reward weights: constant, from others to the run's own, growing penalties, or
following the episodes' length.

A schedule is a function; weights are traced, so nothing is compiled again when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jaxtd3.config.sections import LoopConfig
from jaxtd3.core.sharding import mean_over
from jaxtd3.core.types import Array, EnvSpec
from jaxtd3.errors import UserError, nearest


class Progress(NamedTuple):
    """How far a run is, as a schedule of reward weights sees it."""

    iteration: Array  # []
    survival: Array  # [] in [0, 1]: how long episodes last, over the time limit


Schedule = Callable[[Array, Progress], Array]
"""schedule(weights [K], progress) -> the reward weights of now [K]"""


def growing_penalties(iterations: int) -> Schedule:
    """Terms of negative weight count from nothing up to fully, linearly over `iterations`."""

    def schedule(weights: Array, progress: Progress) -> Array:
        share = jnp.clip(progress.iteration / iterations, 0.0, 1.0)
        return jnp.where(weights < 0, weights * share, weights)

    return schedule


def moving_weights(terms: tuple[str, ...], start: Mapping[str, float], iterations: int) -> Schedule:
    """Weights of `start` for half of `iterations`, then linearly to the run's own."""
    for name in start:
        if name not in terms:
            raise UserError(nearest("reward term", name, terms))
    changed = jnp.array([name in start for name in terms], bool)
    first = jnp.array([start.get(name, 0.0) for name in terms], jnp.float32)

    def schedule(weights: Array, progress: Progress) -> Array:
        share = jnp.clip(2 * progress.iteration / iterations - 1, 0.0, 1.0)
        return jnp.where(changed, first + (weights - first) * share, weights)

    return schedule


def following_length(terms: tuple[str, ...], alive_end: float, least: float = 0.5) -> Schedule:
    """Penalties from `least` to 1, the bonus `alive` from 1 to `alive_end`, as episodes grow."""
    alive = jnp.array([name == "alive" for name in terms], bool)

    def schedule(weights: Array, progress: Progress) -> Array:
        share = jnp.clip(progress.survival, 0.0, 1.0)
        grown, shrunk = least + (1 - least) * share, 1 + (alive_end - 1) * share
        return weights * jnp.where(alive, shrunk, jnp.where(weights < 0, grown, 1.0))

    return schedule


def make_schedule(cfg: LoopConfig, spec: EnvSpec) -> Schedule:
    """The course of the reward weights that a config describes."""
    course: list[Schedule] = []
    if cfg.curriculum_weights:
        course.append(moving_weights(spec.reward_terms, cfg.curriculum_weights, cfg.curriculum))
    elif cfg.curriculum:
        course.append(growing_penalties(cfg.curriculum))
    if cfg.curriculum_length:
        course.append(following_length(spec.reward_terms, cfg.curriculum_alive))

    def schedule(weights: Array, progress: Progress) -> Array:
        for step in course:
            weights = step(weights, progress)
        return weights

    return schedule


def survival(steps: Array, limit: int, axis_name: str | None) -> Array:
    """How long episodes last, over the time limit, told from the ages `steps [E]` of those that
    run: their mean is half of it. []"""
    age = jnp.mean(steps.astype(jnp.float32))
    if axis_name is not None:
        age = mean_over(age, axis_name)
    return jnp.minimum(2 * age / limit, 1.0)
