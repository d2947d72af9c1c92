"""Evaluation on the device: the deterministic policy, one episode per environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxtd3.envs.base import combine_terms
from jaxtd3.sharding import SPLIT, WHOLE, env_specs, over_envs, share
from jaxtd3.types import Agent, Array, BatchEnv, EnvSpec, Metrics

Sums = dict[str, Array]
"""Per episode: return, return_weighted, length, fell [N]; terms [N, K]."""


def make_rollout(env: BatchEnv, agent: Agent) -> Callable[..., Sums]:
    """rollout(agent_state, weights [K], inner, obs [N, D]) -> sums over each of N episodes."""
    spec, single = env.env.spec, env.env  # the environment's own episode length

    def rollout(agent_state: Any, weights: Array, inner: Any, obs: Array) -> Sums:
        num = obs.shape[0]

        def running(carry) -> Array:
            step, alive, *_ = carry
            return (step < spec.episode_length) & jnp.any(alive)

        def body(carry):
            step, alive, inner, obs, sums = carry
            action = jnp.clip(agent.act(agent_state, obs), -1.0, 1.0)
            out = jax.vmap(single.step)(inner, action)
            weighted = combine_terms(spec, out.terms, weights) if spec.reward_terms else out.reward
            finite = jnp.isfinite(out.reward) & jnp.all(jnp.isfinite(out.obs), axis=1)
            counts = alive & finite
            add = {
                "return": out.reward,
                "return_weighted": weighted,
                "length": jnp.ones(num),
                "terms": out.terms,
            }
            fell = sums.pop("fell") | (alive & out.terminated)
            sums = jax.tree.map(
                lambda s, x: s + jnp.where(counts.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0),
                sums,
                add,
            )
            obs = jnp.where(finite[:, None], out.obs, 0.0)
            alive &= ~out.terminated & finite
            return step + 1, alive, out.state, obs, sums | {"fell": fell}

        names = ("return", "return_weighted", "length")
        sums: Sums = {name: jnp.zeros(num) for name in names}
        sums |= {"terms": jnp.zeros((num, len(spec.reward_terms))), "fell": jnp.zeros(num, bool)}
        start = (jnp.zeros((), jnp.int32), jnp.ones(num, bool), inner, obs, sums)
        return jax.lax.while_loop(running, body, start)[-1]

    return rollout


def summarize(spec: EnvSpec, sums: Sums) -> Metrics:
    """Means over episodes; of reward terms, over steps."""
    length = jnp.maximum(jnp.sum(sums["length"]), 1.0)
    terms = jnp.sum(sums["terms"], axis=0) / length
    return {
        "return": jnp.mean(sums["return"]),
        "return_std": jnp.std(sums["return"]),
        "return_weighted": jnp.mean(sums["return_weighted"]),
        "length": jnp.mean(sums["length"]),
        "falls": jnp.mean(sums["fell"], dtype=jnp.float32),
        **{f"term/{name}": terms[i] for i, name in enumerate(spec.reward_terms)},
    }


def make_evaluate(
    env: BatchEnv, agent: Agent, episodes: int | None = None, mesh: Mesh | None = None
) -> Callable[[Any, Array, Array], Metrics]:
    """evaluate(agent_state, weights [K], key) -> metrics, over `episodes` (default: num_envs).

    Ends as soon as every episode has. `return` is under the environment's own weights,
    `return_weighted` under those given. It reads the agent's state and nothing else of the run.
    The devices of a mesh share the episodes.
    """
    num = episodes or env.num_envs
    reset = jax.jit(over_envs(jax.vmap(env.env.reset), mesh))
    rollout = make_rollout(env, agent)

    def run(agent_state: Any, weights: Array, inner: Any, obs: Array) -> Metrics:
        if mesh is None:
            return summarize(env.env.spec, rollout(agent_state, weights, inner, obs))
        mapped = jax.shard_map(
            rollout,
            mesh=mesh,
            in_specs=(WHOLE, WHOLE, env_specs(inner, num), SPLIT),
            out_specs=SPLIT,
            check_vma=False,
        )
        return summarize(env.env.spec, mapped(agent_state, weights, inner, obs))

    out = None
    if mesh is not None:
        share(num, mesh, "eval_episodes")
        out = NamedSharding(mesh, WHOLE)
    run_all = jax.jit(run, out_shardings=out)

    def evaluate(agent_state: Any, weights: Array, key: Array) -> Metrics:
        inner, obs = reset(jax.random.split(key, num))
        return run_all(agent_state, weights, inner, obs)

    return evaluate
