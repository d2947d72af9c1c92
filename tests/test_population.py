"""A population of P is P single runs; stored reward terms are what the environment would give."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import batching

import jaxtd3
from jaxtd3.config.sections import LoopConfig
from jaxtd3.core.tracing import flat_vmap
from jaxtd3.core.types import EnvSpec
from jaxtd3.errors import UserError
from jaxtd3.loop.population import TRACED, make_population, take_member, with_members
from jaxtd3.loop.schedule import (
    Progress,
    following_length,
    growing_penalties,
    make_schedule,
    moving_weights,
    survival,
)
from jaxtd3.run.program import pool_key, run_keys

TINY = {
    "num_envs": 4,
    "length": 32,
    "batch_size": 32,
    "critic_hidden": 16,
    "actor_hidden": 8,
    "num_atoms": 11,
    "critic_updates": 1,
    "policy_updates": 1,
    "warmup": 4,
    "n_step": 3,
    "episode_length": 12,
    "log_every": 24,
}
STEPS = TINY["log_every"]


def config(**changes) -> jaxtd3.Config:
    return jaxtd3.preset("Pendulum", profile="cpu", **{**TINY, **changes}).resolved()


BASE = config()
MEMBERS = [  # they differ in everything that may differ
    BASE.override({"seed": 3, "weights": {"effort": 0.0}}),
    BASE.override({"seed": 1, "gamma": 0.9, "critic_lr": 1e-3, "tau": 0.3, "v_min": -50.0}),
    BASE.override({"seed": 1, "weights": {"angle": -2.0}, "sigma_max": 1.0, "sigma_min": 0.5}),
]


def parts(cfg: jaxtd3.Config):
    env = jaxtd3.make_env(cfg.env)
    agent = jaxtd3.fast_td3(env.spec, cfg.agent)
    return env, agent, jaxtd3.make_replay(env.spec, cfg.replay)


def leaves(state) -> dict[str, np.ndarray]:
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        found[jax.tree_util.keystr(path)] = np.asarray(x)
    return found


class Trained(NamedTuple):
    first: Any
    last: Any
    metrics: Any
    runs: Any
    traces: list


@pytest.fixture(scope="module")
def population() -> Trained:
    """A population, its first and last state and its metrics."""
    traces = []
    runs = jaxtd3.build_population(MEMBERS, on_trace=lambda: traces.append(1))
    first = runs.start()
    last, metrics = runs.advance(jax.tree.map(jnp.copy, first))
    return Trained(first, last, metrics, runs, traces)


@pytest.mark.parametrize("index", range(len(MEMBERS)))
def test_members_are_single_runs(population, index):
    """Within 1e-5: matrix products of P members together are summed in another order than alone."""
    cfg = MEMBERS[index]
    init, _, train_step = jaxtd3.make_train_step(*parts(cfg), cfg.loop)
    start = init(run_keys(cfg.run.seed).init)
    first, last, metrics, *_ = population
    for name, x in leaves(start).items():
        np.testing.assert_array_equal(leaves(take_member(first, index))[name], x, err_msg=name)
    alone, own_metrics = jaxtd3.make_chunk(train_step, STEPS)(start)
    together = leaves(take_member(last, index))
    for name, x in leaves(alone).items():
        np.testing.assert_allclose(together[name], x, rtol=1e-5, atol=1e-5, err_msg=name)
    for name, x in own_metrics.items():
        np.testing.assert_allclose(metrics[name][index], x, rtol=1e-4, atol=1e-4, err_msg=name)
    assert int(alone.agent.updates) == (STEPS - TINY["warmup"])


def test_every_chunk_but_the_first_begins_with_a_new_pool(population):
    later, _ = population.runs.advance(jax.tree.map(jnp.copy, population.last))
    for i, cfg in enumerate(MEMBERS):
        np.testing.assert_array_equal(
            population.last.env.pool_obs[i], population.first.env.pool_obs[i]
        )
        env = take_member(population.last.env, i)
        fresh = jaxtd3.make_env(cfg.env).refresh(env, pool_key(cfg.run.seed, STEPS))
        np.testing.assert_array_equal(later.env.pool_obs[i], fresh.pool_obs)
        assert not np.array_equal(fresh.pool_obs, env.pool_obs)


def test_what_is_no_population_is_refused_in_one_line():
    with pytest.raises(jaxtd3.UserError, match="at least one member"):
        jaxtd3.build_population([])
    wrong = BASE.override({"weights": {"angel": 1.0}})
    with pytest.raises(jaxtd3.UserError, match="did you mean 'angle'"):
        jaxtd3.build_population([wrong]).start()


def test_members_differ(population):
    actors = [leaves(take_member(population.last.agent.actor, i)) for i in range(3)]
    for a, b in ((0, 1), (1, 2)):
        assert any(not np.allclose(actors[a][name], actors[b][name]) for name in actors[a])


def test_another_wave_is_not_traced_again(population):
    others = [m.override({"seed": 9, "gamma": 0.5}) for m in MEMBERS]
    wave = population.runs._replace(configs=others)
    state, _ = wave.advance(wave.start())
    assert len(population.traces) == 1
    np.testing.assert_array_equal(state.agent.hyper.gamma, np.float32(0.5))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"critic_hidden": 32}, "agent.critic_hidden is static"),
        ({"num_envs": 8}, "env.num_envs is static"),
        ({"n_step": 1}, "replay.n_step is static"),
        ({"iterations": 7}, "run.iterations is static"),
    ],
)
def test_static_fields_are_refused(change, says):
    with pytest.raises(jaxtd3.UserError, match=says):
        make_population(*parts(BASE), [BASE, BASE.override(change)])


def test_population_size():
    with pytest.raises(jaxtd3.UserError, match="at least one"):
        make_population(*parts(BASE), [])
    init, _ = make_population(*parts(BASE), MEMBERS)
    with pytest.raises(jaxtd3.UserError, match="2 members for a population of 3"):
        init(MEMBERS[:2])


def test_every_traced_field_is_a_leaf(population):
    """What TRACED promises really reaches the state."""
    env, state = jaxtd3.make_env(BASE.env), take_members(population.first, 2)
    uniform = {name for name in TRACED if name.startswith("replay.")}  # no priorities here
    for name in sorted(TRACED - {"run.seed", "env.weights"} - uniform):
        section, leaf = name.split(".")
        old = getattr(getattr(BASE, section), leaf)
        new = old + 1 if isinstance(old, int) else 0.5 * old + 0.1
        member = BASE.override({name: new})
        hyper = [
            leaves((s.agent.hyper, s.noise.hyper))
            for s in (
                with_members(state, env, [BASE, BASE]),
                with_members(state, env, [BASE, member]),
            )
        ]
        changed = [n for n in hyper[0] if not np.array_equal(hyper[0][n], hyper[1][n])]
        assert len(changed) == 1, name


def take_members(tree, count: int):
    return jax.tree.map(lambda x: x[:count], tree)


def test_flat_vmap_is_vmap():
    def step(state, action):
        return {"x": state["x"] * 2 + action, "n": state["n"] + 1}, jnp.sum(action)

    key = jax.random.key(0)
    state = {"x": jax.random.normal(key, (3, 5, 2)), "n": jnp.arange(15).reshape(3, 5)}
    action = jax.random.normal(key, (3, 5, 2))
    wanted = jax.vmap(jax.vmap(step))(state, action)
    jax.tree.map(np.testing.assert_array_equal, wanted, jax.vmap(flat_vmap(step))(state, action))
    shared = jax.vmap(flat_vmap(step), in_axes=(None, 0))(take_member(state, 0), action)
    first = jax.vmap(jax.vmap(step), in_axes=(None, 0))(take_member(state, 0), action)
    jax.tree.map(np.testing.assert_array_equal, first, shared)
    text = str(jax.make_jaxpr(jax.vmap(flat_vmap(step)))(state, action))
    assert "f32[15,2]" in text, "the physics batch is not flat"


class Buffers(NamedTuple):
    """As Warp's data: some arrays have an environment axis, others serve all of them."""

    each: jax.Array
    shared: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:  # `vmap` asks for it
        return self.each.shape


