"""Other packages' environments as ours, and ours as gymnasium's."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtd3 import EnvConfig, UserError, make_env, preset
from jaxtd3.cli.main import main


def test_brax_steps_as_brax_does():
    from brax import envs

    from jaxtd3.envs.brax import BraxEnv

    env, theirs = BraxEnv("fast", episode_length=7), envs.get_environment("fast")
    state, obs = env.reset(jax.random.key(3))
    expected = theirs.reset(jax.random.key_data(jax.random.key(3)))
    np.testing.assert_array_equal(obs, expected.obs)
    action = jnp.full(env.spec.action_size, 0.3)
    for _ in range(3):
        out = env.step(state, action)
        state, expected = out.state, theirs.step(expected, action)
        np.testing.assert_array_equal(out.obs, expected.obs)
        assert float(out.reward) == float(expected.reward)
    assert env.spec.episode_length == 7


def test_brax_by_reference_and_its_nearest_name(capsys):
    env = make_env(EnvConfig("jaxtd3.envs.brax:fast", num_envs=2))
    assert env.spec.name == "fast"
    assert main(["train", "--env", "jaxtd3.envs.brax:inverted_pendulm"]) == 2
    assert "'inverted_pendulum'" in capsys.readouterr().err


@pytest.mark.slow
def test_brax_physics_steps():
    env = make_env(EnvConfig("jaxtd3.envs.brax:inverted_pendulum", num_envs=2))
    state = env.init(jax.random.key(0))
    step = jax.jit(env.step)
    for i in range(30):
        state, seen, _ = step(state, jnp.ones((2, 1)), jax.random.key(i))
    assert seen.valid.all()


def learned(run: Path, env: str, flags: str) -> dict:
    """The summary of a run with small networks."""
    sizes = "--critic-hidden 64 --actor-hidden 32 --batch-size 256 --num-envs 64 --n-step 3"
    words = f"{flags} {sizes} --gamma 0.99 --no-video --quiet".split()
    assert main(["train", "--env", env, "--run-dir", str(run), *words]) == 0
    return json.loads((run / "summary.json").read_text())


@pytest.mark.slow
def test_brax_pendulum_learns(tmp_path):
    """1 for every step that the pole stays up, of 1000."""
    flags = "--iterations 1200 --v-min 0 --v-max 100"
    summary = learned(tmp_path / "run", "jaxtd3.envs.brax:inverted_pendulum", flags)
    assert summary["first_return"] < 100
    assert summary["final_return"] > 900


def test_gymnax_pendulum_is_gymnax_own():
    gymnax = pytest.importorskip("gymnax")
    from jaxtd3.envs.gymnax import GymnaxEnv

    env = GymnaxEnv("Pendulum-v1")
    theirs, params = gymnax.make("Pendulum-v1")
    state, obs = env.reset(jax.random.key(0))
    out = env.step(state, jnp.array([0.5]))
    key = jax.random.key(9)
    expected = theirs.step_env(key, state.state, jnp.array([0.5 * params.max_torque]), params)
    np.testing.assert_allclose(out.obs, expected[0], rtol=1e-6)
    np.testing.assert_allclose(out.reward, expected[2], rtol=1e-6)
    assert env.spec.episode_length == params.max_steps_in_episode


def test_gymnax_time_limit_is_no_end():
    pytest.importorskip("gymnax")
    env = make_env(EnvConfig("jaxtd3.envs.gymnax:MountainCarContinuous-v0", num_envs=2))
    limit = env.spec.episode_length

    def step(state, key):
        state, seen, _ = env.step(state, jnp.zeros((2, 1)), key)
        return state, (seen.terminated, seen.truncated)

    keys = jax.random.split(jax.random.key(0), limit)
    terminated, truncated = jax.lax.scan(step, env.init(jax.random.key(1)), keys)[1]
    assert not terminated.any()
    assert truncated[-1].all()
    assert not truncated[:-1].any()


def test_gymnax_discrete_actions_are_refused():
    pytest.importorskip("gymnax")
    with pytest.raises(UserError, match="discrete actions"):
        make_env(EnvConfig("jaxtd3.envs.gymnax:CartPole-v1", num_envs=2))


@pytest.mark.slow
def test_gymnax_pendulum_learns(tmp_path):
    pytest.importorskip("gymnax")
    flags = "--iterations 2000 --v-min -500 --v-max 0"
    summary = learned(tmp_path / "run", "jaxtd3.envs.gymnax:Pendulum-v1", flags)
    assert summary["first_return"] < -800
    assert summary["final_return"] > -300


def test_gymnasium_check_env_passes():
    gymnasium = pytest.importorskip("gymnasium")
    from gymnasium.utils.env_checker import check_env

    from jaxtd3.envs.gymnasium import GymnasiumEnv

    env = GymnasiumEnv(EnvConfig("Balance", episode_length=20))
    with jax.numpy_rank_promotion("allow"):
        check_env(env, skip_render_check=True)
    assert isinstance(env, gymnasium.Env)


def test_gymnasium_rewards_follow_the_weights_and_time_is_a_truncation():
    pytest.importorskip("gymnasium")
    from jaxtd3.envs.gymnasium import GymnasiumEnv

    weights = {"upright": 0.0, "middle": 0.0, "effort": -1.0}
    env = GymnasiumEnv(EnvConfig("Balance", episode_length=3, weights=weights))
    obs, _ = env.reset(seed=1)
    again, _ = env.reset(seed=1)
    np.testing.assert_array_equal(obs, again)
    found = [env.step(np.array([0.5], np.float32)) for _ in range(3)]
    for _, reward, terminated, _, info in found:
        np.testing.assert_allclose(reward, -0.02 * 0.25, rtol=1e-5)
        np.testing.assert_allclose(info["reward/effort"], 0.25)
        assert not terminated
    assert [truncated for *_, truncated, _ in found] == [False, False, True]


def test_gymnasium_vector_keeps_the_last_observation():
    pytest.importorskip("gymnasium")
    from gymnasium.vector import AutoresetMode

    from jaxtd3.envs.gymnasium import GymnasiumVectorEnv

    env = GymnasiumVectorEnv(EnvConfig("Balance", episode_length=4), num_envs=3)
    obs, _ = env.reset(seed=0)
    assert obs.shape == env.observation_space.shape == (3, 5)
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    for i in range(4):
        before = obs
        obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert "final_obs" not in info or i == 3
    assert truncated.all()
    assert not terminated.any()
    last = info["final_obs"]
    assert np.abs(last - before).max() < 1.0
    assert not np.allclose(last, obs)


def test_presets_of_adapters_are_the_rows_for_all():
    assert preset("jaxtd3.envs.brax:fast", profile="cpu").env.num_envs == 64
