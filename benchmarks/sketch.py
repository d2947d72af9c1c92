"""The baseline: FastTD3 as a plain fused JAX sketch, one scan, no further thought.

It shares the environments and the settings of a run and nothing else: a flat ring that keeps every
next observation, one-step targets, both critics projected, optax as it comes. `jaxtd3 bench` times
it beside the real thing.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtd3.bench.timing import Task
from jaxtd3.config.config import Config
from jaxtd3.core.types import Array, BatchEnv
from jaxtd3.run.program import Program


class Setup(NamedTuple):
    env: BatchEnv
    cfg: Config
    z: Array  # [A] atoms
    opt: dict[str, Any]


class Sketch(NamedTuple):
    params: Any  # {"actor", "critic": (q1, q2)}
    target: Any
    opts: Any
    stats: tuple[Array, Array, Array]  # count, mean, variance of observations
    ring: dict[str, Array]  # [N, ...]
    head: Array
    size: Array
    env: Any
    sigma: Array
    key: Array


def make_sketch(env: BatchEnv, cfg: Config):
    """(init(key, env_state), step(state), act(state, obs)) for the sizes of a config."""
    agent = cfg.agent
    opt = {
        "actor": optax.adamw(agent.actor_lr, weight_decay=agent.weight_decay),
        "critic": optax.adamw(agent.critic_lr, weight_decay=agent.weight_decay),
    }
    s = Setup(env, cfg, jnp.linspace(agent.v_min, agent.v_max, agent.num_atoms), opt)
    return partial(init, s), partial(step, s), partial(act, s)


def init(s: Setup, key: Array, env_state: Any) -> Sketch:
    spec, cfg = s.env.spec, s.cfg.agent
    capacity = s.cfg.replay.length * s.env.num_envs
    key, k_actor, k_1, k_2, k_sigma = jax.random.split(key, 5)
    h, g, wide = cfg.actor_hidden, cfg.critic_hidden, spec.critic_size + spec.action_size
    widths = [wide, g, g // 2, g // 4, cfg.num_atoms]
    params: dict[str, Any] = {
        "actor": make_mlp(k_actor, [spec.obs_size, h, h // 2, h // 4, spec.action_size]),
        "critic": (make_mlp(k_1, widths), make_mlp(k_2, widths)),
    }
    sizes = {"obs": spec.width, "next_obs": spec.width, "action": spec.action_size}
    ring = {name: jnp.zeros((capacity, size)) for name, size in sizes.items()}
    ring |= {"reward": jnp.zeros(capacity), "discount": jnp.zeros(capacity)}
    return Sketch(
        params=params,
        target=jax.tree.map(jnp.copy, params["critic"]),
        opts={name: s.opt[name].init(params[name]) for name in s.opt},
        stats=(jnp.ones(()), jnp.zeros(spec.width), jnp.ones(spec.width)),
        ring=ring,
        head=jnp.zeros((), jnp.int32),
        size=jnp.zeros((), jnp.int32),
        env=env_state,
        sigma=sample_sigma(s, k_sigma),
        key=key,
    )


def step(s: Setup, state: Sketch) -> Sketch:
    """One iteration: environment steps, then critic updates, some of them with the policy's."""
    loop = s.cfg.loop
    for _ in range(loop.collect_steps):
        state = collect(s, state)
    every = loop.critic_updates // loop.policy_updates
    for i in range(loop.critic_updates):
        state = update(s, state, with_policy=(i + 1) % every == 0)
    return state


def sketch_task(program: Program, length: int, seed: int = 0) -> Task:
    """The baseline on the same environments and sizes, its ring full too."""
    init, step, _ = make_sketch(program.env, program.config)

    @jax.jit
    def first(key: Any, env: Any) -> Any:
        state = init(key, env)
        ring = {k: jax.random.normal(key, v.shape) for k, v in state.ring.items()}
        return state._replace(ring=ring, size=state.size + ring["reward"].shape[0])

    chunk = jax.jit(
        lambda s: jax.lax.scan(lambda s, _: (step(s), None), s, length=length)[0],
        donate_argnums=0,
    )
    key = jax.random.key(seed)
    held = [first(key, program.env.init(key))]

    def run() -> None:
        held[0] = jax.block_until_ready(chunk(held[0]))

    return Task("sketch", run, length)


# --- networks -----------------------------------------------------------------------------------


def make_mlp(key: Array, widths: list[int]) -> list[tuple[Array, Array]]:
    keys = jax.random.split(key, len(widths) - 1)
    return [
        (jax.random.uniform(k, (m, n), minval=-1.0) / m**0.5, jnp.zeros(n))
        for k, (m, n) in zip(keys, itertools.pairwise(widths), strict=True)
    ]


def mlp(layers: Any, x: Array) -> Array:
    for w, b in layers[:-1]:
        x = jax.nn.relu(x @ w + b[None])
    return x @ layers[-1][0] + layers[-1][1][None]


def policy(s: Setup, actor: Any, x: Array) -> Array:
    return jnp.tanh(mlp(actor, s.env.spec.actor_obs(x)))


def critics(s: Setup, params: Any, x: Array, action: Array) -> Array:
    """Logits of both: [2, B, A]."""
    inputs = jnp.concatenate([s.env.spec.critic_obs(x), action], axis=-1)
    return jnp.stack([mlp(q, inputs) for q in params])


