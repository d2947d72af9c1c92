"""Many devices, shown on eight fake CPU devices: `tests/test_devices.py` runs this file so."""

from __future__ import annotations

import functools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtd3
from jaxtd3.agent import normalize
from jaxtd3.core import sharding
from jaxtd3.core.sharding import AXIS, SPLIT, WHOLE
from jaxtd3.core.types import Batch
from jaxtd3.envs.physics.native import share_of_cores
from jaxtd3.errors import UserError
from jaxtd3.run.program import build

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="run by test_devices.py")

SMALL = {
    "num_envs": 16,
    "length": 32,
    "batch_size": 32,
    "critic_hidden": 16,
    "actor_hidden": 16,
    "num_atoms": 11,
    "eval_episodes": 5,  # which need not divide
}


@functools.cache
def parts_of(name: str, devices: int, **changes):
    return build(jaxtd3.preset(name, profile="cpu", devices=devices, **{**SMALL, **changes}))


def chunk_of(parts, length: int):
    settle = parts.config.loop.sync_every > 1
    chunk = jaxtd3.make_chunk(parts.fns.train_step, length, parts.layout, settle=settle)
    return chunk.lower(parts.shapes).compile()


def assert_replicated(tree) -> None:
    """Every device holds the same bits: nobody checks this for us."""
    for leaf in jax.tree.leaves(tree):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        for other in others:
            np.testing.assert_array_equal(first, other)


def run_agrees(name: str, devices: int, iterations: int = 50, evaluate: bool = True, **changes):
    parts = parts_of(name, devices, **changes)
    state, metrics = chunk_of(parts, iterations)(parts.fns.init(jax.random.key(0)))
    assert int(state.iteration) == iterations
    assert int(state.agent.updates) > 0
    assert len(state.replay.obs.sharding.device_set) == devices
    assert state.replay.obs.addressable_shards[0].data.shape[1] == 16 // devices
    assert_replicated(state.agent)
    assert all(np.isfinite(float(v)) for v in metrics.values())
    if evaluate:
        evaluated = parts.evaluate(state.agent, state.weights, jax.random.key(1))
        assert np.isfinite(evaluated["return"])


SLOW = pytest.mark.slow


@pytest.mark.parametrize("devices", [pytest.param(2, marks=SLOW), 8])
def test_pendulum_runs_and_all_devices_hold_the_same_agent(devices):
    run_agrees("Pendulum", devices)


@pytest.mark.parametrize("devices", [pytest.param(n, marks=SLOW) for n in (1, 2, 4, 8)])
def test_cartpole_runs_and_all_devices_hold_the_same_agent(devices):
    run_agrees("CartpoleBalance", devices)


@SLOW
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_mjx_runs_and_all_devices_hold_the_same_agent(devices):
    run_agrees("CartpoleBalance", devices, impl="jax")


@SLOW
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_g1_runs_and_all_devices_hold_the_same_agent(devices):
    run_agrees("G1JoystickFlatTerrain", devices)


def test_a_mesh_of_one_is_the_plain_program():
    """On one device the sharded program is `train_step` without a mesh, up to rounding: the same
    random numbers, though the compiler may fuse otherwise."""
    parts = parts_of("Pendulum", 1)
    sharded, _ = chunk_of(parts, 20)(parts.fns.init(jax.random.key(3)))
    cfg = parts.config
    env = jaxtd3.make_env(cfg.env)
    agent = jaxtd3.fast_td3(env.spec, cfg.agent)
    replay = jaxtd3.make_replay(env.spec, cfg.replay)
    init, _, step = jaxtd3.make_train_step(env, agent, replay, cfg.loop)
    plain, _ = jaxtd3.make_chunk(step, 20)(jax.jit(init)(jax.random.key(3)))
    assert_close(plain.replay.obs, sharded.replay.obs)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
        (plain.agent.actor, plain.agent.critic),
        (sharded.agent.actor, sharded.agent.critic),
    )


