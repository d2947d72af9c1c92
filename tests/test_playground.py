"""Playground's robots behind the adapter: rewards, meshes, randomisation, the privileged part."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mujoco_playground._src import mjx_env

import jaxtd3
from jaxtd3.envs.playground import meshes as mesh_module
from jaxtd3.envs.playground.adapter import cast_like, fit_reward_form, load_playground, raw_key
from jaxtd3.run.program import build

STEPS = 12
ROBOTS = [
    ("G1JoystickFlatTerrain", "native"),
    pytest.param("T1JoystickFlatTerrain", "native", marks=pytest.mark.slow),
    pytest.param("G1JoystickFlatTerrain", "jax", marks=pytest.mark.slow),
]


@functools.cache
def load(name, **changes):
    return load_playground(jaxtd3.EnvConfig(name=name, **changes))


def stock(name, unit=False):
    """The environment as Playground makes it, or with every reward scale at 1."""
    from mujoco_playground import registry

    config = registry.get_default_config(name)
    overrides = {"impl": "jax", "push_config.enable": False}
    if unit:
        overrides |= {f"reward_config.scales.{k}": 1.0 for k in config.reward_config.scales}
    with mesh_module.menagerie_for(name):
        return registry.load(name, config=config, config_overrides=overrides)


@functools.cache
def rollout(name, impl):
    """Two environments, random actions: ours, the stock one and the unit-scale one side by side.

    The stock one steps by MJX as Playground does, or calls the native engine as ours does.
    """
    env, plain, unit = load(name, impl=impl), stock(name), stock(name, unit=True)
    stepping = contextlib.nullcontext
    if impl == "native":
        stepping = functools.partial(mock.patch.object, mjx_env, "step", env.physics.step)

    def body(carry, key):
        state, obs = carry
        action = jax.random.uniform(key, (env.spec.action_size,), minval=-1.0)
        out = env.step(state, action)
        copy = lambda: jax.tree.map(lambda x: x, state.state)  # noqa: E731
        with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
            with stepping():
                theirs = plain.step(copy(), action)
            with mock.patch.object(mjx_env, "step", return_value=theirs.data):
                units = unit.step(copy(), action).metrics  # same physics: compiled once less
        raw = jnp.stack([jnp.float32(units[f"reward/{k}"]) for k in env.spec.reward_terms])
        seen = (theirs.obs["state"], theirs.obs["privileged_state"])
        return (out.state, out.obs), (out.obs, out.reward, out.terms, theirs.reward, raw, seen)

    @jax.jit
    @jax.vmap
    def run(key):
        key_reset, key_steps = jax.random.split(key)
        return jax.lax.scan(body, env.reset(key_reset), jax.random.split(key_steps, STEPS))[1]

    return env.spec, jax.device_get(run(jax.random.split(jax.random.key(3), 2)))


@pytest.mark.parametrize(("name", "impl"), ROBOTS)
def test_traced_weights_give_the_stock_reward(name, impl):
    spec, (_, own, terms, theirs, raw, _) = rollout(name, impl)
    ours = spec.combine(jnp.asarray(terms), jnp.array(spec.default_weights))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(own, theirs, rtol=1e-5, atol=1e-6)
    scale = np.abs(raw).max(axis=(0, 1), keepdims=True) + 1e-3
    np.testing.assert_allclose(terms / scale, raw / scale, atol=1e-5)
    assert np.abs(theirs).max() > 0.01


@pytest.mark.parametrize(("name", "impl"), ROBOTS)
def test_the_privileged_part_is_stored_once(name, impl):
    spec, (obs, *_, (state, privileged)) = rollout(name, impl)
    assert spec.critic_sees_obs
    np.testing.assert_array_equal(privileged[..., : spec.obs_size], state)
    np.testing.assert_allclose(obs, privileged, rtol=1e-6)
    assert spec.width == privileged.shape[-1]


def test_mjx_behind_the_adapter_is_plain_mjx():
    """Recorded and replayed as it is, MJX takes the steps that Playground takes with it."""
    from mujoco_playground import registry

    name = "CartpoleBalance"
    env = load(name, impl="jax")
    plain = registry.load(name, config_overrides={"impl": "jax"})
    actions = jax.random.uniform(jax.random.key(1), (STEPS, 1), minval=-1.0)

    def theirs(state, action):
        with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
            new = plain.step(state.replace(info=dict(state.info)), action)
        return cast_like(new, state), (new.obs, new.reward)

    def ours(state, action):
        out = env.step(state, action)
        return out.state, (out.obs, out.reward)

    @jax.jit
    def run(key):
        state, _ = env.reset(key)
        return jax.lax.scan(ours, state, actions)[1], jax.lax.scan(theirs, state.state, actions)[1]

    (obs, reward), (stock_obs, stock_reward) = run(jax.random.key(0))
    np.testing.assert_allclose(obs, stock_obs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(reward, stock_reward, rtol=1e-5)
    assert np.ptp(obs[:, 0]) > 1e-3


def test_g1_spec():
    spec = load("G1JoystickFlatTerrain").spec
    assert (spec.obs_size, spec.extra_size, spec.action_size) == (103, 113, 29)
    assert (spec.episode_length, spec.dt, spec.reward_scale, spec.reward_clip) == (
        1000, 0.02, 0.02, None,
    )  # fmt: skip
    assert len(spec.reward_terms) == 24
    assert dict(zip(spec.reward_terms, spec.default_weights, strict=True))["termination"] == -100
    assert load("T1JoystickFlatTerrain").spec.reward_clip == (0.0, 10000.0)


def test_standins_give_the_same_rollout_to_the_bit(meshes, monkeypatch):
    name = "G1JoystickFlatTerrain"
    monkeypatch.delenv("MENAGERIE_ROOT", raising=False)
    monkeypatch.setattr(mesh_module, "_download", lambda robots, folder: False)
    bare = load_playground(jaxtd3.EnvConfig(name=name))
    assert bare.meshes.kind == "stand-ins"
    assert "collision shapes only" in str(bare.meshes)
    monkeypatch.setenv("MENAGERIE_ROOT", str(meshes))
    real = load_playground(jaxtd3.EnvConfig(name=name))
    assert real.meshes.kind == "MENAGERIE_ROOT"
    assert real.unwrapped.mj_model.nmeshvert > 10 * bare.unwrapped.mj_model.nmeshvert

    def run(env):
        def body(carry, key):
            action = jax.random.uniform(key, (env.spec.action_size,), minval=-1.0)
            out = env.step(carry, action)
            return out.state, (out.obs, out.reward, out.state.state.data.qpos)

        @jax.jit
        def go(key):
            return jax.lax.scan(body, env.reset(key)[0], jax.random.split(key, STEPS))[1]

        return jax.device_get(go(jax.random.key(0)))

    jax.tree.map(np.testing.assert_array_equal, run(bare), run(real))


def test_standins_are_refused_where_a_mesh_matters():
    import mujoco

    tet = mesh_module.standin("a.stl", 0.01)
    for geom, words in (
        ('<geom type="mesh" mesh="a"/>', "a mesh collides"),
        ('<geom type="mesh" mesh="a" contype="0" conaffinity="0"/>', "a mesh decides body_mass"),
    ):
        xml = (
            '<mujoco><asset><mesh name="a" file="a.stl"/></asset><worldbody><body><freejoint/>'
            f'<geom size="0.1" contype="0" conaffinity="0"/>{geom}</body></worldbody></mujoco>'
        )
        model = mujoco.MjModel.from_xml_string(xml, assets={"a.stl": tet})
        with pytest.raises(ValueError, match=words):
            mesh_module.check_standins("Thing", model, xml, {"a.stl": tet})


@pytest.mark.parametrize("suffix", [".stl", ".obj"])
def test_standin_meshes_compile(suffix):
    import mujoco

    data = mesh_module.standin(f"a{suffix}", 0.01)
    xml = f'<mujoco><asset><mesh name="a" file="a{suffix}"/></asset></mujoco>'
    assert mujoco.MjModel.from_xml_string(xml, assets={f"a{suffix}": data}).nmeshface == 4


def test_the_form_of_a_reward_is_proven_not_assumed():
    names, weights = ("a", "b"), (2.0, -1.0)
    w = np.array(weights)
    found = fit_reward_form(lambda t: 0.02 * w @ t, names, weights, 0.02)
    assert (found.scale, found.clip) == (0.02, None)
    found = fit_reward_form(lambda t: np.clip(w @ t, 0, 1e4), names, weights, 0.02)
    assert (found.scale, found.clip) == (1.0, (0.0, 1e4))
    assert fit_reward_form(lambda t: w @ t + 1, names, weights, 0.02) is None
    assert fit_reward_form(lambda t: (w @ t) ** 2, names, weights, 0.02) is None
    assert fit_reward_form(lambda t: t[0] * t[1], names, weights, 0.02) is None


def test_rewards_that_are_no_sum_are_refused():
    env = load("CartpoleBalance")
    assert env.spec.reward_terms == ()
    with pytest.raises(ValueError, match="not a weighted sum"):
        jaxtd3.batch_env(env, jaxtd3.EnvConfig(num_envs=2, weights={"upright": 1.0}))


def test_coarser_physics_is_for_training_alone():
    """`sim_dt` changes the physics step of training; evaluation runs the environment's own."""
    own = load("CartpoleBalance").unwrapped
    config = jaxtd3.preset("CartpoleBalance", profile="cpu", sim_dt=own.dt / 2)
    parts = build(config)
    assert parts.env.env.unwrapped.sim_dt == own.dt / 2
    assert parts.env.env.unwrapped.mjx_model.opt.timestep == np.float32(own.dt / 2)
    assert parts.env.spec.dt == parts.eval_env.spec.dt == own.dt
    assert parts.eval_env.env.unwrapped.sim_dt == own.sim_dt != own.dt / 2


