"""Python that is slow to trace is run once, and what it did is the same wherever it is replayed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtd3
from jaxtd3.core import sharding
from jaxtd3.core.tracing import compile_soon, record
from jaxtd3.envs.physics.mjx import even_vmap


class Counted:
    """A function of a dict and an array that counts how often its Python runs."""

    def __init__(self):
        self.calls = 0

    def __call__(self, tree, x):
        self.calls += 1
        return {"sum": jnp.sin(tree["a"]) @ x, "same": tree["b"]}


def arguments(*batch: int):
    a = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
    tree = {"a": jnp.broadcast_to(a, (*batch, 3, 4)), "b": jnp.ones((*batch, 2), jnp.int32)}
    return tree, jnp.broadcast_to(jnp.arange(4.0), (*batch, 4)) * 1.5


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def near(a, b):
    """To the last bit or two: one product of matrices sums otherwise than many of vectors."""
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), a, b)


def test_replayed_alone_batched_compiled_and_sharded():
    plain, counted = Counted(), Counted()
    recorded = record(counted)
    one, many = arguments(), arguments(6)
    equal(recorded(*one), plain(*one))
    equal(jax.jit(recorded)(*one), jax.jit(plain)(*one))
    equal(jax.vmap(recorded)(*many), jax.vmap(plain)(*many))
    mesh = sharding.make_mesh(1)
    over = jax.jit(sharding.over_envs(recorded, mesh))
    equal(over(*many), jax.vmap(plain)(*many))
    grown = jax.lax.scan(lambda c, _: (c, jax.vmap(recorded)(*many)), 0, length=2)[1]
    equal(jax.tree.map(lambda x: x[1], grown), jax.vmap(plain)(*many))
    assert counted.calls == 1


def test_recorded_under_one_mesh_and_called_under_another():
    """First inside shard_map, then in a program that is laid out on the same mesh."""
    counted, mesh = Counted(), sharding.make_mesh(1)
    layout = jax.NamedSharding(mesh, sharding.SPLIT)
    many = jax.device_put(arguments(6), layout)

    def use(function):
        """What is replayed meets what is not: their meshes must be one."""
        return lambda t, x: jnp.einsum("bi,bij->bj", jax.vmap(function)(t, x)["sum"], t["a"])

    recorded, wanted = use(record(counted)), jax.jit(use(Counted()))(*many)
    specs = {"in_specs": sharding.SPLIT, "out_specs": sharding.SPLIT}
    over = jax.shard_map(recorded, mesh=mesh, check_vma=False, **specs)
    for program in (jax.jit(over), jax.jit(recorded), jax.jit(over)):
        np.testing.assert_allclose(program(*many), wanted, rtol=1e-6)
    assert counted.calls == 2


def test_other_types_and_structures_are_recorded_anew():
    counted = Counted()
    recorded = record(counted)
    tree, x = arguments()
    recorded(tree, x)
    wide = recorded(tree, jnp.stack([x, x], axis=1))
    assert wide["sum"].shape == (3, 2)
    assert counted.calls == 2
    with pytest.raises(KeyError, match="b"):  # the same leaves under other names
        recorded({"a": tree["a"], "c": tree["b"]}, x)


def test_what_closes_over_a_trace_is_not_kept():
    """A recorded function may be made of a value of one program; another must not see it."""
    held = {}
    recorded = record(lambda x: x * held["scale"])

    def scaled(scale, x):
        held["scale"] = scale
        return recorded(x)

    assert jax.jit(scaled)(2.0, 3.0 * jnp.ones(())) == 6.0
    assert jax.jit(lambda s, x: scaled(s, x) + 0)(5.0, 3.0 * jnp.ones(())) == 15.0


def test_even_vmap_is_vmap_whatever_has_the_axis():
    counted = Counted()
    even = even_vmap(record(counted))
    tree, x = arguments()
    xs = arguments(5)[1] * jnp.arange(5.0)[:, None]
    axes = ({"a": None, "b": None}, 0)
    wanted = jax.vmap(Counted(), axes)(tree, xs)
    near(jax.vmap(even, axes)(tree, xs), wanted)
    equal(even(tree, x), Counted()(tree, x))
    trees = arguments(5)[0]
    near(jax.vmap(even, (0, None))(trees, x), jax.vmap(Counted(), (0, None))(trees, x))
    near(jax.jit(jax.vmap(even))(trees, xs), jax.jit(jax.vmap(Counted()))(trees, xs))
    assert counted.calls == 1


def test_mjx_is_traced_once_for_reset_step_training_and_evaluation(monkeypatch):
    from jaxtd3.envs.physics import mjx

    calls = []
    plain = mjx._plain_forward

    def counting(model, data):
        calls.append(1)
        return plain(model, data)

    monkeypatch.setattr(mjx, "_plain_forward", counting)
    env = jaxtd3.make_env(jaxtd3.EnvConfig(name="CartpoleBalance", num_envs=4, impl="jax"))
    state = jax.eval_shape(env.init, jax.random.key(0))
    action = jax.ShapeDtypeStruct((4, env.spec.action_size), jnp.float32)
    jax.eval_shape(env.step, state, action, jax.random.key(0))
    jax.eval_shape(jax.vmap(env.env.reset), jax.random.split(jax.random.key(0), 3))
    assert len(calls) == 1


def test_what_is_compiled_soon_is_the_same_function():
    x = jnp.linspace(-3.0, 3.0, 100)
    function = lambda x, scale: scale * jnp.exp(jnp.sin(x))  # noqa: E731
    soon = compile_soon(function, x, jnp.float32(2))
    np.testing.assert_allclose(soon(x, jnp.float32(2)), function(x, 2.0), rtol=1e-6)
