"""The networks' matrix product: its derivatives, and how that by the weights is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtd3.linear import product


def loss(multiply, x, w):
    return jnp.sum(jnp.sin(multiply(x, w)))


def inputs(*shape: int, outputs: int = 16):
    key_x, key_w = jax.random.split(jax.random.key(0))
    return jax.random.normal(key_x, shape), jax.random.normal(key_w, (shape[-1], outputs))


@pytest.mark.parametrize("shape", [(32,), (8, 32), (8, 12), (4, 8, 32)])
def test_derivatives_are_those_of_a_plain_product(shape):
    x, w = inputs(*shape)
    for mine, plain in zip(
        jax.grad(loss, (1, 2))(product, x, w),
        jax.grad(loss, (1, 2))(jnp.matmul, x, w),
        strict=True,
    ):
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-5)
    forward = [
        jax.jvp(lambda w, f=f: loss(f, x, w), (w,), (jnp.cos(w),))[1] for f in (product, jnp.matmul)
    ]
    np.testing.assert_allclose(*forward, rtol=1e-5, atol=1e-5)


def test_derivatives_under_vmap():
    x, w = inputs(5, 8, 32)
    many = jnp.stack([w, 2 * w, 3 * w, 4 * w, 5 * w])
    each = [jax.vmap(jax.grad(loss, 2), (None, 0, 0))(f, x, many) for f in (product, jnp.matmul)]
    np.testing.assert_allclose(*each, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wide", [True, False])
def test_the_gradient_is_turned_round_where_the_input_is_wider(wide):
    x, w = inputs(64, 32 if wide else 8)
    jaxpr = jax.make_jaxpr(jax.grad(loss, 2), static_argnums=0)(product, x, w)
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert ("optimization_barrier" in names) == wide
    if wide:
        (dot,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general")
        assert [v.aval.shape for v in dot.invars] == [(64, 16), (64, 32)]  # narrow, wide
