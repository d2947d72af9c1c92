"""Learning left from right: batches of a replay, and their mirror images.

A robot's mirror is found and checked in `envs/playground/mirror.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtd3.core.types import Array, Batch, EnvSpec, Replay
from jaxtd3.envs.playground.mirror import Mirror, as_seen, find_mirror, reflect


def mirror_batch(mirror: Mirror, batch: Batch) -> Batch:
    """The mirror image of a batch: what would have been seen and done on the other side."""
    return batch._replace(
        obs=reflect(mirror.obs, batch.obs),
        action=reflect(mirror.action, batch.action),
        next_obs=reflect(mirror.obs, batch.next_obs),
    )


def augment(mirror: Mirror, batch: Batch, key: Array) -> Batch:
    """Every example as it is or mirrored, by the toss of a coin: [B]."""
    coin = jax.random.bernoulli(key, shape=batch.reward.shape)[:, None]
    image = mirror_batch(mirror, batch)
    return batch._replace(
        obs=jnp.where(coin, image.obs, batch.obs),
        action=jnp.where(coin, image.action, batch.action),
        next_obs=jnp.where(coin, image.next_obs, batch.next_obs),
    )


def double(mirror: Mirror, batch: Batch, key: Array) -> Batch:
    """Every example and its mirror image: [2 B]."""
    del key
    image = mirror_batch(mirror, batch)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), batch, image)


SYMMETRIES: dict[str, Callable[[Mirror, Batch, Array], Batch]] = {
    "augment": augment,
    "double": double,
}


def symmetric(replay: Replay, how: str, spec: EnvSpec) -> Replay:
    """A replay whose batches know left from right no more: `how` is off, or one of SYMMETRIES."""
    if how == "off":
        return replay
    mirror, change = as_seen(find_mirror(spec.name), spec), SYMMETRIES[how]

    def sample(state: Any, key: Array, gamma: Array, weights: Array | None = None) -> Batch:
        key_sample, key_coin = jax.random.split(key)
        return change(mirror, replay.sample(state, key_sample, gamma, weights), key_coin)

    return replay._replace(sample=sample)
