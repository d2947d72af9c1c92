"""The heart: one iteration of collecting and learning as one pure function.

init, collect_step, train_step = make_train_step(env, agent, replay, cfg)
state = init(jax.random.key(0))
state, metrics = train_step(state)          # jit it, scan it, vmap it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtd3 import exploration
from jaxtd3.errors import nearest
from jaxtd3.normalize import discounted_return
from jaxtd3.sharding import AXIS, WHOLE, average, local_key, mean_over, reduce_shards
from jaxtd3.types import (
    Agent,
    Array,
    Batch,
    BatchEnv,
    EnvSpec,
    Metrics,
    Noise,
    Replay,
    TrainState,
)

StepFn = Callable[[TrainState], tuple[TrainState, Metrics]]


@dataclass(frozen=True)
class LoopConfig:
    """How collecting and learning alternate."""

    collect_steps: int = 1
    """Environment steps per iteration."""
    critic_updates: int = 2
    """Critic updates per iteration."""
    policy_updates: int = 1
    """Policy updates per iteration, spread evenly over the critic updates."""
    warmup: int = 10
    """Iterations of collecting before learning begins."""
    sync_every: int = 1
    """Updates between two averagings over devices (1: of gradients, at every update; more: each
    device learns alone in between, as Gorila's bundles do)."""
    warmup_random: bool = False
    """Uniform actions during warm-up, instead of the untrained policy with noise."""
    noise: str = "mixed"
    """How sigma differs between environments: mixed (drawn per episode), constant (sigma_max
    everywhere), linear (sigma_min ... sigma_max, as PQL), geometric (powers of sigma_max, as
    Ape-X)."""
    sigma_min: float = 0.001
    """Lowest exploration noise."""
    sigma_max: float = 0.4
    """Highest exploration noise."""
    noise_alpha: float = 7.0
    """Steepness of the geometric ladder."""
    noise_decay: float = 1.0
    """Share of the exploration noise that is left at the end (1: no decay)."""
    noise_steps: int = 100_000
    """Environment steps over which the noise decays, linearly (preset: the whole run)."""
    noise_correlation: float = 0.0
    """Correlation of exploration noise from step to step (0: white; 1: held for the episode)."""
    noise_hold: int = 0
    """Hold exploration noise for a random number of steps, at most so many, k steps with
    probability proportional to 1 / k^2 (0: off)."""
    sigma_white: float = 0.0
    """White noise beside the correlated noise."""
    curriculum: int = 0
    """Iterations over which reward terms of negative weight grow from nothing to their full weight
    (0: full from the start)."""
    curriculum_length: bool = False
    """Reward weights follow the length of the episodes: penalties grow from half to their full
    weight, the bonus for being alive shrinks to curriculum_alive, as episodes grow to their time
    limit. Goes well with store_terms: past data then count under the weights of now."""
    curriculum_alive: float = 0.5
    """Share of the bonus for being alive that is left when episodes last to their time limit."""

    def __post_init__(self):
        k, u, v = self.collect_steps, self.critic_updates, self.policy_updates
        if min(k, u, v) < 1:
            raise ValueError(f"collect_steps={k}, critic_updates={u}, policy_updates={v}: below 1")
        if max(k, u) % min(k, u):
            raise ValueError(f"collect_steps={k} and critic_updates={u}: one must divide the other")
        if u % v:
            raise ValueError(f"critic_updates={u} is not divisible by policy_updates={v}")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup} is negative")
        if self.sync_every < 1:
            raise ValueError(f"sync_every={self.sync_every} is below 1")
        if self.curriculum < 0:
            raise ValueError(f"curriculum={self.curriculum} is negative")
        if self.curriculum and self.curriculum_length:
            raise ValueError("curriculum and curriculum_length: only one of them")
        if not 0 <= self.curriculum_alive <= 1:
            raise ValueError(f"curriculum_alive={self.curriculum_alive} is not between 0 and 1")
        check_noise(self)


