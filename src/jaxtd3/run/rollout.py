"""Evaluation on the device: the deterministic policy, one episode per environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxtd3.core.sharding import SPLIT, WHOLE, env_specs, over_envs
from jaxtd3.core.tracing import flat_vmap
from jaxtd3.core.types import Agent, Array, BatchEnv, Metrics
from jaxtd3.envs.batch import step_shapes
from jaxtd3.envs.metrics import TINY, Metric, MetricStep, metrics_of, ratio
from jaxtd3.envs.playground.mirror import Mirror, mirror_of, reflect

Sums = dict[str, Array]
"""Per episode: return, return_weighted, length, fell, lost (its numbers were not finite),
asymmetry (of robots with a mirror) [N]; terms [N, K]; metrics [N, M, 2]."""


def shown_metrics(env: BatchEnv) -> dict[str, Metric]:
    """The metrics that an evaluation adds to return and length."""
    same = ("default_reward", "survival", "tracking_error", "action_rate")
    return {name: metric for name, metric in metrics_of(env.env).items() if name not in same}


def make_rollout(
    env: BatchEnv, agent: Agent, metrics: Mapping[str, Metric], mirror: Mirror | None = None
) -> Callable[..., Sums]:
    """rollout(agent_state, weights [K], inner, obs [N, D]) -> sums over each of N episodes.

    vmap it over the members of a population: they share one physics batch.
    """
    spec, single = env.env.spec, env.env  # the environment's own episode length
    physics = flat_vmap(single.step, step_shapes(spec, env.single))

    def pairs_of(step: MetricStep) -> Array:
        """Numerator and denominator of every metric, of one step of one environment: [M, 2]."""
        return jnp.stack([ratio(metric, single, step) for metric in metrics.values()])

    def rollout(agent_state: Any, weights: Array, inner: Any, obs: Array) -> Sums:
        num = obs.shape[0]

        def running(carry) -> Array:
            step, alive, *_ = carry
            return (step < spec.episode_length) & jnp.any(alive)

        def body(carry):
            step, alive, inner, obs, previous, sums = carry
            action = jnp.clip(agent.act(agent_state, obs), -1.0, 1.0)
            out = physics(inner, action)
            left = (spec.episode_length - 1 - step).astype(jnp.float32)
            seen = MetricStep(
                before=inner,
                action=action,
                previous=jnp.where(step == 0, action, previous),
                after=out.state,
                reward=out.reward,
                terminated=out.terminated,
                first=jnp.full(num, step == 0),
                remaining=jnp.full(num, left),
            )
            weighted = spec.combine(out.terms, weights) if spec.reward_terms else out.reward
            finite = jnp.isfinite(out.reward) & jnp.all(jnp.isfinite(out.obs), axis=1)
            counts = alive & finite
            add = {
                "return": out.reward,
                "return_weighted": weighted,
                "length": jnp.ones(num),
                "terms": out.terms,
                "metrics": jax.vmap(pairs_of)(seen),
            }
            if mirror is not None:
                twin = agent.act(agent_state, reflect(mirror.obs, obs))
                twin = reflect(mirror.action, jnp.clip(twin, -1.0, 1.0))
                add["asymmetry"] = jnp.mean(jnp.abs(action - twin), axis=1)
            ends = {
                "fell": sums.pop("fell") | (alive & out.terminated),
                "lost": sums.pop("lost") | (alive & ~finite),
            }
            sums = jax.tree.map(
                lambda s, x: s + jnp.where(counts.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0),
                sums,
                add,
            )
            obs = jnp.where(finite[:, None], out.obs, 0.0)
            alive &= ~out.terminated & finite
            return step + 1, alive, out.state, obs, action, sums | ends

        names = ["return", "return_weighted", "length"]
        if mirror is not None:
            names.append("asymmetry")
        sums: Sums = {name: jnp.zeros(num) for name in names}
        sums |= {"terms": jnp.zeros((num, len(spec.reward_terms)))}
        sums |= {name: jnp.zeros(num, bool) for name in ("fell", "lost")}
        sums["metrics"] = jnp.zeros((num, len(metrics), 2))
        first = jnp.zeros((num, spec.action_size))
        start = (jnp.zeros((), jnp.int32), jnp.ones(num, bool), inner, obs, first, sums)
        return jax.lax.while_loop(running, body, start)[-1]

    return rollout


def mean_metrics(metrics: Mapping[str, Metric], sums: Sums) -> Metrics:
    """Every metric over all steps of all episodes."""
    pairs = jnp.sum(sums["metrics"], axis=0)
    means = pairs[:, 0] / jnp.maximum(pairs[:, 1], TINY)
    return {name: means[i] for i, name in enumerate(metrics)}


def summarize(env: BatchEnv, sums: Sums) -> Metrics:
    """Means over episodes; of reward terms and metrics, over steps; how many episodes were lost."""
    spec = env.env.spec
    length = jnp.maximum(jnp.sum(sums["length"]), 1.0)
    terms = jnp.sum(sums["terms"], axis=0) / length
    return {
        "return": jnp.mean(sums["return"]),
        "return_std": jnp.std(sums["return"]),
        "return_weighted": jnp.mean(sums["return_weighted"]),
        "length": jnp.mean(sums["length"]),
        "falls": jnp.mean(sums["fell"], dtype=jnp.float32),
        "lost": jnp.sum(sums["lost"], dtype=jnp.float32),
        **mean_metrics(shown_metrics(env), sums),
        **({"asymmetry": jnp.sum(sums["asymmetry"]) / length} if "asymmetry" in sums else {}),
        **{f"term/{name}": terms[i] for i, name in enumerate(spec.reward_terms)},
    }


def make_evaluate(
    env: BatchEnv, agent: Agent, episodes: int | None = None, mesh: Mesh | None = None
) -> Callable[[Any, Array, Array], Metrics]:
    """evaluate(agent_state, weights [K], key) -> metrics, over `episodes` (default: num_envs).

    Ends as soon as every episode has. `return` is under the environment's own weights,
    `return_weighted` under those given. It reads the agent's state and nothing else of the run.
    The devices of a mesh share the episodes, rounded up to a number that they can.
    """
    num = episodes or env.num_envs
    if mesh is not None:
        num = math.ceil(num / mesh.size) * mesh.size  # each device runs as many as the others
    reset = jax.jit(over_envs(env.env.reset, mesh))
    rollout = make_rollout(env, agent, shown_metrics(env), mirror_of(env.env))

    def run(agent_state: Any, weights: Array, inner: Any, obs: Array) -> Metrics:
        if mesh is None:
            return summarize(env, rollout(agent_state, weights, inner, obs))
        mapped = jax.shard_map(
            rollout,
            mesh=mesh,
            in_specs=(WHOLE, WHOLE, env_specs(inner, env.single), SPLIT),
            out_specs=SPLIT,
            check_vma=False,
        )
        return summarize(env, mapped(agent_state, weights, inner, obs))

    out = None
    if mesh is not None:
        out = NamedSharding(mesh, WHOLE)
    run_all = jax.jit(run, out_shardings=out)

    def evaluate(agent_state: Any, weights: Array, key: Array) -> Metrics:
        inner, obs = reset(jax.random.split(key, num))
        return run_all(agent_state, weights, inner, obs)

    return evaluate


def make_measure(
    env: BatchEnv, agent: Agent, metrics: Mapping[str, Metric], episodes: int
) -> Callable[[Any, Array, Array], Metrics]:
    """measure(agent_state, weights [K], key) -> every metric, over whole episodes without noise.

    Beside the metrics it gives the mean `length` of an episode and `own_reward`, the return under
    the given weights, which is no fair measure. vmap it over the members of a population.
    """
    rollout, reset = make_rollout(env, agent, metrics), flat_vmap(env.env.reset)

    def measure(agent_state: Any, weights: Array, key: Array) -> Metrics:
        inner, obs = reset(jax.random.split(key, episodes))
        sums = rollout(agent_state, weights, inner, obs)
        return mean_metrics(metrics, sums) | {
            "length": jnp.mean(sums["length"]),
            "own_reward": jnp.mean(sums["return_weighted"]),
        }

    return measure
