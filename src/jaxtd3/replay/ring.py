"""The replay ring: time-major, on the device, without a second copy of the next observation.

          env 0   env 1   ...  env E-1
        +-------+-------+----+-------+
  t = 0 | slab written by one `add`  |   obs [T, E, D]  action [T, E, U]  reward, end [T, E]
        +-------+-------+----+-------+
  ...   |                            |   the next observation of (t, e) is obs[t + 1, e] ...
        +-------+-------+----+-------+
 head ->| oldest, overwritten next   |   ... unless (t, e) ended an episode: a terminated step needs
        +----------------------------+   none, a truncated one keeps its own in a small side ring.

An environment truncates at most once per `episode_length` steps, so a side ring of
`ceil(T / L) + 2` rows is exact. Windows of n steps are built when sampling and end at the first of:
n steps, an episode end, the step before a quarantined one, the newest slab.

An actor that sees its last K observations (`EnvSpec.history`) costs no further byte: the newest one
is stored, and the window is gathered from the rows before it, back to the first of its episode,
which is repeated from there on. The K - 1 oldest slabs are no starts: what came before is gone.

With `store_terms` the ring keeps the raw reward terms instead of the reward: what is sampled is
rewarded under the weights that sampling is given, so all past data count when they change.

The arrays are only ever touched by one slab write and by gathers: reshaping the ring, or passing it
through `lax.cond`, would copy it.
"""

from __future__ import annotations

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from jaxtd3.config.sections import ReplayConfig
from jaxtd3.core.types import Array, Batch, EnvSpec, Replay, Transition
from jaxtd3.replay.symmetry import symmetric

RUNNING, TERMINATED, TRUNCATED, INVALID = 0, 1, 2, 3


class ReplayState(struct.PyTreeNode):
    obs: Array  # [T, E, D]
    action: Array  # [T, E, U]
    reward: Array  # [T, E] f32; [1, 1] with store_terms
    end: Array  # [T, E] uint8: RUNNING, TERMINATED, TRUNCATED or INVALID
    slot: Array  # [T, E] uint16: row of the side ring, where truncated
    final_obs: Array  # [S, E, D] side ring; [T, E, D] with store_next_obs
    next_slot: Array  # [E] int32: side-ring row to write next
    head: Array  # [] int32: slab to write next
    size: Array  # [] int32: slabs written, at most T
    terms: Any = None  # [T, E, K] f32 with store_terms


def side_rows(spec: EnvSpec, cfg: ReplayConfig) -> int:
    """Rows of the side ring."""
    if cfg.store_next_obs:
        return cfg.length
    return math.ceil(cfg.length / spec.episode_length) + 2


def make_replay(spec: EnvSpec, cfg: ReplayConfig, axis_name: str | None = None) -> Replay:
    """The ring buffer of one device, bound to an environment's sizes.

    `axis_name` names the mapped axis over which priorities are normalised, if any.
    """
    if cfg.length <= spec.history:
        raise ValueError(f"length={cfg.length} is too short for history={spec.history}")
    if not cfg.store_next_obs and side_rows(spec, cfg) > 2**16:
        raise ValueError(
            f"episode_length={spec.episode_length} is too short for length={cfg.length}: "
            "set store_next_obs"
        )
    if cfg.store_terms and not spec.reward_terms:
        raise ValueError(f"{spec.name}'s reward is not a weighted sum: there are no terms to store")
    replay = Replay(
        init=lambda num_envs: init(spec, cfg, num_envs),
        add=lambda state, tr: add(state, tr, store_next_obs=cfg.store_next_obs),
        sample=lambda state, key, gamma, weights=None: sample(
            state, key, gamma, spec, cfg, weights
        ),
    )
    if cfg.prioritized:
        from jaxtd3.replay.prioritized import prioritized_replay  # it builds upon this module

        replay = prioritized_replay(spec, cfg, axis_name)
    return symmetric(replay, cfg.symmetry, spec)


