"""From one environment to a training batch: time limit, reset pool, NaN quarantine, reward weights.

Reset pool: an environment that is done takes a whole fresh state (physics, observation, info,
random numbers) from a pool; the pool is refilled between chunks by the very program that made the
first states, so the reset is compiled once and never stands inside the training program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxtd3.config.sections import EnvConfig
from jaxtd3.core.sharding import over_envs
from jaxtd3.core.tracing import flat_vmap
from jaxtd3.core.types import Array, BatchEnv, Env, EnvSpec, EnvState, EnvStep, Metrics, Transition
from jaxtd3.errors import nearest


def choose_impl(impl: str) -> Any:
    """The physics back end that is meant: of `auto`, the one for this hardware.

    On a CPU that is native for every environment: also where MJX steps faster (Cartpole), it
    compiles for longer than all of training takes. Warp is for NVIDIA alone.
    """
    if impl != "auto":
        return impl
    backend = jax.default_backend()
    if backend == "cpu":
        return "native"
    rocm = "rocm" in jax.devices()[0].client.platform_version.lower()
    return "warp" if backend in ("gpu", "cuda") and not rocm else "jax"


def undisturbed(cfg: EnvConfig) -> EnvConfig:
    """What evaluation runs: no pushes, no delay, and the environment's own physics step."""
    return replace(cfg, push=False, action_delay=0.0, sim_dt=None)


def disturbances(cfg: EnvConfig) -> str:
    """What `undisturbed` takes away, as the label of a physics engine: empty where it is nothing.

    By it the engines of a run's training and of its evaluations, of one model, are told apart.
    """
    return "" if cfg == undisturbed(cfg) else repr((cfg.push, cfg.action_delay, cfg.sim_dt))


def reward_weights(spec: EnvSpec, changes: Mapping[str, float]) -> Array:
    """The environment's own weights with `changes` applied: [K]."""
    if changes and not spec.reward_terms:
        raise ValueError(f"{spec.name}'s reward is not a weighted sum: it cannot be re-weighted")
    for name, value in changes.items():
        if name not in spec.reward_terms:
            raise ValueError(nearest("reward term", name, spec.reward_terms))
        if not math.isfinite(value):
            raise ValueError(f"reward {name}={value} is not finite")
    own = zip(spec.reward_terms, spec.default_weights, strict=True)
    return jnp.array([changes.get(name, weight) for name, weight in own], jnp.float32)


# In what follows `single` are the shapes of ONE state. A leaf of a batch that has no more axes than
# there has no environment axis (Warp shares some buffers).


def step_shapes(spec: EnvSpec, single: Any) -> tuple[Any, Any]:
    """Shapes of the arguments of ONE environment's step."""
    return single, jax.ShapeDtypeStruct((spec.action_size,), jnp.float32)


