"""Running statistics: of observations (mean, variance) and of returns (for reward scaling).

Counts are floats: 1e10 samples overflow int32. Every function takes the name of a mapped axis (or
None) and then gives the exact statistics of the data of all shards together.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtd3.core.types import Array


class Stats(NamedTuple):
    """Mean and variance of `total` samples."""

    mean: Array  # [D]
    var: Array  # [D]
    total: Array  # []


class ReturnStats(NamedTuple):
    """Statistics of the running discounted return G."""

    stats: Stats  # over [1]
    max_abs: Array  # [] largest |G| so far


def psum(x: Array, axis_name: str | None) -> Array:
    """Sum over a mapped axis; the identity without one."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def init_stats(size: int) -> Stats:
    return Stats(jnp.zeros(size), jnp.ones(size), jnp.zeros(()))


def update_stats(
    stats: Stats, x: Array, valid: Array | None = None, axis_name: str | None = None
) -> Stats:
    """Merge a batch `x [N, D]` (rows where `valid [N]`) into the statistics.

    FastTD3's rule: Chan's merge, but with the distance of the batch mean from the NEW mean, so the
    shift between old and new data counts (old / total)^2 of its due. The mean is exact; the
    variance is as soon as old data outnumber new.
    """
    keep = jnp.ones(x.shape[0], bool) if valid is None else valid
    x = jnp.where(keep[:, None], x, 0.0)
    count_and_sum = jnp.append(jnp.sum(x, axis=0), jnp.sum(keep, dtype=jnp.float32))
    total = psum(count_and_sum, axis_name)
    n = total[-1]
    safe_n = jnp.maximum(n, 1.0)
    batch_mean = total[:-1] / safe_n
    centred = jnp.where(keep[:, None], x - batch_mean[None], 0.0)
    batch_var = psum(jnp.sum(centred**2, axis=0), axis_name) / safe_n

    count = stats.total + n
    rate = n / jnp.maximum(count, 1.0)
    mean = stats.mean + rate * (batch_mean - stats.mean)
    shift = (1 - rate) * (batch_mean - mean) ** 2
    var = stats.var + rate * (batch_var - stats.var + shift)
    new = Stats(mean, var, count)
    return jax.tree.map(lambda a, b: jnp.where(n > 0, a, b), new, stats)


def normalize(stats: Stats, x: Array, eps: float = 1e-2) -> Array:
    """(x - mean) / (std + eps): [.., D]."""
    lead = tuple(range(x.ndim - 1))
    mean, std = (jnp.expand_dims(v, lead) for v in (stats.mean, jnp.sqrt(stats.var)))
    return (x - mean) / (std + eps)


def init_return_stats() -> ReturnStats:
    return ReturnStats(init_stats(1), jnp.zeros(()))


def discounted_return(previous: Array, reward: Array, done: Array, gamma: Array) -> Array:
    """G <- gamma * (1 - done) * G + r: [E]."""
    return jnp.where(done, 0.0, gamma * previous) + reward


def update_return_stats(
    stats: ReturnStats, g: Array, valid: Array | None = None, axis_name: str | None = None
) -> ReturnStats:
    """Merge the running returns `g [E]` of all environments."""
    keep = jnp.ones(g.shape, bool) if valid is None else valid
    largest = jnp.max(jnp.where(keep, jnp.abs(g), 0.0))
    if axis_name is not None:
        largest = jax.lax.pmax(largest, axis_name)
    return ReturnStats(
        update_stats(stats.stats, g[:, None], keep, axis_name),
        jnp.maximum(stats.max_abs, largest),
    )


def reward_scale(stats: ReturnStats, g_max: Array | float, eps: float = 1e-8) -> Array:
    """The divisor max(std(G), max|G| / g_max) of rewards: []."""
    return jnp.maximum(jnp.sqrt(stats.stats.var[0]) + eps, stats.max_abs / g_max)