def normalize(stats: Any, x: Array) -> Array:
    _, mean, var = stats
    return (x - mean[None]) / (jnp.sqrt(var)[None] + 0.01)


def project(z: Array, p: Array, reward: Array, discount: Array) -> Array:
    """C51's projection of one distribution."""
    b = (jnp.clip(reward + discount * z, z[0], z[-1]) - z[0]) / (z[1] - z[0])
    low = jnp.clip(jnp.floor(b).astype(jnp.int32), 0, z.shape[0] - 2)
    m = jnp.zeros_like(p).at[low].add(p * (low + 1 - b))
    return m.at[low + 1].add(p * (b - low))


# --- collecting ---------------------------------------------------------------------------------


def act(s: Setup, state: Sketch, obs: Array) -> Array:
    return policy(s, state.params["actor"], normalize(state.stats, obs))


def sample_sigma(s: Setup, key: Array) -> Array:
    shape, loop = (s.env.num_envs, 1), s.cfg.loop
    return jax.random.uniform(key, shape, jnp.float32, loop.sigma_min, loop.sigma_max)


def collect(s: Setup, state: Sketch) -> Sketch:
    """One step of every environment into the ring."""
    key, k_noise, k_env, k_sigma = jax.random.split(state.key, 4)
    action = act(s, state, state.env.obs)
    noise = state.sigma * jax.random.normal(k_noise, action.shape)
    env_state, tr, _ = s.env.step(state.env, jnp.clip(action + noise, -1.0, 1.0), k_env)
    row = {
        "obs": tr.obs,
        "next_obs": tr.final_obs,
        "action": tr.action,
        "reward": tr.reward,
        "discount": s.cfg.agent.gamma * (1.0 - tr.terminated),
    }
    put = jax.lax.dynamic_update_slice_in_dim
    ring = {name: put(old, row[name], state.head, 0) for name, old in state.ring.items()}
    n, capacity = s.env.num_envs, ring["reward"].shape[0]
    return state._replace(
        ring=ring,
        head=(state.head + n) % capacity,
        size=jnp.minimum(state.size + n, capacity),
        stats=merge(state.stats, tr.obs),
        env=env_state,
        sigma=jnp.where(tr.done[:, None], sample_sigma(s, k_sigma), state.sigma),
        key=key,
    )


def merge(stats: Any, x: Array) -> tuple[Array, Array, Array]:
    """Running mean and variance with `x [E, D]` taken in."""
    (count, mean, var), n = stats, x.shape[0]
    total, delta = count + n, x.mean(0) - mean
    var = (count * var + n * x.var(0) + delta**2 * count * n / total) / total
    return total, mean + delta * n / total, var


# --- learning -----------------------------------------------------------------------------------


def descend(s: Setup, state: Sketch, name: str, loss_fn: Any) -> Sketch:
    grads = jax.grad(loss_fn)(state.params[name])
    change, new = s.opt[name].update(grads, state.opts[name], state.params[name])
    params = state.params | {name: optax.apply_updates(state.params[name], change)}
    return state._replace(params=params, opts=state.opts | {name: new})


def targets(s: Setup, state: Sketch, batch: Any, after: Array, key: Array) -> Array:
    """What both critics learn: [2, B, A]."""
    cfg = s.cfg.agent
    noise = cfg.policy_noise * jax.random.normal(key, batch["action"].shape)
    noise = jnp.clip(noise, -cfg.noise_clip, cfg.noise_clip)
    action = jnp.clip(policy(s, state.params["actor"], after) + noise, -1.0, 1.0)
    p = jax.nn.softmax(critics(s, state.target, after, action))
    project_both = jax.vmap(jax.vmap(project, (None, 0, 0, 0)), (None, 0, None, None))
    both = project_both(s.z, p, batch["reward"], batch["discount"])
    if not cfg.cdq:
        return both
    q = both @ s.z
    lower = jnp.where((q[0] < q[1])[:, None], both[0], both[1])
    return jnp.broadcast_to(lower, both.shape)


def update(s: Setup, state: Sketch, with_policy: bool) -> Sketch:
    cfg, size = s.cfg.agent, s.cfg.replay.batch_size
    key, k_index, k_noise = jax.random.split(state.key, 3)
    index = jax.random.randint(k_index, (size,), 0, state.size)
    batch = {name: x[index] for name, x in state.ring.items()}
    obs, after = (normalize(state.stats, batch[name]) for name in ("obs", "next_obs"))
    target = targets(s, state, batch, after, k_noise)

    def critic_loss(params: Any) -> Array:
        logits = critics(s, params, obs, batch["action"])
        return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(logits), axis=(0, 2)))

    def actor_loss(actor: Any) -> Array:
        q = jax.nn.softmax(critics(s, state.params["critic"], obs, policy(s, actor, obs))) @ s.z
        return -jnp.mean(jnp.min(q, axis=0) if cfg.cdq else jnp.mean(q, axis=0))

    state = descend(s, state._replace(key=key), "critic", critic_loss)
    new = optax.incremental_update(state.params["critic"], state.target, cfg.tau)
    state = state._replace(target=new)
    return descend(s, state, "actor", actor_loss) if with_policy else state
