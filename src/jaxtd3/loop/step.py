"""The heart: one iteration of collecting and learning as one pure function.

init, collect_step, train_step = make_train_step(env, agent, replay, cfg)
state = init(jax.random.key(0))
state, metrics = train_step(state)          # jit it, scan it, vmap it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtd3.agent import exploration
from jaxtd3.agent.normalize import discounted_return
from jaxtd3.config.sections import LoopConfig, hyper_values
from jaxtd3.core.sharding import local_key
from jaxtd3.core.types import (
    Agent,
    Array,
    Batch,
    BatchEnv,
    Metrics,
    Noise,
    Replay,
    TrainState,
)
from jaxtd3.loop.metrics import merge_metrics, reduce_metrics
from jaxtd3.loop.schedule import Progress, Schedule, make_schedule, survival

StepFn = Callable[[TrainState], tuple[TrainState, Metrics]]


class TrainFns(NamedTuple):
    init: Callable[[Array], TrainState]
    collect_step: StepFn
    train_step: StepFn


def make_noise(cfg: LoopConfig) -> Noise:
    """The exploration noise that a config describes."""
    ladder = exploration.LADDERS[cfg.noise]
    hyper = hyper_values(exploration.NoiseHyper, cfg)
    noise = exploration.make_noise(ladder, hyper, cfg.noise_hold)
    steps = cfg.warmup * cfg.collect_steps
    return exploration.random_warmup(noise, steps) if cfg.warmup_random else noise


def make_learn(agent: Agent, replay: Replay, cfg: LoopConfig) -> Callable[..., Any]:
    """learn(state, key, plan, weights) -> (agent_state, replay_state, metrics): updates alone."""
    prioritize = replay.update_priority

    def learn(
        state: TrainState, key: Array, plan: tuple[bool, ...], weights: Array
    ) -> tuple[Any, Any, Metrics]:
        """One critic update per entry of `plan`, of data that are rewarded under `weights [K]`; the
        policy learns where the plan says True."""
        learning = state.iteration >= cfg.warmup

        def sample_batch(ring: Any, key: Array) -> Batch:
            batch = replay.sample(ring, key, agent.discount(state.agent), weights)
            return batch._replace(weight=jnp.where(learning, batch.weight, 0.0))

        def sample_all(keys: Array) -> list[Batch]:
            """A batch for each key, drawn in a loop of its own: in one block with the write of new
            data XLA repeats that write in every read, and copies the ring for it. (A loop of one
            is no loop to XLA, so a lone key is drawn twice.)"""
            keys = keys if len(plan) > 1 else jnp.concatenate([keys, keys])
            batches = jax.lax.map(lambda k: sample_batch(state.replay, k), keys)
            return [jax.tree.map(lambda x, i=i: x[i], batches) for i in range(len(pattern))]

        def one(carry: Any, batch: Batch, key: Array, policy: bool) -> tuple[Any, Metrics]:
            agent_state, ring = carry
            agent_state, metrics, td_error = agent.update(agent_state, batch, key, policy=policy)
            if prioritize is not None and td_error is not None:
                ring = prioritize(ring, batch, td_error)
            return (agent_state, ring), metrics

        pattern = shortest_period(plan)

        def group(carry: Any, key: Array) -> tuple[Any, Metrics]:
            """The pattern, unrolled: the delayed policy costs no cond."""
            key_sample, key_update = jax.random.split(key)
            keys_sample = jax.random.split(key_sample, len(pattern))
            keys_update = jax.random.split(key_update, len(pattern))
            batches = sample_all(keys_sample) if prioritize is None else None
            history = []
            for i, policy in enumerate(pattern):
                # what one update learns decides what the next one draws from a prioritised ring
                batch = batches[i] if batches else sample_batch(carry[1], keys_sample[i])
                carry, metrics = one(carry, batch, keys_update[i], policy)
                history.append(metrics)
            return carry, merge_metrics(history)

        keys = jax.random.split(key, len(plan) // len(pattern))
        carry = (state.agent, None if prioritize is None else state.replay)
        if len(pattern) == len(plan):
            carry, metrics = group(carry, keys[0])
        else:
            carry, stacked = jax.lax.scan(group, carry, keys)
            metrics = reduce_metrics(stacked)
        agent_state, ring = carry
        return agent_state, state.replay if ring is None else ring, metrics

    return learn


def make_train_step(
    env: BatchEnv,
    agent: Agent,
    replay: Replay,
    cfg: LoopConfig,
    axis_name: str | None = None,
    *,
    noise: Noise | None = None,
    schedule: Schedule | None = None,
) -> TrainFns:
    """Bind the parts together: `(init, collect_step, train_step)`.

    `axis_name` names the mesh axis over which a sharded program runs the steps (`make_chunk`).
    """
    explore = noise or make_noise(cfg)
    weights_at = schedule or make_schedule(cfg, env.spec)
    learn = make_learn(agent, replay, cfg)

    def init(key: Array) -> TrainState:
        key, key_agent, key_env, key_noise = jax.random.split(key, 4)
        state = TrainState(
            agent=agent.init(key_agent),
            replay=replay.init(env.num_envs),
            env=env.init(key_env),
            noise=explore.init(key_noise, env.num_envs, env.spec.action_size),
            discounted=jnp.zeros(env.num_envs),
            weights=jnp.copy(env.weights),  # a state may be donated, these may not
            key=key,
            iteration=jnp.zeros((), jnp.int32),
        )
        return strong_types(state)

    def weights_now(state: TrainState) -> Array:
        length = survival(state.env.steps, env.spec.episode_length, axis_name)
        return weights_at(state.weights, Progress(state.iteration, length))

    def prioritize_new(state: TrainState, key: Array, weights: Array) -> TrainState:
        """New data enter a prioritised replay by their TD error."""
        if not (agent.td_error and replay.fresh and replay.update_priority):
            return state
        batch = replay.fresh(state.replay, agent.discount(state.agent), weights)
        td_error = agent.td_error(state.agent, batch, key)
        return state.replace(replay=replay.update_priority(state.replay, batch, td_error))

    def collect(state: TrainState, key: Array, weights: Array) -> tuple[TrainState, Metrics]:
        """One step of every environment into the ring."""
        key_noise, key_env, key_resample, key_priority = jax.random.split(key, 4)
        action = agent.act(state.agent, state.env.obs)
        action = explore.apply(state.noise, action, key_noise)
        env_state, tr, metrics = env.step(state.env, action, key_env, weights)
        gamma = agent.discount(state.agent)
        discounted = discounted_return(state.discounted, tr.reward, tr.done, gamma)
        state = state.replace(
            agent=agent.observe(state.agent, tr, discounted),
            replay=replay.add(state.replay, tr),
            env=env_state,
            noise=explore.resample(state.noise, tr.done, key_resample),
            discounted=discounted,
        )
        return prioritize_new(state, key_priority, weights), metrics

    def collect_step(state: TrainState) -> tuple[TrainState, Metrics]:
        key, key_collect = jax.random.split(state.key)
        state = state.replace(key=key)
        state, metrics = collect(state, local_key(key_collect, axis_name), weights_now(state))
        return strong_types(state), metrics

    def train_step(state: TrainState) -> tuple[TrainState, Metrics]:
        rounds = min(cfg.collect_steps, cfg.critic_updates)
        collects, updates = cfg.collect_steps // rounds, cfg.critic_updates // rounds
        plan = update_plan(cfg)
        key, *keys = jax.random.split(state.key, rounds + 1)
        state = state.replace(key=key)
        history = []
        for i, key_round in enumerate(keys):
            key_round = local_key(key_round, axis_name)
            key_learn, *keys_collect = jax.random.split(key_round, collects + 1)
            for key_collect in keys_collect:
                weights = weights_now(state)
                state, metrics = collect(state, key_collect, weights)
                history.append(metrics)
            now = plan[i * updates : (i + 1) * updates]
            agent_state, replay_state, metrics = learn(state, key_learn, now, weights)
            state = state.replace(agent=agent_state, replay=replay_state)
            history.append({f"train/{name}": value for name, value in metrics.items()})
        state = state.replace(iteration=state.iteration + 1)
        return strong_types(state), merge_metrics(history)

    return TrainFns(init, collect_step, train_step)


def update_plan(cfg: LoopConfig) -> tuple[bool, ...]:
    """For each critic update of an iteration, whether the policy learns with it."""
    every = cfg.critic_updates // cfg.policy_updates
    return tuple((i + 1) % every == 0 for i in range(cfg.critic_updates))


def shortest_period(plan: tuple[bool, ...]) -> tuple[bool, ...]:
    """The shortest head of `plan` whose repetition is `plan`."""
    sizes = (n for n in range(1, len(plan) + 1) if len(plan) % n == 0)
    return next(plan[:n] for n in sizes if plan[:n] * (len(plan) // n) == plan)


def strong_types(tree: Any) -> Any:
    """Drop weak types, so that a state that was stepped is traced as the first one was."""

    def strong(x: Array) -> Array:
        return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x

    return jax.tree.map(strong, tree)
