"""The compiled program: one trace, no copies of the ring, no transfers, no key used twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtd3
from jaxtd3.replay import ring

SMALL = {
    "num_envs": 4,
    "length": 32,
    "batch_size": 16,
    "critic_hidden": 16,
    "actor_hidden": 16,
    "num_atoms": 11,
}


def build(name="Pendulum", **changes):
    cfg = jaxtd3.preset(name, profile="cpu", **{**SMALL, **changes})
    env = jaxtd3.make_env(cfg.env)
    agent = jaxtd3.fast_td3(env.spec, cfg.agent)
    replay = jaxtd3.make_replay(env.spec, cfg.replay)
    return cfg, env, jaxtd3.make_train_step(env, agent, replay, cfg.loop)


@pytest.fixture(scope="module")
def program():
    cfg, env, fns = build()
    return env, fns, jaxtd3.make_chunk(fns.train_step, 5)


def equal(a, b):
    def same(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)

    jax.tree.map(same, a, b)


@pytest.mark.as_shipped
def test_one_trace_and_no_transfer_for_many_chunks(program):
    env, fns, chunk = program
    state = fns.init(jax.random.key(0))
    state, metrics = chunk(state)
    for i in range(3):
        state = state.replace(env=env.refresh(state.env, jax.random.key(i)))
        with jax.transfer_guard("disallow"):
            state, metrics = chunk(state)
    assert chunk._cache_size() == 1
    assert int(state.iteration) == 20
    assert all(x.shape == () for x in metrics.values())


def test_the_same_seed_is_the_same_run(program):
    _, fns, chunk = program
    runs = [chunk(fns.init(jax.random.key(7)))[0] for _ in range(2)]
    equal(*runs)
    other, _ = chunk(fns.init(jax.random.key(8)))
    assert not np.array_equal(other.env.obs, runs[0].env.obs)


def test_vmap_over_seeds(program):
    """Three different runs, each the one that its seed gives alone."""
    _, fns, chunk = program
    keys = jax.random.split(jax.random.key(1), 3)
    many = jaxtd3.make_chunk(jax.vmap(fns.train_step), 5)
    states, _ = many(jax.vmap(fns.init)(keys))
    again, _ = many(jax.vmap(fns.init)(keys))
    equal(states, again)
    obs = np.asarray(states.env.obs)
    assert not np.allclose(obs[0], obs[1])
    assert not np.allclose(obs[1], obs[2])
    for i, key in enumerate(keys):
        single, _ = chunk(fns.init(key))
        for part in ("agent", "env", "replay"):
            jax.tree.map(
                lambda x, y, i=i: np.testing.assert_allclose(
                    np.asarray(x[i], np.float32), np.asarray(y, np.float32), rtol=1e-3, atol=1e-4
                ),
                getattr(states, part),
                getattr(single, part),
            )


def test_no_key_is_used_twice():
    with jax.debug_key_reuse(True):
        _, _, fns = build(critic_updates=4, policy_updates=2)
        state = fns.init(jax.random.key(0))
        jax.make_jaxpr(fns.collect_step)(state)
        jax.jit(fns.train_step)(state)


@pytest.mark.as_shipped
def test_the_ring_is_updated_in_place():
    """A ring of over 200 MB is aliased to its argument, and scratch stays below a fifth of it."""
    cfg, env, fns = build(num_envs=64, length=140_000, batch_size=256)
    size = ring.nbytes(env.spec, cfg.replay, 64)
    assert size > 200e6
    state = jax.eval_shape(fns.init, jax.random.key(0))
    memory = jaxtd3.make_chunk(fns.train_step, 10).lower(state).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 0.2 * size


@pytest.mark.parametrize(
    ("rates", "updates"),
    [
        pytest.param((1, 8, 4), 8, marks=pytest.mark.slow),
        pytest.param((8, 1, 1), 1, marks=pytest.mark.slow),
        ((2, 4, 1), 4),  # test_lineage.py counts the others over 1000 iterations
    ],
)
def test_rates_are_exact(rates, updates):
    collect, critic, policy = rates
    _, _, fns = build(collect_steps=collect, critic_updates=critic, policy_updates=policy, warmup=0)
    chunk = jaxtd3.make_chunk(fns.train_step, 3)
    # One transition has no successor yet: a first batch of weight 0 is not an update.
    state, _ = chunk(fns.init(jax.random.key(0)))
    before = int(state.agent.updates), int(state.agent.actor_opt[0].count), int(state.replay.size)
    state, _ = chunk(state)
    assert int(state.agent.updates) - before[0] == 3 * critic
    assert int(state.agent.actor_opt[0].count) - before[1] == 3 * policy
    assert int(state.replay.size) - before[2] == min(3 * collect, 32 - before[2])


def test_warm_up_collects_and_does_not_learn():
    _, _, fns = build(warmup=6)
    first = fns.init(jax.random.key(0))
    params = jax.tree.map(jnp.copy, first.agent.actor)
    step = jax.jit(fns.train_step)
    state = first
    for _ in range(6):
        state, _ = step(state)
    equal(state.agent.actor, params)
    assert int(state.agent.updates) == 0
    assert int(state.agent.skipped) == 0
    assert int(state.replay.size) == 6
    state, _ = step(state)
    assert int(state.agent.updates) > 0


def test_collect_step_fills_the_ring_alone():
    _, _, fns = build()
    state, metrics = jax.jit(fns.collect_step)(fns.init(jax.random.key(0)))
    assert int(state.replay.size) == 1
    assert "env/reward" in metrics


def test_a_bad_update_is_skipped_and_counted():
    _, env, fns = build(warmup=0)
    state, _ = jaxtd3.make_chunk(fns.train_step, 3)(fns.init(jax.random.key(0)))
    poisoned = state.replay.replace(reward=jnp.full_like(state.replay.reward, jnp.nan))
    before = jax.tree.map(jnp.copy, (state.agent.actor, state.agent.critic, state.agent.target))
    bad, _ = jax.jit(fns.train_step)(state.replace(replay=poisoned))
    assert int(bad.agent.skipped) > 0
    equal((bad.agent.critic, bad.agent.target), before[1:])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(bad.agent.actor))


def test_what_is_stored_is_what_the_env_received(program):
    _, fns, chunk = program
    state, _ = chunk(fns.init(jax.random.key(0)))
    actions = np.asarray(state.replay.action[: int(state.replay.size)])
    assert np.abs(actions).max() <= 1


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        ("G1JoystickFlatTerrain", "warp"),
        ("CartpoleBalance", "jax"),
        pytest.param("G1JoystickFlatTerrain", "jax", marks=pytest.mark.slow),
    ],
)
def test_the_chunk_lowers_for_cuda(name, impl):
    """The whole chunk, traced and lowered for an NVIDIA GPU on a machine without one."""
    _, env, fns = build(name, impl=impl, symmetry="off")
    state = jax.eval_shape(fns.init, jax.random.key(0))
    chunk = jaxtd3.make_chunk(fns.train_step, 2)
    lowered = chunk.trace(state).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "stablehlo.while" in text
    assert ("@jax_callable" in text) == (impl == "warp")  # Warp kernels enter as foreign calls