def check_noise(cfg: LoopConfig) -> None:
    """Refuse exploration settings that make no sense."""
    if cfg.noise not in exploration.LADDERS:
        raise ValueError(nearest("noise", cfg.noise, exploration.LADDERS))
    if not 0 <= cfg.sigma_min <= cfg.sigma_max:
        raise ValueError(
            f"sigma_min={cfg.sigma_min}, sigma_max={cfg.sigma_max}: not 0 <= min <= max"
        )
    if cfg.noise == "geometric" and cfg.sigma_max >= 1:
        raise ValueError(f"sigma_max={cfg.sigma_max}: a geometric ladder needs less than 1")
    checks = {
        "noise_alpha": cfg.noise_alpha >= 0,
        "noise_decay": cfg.noise_decay >= 0,
        "noise_steps": cfg.noise_steps >= 1,
        "noise_correlation": 0 <= cfg.noise_correlation <= 1,
        "noise_hold": cfg.noise_hold >= 0,
        "sigma_white": cfg.sigma_white >= 0,
    }
    for name, ok in checks.items():
        if not ok:
            raise ValueError(f"{name}={getattr(cfg, name)} is out of range")
    if cfg.noise_hold and cfg.noise_correlation:
        raise ValueError(
            f"noise_hold={cfg.noise_hold} and noise_correlation={cfg.noise_correlation}: "
            "only one of them"
        )


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
    if cfg.curriculum_length:
        return following_length(spec.reward_terms, cfg.curriculum_alive)
    return growing_penalties(cfg.curriculum) if cfg.curriculum else lambda weights, _: weights


def survival(steps: Array, limit: int, axis_name: str | None) -> Array:
    """How long episodes last, over the time limit, told from the ages `steps [E]` of those that
    run: their mean is half of it. []"""
    age = jnp.mean(steps.astype(jnp.float32))
    if axis_name is not None:
        age = mean_over(age, axis_name)
    return jnp.minimum(2 * age / limit, 1.0)


class TrainFns(NamedTuple):
    init: Callable[[Array], TrainState]
    collect_step: StepFn
    train_step: StepFn


def noise_hyper(cfg: LoopConfig) -> exploration.NoiseHyper:
    """The traced settings of the exploration noise."""
    return exploration.NoiseHyper(
        sigma_min=cfg.sigma_min,
        sigma_max=cfg.sigma_max,
        alpha=cfg.noise_alpha,
        decay=cfg.noise_decay,
        steps=cfg.noise_steps,
        correlation=cfg.noise_correlation,
        white=cfg.sigma_white,
    )


def make_noise(cfg: LoopConfig) -> Noise:
    """The exploration noise that a config describes."""
    ladder = exploration.LADDERS[cfg.noise]
    noise = exploration.make_noise(ladder, noise_hyper(cfg), cfg.noise_hold)
    steps = cfg.warmup * cfg.collect_steps
    return exploration.random_warmup(noise, steps) if cfg.warmup_random else noise


