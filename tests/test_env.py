"""The batch around an environment: time limit, terminal observation, reset pool, quarantine."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtd3
from jaxtd3.core.types import Agent, EnvSpec, EnvStep
from jaxtd3.envs.batch import reward_weights, select_envs, sound_envs, take_envs
from jaxtd3.run.rollout import make_evaluate


class Walk(NamedTuple):
    position: jax.Array
    start: jax.Array
    rng: jax.Array
    steps: jax.Array


class Walker:
    """Walks by its action plus noise of its own; falls beyond 2. Obs: [position, start]."""

    spec = EnvSpec("Walker", 2, 1, 5, reward_terms=("near", "small"), default_weights=(1.0, -0.5))

    def reset(self, key):
        start = jax.random.uniform(key, minval=-1.0, maxval=1.0)
        state = Walk(start, start, jax.random.key_data(key), jnp.zeros((), jnp.int32))
        return state, self.observe(state)

    def observe(self, s):
        return jnp.stack([s.position, s.start])

    def step(self, s, action):
        key = jax.random.wrap_key_data(s.rng)
        noise = 0.01 * jax.random.normal(jax.random.fold_in(key, s.steps))
        new = s._replace(position=s.position + action[0] + noise, steps=s.steps + 1)
        terms = jnp.stack([1 - jnp.abs(new.position), action[0] ** 2])
        reward = terms[0] - 0.5 * terms[1]
        return EnvStep(new, self.observe(new), reward, terms, jnp.abs(new.position) > 2)

    def rekey(self, s, key):
        return s._replace(rng=jax.random.key_data(key))


class Breaking(Walker):
    """Its numbers are gone in the third step where it started on the right."""

    def step(self, s, action):
        out = super().step(s, action)
        broken = (s.start > 0) & (s.steps == 2)
        return out._replace(obs=jnp.where(broken, jnp.nan, out.obs))


NUM = 6


def make(**changes):
    env = jaxtd3.batch_env(Walker(), jaxtd3.EnvConfig(name="Walker", num_envs=NUM, **changes))
    return env, env.init(jax.random.key(0)), jax.jit(env.step)


def test_the_time_limit_truncates_and_shows_the_last_observation():
    env, state, step = make()
    for i in range(5):
        before = state
        state, tr, _ = step(state, jnp.zeros((NUM, 1)), jax.random.key(i))
        assert bool(tr.truncated.any()) == (i == 4)
        np.testing.assert_array_equal(tr.obs, before.obs)
    assert bool(tr.truncated.all())
    assert not tr.terminated.any()
    np.testing.assert_array_equal(tr.final_obs[:, 1], before.obs[:, 1])  # still the old start
    assert (np.asarray(state.obs)[:, 1] != np.asarray(before.obs)[:, 1]).all()  # a new one
    np.testing.assert_array_equal(state.steps, np.zeros(NUM))


def test_a_fall_terminates_and_is_not_a_truncation():
    env, state, step = make()
    push = jnp.zeros((NUM, 1)).at[2].set(1.0)
    for i in range(4):
        state, tr, metrics = step(state, push, jax.random.key(i))
        if tr.terminated.any():
            break
    assert np.flatnonzero(tr.terminated).tolist() == [2]
    assert not tr.truncated.any()
    assert float(metrics["episode/terminated"]) == 1
    assert float(abs(tr.final_obs[2, 0])) > 2


def test_reset_takes_a_whole_pooled_state_with_random_numbers_of_its_own():
    env, state, step = make()
    pool = np.asarray(state.pool.start)
    for i in range(5):
        state, _, _ = step(state, jnp.zeros((NUM, 1)), jax.random.key(i))
    starts = np.asarray(state.inner.start)
    np.testing.assert_allclose(np.sort(starts), np.sort(pool))  # all different entries
    np.testing.assert_array_equal(state.inner.steps, np.zeros(NUM))
    # Even from one and the same pooled state two environments part.
    one = jax.tree.map(lambda x: jnp.repeat(x[:1], NUM, axis=0), state.pool)
    state = state.replace(pool=one, pool_obs=jnp.repeat(state.pool_obs[:1], NUM, axis=0))
    for i in range(6):
        state, _, _ = step(state, jnp.zeros((NUM, 1)), jax.random.key(100 + i))
    assert len(np.unique(state.inner.start)) == 1
    assert len(np.unique(state.inner.position)) == NUM


def test_refresh_refills_the_pool_and_cached_does_not():
    env, state, _ = make()
    fresh = env.refresh(state, jax.random.key(5))
    assert (np.asarray(fresh.pool.start) != np.asarray(state.pool.start)).all()
    np.testing.assert_array_equal(fresh.inner.start, state.inner.start)
    env, state, step = make(reset="cached")
    assert env.refresh(state, jax.random.key(5)) is state
    first = np.asarray(state.inner.start)
    for i in range(5):
        state, _, _ = step(state, jnp.zeros((NUM, 1)), jax.random.key(i))
    np.testing.assert_array_equal(state.inner.start, first)


def test_reset_in_step_renews_a_part_of_the_pool():
    env, state, step = make(reset="step")
    new, _, _ = step(state, jnp.zeros((NUM, 1)), jax.random.key(1))
    changed = np.asarray(new.pool.start) != np.asarray(state.pool.start)
    assert changed.sum() == 1


@pytest.mark.parametrize("poison", ["state", "action"])
def test_a_nan_heals_in_one_step_and_goes_nowhere(poison):
    env, state, step = make()
    action = jnp.zeros((NUM, 1))
    if poison == "state":
        position = state.inner.position.at[3].set(jnp.nan)
        state = state.replace(inner=state.inner._replace(position=position))
    else:
        action = action.at[3].set(jnp.nan)
    state, tr, metrics = step(state, action, jax.random.key(0))
    assert np.flatnonzero(~np.asarray(tr.valid)).tolist() == [3]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((tr, metrics, state)))
    assert float(metrics["env/quarantined"]) == 1
    assert not tr.terminated[3]
    assert not tr.truncated[3]
    assert bool(tr.done[3])
    assert int(state.steps[3]) == 0
    _, tr, metrics = step(state, jnp.zeros((NUM, 1)), jax.random.key(1))
    assert bool(tr.valid.all())
    assert float(metrics["env/quarantined"]) == 0


def test_a_nan_never_reaches_replay_statistics_or_loss():
    """Through the whole program: poison one environment's physics in every iteration."""

    class Sick(Walker):
        def step(self, s, action):
            out = super().step(s, action)
            sick = (s.steps == 2) & (s.start > 0)
            return out._replace(
                state=out.state._replace(position=jnp.where(sick, jnp.nan, out.state.position)),
                reward=jnp.where(sick, jnp.nan, out.reward),
            )

    env = jaxtd3.batch_env(Sick(), jaxtd3.EnvConfig(name="Walker", num_envs=NUM))
    agent = jaxtd3.fast_td3(env.spec, jaxtd3.AgentConfig(critic_hidden=16, actor_hidden=16))
    replay = jaxtd3.make_replay(env.spec, jaxtd3.ReplayConfig(16, 32, 3))
    init, _, train_step = jaxtd3.make_train_step(env, agent, replay, jaxtd3.LoopConfig(warmup=2))
    state, metrics = jaxtd3.make_chunk(train_step, 30)(init(jax.random.key(0)))
    assert float(metrics["env/quarantined"]) > 10
    for name, tree in (("replay", state.replay), ("agent", state.agent), ("metrics", metrics)):
        for x in jax.tree.leaves(tree):
            assert np.isfinite(np.asarray(x, np.float32)).all(), name
    assert int(state.agent.skipped) == 0
    assert (np.asarray(state.replay.end) == 3).any()


