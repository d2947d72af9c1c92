"""A dense layer, and a matrix product whose gradients suit the back end that computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxtd3.core.types import Array
from jaxtd3.runtime import cpu_has_bf16, is_jaxlib_010


class Dense(nn.Module):
    """y = x W + b in `dtype`; parameters, sums and bias in f32, rounded once at the end."""

    features: int
    dtype: Any = jnp.float32
    use_bias: bool = True
    kernel_init: Callable[..., Array] = nn.initializers.lecun_normal()
    bias_init: Callable[..., Array] = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        w = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        rows = x.astype(self.dtype).reshape(-1, x.shape[-1])
        y = product(rows, w)
        if self.use_bias:
            y += self.param("bias", self.bias_init, (self.features,))[None]
        return y.astype(self.dtype).reshape(*x.shape[:-1], self.features)


def contract(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    """The product of two matrices over one axis of each, summed in f32."""
    dims = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


@jax.custom_vjp
def product(x: Array, w: Array) -> Array:
    """x @ w, [N, K] @ [K, M] -> f32, computed in the type of `x`; `w` and its gradient are f32."""
    return contract(x, w.astype(x.dtype), 1, 0)


def product_forward(x: Any, w: Any) -> tuple[Array, Any]:
    """The product, and of its operands what the wanted gradients need."""
    narrow = w.value.astype(x.value.dtype)
    saved = (x.value if w.perturbed else None, narrow if x.perturbed else None)
    return product(x.value, w.value), saved


def product_backward(saved: Any, g: Any) -> tuple[Array | None, Array | None]:
    x, w = saved
    if isinstance(g, SymbolicZero) or (x is None and w is None):
        return None, None
    g = g.astype((w if x is None else x).dtype)
    dx = None if w is None else contract(g, w, 1, 1).astype(w.dtype)
    return dx, None if x is None else weight_gradient(x, g)


def weight_gradient(x: Array, g: Array) -> Array:
    """x.T @ g, [N, K], [N, M] -> [K, M].

    It contracts over the batch, so one operand must be transposed on the way, and it pays to take
    the narrower: XLA's CPU back end always takes the left one, which is x unless turned round as
    here. The barrier keeps the compiler from turning it back.
    """
    if x.shape[1] > g.shape[1]:
        return jax.lax.optimization_barrier(over_rows(g, x)).T
    return over_rows(x, g)


def over_rows(a: Array, b: Array) -> Array:
    """a.T @ b."""

    def plain(a: Array, b: Array) -> Array:
        return contract(a, b, 0, 0)

    def transposed(a: Array, b: Array) -> Array:
        """For CPUs: their bf16 kernels know only plain layouts. By way of a vector, because a
        transposed array is one of another layout to the compiler, not one moved in memory."""
        flat = jax.lax.optimization_barrier(a.T.ravel())
        return contract(flat.reshape(a.shape[::-1]), b, 1, 0)

    if a.dtype == jnp.float32:
        return plain(a, b)
    return jax.lax.platform_dependent(a, b, cpu=transposed, default=plain)


product.defvjp(product_forward, product_backward, symbolic_zeros=True)


# --- the compiler's bf16 ------------------------------------------------------------------------

CPU_KERNELS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def precision(compute: str) -> str:
    """The precision that is meant, f32 or bf16: of `auto`, bf16 where the hardware has units."""
    if compute != "auto":
        return compute
    return "bf16" if jax.default_backend() != "cpu" or cpu_has_bf16() else "f32"


def compiler_options(compute: str) -> dict[str, str]:
    """What the compiler must be told for fast products in `compute`.

    A CPU with bf16 units multiplies twice as fast in it, but XLA widens bf16 to f32 there unless
    its library of kernels is asked for.
    """
    bf16 = precision(compute) == "bf16"
    wanted = bf16 and jax.default_backend() == "cpu" and cpu_has_bf16()
    return dict(CPU_KERNELS) if wanted and is_jaxlib_010() else {}
