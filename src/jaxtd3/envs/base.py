"""From one environment to a training batch: time limit, reset pool, NaN quarantine, reward weights.

Reset pool: an environment that is done takes a whole fresh state (physics, observation, info,
random numbers) from a pool; the pool is refilled between chunks by the very program that made the
first states, so the reset is compiled once and never stands inside the training program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxtd3.errors import nearest
from jaxtd3.flat import flat_vmap
from jaxtd3.sharding import over_envs
from jaxtd3.types import Array, BatchEnv, Env, EnvSpec, EnvState, EnvStep, Metrics, Transition


@dataclass(frozen=True)
class EnvConfig:
    """The environment."""

    name: str = "G1JoystickFlatTerrain"
    """Environment: any of Playground's, one you registered, or file.py:Class."""
    num_envs: int = 1024
    """Environments stepped together, over all devices."""
    episode_length: int | None = None
    """Steps until a training episode is cut off and bootstrapped through (default: the
    environment's own, which evaluation always runs)."""
    impl: Literal["auto", "native", "jax", "warp"] = "auto"
    """Physics back end; auto: warp on an NVIDIA GPU, native (MuJoCo's C engine) elsewhere; jax:
    MJX as JAX operations."""
    physics_threads: int = 0
    """Threads that step native physics on each device (0: the cores shared out); no bit depends on
    it."""
    reset: Literal["pool", "step", "cached"] = "pool"
    """pool: refilled between chunks; step: also refilled by num_envs/16 states every step;
    cached: every environment returns to its own first state for ever (Playground's way)."""
    randomize: bool = False
    """Randomise the robot's dynamics at every reset, where Playground knows how."""
    push: bool = False
    """Push the robot now and then, where the environment knows how."""
    sim_dt: float | None = None
    """Seconds of one physics step in training (default: the environment's own, which evaluation
    always runs). Coarser physics is that much faster."""
    action_bounds: Literal["scale", "limits"] = "scale"
    """What actions of -1 and 1 stand for: scale (the environment's action_scale from the default
    pose, the same for all joints) or limits (the limits of each joint)."""
    stagger: bool = False
    """Start the first episodes at random ages, so that time limits do not fall together."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Reward weights that differ from the environment's own."""
    source_sha256: str = ""
    """Digest of the file that file.py:Class was read from."""

    def __post_init__(self):
        if self.num_envs < 1:
            raise ValueError(f"num_envs={self.num_envs} is below 1")
        if self.physics_threads < 0:
            raise ValueError(f"physics_threads={self.physics_threads} is negative")
        if self.episode_length is not None and self.episode_length < 1:
            raise ValueError(f"episode_length={self.episode_length} is below 1")
        if self.sim_dt is not None and not self.sim_dt > 0:
            raise ValueError(f"sim_dt={self.sim_dt} is not above 0")
        for name, allowed in (
            ("impl", ("auto", "native", "jax", "warp")),
            ("reset", ("pool", "step", "cached")),
            ("action_bounds", ("scale", "limits")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(nearest(name, getattr(self, name), allowed))


def choose_impl(impl: str) -> Any:
    """The physics back end that is meant: of `auto`, the faster one on this hardware."""
    if impl != "auto":
        return impl
    return "warp" if jax.default_backend() in ("gpu", "cuda") else "native"


def undisturbed(cfg: EnvConfig) -> EnvConfig:
    """What evaluation runs: no pushes, and the environment's own physics step."""
    return replace(cfg, push=False, sim_dt=None)


def combine_terms(spec: EnvSpec, terms: Array, weights: Array) -> Array:
    """The reward of raw terms [.., K] under weights [K]: [..]."""
    return spec.combine(terms, weights)


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


def select_envs(mask: Array, new: Any, old: Any) -> Any:
    """Whole states of `new` where `mask [E]`, else of `old`.

    Leaves without an environment axis (Warp shares some buffers) are kept.
    """

    def pick(a: Array, b: Array) -> Array:
        if b.shape[:1] != mask.shape:
            return b
        return jnp.where(mask.reshape(mask.shape + (1,) * (b.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)


def take_envs(index: Array, states: Any, num: int) -> Any:
    """States `index [E]` of a pool of `num`."""
    return jax.tree.map(lambda x: x[index] if x.shape[:1] == (num,) else x, states)


def finite_envs(tree: Any, num_envs: int, infinite: bool = True) -> Array:
    """True for environments all of whose floats are finite (or, `infinite=False`, not NaN): [E]."""
    ok = jnp.ones(num_envs, bool)
    for x in jax.tree.leaves(tree):
        if x.shape[:1] == (num_envs,) and jnp.issubdtype(x.dtype, jnp.floating):
            bad = ~jnp.isfinite(x) if infinite else jnp.isnan(x)
            ok &= ~jnp.any(bad.reshape(num_envs, -1), axis=1)
    return ok


def transition_of(
    obs: Array, action: Array, out: EnvStep, reward: Array, late: Array
) -> Transition:
    """What a step of a batch leaves for learning; `late [E]`: the time limit is reached.

    A step with a number that is not finite is quarantined: not valid, all zeros, episode over.
    """
    num = obs.shape[0]
    valid = finite_envs((out.obs, out.reward, out.terms, action), num)
    valid &= finite_envs(out.state, num, infinite=False)
    terminated = out.terminated & valid

    def clean(x: Array) -> Array:
        return jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0)

    return Transition(
        obs=obs,
        action=clean(action),
        reward=clean(reward),
        terms=clean(out.terms),
        env_reward=clean(out.reward),
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
    weights = reward_weights(spec, cfg.weights)
    physics = flat_vmap(env.step)
    # one program for first states and every refill
    reset_all = jax.jit(over_envs(flat_vmap(env.reset), mesh))

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
            weights=jnp.copy(weights),  # a state may be donated, this one may not
        )

    def fill(state: EnvState, at: Array, fresh: tuple[Any, Array]) -> EnvState:
        """Put fresh states into pool rows `at`, unless they are not finite."""
        num = state.obs.shape[0]
        good = finite_envs(fresh, at.shape[0], infinite=False)
        old = take_envs(at, (state.pool, state.pool_obs), num)
        new = select_envs(good, fresh, old)
        pool, pool_obs = jax.tree.map(
            lambda x, y: x.at[at].set(y) if x.shape[:1] == (num,) else x,
            (state.pool, state.pool_obs),
            new,
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
        return select_envs(finite_envs(new, num, infinite=False), new, old)

    def step(state: EnvState, action: Array, key: Array) -> tuple[EnvState, Transition, Metrics]:
        num = state.obs.shape[0]  # of this device
        key_rekey, key_fill = jax.random.split(key)
        action = jnp.clip(action, -1.0, 1.0)
        out = physics(state.inner, action)
        reward = combine_terms(spec, out.terms, state.weights) if spec.reward_terms else out.reward
        steps = state.steps + 1

        transition = transition_of(state.obs, action, out, reward, steps >= limit)
        done = transition.done

        if cfg.reset == "cached":
            index, cursor = jnp.arange(num), state.cursor
        else:  # the done ones take consecutive pool entries, so no two of them the same
            index = (state.cursor + jnp.cumsum(done) - 1) % num
            cursor = (state.cursor + jnp.sum(done, dtype=jnp.int32)) % num
        fresh, fresh_obs = take_envs(index, (state.pool, state.pool_obs), num)
        if hasattr(env, "rekey"):
            fresh = jax.vmap(env.rekey)(fresh, jax.random.split(key_rekey, num))
        returns = state.returns + transition.reward
        metrics = episode_metrics(transition, returns, steps)
        state = state.replace(
            inner=select_envs(done, fresh, out.state),
            obs=jnp.where(done[:, None], fresh_obs, out.obs),
            steps=jnp.where(done, 0, steps),
            returns=jnp.where(done, 0.0, returns),
            cursor=cursor,
        )
        if cfg.reset == "step":
            refills = max(1, num // 16)
            at = (cursor + jnp.arange(refills)) % num
            state = fill(state, at, flat_vmap(env.reset)(jax.random.split(key_fill, refills)))
        return state, transition, metrics

    return BatchEnv(spec, env, num, init, step, refresh)
