"""The projection against independent formulas, and its properties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtd3.agent import distributional as dist

PROJECTIONS = [dist.project_scatter, dist.project_dense, dist.project]


def oracle(z, moved, p):
    """The textbook loop, in float64: each atom's mass is shared by its two neighbours."""
    out = np.zeros(len(z))
    dz = (z[-1] - z[0]) / (len(z) - 1)
    for x, mass in zip(moved, p, strict=True):
        b = (np.clip(x, z[0], z[-1]) - z[0]) / dz
        low, up = int(np.floor(b)), int(np.ceil(b))
        if low == up:
            out[low] += mass
        else:
            out[low] += mass * (up - b)
            out[up] += mass * (b - low)
    return out


@pytest.mark.parametrize("project", PROJECTIONS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    reward=st.floats(-15, 15),
    discount=st.sampled_from([0.0, 0.5, 0.9126, 0.97, 1.0]),
)
def test_against_the_loop(project, seed, reward, discount):
    z = dist.support(-5.0, 5.0, 21)
    p = np.random.default_rng(seed).dirichlet(np.ones(21)).astype(np.float32)
    moved = dist.bellman_atoms(z, jnp.float32(reward), jnp.float32(discount))
    ours = project(z, moved, jnp.asarray(p))
    theirs = oracle(np.asarray(z, np.float64), np.asarray(moved, np.float64), p.astype(np.float64))
    np.testing.assert_allclose(ours, theirs, atol=3e-6)
    assert float(jnp.sum(ours)) == pytest.approx(1, abs=1e-5)
    assert float(jnp.min(ours)) >= 0
    # The mean is that of the clipped atoms, so inside the support it is r + discount * mean.
    assert float(ours @ z) == pytest.approx(float(moved @ p), abs=1e-4)


def test_mean_is_preserved_inside_the_support():
    z = dist.support(-5.0, 5.0, 21)
    p = jax.nn.softmax(jnp.arange(21.0) / 10)
    moved = dist.bellman_atoms(z, jnp.float32(0.2), jnp.float32(0.9))
    assert float(dist.project(z, moved, p) @ z) == pytest.approx(0.2 + 0.9 * float(p @ z), abs=1e-5)


def test_atoms_that_land_on_atoms_do_not_move():
    z = dist.support(-1.0, 1.0, 5)
    p = jnp.array([0.1, 0.2, 0.3, 0.4, 0.0])
    for project in PROJECTIONS:
        np.testing.assert_allclose(project(z, z, p), p, atol=1e-7)
        shifted = dist.bellman_atoms(z, jnp.float32(0.5), jnp.float32(1.0))
        np.testing.assert_allclose(project(z, shifted, p), [0, 0.1, 0.2, 0.3, 0.4], atol=1e-6)


def test_terminal_is_the_reward():
    z = dist.support(-1.0, 1.0, 5)
    p = jnp.full(5, 0.2)
    moved = dist.bellman_atoms(z, jnp.float32(0.25), jnp.float32(0.0))
    np.testing.assert_allclose(dist.project(z, moved, p), [0, 0, 0.5, 0.5, 0], atol=1e-6)


@pytest.mark.parametrize("batch", [1, 7, 2048])
def test_scatter_equals_dense_in_batches(batch):
    """Sizes at which a CPU compiler once summed wrongly (mat-vec and reduce under vmap)."""
    z = dist.support(-10.0, 10.0, 101)
    key_p, key_r, key_d = jax.random.split(jax.random.key(batch), 3)
    p = jax.nn.softmax(3 * jax.random.normal(key_p, (batch, 101)))
    r = 4 * jax.random.normal(key_r, (batch,))
    d = jax.random.uniform(key_d, (batch,))
    moved = jax.vmap(dist.bellman_atoms, (None, 0, 0))(z, r, d)
    scatter = jax.jit(jax.vmap(dist.project_scatter, (None, 0, 0)))(z, moved, p)
    dense = jax.jit(jax.vmap(dist.project_dense, (None, 0, 0)))(z, moved, p)
    np.testing.assert_allclose(scatter, dense, atol=2e-5)
    np.testing.assert_allclose(jnp.sum(dense, axis=1), np.ones(batch), atol=1e-4)


def test_cross_entropy():
    logits = jnp.log(jnp.array([0.2, 0.3, 0.5]))
    target = jnp.array([0.0, 1.0, 0.0])
    assert float(dist.cross_entropy(target, logits)) == pytest.approx(-np.log(0.3), rel=1e-6)