def test_push_and_randomisation_are_options():
    with pytest.raises(jaxtd3.UserError, match="no pushes"):
        load("CartpoleBalance", push=True)
    with pytest.raises(jaxtd3.UserError, match="no domain randomisation"):
        load("CartpoleBalance", randomize=True)
    assert load("T1JoystickFlatTerrain").unwrapped._config.push_config.enable is False
    assert load("T1JoystickFlatTerrain", push=True).unwrapped._config.push_config.enable is True


def test_randomised_dynamics_differ_between_environments():
    """The model's leaves ride in the state: a traced argument, new at each reset."""
    env = load("T1JoystickFlatTerrain", randomize=True)
    state = jax.eval_shape(lambda k: env.reset(k)[0], jax.random.key(0))
    assert len(state.model) >= 4
    out = jax.eval_shape(
        env.step, state, jax.ShapeDtypeStruct((env.spec.action_size,), jnp.float32)
    )
    assert jax.tree.map(jnp.shape, out.state.model) == jax.tree.map(jnp.shape, state.model)

    def mass(key):
        batch, _ = env._randomized(raw_key(key))
        return batch.body_mass[0]

    masses = jax.vmap(mass)(jax.random.split(jax.random.key(0), 4))
    assert len(np.unique(np.asarray(masses)[:, 1])) == 4
    lowered = jax.jit(env.step).lower(state, jnp.zeros(env.spec.action_size))
    assert lowered  # randomised leaves trace as arguments, not as constants


def test_physics_alone_is_traced_at_highest_precision():
    env = load("CartpoleBalance", impl="jax")
    state = jax.eval_shape(lambda k: env.reset(k)[0], jax.random.key(0))
    text = str(jax.make_jaxpr(env.step)(state, jnp.zeros(1)))
    assert "HIGHEST" in text
    agent = jaxtd3.fast_td3(env.spec, jaxtd3.AgentConfig())
    agent_state = jax.eval_shape(agent.init, jax.random.key(0))
    text = str(jax.make_jaxpr(agent.act)(agent_state, jnp.zeros((2, env.spec.width))))
    assert "HIGHEST" not in text