def test_native_physics_does_not_depend_on_the_number_of_devices():
    """The same states and actions: the same bits, each device with simulations of its own."""
    found = []
    for devices in (1, 2):
        parts = parts_of("CartpoleBalance", devices, actor_hidden=8)  # with an engine of its own
        inner = parts.env.init(jax.random.key(0)).inner
        action = jnp.linspace(-1, 1, 16)[:, None]
        step = jax.jit(sharding.over_envs(parts.env.env.step, parts.mesh))
        found.append(step(step(inner, action).state, action))
        physics = parts.env.env.physics
        assert physics.threads == share_of_cores(devices)
        assert {num for num, _ in physics._free} == {16 // devices}
    one, two = found
    np.testing.assert_array_equal(one.obs, two.obs)
    np.testing.assert_array_equal(one.state.state.data.qpos, two.state.state.data.qpos)
    assert np.ptp(one.obs, axis=0).max() > 0.01


@pytest.mark.parametrize("name", ["Pendulum", pytest.param("CartpoleBalance", marks=SLOW)])
def test_first_states_do_not_depend_on_the_number_of_devices(name):
    one, four = (parts_of(name, n).fns.init(jax.random.key(0)) for n in (1, 4))
    np.testing.assert_array_equal(one.env.obs, four.env.obs)
    np.testing.assert_array_equal(one.env.pool_obs, four.env.pool_obs)
    np.testing.assert_array_equal(one.noise.rung, four.noise.rung)


# --- gradients and statistics ---------------------------------------------------------------------


def global_batch(spec, size: int) -> Batch:
    keys = jax.random.split(jax.random.key(7), 4)
    return Batch(
        obs=jax.random.normal(keys[0], (size, spec.width)),
        action=jax.random.uniform(keys[1], (size, spec.action_size), minval=-1.0),
        reward=jax.random.normal(keys[2], (size,)),
        discount=jnp.full(size, 0.9),
        next_obs=jax.random.normal(keys[3], (size, spec.width)),
        weight=jnp.where(jnp.arange(size) % 5 == 0, 0.0, 1.0),
    )


def gradients(state):
    """Adam's first moment after one update is a tenth of the gradient."""
    return state.critic_opt[0].mu, state.actor_opt[0].mu


def sharded_and_single_gradients():
    cfg = jaxtd3.preset("Pendulum", profile="cpu", policy_noise=0.0, **SMALL)
    env = jaxtd3.make_env(cfg.env)
    mesh = sharding.make_mesh(4)
    batch = global_batch(env.spec, 64)
    alone = jaxtd3.fast_td3(env.spec, cfg.agent)
    state = alone.init(jax.random.key(0))
    key = jax.random.key(1)
    single, *_ = jax.jit(partial(alone.update, policy=True))(state, batch, key)
    spread = jaxtd3.fast_td3(env.spec, cfg.agent, AXIS)
    mapped = jax.shard_map(
        partial(spread.update, policy=True),
        mesh=mesh,
        in_specs=(WHOLE, Batch(*[SPLIT] * 6), WHOLE),
        out_specs=WHOLE,
        check_vma=False,
    )
    many, *_ = jax.jit(mapped)(state, batch, key)
    return gradients(many), gradients(single)


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


def test_the_sharded_gradient_is_the_gradient_of_the_global_batch():
    many, single = sharded_and_single_gradients()
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(single)) > 1e-4
    assert_close(many, single)


def test_a_sum_in_place_of_the_mean_would_be_seen(monkeypatch):
    """Adam hides the factor in the parameters; the comparison above does not."""
    monkeypatch.setattr(jax.lax, "pmean", jax.lax.psum)
    many, single = sharded_and_single_gradients()
    with pytest.raises(AssertionError):
        assert_close(many, single)


def test_statistics_are_those_of_all_data_together():
    mesh = sharding.make_mesh(8)
    x = jax.random.normal(jax.random.key(0), (3, 64, 5)) * 3 + 1
    valid = jax.random.bernoulli(jax.random.key(1), 0.8, (3, 64))
    one = many = normalize.init_stats(5)
    update = jax.shard_map(
        lambda s, x, v: normalize.update_stats(s, x, v, AXIS),
        mesh=mesh,
        in_specs=(WHOLE, SPLIT, SPLIT),
        out_specs=WHOLE,
        check_vma=False,
    )
    for i in range(3):
        one = normalize.update_stats(one, x[i], valid[i])
        many = jax.jit(update)(many, x[i], valid[i])
    assert float(many.total) == float(valid.sum())
    assert_close(many, one)


