"""Tiny MDPs with known values, learnt by the real `train_step`: they catch what shapes cannot.

All of them train at once: one agent per MDP, vmapped, in one compiled program.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import jaxtd3
from jaxtd3.core.tracing import SOON
from jaxtd3.core.types import EnvSpec, EnvStep
from jaxtd3.nets.mlp import mlp_networks

pytestmark = pytest.mark.as_shipped

GAMMA = 0.9
CONSTANT, OBSERVATION, DELAYED, ACTION, BOTH, ENDLESS = range(6)
LIMIT = 4  # only the endless one lives that long
# As fast as with all optimisations, here; compiled in half the time.
SOON_COMPILED = SOON | {"xla_backend_optimization_level": 1}


class ProbeState(NamedTuple):
    obs: jax.Array  # [1]
    age: jax.Array  # []
    kind: jax.Array  # [] which MDP this is


class Probe:
    spec = EnvSpec("Probe", 1, 1, LIMIT)

    def reset(self, key):
        obs = jnp.where(jax.random.bernoulli(key), 1.0, -1.0)[None]
        return ProbeState(obs, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)), obs

    def step(self, state, action):
        obs, a, age = state.obs[0], action[0], state.age
        rewards = jnp.stack(
            [
                jnp.ones(()),  # constant: worth 1
                obs,  # the observation: worth itself
                (age == 1).astype(jnp.float32),  # paid at the second step: worth gamma, then 1
                1 - (a - 0.5) ** 2,  # action: 0.5 is best, worth 1
                obs * a,  # both: the sign of the observation is best, worth 1
                jnp.ones(()),  # endless, cut off by the time limit: worth 1 / (1 - gamma)
            ]
        )
        last = jnp.array([1, 1, 2, 1, 1, 10**6])[state.kind]
        age = age + 1
        shown = jnp.where(state.kind == DELAYED, 2.0 * age, obs)[None]
        new = ProbeState(shown, age, state.kind)
        return EnvStep(new, shown, rewards[state.kind], jnp.zeros(0), age >= last)


def train(kinds, iterations, **replay):
    """value(kind, obs, action=None) -> (mean of the critics, action) after training them all."""
    cfg = jaxtd3.AgentConfig(
        gamma=GAMMA,
        v_min=-2.0,
        v_max=12.0,
        num_atoms=57,
        actor_hidden=32,
        critic_hidden=64,
        actor_lr=3e-3,
        actor_lr_end=3e-3,
        critic_lr=3e-3,
        critic_lr_end=3e-3,
        weight_decay=0.0,
    )
    env = jaxtd3.batch_env(Probe(), jaxtd3.EnvConfig(name="Probe", num_envs=16))
    agent = jaxtd3.fast_td3(env.spec, cfg)
    ring = jaxtd3.make_replay(
        env.spec, jaxtd3.ReplayConfig(**{"length": 128, "batch_size": 128} | replay)
    )
    init, _, train_step = jaxtd3.make_train_step(env, agent, ring, jaxtd3.LoopConfig(sigma_max=0.8))
    init = jax.jit(jax.vmap(init), compiler_options=SOON_COMPILED)
    state = init(jax.random.split(jax.random.key(0), len(kinds)))
    kind = jnp.broadcast_to(jnp.array(kinds)[:, None], (len(kinds), 16)).astype(jnp.int32)
    inner, pool = (s._replace(kind=kind + 0) for s in (state.env.inner, state.env.pool))
    state = state.replace(env=state.env.replace(inner=inner, pool=pool))
    chunk = jaxtd3.make_chunk(jax.vmap(train_step), iterations)
    state, _ = chunk.lower(state).compile(compiler_options=SOON_COMPILED)(state)
    nets = mlp_networks(env.spec, cfg)
    z = jnp.linspace(cfg.v_min, cfg.v_max, cfg.num_atoms)

    @jax.jit
    def judged(agent_state, x, action):
        a = jnp.where(jnp.isnan(action), agent.act(agent_state, x), action)
        seen = (x - agent_state.obs_stats.mean) / (jnp.sqrt(agent_state.obs_stats.var) + 1e-2)
        q = jax.nn.softmax(nets.critic(agent_state.critic, seen, a)) @ z
        return q.mean(), a[0, 0]

    def value(kind, obs, action=None):
        agent_state = jax.tree.map(lambda x: x[kinds.index(kind)], state.agent)
        given = jnp.nan if action is None else action
        q, a = judged(agent_state, jnp.array([[obs]]), jnp.array([[given]]))
        return float(q), float(a)

    return value


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """For the test's own arithmetic."""
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module")
def value(promotion):
    return train([CONSTANT, OBSERVATION, DELAYED, ACTION, BOTH, ENDLESS], 800)


def near(x):
    return pytest.approx(x, abs=0.05 * max(abs(x), 1.0))


def test_constant_reward_is_worth_itself(value):
    assert value(CONSTANT, 1.0)[0] == near(1.0)


def test_reward_is_the_observation(value):
    assert value(OBSERVATION, 1.0)[0] == near(1.0)
    assert value(OBSERVATION, -1.0)[0] == near(-1.0)


def test_delayed_reward_is_discounted(value):
    assert value(DELAYED, 2.0)[0] == near(1.0)
    assert value(DELAYED, 1.0)[0] == near(GAMMA)
    assert value(DELAYED, -1.0)[0] == near(GAMMA)


def test_the_policy_finds_the_better_action(value):
    best, action = value(ACTION, 1.0)
    assert best == near(1.0)
    assert action == pytest.approx(0.5, abs=0.1)
    assert value(ACTION, 1.0, action=-0.5)[0] == near(0.0)


@pytest.mark.parametrize("obs", [1.0, -1.0])
def test_the_better_action_depends_on_the_observation(value, obs):
    best, action = value(BOTH, obs)
    assert best == near(1.0)
    assert action == pytest.approx(obs, abs=0.05)


def test_a_time_limit_is_not_an_end(value):
    assert value(ENDLESS, 1.0)[0] == near(1 / (1 - GAMMA))


@pytest.mark.slow
def test_three_step_windows_and_no_bootstrap():
    """n = 3 gives the same values; a time limit may be told to end the value."""
    value = train([DELAYED, ENDLESS], 600, n_step=3, bootstrap_truncated=False)
    assert value(DELAYED, 1.0)[0] == near(GAMMA)
    assert value(DELAYED, 2.0)[0] == near(1.0)
    # With 1, 2 or 3 steps left nothing is bootstrapped; with 4 the window ends one step before.
    ends = [sum(GAMMA**i for i in range(n)) for n in (1, 2, 3, 3)]
    expected = sum(ends) / 4 / (1 - GAMMA**3 / 4)
    assert value(ENDLESS, 1.0)[0] == near(expected)
