"""Metrics of many steps to one set of scalars."""

from __future__ import annotations

import jax.numpy as jnp

from jaxtd3.core.types import Metrics


def is_sum(name: str) -> bool:
    """Counts and sums add up over time; every other metric is averaged."""
    return name.startswith("episode/") or name == "env/quarantined"


def reduce_metrics(stacked: Metrics) -> Metrics:
    """Metrics with a leading time axis to scalars."""
    return {k: jnp.sum(v, axis=0) if is_sum(k) else jnp.mean(v, axis=0) for k, v in stacked.items()}


def merge_metrics(history: list[Metrics]) -> Metrics:
    """Metrics of several steps to one set; a name may be missing from some."""
    names = dict.fromkeys(name for metrics in history for name in metrics)
    stacked = {n: jnp.stack([m[n] for m in history if n in m]) for n in names}
    return reduce_metrics(stacked)