def select_envs(mask: Array, new: Any, old: Any, single: Any) -> Any:
    """Whole states of `new` where `mask [E]`, else of `old`; what has no such axis is kept."""

    def pick(a: Array, b: Array, one: Any) -> Array:
        if b.ndim == one.ndim:
            return b
        return jnp.where(mask.reshape(mask.shape + (1,) * (b.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old, single)


def take_envs(index: Array, states: Any, single: Any) -> Any:
    """States `index [E]` of a pool."""
    return jax.tree.map(lambda x, one: x[index] if x.ndim > one.ndim else x, states, single)


def finite(*arrays: Array, infinite: bool = True) -> Array:
    """True for environments all of whose floats are finite (or, `infinite=False`, not NaN): [E]."""
    ok = jnp.ones(arrays[0].shape[0], bool)
    for x in arrays:
        if jnp.issubdtype(x.dtype, jnp.floating):
            bad = ~jnp.isfinite(x) if infinite else jnp.isnan(x)
            ok &= ~jnp.any(bad.reshape(bad.shape[0], -1), axis=1)
    return ok


def sound_envs(states: Any, single: Any) -> Array:
    """True for states without a NaN: [E]."""
    pairs = zip(jax.tree.leaves(states), jax.tree.leaves(single), strict=True)
    return finite(*(x for x, one in pairs if x.ndim > one.ndim), infinite=False)


def transition_of(
    obs: Array, action: Array, out: EnvStep, reward: Array, late: Array, single: Any
) -> Transition:
    """What a step of a batch leaves for learning; `late [E]`: the time limit is reached.

    A step with a number that is not finite is quarantined: not valid, all zeros, episode over.
    """
    valid = finite(out.obs, out.reward, out.terms, action) & sound_envs(out.state, single)
    terminated = out.terminated & valid

    def clean(x: Array) -> Array:
        return jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0)

    return Transition(
        obs=obs,
        action=clean(action),
        reward=clean(reward),
        terms=clean(out.terms),
        terminated=terminated,
        truncated=late & ~terminated & valid,
        final_obs=clean(out.obs),
        valid=valid,
    )


def episode_metrics(tr: Transition, returns: Array, steps: Array) -> Metrics:
    """Of the episodes that end with a step: how many, how long, how good; what was quarantined."""
    ended = tr.done & tr.valid
    return {
        "episode/count": jnp.sum(ended, dtype=jnp.float32),
        "episode/return_sum": jnp.sum(jnp.where(ended, returns, 0.0)),
        "episode/length_sum": jnp.sum(jnp.where(ended, steps, 0), dtype=jnp.float32),
        "episode/terminated": jnp.sum(tr.terminated, dtype=jnp.float32),
        "env/quarantined": jnp.sum(~tr.valid, dtype=jnp.float32),
        "env/reward": jnp.mean(tr.reward),
    }


def batch_env(env: Env, cfg: EnvConfig, mesh: Mesh | None = None) -> BatchEnv:
    """The training environment over `cfg.num_envs` copies of `env`.

    `init` and `refresh` make states of all environments, each device its own where there is a
    mesh; `step` moves those that its arguments hold, so it stands inside `shard_map` as it is.
    """
    spec, num = env.spec, cfg.num_envs
    limit = cfg.episode_length or spec.episode_length
    if limit != spec.episode_length:
        spec = replace(spec, episode_length=limit)
    own = reward_weights(spec, cfg.weights)
    reset_some = flat_vmap(env.reset)
    # one program for first states and every refill
    reset_all = jax.jit(over_envs(env.reset, mesh))
    pair = jax.eval_shape(env.reset, jax.random.key(0))  # (state, obs) of one environment
    single = pair[0]
    physics = flat_vmap(env.step, step_shapes(spec, single))

    def init(key: Array) -> EnvState:
        key_first, key_pool, key_age = jax.random.split(key, 3)
        inner, obs = reset_all(jax.random.split(key_first, num))
        if cfg.reset == "cached":
            pool, pool_obs = jax.tree.map(jnp.copy, (inner, obs))
        else:
            pool, pool_obs = reset_all(jax.random.split(key_pool, num))
        steps = jnp.zeros(num, jnp.int32)
        if cfg.stagger:
            steps = jax.random.randint(key_age, (num,), 0, limit, jnp.int32)
        return EnvState(
            inner=inner,
            obs=obs,
            steps=steps,
            returns=jnp.zeros(num),
            pool=pool,
            pool_obs=pool_obs,
            cursor=jnp.zeros(1 if mesh is None else mesh.size, jnp.int32),
        )

    def fill(state: EnvState, at: Array, fresh: tuple[Any, Array]) -> EnvState:
        """Put fresh states into pool rows `at`, unless they are not finite."""
        pool = state.pool, state.pool_obs
        new = select_envs(sound_envs(fresh, pair), fresh, take_envs(at, pool, pair), pair)
        pool, pool_obs = jax.tree.map(
            lambda x, y, one: x.at[at].set(y) if x.ndim > one.ndim else x, pool, new, pair
        )
        return state.replace(pool=pool, pool_obs=pool_obs)

    def refresh(state: EnvState, key: Array) -> EnvState:
        if cfg.reset == "cached":
            return state
        old = state.pool, state.pool_obs
        new = choose(reset_all(jax.random.split(key, num)), old)
        # Empty arrays forget how they lay on a mesh: the old ones do as well.
        pool, pool_obs = jax.tree.map(lambda a, b: a if a.size else b, new, old)
        return state.replace(pool=pool, pool_obs=pool_obs)

    @jax.jit
    def choose(new: Any, old: Any) -> Any:
        """A whole new pool, but for states that are not finite; nothing moves between devices."""
        return select_envs(sound_envs(new, pair), new, old, pair)

    def step(
        state: EnvState, action: Array, key: Array, weights: Array | None = None
    ) -> tuple[EnvState, Transition, Metrics]:
        num = state.obs.shape[0]  # of this device
        key_rekey, key_fill = jax.random.split(key)
        action = jnp.clip(action, -1.0, 1.0)
        out = physics(state.inner, action)
        now = own if weights is None else weights
        reward = spec.combine(out.terms, now) if spec.reward_terms else out.reward
        steps = state.steps + 1

        transition = transition_of(state.obs, action, out, reward, steps >= limit, single)
        done = transition.done

        if cfg.reset == "cached":
            index, cursor = jnp.arange(num), state.cursor
        else:  # the done ones take consecutive pool entries, so no two of them the same
            index = (state.cursor + jnp.cumsum(done) - 1) % num
            cursor = (state.cursor + jnp.sum(done, dtype=jnp.int32)) % num
        fresh, fresh_obs = take_envs(index, (state.pool, state.pool_obs), pair)
        if hasattr(env, "rekey"):
            fresh = jax.vmap(env.rekey)(fresh, jax.random.split(key_rekey, num))
        returns = state.returns + transition.reward
        metrics = episode_metrics(transition, returns, steps)
        state = state.replace(
            inner=select_envs(done, fresh, out.state, single),
            obs=jnp.where(done[:, None], fresh_obs, out.obs),
            steps=jnp.where(done, 0, steps),
            returns=jnp.where(done, 0.0, returns),
            cursor=cursor,
        )
        if cfg.reset == "step":
            refills = max(1, num // 16)
            at = (cursor + jnp.arange(refills)) % num
            state = fill(state, at, reset_some(jax.random.split(key_fill, refills)))
        return state, transition, metrics

    return BatchEnv(spec, env, num, init, step, refresh, own, single)
