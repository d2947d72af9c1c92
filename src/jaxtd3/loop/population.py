"""Many runs as one program: members differ in what is traced, and share everything else.

    members [P]:  agent, replay, statistics, noise       vmapped over P
    physics:      P * E environments, one flat batch     (`core/tracing.py`)

A member is a `Config`. What may differ between members is in `TRACED`; a difference anywhere else
would be another program, and is refused. Member p's random numbers are those of the single run with
its seed: a population of P is P single runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxtd3.config.config import Config, find_field
from jaxtd3.config.sections import SECTIONS, TRACED
from jaxtd3.core.types import Agent, Array, BatchEnv, Metrics, Replay, TrainState
from jaxtd3.errors import UserError
from jaxtd3.loop.step import StepFn, make_train_step
from jaxtd3.loop.traced import retune, traced_values


class PopulationFns(NamedTuple):
    init: Callable[..., TrainState]
    """init(members) -> TrainState, every leaf [P, ...]; default: the members it was made for"""
    train_step: StepFn
    """train_step(state) -> (state, metrics [P]): jit it, scan it"""


def require_traced(name: str) -> str:
    """`section.field` of a field in which members may differ; one line where it is static."""
    full = ".".join(find_field(name))
    if full not in TRACED:
        free = ", ".join(sorted(field.split(".")[1] for field in TRACED - {"env.weights"}))
        raise UserError(
            f"{full} is static: it shapes the program that all members share. "
            f"Members may differ in reward weights, {free}"
        )
    return full


def check_members(members: Sequence[Config]) -> None:
    """Refuse members that are not one program."""
    if not members:
        raise UserError("a population needs at least one member")
    first = members[0]
    for member in members[1:]:
        for section in SECTIONS:
            a, b = getattr(first, section), getattr(member, section)
            for f in dataclasses.fields(a):
                if getattr(a, f.name) != getattr(b, f.name):
                    require_traced(f"{section}.{f.name}")
        if member.algo != first.algo:
            raise UserError(f"algo {first.algo} and {member.algo}: members share one algorithm")


def stack(trees: Sequence[Any]) -> Any:
    """Equal trees as one, with a leading axis P."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def take_member(tree: Any, index: int) -> Any:
    """Member `index` of a population's state or metrics."""
    return jax.tree.map(lambda x: x[index], tree)


def with_members(state: TrainState, env: BatchEnv, members: Sequence[Config]) -> TrainState:
    """The population's state under each member's traced settings."""

    return retune(state, stack([traced_values(cfg, env.spec) for cfg in members]))


def make_population(
    env: BatchEnv,
    agent: Agent,
    replay: Replay,
    members: Sequence[Config],
    *,
    key_of: Callable[[int], Array] = jax.random.key,
    mesh: Mesh | None = None,
) -> PopulationFns:
    """`(init, train_step)` of a population whose P members are single runs side by side.

    `init(other_members)` starts another P of them with the same compiled programs. `key_of(seed)`
    is the key that a single run's `init` is given. With a mesh, each device holds P / devices
    members; they never speak to each other.
    """
    check_members(members)
    size = len(members)
    fns = make_train_step(env, agent, replay, members[0].loop)
    step = jax.vmap(fns.train_step)
    if mesh is not None:
        axis = mesh.axis_names[0]
        if size % mesh.shape[axis]:
            raise UserError(f"{size} members are not divisible by {mesh.shape[axis]} devices")
        spec = PartitionSpec(axis)
        step = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def init(wave: Sequence[Config] = members) -> TrainState:
        if len(wave) != size:
            raise UserError(f"{len(wave)} members for a population of {size}")
        check_members([members[0], *wave])
        keys = jnp.stack([key_of(cfg.run.seed) for cfg in wave])
        state = with_members(jax.vmap(fns.init)(keys), env, wave)
        if mesh is None:
            return state
        return jax.device_put(state, jax.NamedSharding(mesh, PartitionSpec(mesh.axis_names[0])))

    def train_step(state: TrainState) -> tuple[TrainState, Metrics]:
        return step(state)

    return PopulationFns(init, train_step)
