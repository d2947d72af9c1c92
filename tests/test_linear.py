"""The networks' matrix product: its gradients, and how that by the weights is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.counts import count_dots

from jaxtd3.envs.registry import preset
from jaxtd3.nets import dense
from jaxtd3.nets.dense import product


def loss(multiply, x, w):
    return jnp.sum(jnp.sin(multiply(x, w)))


def inputs(*shape: int, outputs: int = 16):
    key_x, key_w = jax.random.split(jax.random.key(0))
    return jax.random.normal(key_x, shape), jax.random.normal(key_w, (shape[-1], outputs))


@pytest.mark.parametrize("shape", [(8, 32), (8, 12)])
def test_gradients_are_those_of_a_plain_product(shape):
    x, w = inputs(*shape)
    for mine, plain in zip(
        jax.grad(loss, (1, 2))(product, x, w),
        jax.grad(loss, (1, 2))(jnp.matmul, x, w),
        strict=True,
    ):
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(256, 32), (256, 12)])
def test_bf16_keeps_weights_and_their_gradient_in_f32(shape):
    x, w = inputs(*shape)
    half = x.astype(jnp.bfloat16)
    assert product(half, w).dtype == jnp.float32
    dx, dw = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)(product, half, w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    # the same with every operand rounded by hand, and nothing else
    rounded = w.astype(jnp.bfloat16).astype(jnp.float32)
    wide = half.astype(jnp.float32)
    g = jnp.cos(wide @ rounded).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(dw, wide.T @ g, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(dx.astype(jnp.float32), g @ rounded.T, rtol=1e-2, atol=1e-2)


def test_gradients_under_vmap():
    x, w = inputs(8, 32)
    many = jnp.stack([w, 2 * w, 3 * w, 4 * w, 5 * w])
    each = [jax.vmap(jax.grad(loss, 2), (None, None, 0))(f, x, many) for f in (product, jnp.matmul)]
    np.testing.assert_allclose(*each, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wide", [True, False])
def test_the_gradient_is_turned_round_where_the_input_is_wider(wide):
    x, w = inputs(64, 32 if wide else 8)
    jaxpr = jax.make_jaxpr(jax.grad(loss, 2), static_argnums=0)(product, x, w)
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert ("optimization_barrier" in names) == wide
    last = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"][-1]
    shapes = [v.aval.shape for v in last.invars]
    assert shapes == ([(64, 16), (64, 32)] if wide else [(64, 8), (64, 16)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("argument", "dots"), [(1, 2), (2, 2), ((1, 2), 3)])
def test_a_gradient_that_nobody_asked_for_is_not_computed(argument, dots, dtype):
    x, w = inputs(64, 32)
    jaxpr = jax.make_jaxpr(jax.grad(loss, argument), static_argnums=0)(product, x.astype(dtype), w)
    assert count_dots(jaxpr.jaxpr).total() == dots  # of two ways for two back ends one counts


def test_the_compiler_is_told_of_bf16_only(monkeypatch):
    monkeypatch.setattr(dense, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(dense, "is_jaxlib_010", lambda: True)
    assert dense.compiler_options("f32") == {}
    assert dense.compiler_options("bf16") == dense.CPU_KERNELS
    assert dense.precision("auto") == "bf16"
    assert dense.compiler_options("auto") == dense.CPU_KERNELS
    monkeypatch.setattr(dense, "cpu_has_bf16", lambda: False)
    assert dense.compiler_options("bf16") == {}
    assert dense.precision("auto") == "f32"
    assert dense.precision("bf16") == "bf16"  # asked for: no silent change


@pytest.mark.skipif(not dense.cpu_has_bf16(), reason="this CPU has no bf16 units")
@pytest.mark.parametrize("shape", [(64, 32), (64, 8)])
def test_the_cpu_multiplies_bf16_as_bf16(shape):
    """No product of a gradient is widened to f32 on the way to the kernels."""
    x, w = inputs(*shape)
    half = x.astype(jnp.bfloat16)
    program = jax.jit(
        lambda x, w: jax.grad(loss, (1, 2))(product, x, w),
        compiler_options=dense.compiler_options("bf16"),
    )
    program = program.lower(half, w).compile()
    lines = program.as_text().splitlines()
    dots = [i for i, line in enumerate(lines) if " dot(" in line]
    assert len(dots) == 3
    for i in dots:  # the operands are the parameters of the kernel's own computation
        assert all(" bf16[" in line for line in lines[i - 2 : i]), lines[i - 2 : i + 1]


@pytest.mark.parametrize(
    "network",
    ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("simnorm", "simbav2"))],
)
def test_every_network_learns_in_bf16(network):
    from benchmarks.programs import full_state

    from jaxtd3.run.program import build, chunk_of

    sizes = {"critic_hidden": 32, "actor_hidden": 16, "num_atoms": 11, "layer_norm": True}
    sizes |= {"batch_size": 64, "length": 8, "simnorm_groups": 2, "simnorm_dim": 4}
    sizes |= {"critic_updates": 2, "policy_updates": 1}
    config = preset("Pendulum", num_envs=8, network=network, compute="bf16", **sizes)
    parts = build(config)
    state, metrics = chunk_of(parts, 2)(full_state(parts))
    assert np.isfinite(metrics["train/critic_loss"])
    assert int(state.agent.skipped) == 0
    assert int(state.agent.updates) == 2 * config.loop.critic_updates