def init(spec: EnvSpec, cfg: ReplayConfig, num_envs: int) -> ReplayState:
    """An empty ring."""
    store = jnp.bfloat16 if cfg.bf16 else jnp.float32
    t, e = cfg.length, num_envs
    slots = (1, 1) if cfg.store_next_obs else (t, e)
    kept: dict[str, Any] = {}
    if cfg.store_terms:
        kept = {"terms": jnp.zeros((t, e, len(spec.reward_terms)))}
    return ReplayState(
        obs=jnp.zeros((t, e, spec.frame_width), store),
        action=jnp.zeros((t, e, spec.action_size), store),
        reward=jnp.zeros((1, 1) if cfg.store_terms else (t, e), jnp.float32),
        end=jnp.zeros((t, e), jnp.uint8),
        slot=jnp.zeros(slots, jnp.uint16),
        final_obs=jnp.zeros((side_rows(spec, cfg), e, spec.frame_width), store),
        next_slot=jnp.zeros((e,), jnp.int32),
        head=jnp.zeros((), jnp.int32),
        size=jnp.zeros((), jnp.int32),
        **kept,
    )


def nbytes(spec: EnvSpec, cfg: ReplayConfig, num_envs: int) -> int:
    """Bytes of the ring, every array counted, without allocating it."""
    shapes = jax.eval_shape(lambda: init(spec, cfg, num_envs))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def bytes_per_transition(spec: EnvSpec, cfg: ReplayConfig, num_envs: int) -> float:
    return nbytes(spec, cfg, num_envs) / (cfg.length * num_envs)


