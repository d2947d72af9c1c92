"""Left-right symmetry: the mirror images of G1 and T1, checked against physics."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtd3
from jaxtd3.core.types import Batch, EnvSpec
from jaxtd3.envs.playground import mirror as mirrors
from jaxtd3.errors import UserError
from jaxtd3.replay import symmetry

ROBOTS = ["T1JoystickFlatTerrain", "G1JoystickFlatTerrain"]


@functools.cache
def robot(name):
    env = mirrors.quiet_env(name)
    return env, mirrors.read_mirror(env)


def turned(how, index):
    """The reflection with one sign wrong."""
    sign = how.sign.copy()
    sign[index] *= -1
    return how._replace(sign=sign)


@pytest.mark.parametrize("name", ROBOTS)
def test_twice_mirrored_is_as_before(name):
    env, mirror = robot(name)
    mirrors.check_twice(mirror, name)
    x = np.random.default_rng(0).normal(size=(3, env.spec.width)).astype(np.float32)
    back = mirrors.reflect(mirror.obs, mirrors.reflect(mirror.obs, jnp.asarray(x)))
    np.testing.assert_array_equal(back, x)
    left = int(np.flatnonzero(mirror.action.perm != np.arange(len(mirror.action.perm)))[0])
    with pytest.raises(UserError, match="action mirrored twice is not itself"):
        mirrors.check_twice(mirror._replace(action=turned(mirror.action, left)), name)


@pytest.mark.parametrize("name", ROBOTS)
def test_standing_is_its_own_mirror_image(name):
    env, mirror = robot(name)
    mirrors.check_standing(mirror, env)
    bent = 7 + int(np.abs(np.asarray(env.unwrapped._init_q)[7:]).argmax())
    with pytest.raises(UserError, match="standing is not its own mirror image"):
        mirrors.check_standing(mirror._replace(qpos=turned(mirror.qpos, bent)), env)


@pytest.mark.parametrize("name", ROBOTS)
def test_a_mirrored_step_is_the_mirror_of_the_step(name):
    """And one wrong sign, in a joint on the middle line or in what is observed, is found."""
    env, mirror = robot(name)
    mirrors.check_step(mirror, env)
    waist = next(i for i, n in enumerate(mirrors.qpos_names(env)) if "aist" in n)
    joint = waist - 7
    wrong = mirror._replace(
        qpos=turned(mirror.qpos, waist),
        qvel=turned(mirror.qvel, joint + 6),
        action=turned(mirror.action, joint),
    )
    with pytest.raises(UserError, match="a mirrored step differs in"):
        mirrors.check_step(wrong, env)
    phase = mirror.labels.index("sin_phase")
    unswapped = mirror.obs.perm.copy()
    unswapped[phase : phase + 2] = [phase, phase + 1]
    wrong = mirror._replace(obs=mirror.obs._replace(perm=unswapped))
    with pytest.raises(UserError, match="differs in observed sin_phase"):
        mirrors.check_step(wrong, env)


def test_robots_without_a_mirror_are_refused_by_name():
    with pytest.raises(UserError, match="no mirror of CheetahRun"):
        mirrors.find_mirror("CheetahRun")
    spec = jaxtd3.make_env(jaxtd3.EnvConfig(name="Pendulum", num_envs=2)).spec
    with pytest.raises(UserError, match="no mirror of Pendulum"):
        jaxtd3.make_replay(spec, jaxtd3.ReplayConfig(length=8, batch_size=4, symmetry="augment"))
    with pytest.raises(ValueError, match="did you mean 'augment'"):
        jaxtd3.ReplayConfig(symmetry="augmented")
    with pytest.raises(ValueError, match="does not go with prioritized"):
        jaxtd3.ReplayConfig(symmetry="double", prioritized=True)


ANY = EnvSpec("any", 3, 2, 10)


def tiny_mirror():
    flip = mirrors.join([mirrors.signs(1), mirrors.swap(mirrors.signs(-1))])
    action = mirrors.swap(mirrors.signs(1))
    return mirrors.Mirror(flip, action, flip, flip, {}, ("a", "b", "b"))


def tiny_batch(num):
    obs = jnp.arange(3.0 * num).reshape(num, 3) + 1
    return Batch(
        obs=obs,
        action=obs[:, :2] / 10,
        reward=jnp.arange(num, dtype=jnp.float32),
        discount=jnp.ones(num),
        next_obs=obs + 100,
        weight=jnp.ones(num),
    )


def test_batches_are_augmented_or_doubled():
    mirror, batch = tiny_mirror(), tiny_batch(64)
    image = symmetry.mirror_batch(mirror, batch)
    np.testing.assert_array_equal(image.obs[0], [1, -3, -2])
    np.testing.assert_allclose(image.action[0], [0.2, 0.1])
    found = symmetry.augment(mirror, batch, jax.random.key(0))
    same = np.asarray(found.obs == batch.obs).all(axis=1)
    other = np.asarray(found.obs == image.obs).all(axis=1)
    assert 16 < same.sum() < 48
    np.testing.assert_array_equal(same, ~other)
    for name in ("action", "next_obs"):  # an example is mirrored as a whole
        got, plain, mirrored = (getattr(b, name) for b in (found, batch, image))
        np.testing.assert_array_equal(got, np.where(same[:, None], plain, mirrored))
    twice = symmetry.double(mirror, batch, jax.random.key(0))
    assert twice.obs.shape == (128, 3)
    np.testing.assert_array_equal(twice.obs[64:], image.obs)
    np.testing.assert_array_equal(twice.reward[64:], batch.reward)


def test_a_replay_draws_mirrored_batches(monkeypatch):
    monkeypatch.setattr(symmetry, "find_mirror", lambda name: tiny_mirror())
    batch = tiny_batch(8)
    plain = jaxtd3.Replay(None, None, lambda state, key, gamma, weights: batch)
    drawn = symmetric_sample(plain, "double")
    assert drawn.obs.shape == (16, 3)
    assert symmetry.symmetric(plain, "off", ANY) is plain


def symmetric_sample(replay, how):
    return symmetry.symmetric(replay, how, ANY).sample(None, jax.random.key(0), 0.9)