def make_learn(agent: Agent, replay: Replay, cfg: LoopConfig) -> Callable[..., Any]:
    """learn(state, key, plan) -> (agent_state, replay_state, metrics): updates, no environment."""
    judge = replay.update_priority

    def learn(state: TrainState, key: Array, plan: tuple[bool, ...]) -> tuple[Any, Any, Metrics]:
        """One critic update per entry of `plan`; the policy learns where it says True."""
        learning = state.iteration >= cfg.warmup

        def draw(ring: Any, key: Array) -> Batch:
            batch = replay.sample(ring, key, state.agent.hyper.gamma)
            return batch._replace(weight=jnp.where(learning, batch.weight, 0.0))

        def draw_all(keys: Array) -> list[Batch]:
            """A batch for each key, drawn in a loop of its own: in one block with the write of new
            data XLA repeats that write in every read, and copies the ring for it. (A loop of one
            is no loop to XLA, so a lone key is drawn twice.)"""
            keys = keys if len(plan) > 1 else jnp.concatenate([keys, keys])
            batches = jax.lax.map(lambda k: draw(state.replay, k), keys)
            return [jax.tree.map(lambda x, i=i: x[i], batches) for i in range(len(pattern))]

        def one(carry: Any, batch: Batch, key: Array, policy: bool) -> tuple[Any, Metrics]:
            agent_state, ring = carry
            agent_state, metrics = agent.update(agent_state, batch, key, policy=policy)
            td_error = metrics.pop("td_error", None)
            if judge is not None and td_error is not None:
                ring = judge(ring, batch, td_error)
            return (agent_state, ring), metrics

        pattern = shortest_period(plan)

        def group(carry: Any, key: Array) -> tuple[Any, Metrics]:
            """The pattern, unrolled: the delayed policy costs no cond."""
            key_sample, key_update = jax.random.split(key)
            keys_sample = jax.random.split(key_sample, len(pattern))
            keys_update = jax.random.split(key_update, len(pattern))
            batches = draw_all(keys_sample) if judge is None else None
            history = []
            for i, policy in enumerate(pattern):
                # what one update learns decides what the next one draws from a prioritised ring
                batch = batches[i] if batches else draw(carry[1], keys_sample[i])
                carry, metrics = one(carry, batch, keys_update[i], policy)
                history.append(metrics)
            return carry, merge_metrics(history)

        keys = jax.random.split(key, len(plan) // len(pattern))
        carry = (state.agent, None if judge is None else state.replay)
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
            key=key,
            iteration=jnp.zeros((), jnp.int32),
        )
        return strong_types(state)

    def judge(state: TrainState, key: Array) -> TrainState:
        """New data enter a prioritised replay by their TD error."""
        if not (agent.td_error and replay.fresh and replay.update_priority):
            return state
        batch = replay.fresh(state.replay, state.agent.hyper.gamma)
        td_error = agent.td_error(state.agent, batch, key)
        return state.replace(replay=replay.update_priority(state.replay, batch, td_error))

    def collect(state: TrainState, key: Array) -> tuple[TrainState, Metrics]:
        """One step of every environment into the ring."""
        key_noise, key_env, key_redraw, key_judge = jax.random.split(key, 4)
        action = agent.act(state.agent, state.env.obs)
        action = explore.apply(state.noise, action, key_noise)
        length = survival(state.env.steps, env.spec.episode_length, axis_name)
        weights = weights_at(state.env.weights, Progress(state.iteration, length))
        env_state, tr, metrics = env.step(state.env.replace(weights=weights), action, key_env)
        gamma = state.agent.hyper.gamma
        discounted = discounted_return(state.discounted, tr.reward, tr.done, gamma)
        state = state.replace(
            agent=agent.observe(state.agent, tr, discounted),
            replay=replay.relabel(replay.add(state.replay, tr), weights),
            env=env_state.replace(weights=state.env.weights),
            noise=explore.redraw(state.noise, tr.done, key_redraw),
            discounted=discounted,
        )
        return judge(state, key_judge), metrics

    def collect_step(state: TrainState) -> tuple[TrainState, Metrics]:
        key, key_collect = jax.random.split(state.key)
        state, metrics = collect(state.replace(key=key), local_key(key_collect, axis_name))
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
                state, metrics = collect(state, key_collect)
                history.append(metrics)
            now = plan[i * updates : (i + 1) * updates]
            agent_state, replay_state, metrics = learn(state, key_learn, now)
            state = state.replace(agent=agent_state, replay=replay_state)
            history.append({f"train/{name}": value for name, value in metrics.items()})
        state = state.replace(iteration=state.iteration + 1)
        return strong_types(state), merge_metrics(history)

    return TrainFns(init, collect_step, train_step)


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
    (`sync_every`) at the end. `options` are for the compiler (`linear.compiler_options`).
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


def update_plan(cfg: LoopConfig) -> tuple[bool, ...]:
    """For each critic update of an iteration, whether the policy learns with it."""
    every = cfg.critic_updates // cfg.policy_updates
    return tuple((i + 1) % every == 0 for i in range(cfg.critic_updates))


def shortest_period(plan: tuple[bool, ...]) -> tuple[bool, ...]:
    """The shortest head of `plan` whose repetition is `plan`."""
    sizes = (n for n in range(1, len(plan) + 1) if len(plan) % n == 0)
    return next(plan[:n] for n in sizes if plan[:n] * (len(plan) // n) == plan)


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


def strong_types(tree: Any) -> Any:
    """Drop weak types, so that a state that was stepped is traced as the first one was."""

    def strong(x: Array) -> Array:
        return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x

    return jax.tree.map(strong, tree)
