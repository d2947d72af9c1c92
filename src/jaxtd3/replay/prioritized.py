"""Prioritised replay on the device (Ape-X): what surprised the learner is drawn more often.

    P(i) = p_i / sum_j p_j,    p_i = (|TD error_i| + eps)^alpha,    weight_i = (n P(i))^-beta

Beside the ring stand the priorities `p [T, E]` and their sums over blocks of about sqrt(T) steps of
one environment, `[T / L, E]`. Drawing picks an environment, then a block, then a step, each by a
cumulative sum over some sqrt(T) numbers; writing recomputes the sums of the touched blocks, so they
never drift. All is per environment, so the ring may be split over devices anywhere along E.

A step has a priority as soon as the uniform sampler would draw it (the newest slab has no successor
yet) and loses it when it is overwritten; quarantined steps never get one.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import struct

from jaxtd3.config.sections import ReplayConfig, hyper_type, hyper_values
from jaxtd3.core.types import Array, Batch, EnvSpec, Replay, Transition
from jaxtd3.replay import ring as uniform
from jaxtd3.replay.ring import INVALID, ReplayState

EPS = 1e-3  # keeps every priority above 0 and every weight finite


class PriorityHyper(hyper_type(ReplayConfig)):  # type: ignore[misc]
    """Traced settings of priorities, all scalars: alpha, beta, beta_end, steps."""


class PrioritizedState(struct.PyTreeNode):
    ring: ReplayState
    p: Array  # [K * L, E] f32, 0 where nothing may be drawn; rows beyond T stay 0
    sums: Array  # [K, E] f32, of p over L rows
    count: Array  # [K, E] f32, of them how many are above 0
    top: Array  # [] f32, the largest priority so far: that of new data
    age: Array  # [] f32, slabs added so far
    hyper: PriorityHyper

    @property
    def size(self) -> Array:
        return self.ring.size


def block_length(length: int) -> int:
    """L: rows per block, about the square root of all."""
    return math.isqrt(length - 1) + 1


def prioritized_replay(spec: EnvSpec, cfg: ReplayConfig, axis_name: str | None = None) -> Replay:
    """The ring buffer with priorities; `axis_name`: probabilities are those among all shards."""

    def newest(state: PrioritizedState, gamma: Array, weights: Array | None = None) -> Batch:
        return fresh(state, gamma, spec, cfg, weights)

    return Replay(
        init=lambda num_envs: init(spec, cfg, num_envs),
        add=lambda state, tr: add(state, tr, spec, cfg),
        sample=lambda state, key, gamma, weights=None: sample(
            state, key, gamma, spec, cfg, weights, axis_name
        ),
        update_priority=lambda state, batch, td: update_priority(state, batch, td, axis_name),
        fresh=newest if cfg.priority_new == "td" else None,
    )


def init(spec: EnvSpec, cfg: ReplayConfig, num_envs: int) -> PrioritizedState:
    """An empty ring, no priorities."""
    rows = block_length(cfg.length)
    blocks = math.ceil(cfg.length / rows)
    return PrioritizedState(
        ring=uniform.init(spec, cfg, num_envs),
        p=jnp.zeros((blocks * rows, num_envs)),
        sums=jnp.zeros((blocks, num_envs)),
        count=jnp.zeros((blocks, num_envs)),
        top=jnp.ones(()),
        age=jnp.zeros(()),
        hyper=jax.tree.map(jnp.float32, hyper_values(PriorityHyper, cfg)),
    )


# --- writing ------------------------------------------------------------------------------------


def summed(state: PrioritizedState) -> Array:
    """True, once the sums are known; what is written to `p` waits for it.

    XLA copies `p` unless all that was read of it is needed by what is written next.
    """
    return jnp.sum(state.sums) + jnp.sum(state.count) >= 0


def write_row(p: Array, row: Array, values: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(p, values, row, 0)


def sum_rows(state: PrioritizedState, row: Array) -> PrioritizedState:
    """The sums of the block that a slab lies in, anew."""
    rows = state.p.shape[0] // state.sums.shape[0]
    block = jax.lax.dynamic_slice_in_dim(state.p, (row // rows) * rows, rows, 0)
    return state.replace(
        sums=write_row(state.sums, row // rows, jnp.sum(block, 0)),
        count=write_row(state.count, row // rows, jnp.sum(block > 0, 0, dtype=jnp.float32)),
    )


def available(ring: ReplayState, spec: EnvSpec, cfg: ReplayConfig) -> tuple[Array, Array]:
    """(row, whether there is one) of the newest slab that may be drawn."""
    length = ring.obs.shape[0]
    behind = 1 if cfg.store_next_obs else 2
    return (ring.head - behind) % length, uniform.num_starts(ring, spec, cfg) > 0


def add(
    state: PrioritizedState, tr: Transition, spec: EnvSpec, cfg: ReplayConfig
) -> PrioritizedState:
    """Write one slab; the one that thereby may be drawn gets the largest priority so far."""
    lost = state.ring.head  # no start any more
    if spec.history > 1:
        lost = (lost + spec.history - 1) % cfg.length
    ring = uniform.add(state.ring, tr, store_next_obs=cfg.store_next_obs)
    row, exists = available(ring, spec, cfg)
    valid = jax.lax.dynamic_index_in_dim(ring.end, row, 0, keepdims=False) != INVALID
    p = write_row(state.p, row, jnp.where(valid & exists & summed(state), state.top, 0.0))
    if not cfg.store_next_obs or spec.history > 1:
        p = write_row(p, lost, jnp.zeros(p.shape[1]))
    state = sum_rows(sum_rows(state.replace(ring=ring, p=p), row), lost)
    return state.replace(age=state.age + 1)


def fresh(
    state: PrioritizedState,
    gamma: Array,
    spec: EnvSpec,
    cfg: ReplayConfig,
    weights: Array | None = None,
) -> Batch:
    """The windows that the last `add` made available, one per environment."""
    row, exists = available(state.ring, spec, cfg)
    env = jnp.arange(state.p.shape[1])
    newest = jnp.maximum(uniform.num_starts(state.ring, spec, cfg) - 1, 0) + (spec.history - 1)
    offset = jnp.full(env.shape, newest)
    batch = uniform.windows(state.ring, offset, env, gamma, spec, cfg, weights)
    rows = jnp.full(env.shape, row)
    return batch._replace(weight=jnp.where(exists, batch.weight, 0.0), index=(rows, env))


def update_priority(
    state: PrioritizedState, batch: Batch, td_error: Array, axis_name: str | None = None
) -> PrioritizedState:
    """The learner's |TD error| `[B]` as priorities; where it is not finite they stay.

    Twice the same step in a batch: the larger one counts, in whatever order they are written.
    """
    row, env = batch.index
    rows = state.p.shape[0] // state.sums.shape[0]
    old = state.p[row, env]
    known = (batch.weight > 0) & (old > 0) & jnp.isfinite(td_error) & summed(state)
    new = jnp.where(known, (jnp.abs(td_error) + EPS) ** state.hyper.alpha, old)
    p = state.p.at[row, env].set(new).at[row, env].max(new)
    block = (row // rows)[:, None] * rows + jnp.arange(rows)[None]  # [B, L]
    sums = state.sums.at[row // rows, env].set(jnp.sum(p[block, env[:, None]], axis=1))
    top = jnp.max(new)
    if axis_name is not None:
        top = jax.lax.pmax(top, axis_name)
    return state.replace(p=p, sums=sums, top=jnp.maximum(state.top, top))


# --- drawing ------------------------------------------------------------------------------------


def pick(key: Array, p: Array) -> Array:
    """Of each row of `p [B, M]` one index, with probability in proportion: [B].

    Sums by a triangular product: M is some hundred at most, and XLA's cumsum five times slower.
    """
    ones = jnp.triu(jnp.ones((p.shape[1], p.shape[1])))
    total = jnp.matmul(p, ones, precision="highest")
    u = jax.random.uniform(key, (p.shape[0], 1)) * total[:, -1:]
    chosen = jnp.sum(total <= u, axis=1)
    last = p.shape[1] - 1 - jnp.argmax(p[:, ::-1] > 0, axis=1)  # rounding may reach beyond it
    return jnp.minimum(chosen, last)


def choose(state: PrioritizedState, key: Array, size: int) -> tuple[Array, Array]:
    """`size` steps in proportion to their priorities: (row [B], env [B])."""
    key_env, key_block, key_row = jax.random.split(key, 3)
    rows = state.p.shape[0] // state.sums.shape[0]
    total = jnp.cumsum(jnp.sum(state.sums, axis=0))  # [E]
    u = jax.random.uniform(key_env, (size,)) * total[-1]
    last = total.shape[0] - 1 - jnp.argmax(jnp.any(state.count > 0, axis=0)[::-1])
    env = jnp.searchsorted(total, u, side="right", method="scan_unrolled")
    env = jnp.minimum(env, last)
    block = pick(key_block, state.sums[:, env].T)  # of [B, K]
    inside = block[:, None] * rows + jnp.arange(rows)[None]  # [B, L]
    row = block * rows + pick(key_row, state.p[inside, env[:, None]])
    return row, env


def sample(
    state: PrioritizedState,
    key: Array,
    gamma: Array,
    spec: EnvSpec,
    cfg: ReplayConfig,
    weights: Array | None = None,
    axis_name: str | None = None,
) -> Batch:
    """`batch_size` windows by priority, weighted so that `beta = 1` undoes the preference.

    A shard draws its part of the batch from its own ring, that is with P_s(i) = p_i / total_s where
    all of them together would draw with P(i) = p_i / total: the weight has the factor
    P / (P_s / shards), and the expectation is that of one ring.
    """
    row, env = choose(state, key, cfg.batch_size)
    length = state.ring.obs.shape[0]
    offset = (row - (state.ring.head - state.ring.size)) % length
    batch = uniform.windows(state.ring, offset, env, gamma, spec, cfg, weights)
    weight = importance(state, state.p[row, env], axis_name)
    return batch._replace(weight=batch.weight * weight, index=(row, env))


def importance(state: PrioritizedState, p: Array, axis_name: str | None = None) -> Array:
    """(n P)^-beta, times how much rarer this shard is drawn from than it should be: [B]."""
    h = state.hyper
    here = jnp.sum(state.sums)
    sums = jnp.stack([here, jnp.sum(state.count), jnp.ones(())])
    total, n, shards = sums if axis_name is None else jax.lax.psum(sums, axis_name)
    beta = h.beta + (h.beta_end - h.beta) * jnp.clip(state.age / h.steps, 0.0, 1.0)
    some = (p > 0) & (total > 0)
    relative = jnp.where(some, n * p / jnp.where(some, total, 1.0), 1.0)
    share = shards * here / jnp.where(total > 0, total, 1.0)
    return jnp.where(some, relative**-beta * share, 0.0)
