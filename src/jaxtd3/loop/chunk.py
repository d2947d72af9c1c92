"""Many iterations as one compiled program, on one device or on all of a mesh."""

from __future__ import annotations

import jax

from jaxtd3.core.sharding import AXIS, WHOLE, average, reduce_shards
from jaxtd3.core.types import Metrics, TrainState
from jaxtd3.loop.metrics import is_sum, reduce_metrics
from jaxtd3.loop.step import StepFn


def make_chunk(
    train_step: StepFn,
    length: int,
    layout: TrainState | None = None,
    *,
    settle: bool = False,
    options: dict[str, str] | None = None,
) -> StepFn:
    """`length` iterations as one compiled program that updates the state in place.

    The state is donated: its old value is gone after the call. Metrics come back reduced over the
    chunk, so one small transfer tells all. With a layout (`sharding.make_layout`) every device runs
    the steps on its part of the state; `settle` then averages agents that learnt apart
    (`sync_every`) at the end. `options` are for the compiler (`dense.compiler_options`).
    """

    def chunk(state: TrainState) -> tuple[TrainState, Metrics]:
        state, metrics = jax.lax.scan(lambda s, _: train_step(s), state, length=length)
        return state, reduce_metrics(metrics)

    if layout is None:
        return jax.jit(chunk, donate_argnums=0, compiler_options=options)

    def part(state: TrainState) -> tuple[TrainState, Metrics]:
        state, metrics = chunk(state)
        if settle:
            state = state.replace(agent=average(state.agent, AXIS))
        return state, reduce_shards(metrics, is_sum, AXIS)

    specs = jax.tree.map(lambda sharding: sharding.spec, layout)
    mesh = jax.tree.leaves(layout)[0].mesh
    # MJX's solver fails the check of what is replicated; tests compare the devices instead.
    mapped = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(specs, WHOLE),
        check_vma=False,
    )
    return jax.jit(
        mapped,
        donate_argnums=0,
        in_shardings=(layout,),
        out_shardings=(layout, None),
        compiler_options=options,
    )
