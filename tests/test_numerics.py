"""What a compiler got wrong once, and must not get wrong unseen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.as_shipped


@pytest.mark.parametrize("batch", [3, pytest.param(257, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [21, 51, 101, 128])
def test_vmapped_matvec_and_reduce(batch, size):
    """jaxlib 0.10.2 fuses these wrongly on a CPU at some sizes (jax issue 39103)."""
    key_p, key_m = jax.random.split(jax.random.key(size))
    p = jax.random.uniform(key_p, (batch, 2, size))
    m = jax.random.normal(key_m, (batch, size))

    def one(p, m):
        q = p @ m
        return q, jnp.argmin(q), jnp.sum(p * m[None, :], axis=1)

    q, lowest, summed = jax.jit(jax.vmap(one))(p, m)
    expected = np.einsum("bns,bs->bn", np.asarray(p, np.float64), np.asarray(m, np.float64))
    np.testing.assert_allclose(q, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(summed, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(lowest, np.argmin(np.asarray(q), axis=1))
