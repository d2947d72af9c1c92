"""Evaluation on the device: the deterministic policy, one episode per environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtd3.envs.base import combine_terms
from jaxtd3.types import Agent, Array, BatchEnv, Metrics


def make_evaluate(
    env: BatchEnv, agent: Agent, episodes: int | None = None
) -> Callable[[Any, Array, Array], Metrics]:
    """evaluate(agent_state, weights [K], key) -> metrics, over `episodes` (default: num_envs).

    Ends as soon as every episode has. `return` is under the environment's own weights,
    `return_weighted` under those given. It reads the agent's state and nothing else of the run.
    """
    spec, single = env.env.spec, env.env  # the environment's own episode length
    num = episodes or env.num_envs
    reset = jax.jit(jax.vmap(single.reset))

    @jax.jit
    def run(agent_state: Any, weights: Array, inner: Any, obs: Array) -> Metrics:
        zeros = jnp.zeros(num)
        sums = {
            "return": zeros,
            "return_weighted": zeros,
            "length": zeros,
            "terms": jnp.zeros((num, len(spec.reward_terms))),
        }

        def running(carry) -> Array:
            step, alive, *_ = carry
            return (step < spec.episode_length) & jnp.any(alive)

        def body(carry):
            step, alive, fell, inner, obs, sums = carry
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
            sums = jax.tree.map(
                lambda s, x: s + jnp.where(counts.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0),
                sums,
                add,
            )
            fell = fell | (alive & out.terminated)
            obs = jnp.where(finite[:, None], out.obs, 0.0)
            return step + 1, alive & ~out.terminated & finite, fell, out.state, obs, sums

        alive = jnp.ones(num, bool)
        start = (jnp.zeros((), jnp.int32), alive, ~alive, inner, obs, sums)
        *_, fell, _, _, sums = jax.lax.while_loop(running, body, start)
        length = jnp.maximum(jnp.sum(sums["length"]), 1.0)
        terms = jnp.sum(sums["terms"], axis=0) / length
        return {
            "return": jnp.mean(sums["return"]),
            "return_std": jnp.std(sums["return"]),
            "return_weighted": jnp.mean(sums["return_weighted"]),
            "length": jnp.mean(sums["length"]),
            "falls": jnp.mean(fell, dtype=jnp.float32),
            **{f"term/{name}": terms[i] for i, name in enumerate(spec.reward_terms)},
        }

    def evaluate(agent_state: Any, weights: Array, key: Array) -> Metrics:
        inner, obs = reset(jax.random.split(key, num))
        return run(agent_state, weights, inner, obs)

    return evaluate