def test_actions_are_clipped_and_stored_as_received():
    env, state, step = make()
    _, tr, _ = step(state, jnp.full((NUM, 1), 7.0), jax.random.key(0))
    np.testing.assert_array_equal(tr.action, np.ones((NUM, 1)))


def test_traced_weights_change_the_reward_without_a_new_trace():
    env, state, step = make(weights={"small": -2.0})
    np.testing.assert_array_equal(env.weights, [1.0, -2.0])
    action = jnp.full((NUM, 1), 0.5)
    _, tr, _ = step(state, action, jax.random.key(0))
    np.testing.assert_allclose(tr.reward, tr.terms[:, 0] - 2 * tr.terms[:, 1], rtol=1e-6)
    for weight in (3.0, 4.0):
        _, tr, _ = step(state, action, jax.random.key(0), jnp.array([0.0, weight]))
        np.testing.assert_allclose(tr.reward, weight * tr.terms[:, 1], rtol=1e-6)
    assert step._cache_size() == 2


def test_what_has_an_environment_axis_is_known_from_one_environment():
    """A shared leaf that is as long as there are environments is neither picked from nor judged."""
    mask = jnp.array([True, False, False])
    single = {"own": jnp.zeros(2), "shared": jnp.zeros(3)}
    old = {"own": jnp.zeros((3, 2)), "shared": jnp.zeros(3)}
    new = {"own": jnp.ones((3, 2)), "shared": jnp.full(3, jnp.nan)}
    chosen = select_envs(mask, new, old, single)
    np.testing.assert_array_equal(chosen["own"], [[1, 1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(chosen["shared"], np.zeros(3))
    taken = take_envs(jnp.array([2, 2]), new, single)
    assert [x.shape for x in (taken["own"], taken["shared"])] == [(2, 2), (3,)]
    np.testing.assert_array_equal(sound_envs(new, single), [True] * 3)
    new["own"] = new["own"].at[1, 0].set(jnp.nan)
    np.testing.assert_array_equal(sound_envs(new, single), [True, False, True])


def test_clipped_sums_are_clipped():
    spec = EnvSpec(
        "x", 1, 1, 5, reward_terms=("a",), default_weights=(1.0,), reward_scale=0.5,
        reward_clip=(0.0, 10.0),
    )  # fmt: skip
    terms = jnp.array([[-4.0], [4.0], [400.0]])
    np.testing.assert_allclose(spec.combine(terms, jnp.array([1.0])), [0.0, 2.0, 10.0])


def test_stagger_spreads_the_time_limits():
    env, state, step = make(stagger=True)
    truncated = []
    for i in range(5):
        state, tr, _ = step(state, jnp.zeros((NUM, 1)), jax.random.key(i))
        truncated.append(int(tr.truncated.sum()))
    assert sum(truncated) >= NUM
    assert max(truncated) < NUM


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: jaxtd3.EnvConfig(num_envs=0), "num_envs=0 is below 1"),
        (lambda: jaxtd3.EnvConfig(impl="warpp"), "did you mean 'warp'"),
        (lambda: jaxtd3.EnvConfig(reset="pol"), "did you mean 'pool'"),
        (lambda: make(weights={"nearr": 1.0}), "did you mean 'near'"),
        (lambda: make(weights={"near": float("nan")}), "not finite"),
        (lambda: jaxtd3.make_env(jaxtd3.EnvConfig(name="CartpoleBalanc")), "'CartpoleBalance'"),
        (lambda: jaxtd3.preset("G1JoystikFlatTerrain"), "'G1JoystickFlatTerrain'"),
        (lambda: jaxtd3.preset("Pendulum", num_env=4), "did you mean 'num_envs'"),
        (lambda: jaxtd3.preset("Pendulum", algo="fasttd"), "did you mean 'fasttd3'"),
        (
            lambda: jaxtd3.preset("Pendulum", critic_updates=3, policy_updates=2),
            "3 is not divis.*2",
        ),
        (lambda: jaxtd3.preset("Pendulum", v_min=5.0, v_max=1.0), "v_min=5.0.*v_max=1.0"),
        (lambda: jaxtd3.preset("Pendulum", sigma_min=0.5, sigma_max=0.1), "0.5.*0.1"),
        (lambda: jaxtd3.preset("Pendulum", gamma=1.5), "gamma=1.5"),
        (lambda: reward_weights(EnvSpec("Odd", 1, 1, 5), {"a": 1.0}), "not a weighted sum"),
    ],
)
def test_bad_names_and_sizes_raise_at_construction(make_it, words):
    with pytest.raises(ValueError, match=words):
        make_it()


def test_an_evaluation_counts_the_episodes_that_it_lost():
    """An episode whose numbers are gone has ended, and no number of it counts from there on."""
    env = jaxtd3.batch_env(Breaking(), jaxtd3.EnvConfig(name="Breaking", num_envs=NUM))
    agent = Agent(*[None] * len(Agent._fields))._replace(act=lambda state, obs: 0.0 * obs[:, :1])
    _, start = jax.vmap(env.env.reset)(jax.random.split(jax.random.key(4), NUM))
    broken = int((start[:, 0] > 0).sum())
    assert 0 < broken < NUM
    found = make_evaluate(env, agent)(None, jnp.array([1.0, -0.5]), jax.random.key(4))
    assert found["lost"] == broken
    assert found["length"] == pytest.approx((2 * broken + 5 * (NUM - broken)) / NUM)
    assert found["falls"] == 0
    sound = jaxtd3.batch_env(Walker(), jaxtd3.EnvConfig(name="Walker", num_envs=NUM))
    assert make_evaluate(sound, agent)(None, jnp.ones(2), jax.random.key(4))["lost"] == 0