def test_flat_vmap_of_arrays_that_environments_share():
    """Also where a shared array is as long as there are environments, and a member's own is not."""

    def split(cont, _, x, axis):
        return x._replace(each=cont(x.each, axis))

    def join(cont, size, x, axis):
        return x._replace(each=cont(size, x.each, axis))

    batching.register_vmappable(Buffers, int, int, split, join, None)

    def step(state, action):
        return Buffers(state.each + action, state.shared), jnp.sum(action)

    members, envs = 3, 5
    single = Buffers(
        jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((envs,), jnp.float32)
    )
    action = jnp.arange(members * envs * 2.0).reshape(members, envs, 2)
    state = Buffers(jnp.ones((members, envs, 2)), jnp.arange(5.0))
    rule = flat_vmap(step, (single, jax.ShapeDtypeStruct((2,), jnp.float32)))
    out, sums = jax.vmap(rule)(state, action)
    np.testing.assert_array_equal(out.each, 1 + action)
    np.testing.assert_array_equal(out.shared, state.shared)
    np.testing.assert_array_equal(sums, action.sum(-1))


@pytest.mark.slow
def test_members_over_devices():
    """Two devices, two members each: as on one device, to the bit of the order of sums."""
    script = """
        import jax, numpy as np, jaxtd3, test_population as t
        from jaxtd3.core.sharding import make_mesh
        members = [t.MEMBERS[0], t.MEMBERS[1], t.MEMBERS[2], t.MEMBERS[0]]
        states = []
        for mesh in (None, make_mesh(2)):
            init, step = jaxtd3.make_population(*t.parts(t.BASE), members, mesh=mesh)
            states.append(jaxtd3.make_chunk(step, 8)(init())[0])
        assert len(states[1].agent.updates.sharding.device_set) == 2
        for (name, a), b in zip(t.leaves(states[0]).items(), t.leaves(states[1]).values()):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)
    """
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.path.dirname(__file__)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=env, check=True)


