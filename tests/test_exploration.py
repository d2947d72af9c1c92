"""Exploration: the papers' ladders to the digit, correlation, decay, random warm-up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtd3
from jaxtd3.agent import exploration
from jaxtd3.agent.exploration import LADDERS, NoiseHyper, make_noise, random_warmup, sigmas
from jaxtd3.config.sections import LoopConfig
from jaxtd3.loop.step import make_noise as noise_of

STEPS, ENVS, SIZE = 400, 64, 3


def sigma_of(name, num_envs, key=None, **hyper):
    ladder = LADDERS[name]
    noise = make_noise(ladder, NoiseHyper(**hyper))
    state = noise.init(jax.random.key(0) if key is None else key, num_envs, SIZE)
    return np.asarray(sigmas(ladder, state))


def run(noise, steps=STEPS, num_envs=ENVS, done_every=0, action=0.0):
    """Actions [steps, E, U] of a policy that always says `action`."""

    def step(carry, t):
        state, key = carry
        key, key_apply, key_resample = jax.random.split(key, 3)
        out = noise.apply(state, jnp.full((num_envs, SIZE), action), key_apply)
        done = jnp.full((num_envs,), (t + 1) % done_every == 0 if done_every else False)
        return (noise.resample(state, done, key_resample), key), out

    state = noise.init(jax.random.key(1), num_envs, SIZE)
    (state, _), actions = jax.lax.scan(step, (state, jax.random.key(2)), jnp.arange(steps))
    return np.asarray(actions), state


def test_apex_ladder():
    sigma = sigma_of("geometric", 32, sigma_max=0.4, alpha=7.0)
    i = np.arange(32)
    np.testing.assert_allclose(sigma, 0.4 ** (1 + 7 * i / 31), rtol=1e-5)
    np.testing.assert_allclose(sigma[:3], [0.4, 0.325, 0.264], atol=5e-4)
    assert round(float(sigma[-1]), 4) == 0.0007


def test_pql_ladder():
    sigma = sigma_of("linear", 16, sigma_min=0.05, sigma_max=0.8)
    i = np.arange(1, 17)
    np.testing.assert_allclose(sigma, 0.05 + (i - 1) / 15 * (0.8 - 0.05), rtol=1e-5)


@pytest.mark.parametrize("name", ["linear", "geometric"])
def test_a_ladder_of_one(name):
    expected = {"linear": 0.1, "geometric": 0.4}[name]
    assert sigma_of(name, 1, sigma_min=0.1, sigma_max=0.4) == pytest.approx([expected])


def test_constant_and_mixed():
    assert set(sigma_of("constant", 8, sigma_max=0.3).tolist()) == {np.float32(0.3)}
    sigma = sigma_of("mixed", 4096, sigma_min=0.1, sigma_max=0.5)
    assert 0.1 <= sigma.min() < 0.11
    assert 0.49 < sigma.max() <= 0.5
    assert sigma.mean() == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("name", LADDERS)
def test_only_mixed_draws_anew_and_only_where_done(name):
    noise = make_noise(LADDERS[name], NoiseHyper())
    state = noise.init(jax.random.key(0), 8, SIZE)
    done = jnp.arange(8) % 2 == 0
    after = noise.resample(state, done, jax.random.key(1))
    changed = np.asarray(after.rung != state.rung)
    assert changed.tolist() == (np.asarray(done) & (name == "mixed")).tolist()


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.95])
def test_variance_and_correlation(correlation):
    noise = make_noise(LADDERS["constant"], NoiseHyper(sigma_max=0.1, correlation=correlation))
    x = run(noise, num_envs=512)[0] / 0.1
    assert x.std() == pytest.approx(1.0, abs=0.03)
    assert x[0].std() == pytest.approx(1.0, abs=0.06), "at the first step too"
    assert (x[1:] * x[:-1]).mean() == pytest.approx(correlation, abs=0.03)


def test_held_noise_is_one_offset_per_episode():
    noise = make_noise(LADDERS["constant"], NoiseHyper(sigma_max=0.2, correlation=1.0))
    x, _ = run(noise, steps=40, done_every=10)
    for episode in np.split(x, 4):
        np.testing.assert_array_equal(episode, np.broadcast_to(episode[:1], episode.shape))
    assert not np.isclose(x[9], x[10]).any()
    assert x.std() == pytest.approx(0.2, rel=0.1)


def test_white_noise_beside_held_noise():
    hyper = NoiseHyper(sigma_max=0.2, correlation=1.0, white=0.05)
    x, _ = run(make_noise(LADDERS["constant"], hyper), num_envs=256)
    within = x - x.mean(axis=0, keepdims=True)
    assert within.std() == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize("name", LADDERS)
def test_correlated_noise_keeps_the_ladder(name):
    ladder = LADDERS[name]
    noise = make_noise(ladder, NoiseHyper(sigma_min=0.05, sigma_max=0.2, correlation=0.5))
    x, state = run(noise, steps=2000, num_envs=8)
    np.testing.assert_allclose(x.std(axis=(0, 2)), sigmas(ladder, state), rtol=0.1)


def test_decay_is_linear_and_then_stays():
    ladder = LADDERS["linear"]
    noise = make_noise(ladder, NoiseHyper(0.1, 0.5, decay=0.2, steps=100))
    first = noise.init(jax.random.key(0), 4, SIZE)
    for age, left in ((0, 1.0), (50, 0.6), (100, 0.2), (500, 0.2)):
        sigma = sigmas(ladder, first._replace(age=jnp.float32(age)))
        np.testing.assert_allclose(sigma, left * np.linspace(0.1, 0.5, 4), rtol=1e-5)
    assert run(noise, steps=7)[1].age == 7


def test_random_warmup_ends_when_it_says():
    inner = make_noise(LADDERS["constant"], NoiseHyper(sigma_max=0.001))
    x, state = run(random_warmup(inner, 32), steps=64, action=0.5)
    assert np.abs(x[:32]).max() > 0.99
    assert x[:32].mean() == pytest.approx(0.0, abs=0.05)
    assert x[:32].std() == pytest.approx(3**-0.5, abs=0.03), "uniform on [-1, 1]"
    np.testing.assert_allclose(x[32:], 0.5, atol=0.01)
    assert state.left == 0


def test_a_config_describes_all_of_it():
    cfg = LoopConfig(warmup=3, collect_steps=2, warmup_random=True, noise="geometric")
    state = noise_of(cfg).init(jax.random.key(0), 32, SIZE)
    assert state.left == 6
    np.testing.assert_allclose(state.inner.hyper.sigma_max, 0.4)
    plain = noise_of(LoopConfig(noise_correlation=0.9)).init(jax.random.key(0), 32, SIZE)
    assert plain.x.shape == (32, SIZE)


def test_other_settings_for_a_resumed_run():
    state = noise_of(LoopConfig(warmup_random=True)).init(jax.random.key(0), 4, SIZE)
    state = exploration.with_hyper(state, NoiseHyper(sigma_max=0.9))
    assert state.inner.hyper.sigma_max == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"noise": "geometrc"}, "geometric"),
        ({"noise_correlation": 1.5}, "noise_correlation=1.5"),
        ({"noise_decay": -0.1}, "noise_decay"),
        ({"noise_hold": -1}, "noise_hold=-1"),
        ({"noise_hold": 16, "noise_correlation": 0.5}, "only one of them"),
        ({"noise_steps": 0}, "noise_steps"),
        ({"noise": "geometric", "sigma_max": 1.0}, "less than 1"),
        ({"sigma_min": 0.5, "sigma_max": 0.4}, "sigma_min=0.5"),
    ],
)
def test_nonsense_is_refused(changes, said):
    with pytest.raises(jaxtd3.UserError, match=said):
        jaxtd3.preset("Pendulum", profile="cpu", **changes)


def test_the_preset_lets_noise_decay_over_the_run():
    cfg = jaxtd3.preset("Pendulum", profile="cpu", iterations=70, collect_steps=4)
    assert cfg.loop.noise_steps is None  # until the program is built
    assert cfg.resolved().loop.noise_steps == 280
    assert jaxtd3.preset("Pendulum", profile="cpu", noise_steps=5).loop.noise_steps == 5


def test_envs_split_over_devices_keep_their_rungs():
    """The ladder is made for all environments; a shard that steps alone stays on its part."""
    ladder = LADDERS["geometric"]
    noise = make_noise(ladder, NoiseHyper(correlation=0.9))
    whole = noise.init(jax.random.key(0), 8, SIZE)
    shards = whole._replace(rung=whole.rung.reshape(4, 2), x=whole.x.reshape(4, 2, SIZE))
    axes = exploration.NoiseState(0, 0, None, None, None)
    step = jax.vmap(noise.resample, (axes, 0, 0), axes)
    out = step(shards, jnp.ones((4, 2), bool), jax.random.split(jax.random.key(1), 4))
    np.testing.assert_array_equal(out.rung.reshape(-1), whole.rung)


def test_held_noise_stays_for_a_zeta_distributed_time():
    times = np.asarray(exploration.zeta_steps(jax.random.key(0), 20_000, 16))
    assert times.min() == 1
    assert times.max() == 16
    share = 1 / np.arange(1, 17) ** 2
    found = np.bincount(times, minlength=17)[1:] / len(times)
    np.testing.assert_allclose(found, share / share.sum(), atol=0.012)


def test_noise_is_held_and_drawn_anew_together():
    """Between two draws the offset is the same in every step; a done environment draws at once."""
    noise = exploration.make_noise(exploration.LADDERS["constant"], NoiseHyper(0.3, 0.3), hold=8)
    state = noise.init(jax.random.key(0), 64, 2)
    ended = jnp.zeros(64, bool).at[3].set(True)
    for t in range(12):
        before = state
        state = noise.resample(state, ended, jax.random.key(100 + t))
        changed = np.asarray(state.x != before.x).all(axis=1)
        expected = np.asarray(before.left <= 1) | np.asarray(ended)
        np.testing.assert_array_equal(changed, expected)
        np.testing.assert_array_equal(state.left[~expected], before.left[~expected] - 1)
    assert expected.sum() < 64
    action = noise.apply(state, jnp.zeros((64, 2)), jax.random.key(1))
    np.testing.assert_allclose(action, np.clip(0.3 * state.x, -1, 1), rtol=1e-6)