# --- bundles --------------------------------------------------------------------------------------


def test_bundles_learn_apart_and_meet_every_k_updates():
    cfg = jaxtd3.preset("Pendulum", profile="cpu", **SMALL)
    env = jaxtd3.make_env(cfg.env)
    agent = jaxtd3.fast_td3(env.spec, cfg.agent, "i", learn_apart=True)
    agent = sharding.bundles(agent, 3, "i")
    state = jax.vmap(agent.init, axis_size=4, in_axes=None)(jax.random.key(0))
    batch = jax.tree.map(lambda x: x.reshape(4, 16, *x.shape[1:]), global_batch(env.spec, 64))
    step = jax.jit(jax.vmap(partial(agent.update, policy=True), axis_name="i"))
    apart = []
    for i in range(6):
        keys = jax.random.split(jax.random.key(i), 4)
        state, *_ = step(state, batch, keys)
        leaves = jax.tree.leaves((state.critic, state.actor, state.critic_opt[0].mu))
        apart.append(max(float(jnp.abs(x - x[:1]).max()) for x in leaves))
    assert [d > 0 for d in apart] == [True, True, False, True, True, False]


def test_bundles_are_one_agent_at_the_end_of_a_chunk():
    run_agrees("Pendulum", 4, iterations=21, evaluate=False, sync_every=8)


# --- the compiled program -------------------------------------------------------------------------

COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
SIZES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1, "u8": 1, "u16": 2}


def collectives(text: str) -> list[tuple[str, int]]:
    """Name and bytes of every collective of compiled HLO."""
    found = []
    for shapes, name in COLLECTIVE.findall(text):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        size = sum(
            SIZES[dtype] * int(np.prod([int(n) for n in dims.split(",") if n] or [1]))
            for dtype, dims in arrays
        )
        found.append((name, size))
    return found


def test_only_gradients_and_statistics_cross_devices():
    """No gather of the ring, no copy of it: all-reduces alone, none larger than the networks."""
    parts = parts_of("Pendulum", 4, length=4096)
    compiled = chunk_of(parts, 5)
    text = compiled.as_text()
    found = collectives(text)
    assert found
    assert {name for name, _ in found} == {"all-reduce"}
    agent = parts.shapes.agent
    networks = sum(x.size * 4 for x in jax.tree.leaves((agent.actor, agent.critic)))
    ring = parts.shapes.replay.obs
    per_device = ring.size * 4 // 4
    assert sum(size for _, size in found) < 8 * networks < per_device
    shape = f"f32[{ring.shape[0]},{ring.shape[1] // 4},{ring.shape[2]}]"
    assert shape in text
    copies = re.findall(rf"= {re.escape(shape)}\S* copy\(", text)
    assert not copies
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= per_device


@SLOW
@pytest.mark.parametrize("impl", ["jax", "warp"])
def test_g1_on_two_devices_lowers_for_cuda(impl):
    parts = parts_of("G1JoystickFlatTerrain", 2, impl=impl, symmetry="off")
    chunk = jaxtd3.make_chunk(parts.fns.train_step, 2, parts.layout)
    text = chunk.trace(parts.shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "all_reduce" in text
    assert ("@jax_callable" in text) == (impl == "warp")


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": 9}, "devices=9, but there are 8"),
        ({"devices": 8, "num_envs": 12}, "num_envs=12 is not divisible by 8 devices: 8 or 16"),
        ({"devices": 8, "batch_size": 20}, "batch_size=20 is not divisible by 8 devices: 16 or 24"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        parts_of("Pendulum", **changes)


def test_what_is_split_is_known_from_two_sizes():
    """Four numbers that all environments share stay whole, be there four environments or not."""

    def init(num):
        return {"shared": jnp.zeros(4), "ring": jnp.zeros((4, num, 2)), "each": jnp.zeros(num)}

    found = sharding.size_specs(init)
    assert found["shared"] == sharding.WHOLE
    assert found["each"] == sharding.SPLIT
    assert found["ring"] == jax.P(None, sharding.AXIS)