# --- relabelling --------------------------------------------------------------------------------


class Clipped(jaxtd3.Pendulum):
    """A pendulum whose reward is scaled and clipped, as the robots' are."""

    spec = dataclasses.replace(jaxtd3.Pendulum.spec, reward_scale=0.05, reward_clip=(-0.2, 0.1))


def collected(weights, store_terms: bool, steps: int = 20):
    """A ring filled by the same actions whatever the weights: nothing is learnt."""
    cfg = config(weights=weights, store_terms=store_terms)
    env = jaxtd3.batch_env(Clipped(), cfg.env)
    agent = jaxtd3.fast_td3(env.spec, cfg.agent)
    replay = jaxtd3.make_replay(env.spec, cfg.replay)
    init, collect_step, _ = jaxtd3.make_train_step(env, agent, replay, cfg.loop)
    state, _ = jaxtd3.make_chunk(collect_step, steps)(init(jax.random.key(0)))
    return env, replay, state


def test_relabelled_rewards_are_the_environments():
    old, new = {"effort": 5.0}, {"angle": -0.3, "effort": -2.0}
    env, stored, state = collected(old, store_terms=True)
    _, plain, truth = collected(new, store_terms=False)
    weights = jaxtd3.envs.batch.reward_weights(env.spec, new)
    key, gamma = jax.random.key(5), jnp.float32(0.97)
    wanted = plain.sample(truth.replay, key, gamma)
    before = stored.sample(state.replay, key, gamma)
    found = stored.sample(state.replay, key, gamma, weights)
    np.testing.assert_array_equal(found.reward, wanted.reward)
    jax.tree.map(np.testing.assert_array_equal, found._replace(reward=0), wanted._replace(reward=0))
    assert not np.allclose(before.reward, wanted.reward)
    assert len(np.unique(wanted.reward)) > 10
    assert float(wanted.weight.sum()) > 20


def test_without_terms_the_ring_is_as_before():
    env, _, replay = parts(BASE)
    ring = jax.eval_shape(lambda: replay.init(env.num_envs))
    names = {name.lstrip(".") for name in leaves_names(ring)}
    assert names == {
        *("obs", "action", "reward", "end", "slot", "final_obs", "next_slot", "head", "size"),
    }