def add(state: ReplayState, tr: Transition, store_next_obs: bool = False) -> ReplayState:
    """Write one slab `[E, ...]` at the head."""
    length, num_envs, width = state.obs.shape
    chex.assert_shape(tr.reward, (num_envs,))
    head = state.head

    def write(ring: Array, slab: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(ring, slab.astype(ring.dtype), head, 0)

    valid = tr.valid
    truncated = tr.truncated & valid
    end = jnp.where(tr.terminated, TERMINATED, jnp.where(truncated, TRUNCATED, RUNNING))
    end = jnp.where(valid, end, INVALID)
    obs, final_obs = newest(tr.obs, width), newest(tr.final_obs, width)
    final_obs = jnp.where(valid[:, None], final_obs, 0.0)
    slot, next_slot = state.slot, state.next_slot
    if store_next_obs:
        finals = write(state.final_obs, final_obs)
    else:
        # One row per env and step: where nothing was truncated, the row next in turn is scratch.
        rows = state.final_obs.shape[0]
        finals = state.final_obs.at[next_slot, jnp.arange(num_envs)].set(
            final_obs.astype(state.final_obs.dtype)
        )
        slot = write(slot, next_slot)
        next_slot = jnp.where(truncated, (next_slot + 1) % rows, next_slot)
    if state.terms is None:
        label = {"reward": write(state.reward, jnp.where(valid, tr.reward, 0.0))}
    else:
        label = {"terms": write(state.terms, jnp.where(valid[:, None], tr.terms, 0.0))}
    return state.replace(
        obs=write(state.obs, obs),
        action=write(state.action, tr.action),
        **label,
        end=write(state.end, end),
        slot=slot,
        final_obs=finals,
        next_slot=next_slot,
        head=(head + 1) % length,
        size=jnp.minimum(state.size + 1, length),
    )


def newest(obs: Array, width: int) -> Array:
    """The last numbers of flat observations, which are the newest of a window: [E, width]."""
    return obs if obs.shape[1] == width else obs[:, obs.shape[1] - width :]


def reward_at(
    state: ReplayState, row: Array, env: Array, spec: EnvSpec, weights: Array | None
) -> Array:
    """Stored rewards, or those of the stored terms under `weights [K]`: [B]."""
    if state.terms is None:
        return state.reward[row, env]
    own = jnp.array(spec.default_weights, jnp.float32)
    return spec.combine(state.terms[row, env], own if weights is None else weights)


def sample(
    state: ReplayState,
    key: Array,
    gamma: Array,
    spec: EnvSpec,
    cfg: ReplayConfig,
    weights: Array | None = None,
) -> Batch:
    """`batch_size` windows, uniform over all start positions in the ring."""
    num_envs = state.obs.shape[1]
    key_age, key_env = jax.random.split(key)
    shape = (cfg.batch_size,)
    starts = jnp.maximum(num_starts(state, spec, cfg), 1)
    offset = jax.random.randint(key_age, shape, 0, starts) + (spec.history - 1)
    env = jax.random.randint(key_env, shape, 0, num_envs)
    return windows(state, offset, env, gamma, spec, cfg, weights)


def num_starts(state: ReplayState, spec: EnvSpec, cfg: ReplayConfig) -> Array:
    """How many slabs a window may start in: the newest has no successor yet, the `history - 1`
    oldest have lost what was observed before them."""
    return state.size - (spec.history - 1) - (0 if cfg.store_next_obs else 1)


def windows(
    state: ReplayState,
    offset: Array,
    env: Array,
    gamma: Array,
    spec: EnvSpec,
    cfg: ReplayConfig,
    weights: Array | None = None,
) -> Batch:
    """The windows that start `offset [B]` slabs after the oldest one, in environments `env [B]`."""
    length = state.obs.shape[0]
    oldest = state.head - state.size

    def row(ahead: Array | int) -> Array:
        return (oldest + offset + ahead) % length

    first_end = state.end[row(0), env]
    reward = jnp.zeros(offset.shape)
    steps = jnp.zeros(offset.shape, jnp.int32)  # steps in the window, k
    last_end = jnp.full(offset.shape, RUNNING, jnp.uint8)
    open_ = first_end != INVALID  # the window may still grow
    for j in range(cfg.n_step):
        end = state.end[row(j), env]
        newest = offset + j >= state.size - 1
        has_next = (end != RUNNING) | ~newest | cfg.store_next_obs
        take = open_ & (end != INVALID) & has_next & (offset + j < state.size)
        earned = reward_at(state, row(j), env, spec, weights)
        reward = jnp.where(take, reward + gamma**j * earned, reward)
        steps = jnp.where(take, j + 1, steps)
        last_end = jnp.where(take, end, last_end)
        open_ = take & (end == RUNNING)

    if cfg.store_next_obs:
        next_obs = state.final_obs[row(jnp.maximum(steps - 1, 0)), env]
    else:
        side = state.slot[row(jnp.maximum(steps - 1, 0)), env]
        truncated = last_end == TRUNCATED
        next_obs = jnp.where(
            truncated[:, None],
            state.final_obs[side.astype(jnp.int32), env],
            state.obs[row(steps), env],
        )
    obs = state.obs[row(0), env]
    if spec.history > 1:

        def rows_until(ahead: Array | int, count: int) -> list[Array]:
            """Rows of `count` steps until one, oldest first; the first of its episode repeats."""
            rows, same = [row(ahead)], jnp.ones(offset.shape, bool)
            for j in range(1, count):
                same &= state.end[row(ahead - j), env] == RUNNING
                rows.append(jnp.where(same, row(ahead - j), rows[-1]))
            return rows[::-1]

        def with_past(rows: list[Array], last: Array) -> Array:
            past = state.obs[jnp.stack(rows), env[None], : spec.frame_size]
            return jnp.concatenate([*past, last], axis=1)

        obs = with_past(rows_until(0, spec.history)[:-1], obs)
        before = rows_until(jnp.maximum(steps - 1, 0), spec.history - 1)
        next_obs = with_past(before, next_obs)

    bootstrap = last_end != TERMINATED
    if not cfg.bootstrap_truncated:
        bootstrap &= last_end != TRUNCATED
    return Batch(
        obs=obs.astype(jnp.float32),
        action=state.action[row(0), env].astype(jnp.float32),
        reward=reward,
        discount=jnp.where(bootstrap, gamma ** steps.astype(jnp.float32), 0.0),
        next_obs=next_obs.astype(jnp.float32),
        weight=(steps > 0).astype(jnp.float32),
    )


def describe(spec: EnvSpec, cfg: ReplayConfig, num_envs: int) -> str:
    """One line for people: how much memory the ring takes."""
    total = nbytes(spec, cfg, num_envs)
    return (
        f"replay: {cfg.length * num_envs:,} transitions x "
        f"{bytes_per_transition(spec, cfg, num_envs):.0f} B = {total / 2**20:,.0f} MiB"
    )
