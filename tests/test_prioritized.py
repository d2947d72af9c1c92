"""Prioritised replay: frequencies, unbiased weights, what is overwritten, shards."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtd3
from jaxtd3.core.types import EnvSpec, Transition
from jaxtd3.replay import prioritized
from jaxtd3.replay import ring as replay

ENVS, LENGTH = 6, 10
SPEC = EnvSpec("test", obs_size=2, action_size=1, episode_length=100)
CFG = jaxtd3.ReplayConfig(length=LENGTH, batch_size=4096, prioritized=True, priority_beta=1.0)
GAMMA = jnp.float32(0.9)

add = jax.jit(prioritized.add, static_argnums=(2, 3))
sample = jax.jit(prioritized.sample, static_argnums=(3, 4))
update_priority = jax.jit(prioritized.update_priority)
windows = jax.jit(replay.windows, static_argnums=(4, 5))


def slab(t, num_envs=ENVS, invalid=()):
    e = jnp.arange(num_envs, dtype=jnp.float32)
    zeros = jnp.zeros(num_envs, bool)
    return Transition(
        obs=jnp.stack([jnp.full(num_envs, float(t)), e], axis=1),
        action=jnp.zeros((num_envs, 1)),
        reward=100.0 * t + e,
        terms=jnp.zeros((num_envs, 0)),
        terminated=zeros,
        truncated=zeros,
        final_obs=jnp.zeros((num_envs, 2)),
        valid=~jnp.isin(jnp.arange(num_envs), jnp.array(invalid, jnp.int32)),
    )


def filled(slabs, cfg=CFG, num_envs=ENVS, invalid=()):
    state = prioritized.init(SPEC, cfg, num_envs)
    for t in range(slabs):
        state = add(state, slab(t, num_envs, invalid if t == slabs - 3 else ()), SPEC, cfg)
    return state


def with_priorities(state, p):
    """Set `p [T, E]` where something may be drawn."""
    full = jnp.zeros_like(state.p).at[:LENGTH].set(p)
    full = jnp.where(state.p > 0, full, 0.0)
    blocks = state.sums.shape[0]
    return state.replace(p=full, sums=full.reshape(blocks, -1, full.shape[1]).sum(axis=1))


def random_priorities(seed=0, num_envs=ENVS):
    return jnp.asarray(np.random.default_rng(seed).gamma(0.5, size=(LENGTH, num_envs)) + 0.01)


def consistent(state):
    """The block sums are those of the priorities, and the counts."""
    blocks = state.sums.shape[0]
    sums = np.asarray(state.p).reshape(blocks, -1, state.p.shape[1]).sum(axis=1)
    np.testing.assert_allclose(state.sums, sums, rtol=1e-6)
    np.testing.assert_array_equal(state.count.sum(axis=0), (np.asarray(state.p) > 0).sum(axis=0))


def frequencies(state, draws=40):
    draw = jax.jit(lambda key: prioritized.choose(state, key, CFG.batch_size))
    counts = np.zeros(state.p.shape)
    for i in range(draws):
        np.add.at(counts, tuple(map(np.asarray, draw(jax.random.key(i)))), 1)
    return counts


@pytest.mark.parametrize("slabs", [5, LENGTH, 27])
def test_frequencies_match_priorities(slabs):
    """Chi-square against p / sum(p), before the ring is full, when it is, and long after."""
    state = with_priorities(filled(slabs, invalid=(2,)), random_priorities())
    counts = frequencies(state)
    p = np.asarray(state.p, np.float64)
    expected = counts.sum() * p / p.sum()
    assert (counts[p == 0] == 0).all()
    drawn = p > 0
    chi2 = ((counts - expected)[drawn] ** 2 / expected[drawn]).sum()
    k = drawn.sum() - 1
    assert chi2 < k + 5 * np.sqrt(2 * k), f"chi2 {chi2:.0f} with {k} degrees of freedom"


@pytest.mark.parametrize("store_next_obs", [False, True])
def test_what_may_be_drawn_is_what_the_uniform_sampler_draws(store_next_obs):
    cfg = dataclasses.replace(CFG, store_next_obs=store_next_obs, n_step=3)
    for slabs in (1, 2, 7, LENGTH, 23):
        state = filled(slabs, cfg, invalid=(1, 4))
        starts = int(replay.num_starts(state.ring, SPEC, cfg))
        offset, env = (
            x.reshape(-1) for x in jnp.meshgrid(jnp.arange(max(starts, 1)), jnp.arange(ENVS))
        )
        usable = windows(state.ring, offset, env, GAMMA, SPEC, cfg).weight > 0
        rows = (state.ring.head - state.ring.size + offset) % LENGTH
        expected = np.zeros(state.p.shape, bool)
        if starts:
            expected[np.asarray(rows), np.asarray(env)] = np.asarray(usable)
        np.testing.assert_array_equal(np.asarray(state.p) > 0, expected)
        consistent(state)


def test_overwritten_priorities_vanish():
    state = filled(LENGTH)
    first = sample(state, jax.random.key(0), GAMMA, SPEC, CFG)
    state = update_priority(state, first, jnp.full(CFG.batch_size, 1000.0))
    assert float(state.p.max()) > 50
    for t in range(LENGTH):
        state = add(state.replace(top=jnp.ones(())), slab(LENGTH + t), SPEC, CFG)
        consistent(state)
        high = np.asarray(state.p[:LENGTH] > 1)
        kept = np.asarray(state.ring.obs[..., 0] < LENGTH - 1)  # those that could be drawn at first
        np.testing.assert_array_equal(high, kept)
    assert float(state.p.max()) == 1.0


def test_updates_reach_what_was_drawn_and_nothing_else():
    state = filled(LENGTH)
    cfg = dataclasses.replace(CFG, batch_size=8)
    batch = sample(state, jax.random.key(3), GAMMA, SPEC, cfg)
    td = jnp.arange(8.0)
    after = update_priority(state, batch, td)
    row, env = map(np.asarray, batch.index)
    expected = np.array(state.p)
    expected[row, env] = 0
    np.maximum.at(expected, (row, env), (np.arange(8.0) + prioritized.EPS) ** 0.6)
    np.testing.assert_allclose(after.p, expected, rtol=1e-5)
    consistent(after)
    assert float(after.top) == pytest.approx(expected.max(), rel=1e-5)


def test_what_is_not_finite_or_has_no_weight_leaves_priorities_alone():
    state = filled(LENGTH)
    batch = sample(state, jax.random.key(3), GAMMA, SPEC, CFG)
    for weight, td in ((1.0, jnp.nan), (0.0, 7.0)):
        ignored = batch._replace(weight=jnp.full(CFG.batch_size, weight))
        after = update_priority(state, ignored, jnp.full(CFG.batch_size, td))
        np.testing.assert_array_equal(after.p, state.p)
        assert float(after.top) == 1.0


def estimate(state, beta, value, axis_name=None):
    """Sum over all steps of P(i) * weight_i * value_i: the exact expectation of a weighted mean."""
    state = state.replace(
        hyper=state.hyper._replace(beta=jnp.float32(beta), beta_end=jnp.float32(beta))
    )
    p = state.p.reshape(-1)
    weight = prioritized.importance(state, p, axis_name)
    here = jnp.sum(p / jnp.sum(p) * weight * value.reshape(-1))
    return here if axis_name is None else jax.lax.pmean(here, axis_name)


def test_weights_make_the_estimate_unbiased():
    """Analytic: with beta = 1 the expectation is the plain mean over all that may be drawn."""
    state = with_priorities(filled(23, invalid=(0,)), random_priorities(1))
    value = jnp.asarray(np.random.default_rng(2).normal(size=state.p.shape), jnp.float32)
    plain = np.asarray(value)[np.asarray(state.p) > 0].mean()
    assert float(estimate(state, 1.0, value)) == pytest.approx(plain, rel=1e-5)
    assert float(estimate(state, 0.0, value)) != pytest.approx(plain, rel=1e-2)


def test_samples_carry_those_weights():
    state = with_priorities(filled(23), random_priorities(1))
    batches = [sample(state, jax.random.key(i), GAMMA, SPEC, CFG) for i in range(30)]
    reward = np.concatenate([np.asarray(b.weight * b.reward) for b in batches])
    kept = np.asarray(state.p[:LENGTH]) > 0
    plain = np.asarray(state.ring.reward)[kept].mean()
    error = reward.std() / np.sqrt(reward.size)
    assert abs(reward.mean() - plain) < 5 * error
    b = batches[0]
    np.testing.assert_array_equal(b.reward, state.ring.reward[b.index[0], b.index[1]])


def test_beta_goes_from_start_to_end():
    cfg = dataclasses.replace(CFG, priority_beta=0.0, priority_beta_end=1.0, priority_steps=20)
    state = with_priorities(filled(10, cfg), random_priorities())
    p = state.p[state.p > 0]
    plain = float(p.shape[0]) * p / p.sum()
    np.testing.assert_allclose(prioritized.importance(state, p), plain**-0.5, rtol=1e-4)
    late = state.replace(age=jnp.float32(1000))
    np.testing.assert_allclose(prioritized.importance(late, p), plain**-1.0, rtol=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_four_shards_are_one_in_expectation(beta):
    """Exactly: the expectation of any weighted sum is the same, for every beta."""
    state = with_priorities(filled(23, num_envs=8), random_priorities(3, 8))
    value = jnp.asarray(np.random.default_rng(4).normal(size=state.p.shape), jnp.float32)
    whole = estimate(state, beta, value)

    def split(x):
        if x.ndim >= 2 and x.shape[1] == 8:
            return jnp.moveaxis(x.reshape(x.shape[0], 4, 2, *x.shape[2:]), 1, 0)
        return x.reshape(4, 2) if x.shape == (8,) else jnp.broadcast_to(x, (4, *x.shape))

    shards = jax.tree.map(split, state)
    shared = jax.vmap(lambda s, v: estimate(s, beta, v, "shard"), axis_name="shard")
    each = jax.jit(shared)(shards, split(value))
    np.testing.assert_allclose(each, np.full(4, whole), rtol=1e-4)

    def drawn(s, key):
        cfg = dataclasses.replace(CFG, priority_beta=beta, priority_beta_end=beta)
        batch = prioritized.sample(s, key, GAMMA, SPEC, cfg, axis_name="shard")
        return jax.lax.pmean(jnp.mean(batch.weight * batch.reward), "shard")

    state = state.replace(
        hyper=state.hyper._replace(beta=jnp.float32(beta), beta_end=jnp.float32(beta))
    )
    keys = jax.vmap(lambda i: jax.random.split(jax.random.key(i), 4))(jnp.arange(20))
    shards = jax.tree.map(split, state)
    draw = jax.vmap(lambda s, k: jax.vmap(drawn, axis_name="shard")(s, k)[0], (None, 0))
    means = jax.jit(draw)(shards, keys)
    kept = np.asarray(state.p[:LENGTH]) > 0
    p, r = np.asarray(state.p[:LENGTH])[kept], np.asarray(state.ring.reward)[kept]
    prob = p / p.sum()
    expected = (prob * (prob * p.size) ** -beta * r).sum()
    assert np.asarray(means).mean() == pytest.approx(expected, rel=0.02)


SMALL = {
    "num_envs": 4,
    "length": 32,
    "batch_size": 16,
    "critic_hidden": 16,
    "actor_hidden": 16,
    "num_atoms": 11,
    "warmup": 2,
    "prioritized": True,
}


def build(**changes):
    cfg = jaxtd3.preset("Pendulum", profile="cpu", **SMALL | changes)
    env = jaxtd3.make_env(cfg.env)
    agent = jaxtd3.fast_td3(env.spec, cfg.agent)
    ring = jaxtd3.make_replay(env.spec, cfg.replay)
    return cfg, env, jaxtd3.make_train_step(env, agent, ring, cfg.loop)


def test_training_sets_priorities():
    """By the collector as data arrive, and by the learner as they are used."""
    _, _, fns = build()
    state = fns.init(jax.random.key(0))
    step = jax.jit(fns.train_step)
    state, _ = step(state)
    state, _ = step(state)  # still warming up
    row = np.asarray(state.replay.p[0])
    assert (row > 0).all()
    assert len(set(row.tolist())) == 4, "by their TD errors, not all alike"
    np.testing.assert_array_equal(state.replay.p[1], 0)
    for _ in range(10):
        state, metrics = step(state)
    consistent(state.replay)
    assert int(state.agent.updates) > 0
    assert "train/td_error" not in metrics
    p = np.asarray(state.replay.p[:11])
    assert len(np.unique(p.round(6))) > 20, "the learner tells them apart"


def test_the_prioritised_ring_is_updated_in_place():
    cfg, env, fns = build(num_envs=64, length=70_000, batch_size=256)
    state = jax.eval_shape(fns.init, jax.random.key(0))
    size = replay.nbytes(env.spec, cfg.replay, 64)
    assert size > 100e6
    memory = jaxtd3.make_chunk(fns.train_step, 10).lower(state).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 0.2 * size


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"priority_alpha": 1.5}, "priority_alpha=1.5"),
        ({"priority_steps": 0}, "priority_steps"),
        ({"priority_new": "maxi"}, "max"),
    ],
)
def test_nonsense_is_refused(changes, said):
    with pytest.raises(jaxtd3.UserError, match=said):
        jaxtd3.preset("Pendulum", profile="cpu", **changes)