def leaves_names(tree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def test_terms_need_a_weighted_sum():
    spec = dataclasses.replace(jaxtd3.Pendulum.spec, reward_terms=(), default_weights=())
    with pytest.raises(ValueError, match="no terms to store"):
        jaxtd3.make_replay(spec, jaxtd3.ReplayConfig(length=8, store_terms=True))


def test_curriculum():
    schedule = growing_penalties(10)
    weights = jnp.array([1.0, -2.0, 0.0])
    for iteration, share in ((0, 0.0), (5, 0.5), (10, 1.0), (99, 1.0)):
        now = schedule(weights, Progress(jnp.int32(iteration), jnp.float32(0)))
        np.testing.assert_allclose(now, [1.0, -2.0 * share, 0.0], atol=1e-7)
    with pytest.raises(ValueError, match="curriculum=-1"):
        config(curriculum=-1)


def test_curriculum_that_follows_the_length_of_episodes():
    schedule = following_length(("alive", "torques", "tracking"), 0.2)
    weights = jnp.array([10.0, -2.0, 1.0])
    for lasted, expected in (
        (0.0, [10.0, -1.0, 1.0]),
        (0.5, [6.0, -1.5, 1.0]),
        (1.0, [2.0, -2.0, 1.0]),
    ):
        now = schedule(weights, Progress(jnp.int32(0), jnp.float32(lasted)))
        np.testing.assert_allclose(now, expected, rtol=1e-6)
    assert survival(jnp.array([0, 50]), 100, None) == 0.5
    assert survival(jnp.array([90, 90]), 100, None) == 1.0
    with pytest.raises(ValueError, match="only one of them"):
        config(curriculum=5, curriculum_length=True)


def test_curriculum_from_weights_of_the_beginning():
    terms = ("alive", "pose", "tracking")
    weights = jnp.array([10.0, -12.0, 1.0])
    schedule = moving_weights(terms, {"pose": -4.0, "alive": 2.0}, 10)
    for iteration, expected in (
        (0, [2.0, -4.0, 1.0]),
        (5, [2.0, -4.0, 1.0]),
        (8, [6.8, -8.8, 1.0]),
        (10, [10.0, -12.0, 1.0]),
        (99, [10.0, -12.0, 1.0]),
    ):
        now = schedule(weights, Progress(jnp.int32(iteration), jnp.float32(0)))
        np.testing.assert_allclose(now, expected, rtol=1e-6)
    with pytest.raises(UserError, match="did you mean 'pose'"):
        moving_weights(terms, {"pos": 1.0}, 10)
    with pytest.raises(ValueError, match="curriculum_weights needs curriculum"):
        config(curriculum_weights={"angle": -4.0})
    # both courses, one after the other
    spec = EnvSpec("x", 1, 1, 100, reward_terms=terms, default_weights=(10.0, -12.0, 1.0))
    loop = LoopConfig(
        curriculum=10,
        curriculum_weights={"pose": -4.0},
        curriculum_length=True,
        curriculum_alive=0.5,
    )
    both = make_schedule(loop, spec)
    now = both(weights, Progress(jnp.int32(0), jnp.float32(0)))
    np.testing.assert_allclose(now, [10.0, -2.0, 1.0], rtol=1e-6)
    now = both(weights, Progress(jnp.int32(10), jnp.float32(1)))
    np.testing.assert_allclose(now, [5.0, -12.0, 1.0], rtol=1e-6)


def test_curriculum_rewards_all_data_under_the_weights_of_now():
    cfg = config(curriculum=8, store_terms=True, weights={"angle": -1.0})
    env, agent, plain = parts(cfg)

    def update(state, batch, key, *, policy):
        return state, {"angle": jnp.mean(batch.reward)}, None

    def sample(state, key, gamma, weights):
        batch = plain.sample(state, key, gamma, weights)
        return batch._replace(reward=jnp.broadcast_to(weights[0], batch.reward.shape))

    agent, replay = agent._replace(update=update), plain._replace(sample=sample)
    init, collect_step, train_step = jaxtd3.make_train_step(env, agent, replay, cfg.loop)
    state = init(jax.random.key(0))
    full = np.asarray(state.weights)
    state, metrics = jax.jit(collect_step)(state.replace(iteration=jnp.int32(4)))
    now = full * np.where(full < 0, 0.5, 1.0)
    np.testing.assert_array_equal(state.weights, full)  # the goal stays
    seen = np.mean(np.asarray(state.replay.terms[0]) @ now)
    np.testing.assert_allclose(metrics["env/reward"], seen, rtol=1e-5)
    for iteration in (0, 4, 8):
        found = jax.jit(train_step)(state.replace(iteration=jnp.int32(iteration)))[1]
        np.testing.assert_allclose(found["train/angle"], -iteration / 8, atol=1e-6)
