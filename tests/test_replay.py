"""The ring against a plain model: lists of episodes, read with a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtd3.config.sections import ReplayConfig
from jaxtd3.core.types import EnvSpec, Transition
from jaxtd3.replay import ring

D, U = 3, 2
RUN, TERM, TRUNC, BAD = 0, 1, 2, 3
ADD = jax.jit(ring.add, static_argnames="store_next_obs")
WINDOWS = jax.jit(ring.windows, static_argnames=("spec", "cfg"))


class Model:
    """What happened, step by step: obs, action, reward, kind of step, next obs before any reset."""

    def __init__(self, rng, num_envs, length, episode_length):
        self.rng, self.e, self.length, self.limit = rng, num_envs, length, episode_length
        self.steps = []  # one dict of arrays per write
        self.obs = rng.normal(size=(num_envs, D)).astype(np.float32)
        self.age = np.zeros(num_envs, int)

    def write(self):
        rng, e = self.rng, self.e
        self.age += 1
        kind = rng.choice([RUN, TERM, BAD], p=[0.8, 0.12, 0.08], size=e)
        kind = np.where((kind == RUN) & (self.age >= self.limit), TRUNC, kind)
        final = rng.normal(size=(e, D)).astype(np.float32)
        step = {
            "obs": self.obs,
            "action": rng.uniform(-1, 1, (e, U)).astype(np.float32),
            "reward": rng.normal(size=e).astype(np.float32),
            "kind": kind,
            "final": final,
        }
        self.steps.append(step)
        fresh = rng.normal(size=(e, D)).astype(np.float32)
        self.obs = np.where((kind != RUN)[:, None], fresh, final)
        self.age = np.where(kind != RUN, 0, self.age)
        poison = np.where(kind == BAD, np.nan, 0.0).astype(np.float32)  # must never come out again
        return Transition(
            obs=jnp.asarray(step["obs"]),
            action=jnp.asarray(step["action"]),
            reward=jnp.asarray(step["reward"] + poison),
            terms=jnp.zeros((e, 0)),
            terminated=jnp.asarray(kind == TERM),
            truncated=jnp.asarray(kind == TRUNC),
            final_obs=jnp.asarray(final + poison[:, None]),
            valid=jnp.asarray(kind != BAD),
        )

    def window(self, start, e, n, gamma, bootstrap_truncated=True):
        """(reward, discount, next_obs or None, weight) of the window from write `start`."""
        total, k, last = 0.0, 0, RUN
        for j in range(n):
            if start + j >= len(self.steps):
                break
            kind = self.steps[start + j]["kind"][e]
            newest = start + j == len(self.steps) - 1
            if kind == BAD or (newest and kind == RUN):
                break
            total += gamma**j * self.steps[start + j]["reward"][e]
            k, last = j + 1, kind
            if kind != RUN:
                break
        if k == 0:
            return None
        dead = last == TERM or (last == TRUNC and not bootstrap_truncated)
        discount = 0.0 if dead else gamma**k
        if last == TERM:
            next_obs = None
        elif last == TRUNC:
            next_obs = self.steps[start + k - 1]["final"][e]
        else:
            next_obs = self.steps[start + k]["obs"][e]
        return total, discount, next_obs


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    writes=st.integers(2, 40),
    n_step=st.sampled_from([1, 3, 5]),
    limit=st.sampled_from([1, 4, 7]),
    bf16=st.booleans(),
    bootstrap=st.booleans(),
)
def test_every_field_equals_the_model(seed, writes, n_step, limit, bf16, bootstrap):
    length, num_envs, gamma = 11, 3, 0.9
    spec = EnvSpec("model", D, U, limit)
    cfg = ReplayConfig(length, 4, n_step, bf16, bootstrap_truncated=bootstrap)
    model = Model(np.random.default_rng(seed), num_envs, length, limit)
    state = ring.init(spec, cfg, num_envs)
    for _ in range(writes):
        state = ADD(state, model.write())
    size = min(writes, length)
    oldest = writes - size
    assert int(state.size) == size
    assert int(ring.num_starts(state, spec, cfg)) == size - 1
    offset, env = (x.ravel() for x in np.meshgrid(np.arange(length - 1), np.arange(num_envs)))
    batch = jax.device_get(WINDOWS(state, offset, env, jnp.float32(gamma), spec=spec, cfg=cfg))
    near = {"rtol": 1e-2, "atol": 1e-2} if bf16 else {"rtol": 1e-5, "atol": 1e-6}
    for i, (o, e) in enumerate(zip(offset, env, strict=True)):
        if o >= size - 1:
            continue
        step = model.steps[oldest + o]
        np.testing.assert_allclose(batch.obs[i], step["obs"][e], **near)
        expected = model.window(oldest + o, e, n_step, gamma, bootstrap)
        if expected is None:
            assert batch.weight[i] == 0
            continue
        assert batch.weight[i] == 1
        np.testing.assert_allclose(batch.action[i], step["action"][e], **near)
        np.testing.assert_allclose(batch.reward[i], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(batch.discount[i], expected[1], rtol=1e-6)
        if expected[2] is not None:
            np.testing.assert_allclose(batch.next_obs[i], expected[2], **near)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(batch))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), writes=st.integers(2, 30))
def test_samples_are_windows_of_the_ring(seed, writes):
    """`sample` draws only starts whose window is complete, and over time all of them."""
    spec, cfg = EnvSpec("model", D, U, 5), ReplayConfig(8, 256, 3)
    model = Model(np.random.default_rng(seed), 2, 8, 5)
    state = ring.init(spec, cfg, 2)
    for _ in range(writes):
        state = ADD(state, model.write())
    batch = ring.sample(state, jax.random.key(seed), jnp.float32(0.9), spec, cfg)
    size = min(writes, 8)
    possible = np.stack([s["obs"][e] for s in model.steps[writes - size : -1] for e in range(2)])
    match = np.isclose(np.asarray(batch.obs)[:, None], possible[None]).all(-1)
    assert match.any(1).all(), "a sample that is in no slab, or from the newest one"
    assert match.any(0).mean() > 0.9, "a start that is never drawn"


def test_an_empty_ring_gives_no_weight():
    spec, cfg = EnvSpec("model", D, U, 5), ReplayConfig(8, 16, 3)
    state = ring.init(spec, cfg, 2)
    batch = ring.sample(state, jax.random.key(0), jnp.float32(0.9), spec, cfg)
    assert float(jnp.sum(batch.weight)) == 0


G1 = EnvSpec("G1", 103, 29, 1000, 113)


@pytest.mark.parametrize(("bf16", "most"), [(False, 1000), (True, 510)])
def test_bytes_per_transition(bf16, most):
    """All arrays counted; and the count is what is really allocated."""
    cfg = ReplayConfig(length=10240, bf16=bf16)
    assert ring.bytes_per_transition(G1, cfg, 1024) <= most
    small = ReplayConfig(length=64, bf16=bf16)
    state = ring.init(G1, small, 4)
    assert ring.nbytes(G1, small, 4) == sum(x.nbytes for x in jax.tree.leaves(state))
    assert "10,485,760 transitions" in ring.describe(G1, cfg, 1024)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"length": 1}, "length=1 is below 2"),
        ({"batch_size": 0}, "batch_size=0 is below 1"),
        ({"length": 4, "n_step": 4}, "n_step=4 does not fit a ring of length=4"),
    ],
)
def test_bad_sizes_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        ReplayConfig(**changes)
