"""The lineage as options: critics, networks, lagging policies, exact rates, presets, the docs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtd3
from jaxtd3.agent import critics
from jaxtd3.agent.critics import CRITICS
from jaxtd3.config.presets import ALGORITHMS
from jaxtd3.config.sections import COMBINES, AgentConfig
from jaxtd3.core.types import Batch, EnvSpec
from jaxtd3.nets.mlp import NETWORKS, Trunk
from test_learning import learn

SLOW = pytest.mark.slow
SPEC = EnvSpec("test", obs_size=3, action_size=2, episode_length=10, extra_size=2)
Z = jnp.linspace(-1.0, 1.0, 5)
SMALL = {"num_envs": 4, "length": 64, "batch_size": 16, "critic_hidden": 16, "actor_hidden": 16}
SMALL |= {"num_atoms": 11, "simnorm_dim": 4, "simnorm_groups": 2}


def make_config(**changes):
    return AgentConfig(**{"actor_hidden": 16, "critic_hidden": 16, "num_atoms": 5} | changes)


def make_batch(size=8):
    rng = np.random.default_rng(0)
    x = {name: rng.normal(size=(size, 5)) for name in ("obs", "next_obs")}
    x |= {"action": rng.uniform(-1, 1, (size, 2)), "reward": rng.normal(size=size)}
    x |= {"discount": np.full(size, 0.9), "weight": np.ones(size)}
    return Batch(**{k: jnp.asarray(v, jnp.float32) for k, v in x.items()})


# --- critics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", [*COMBINES, "own"])
def test_targets_of_all_kinds_agree_on_means(combine):
    """Distributions that are points: C51, scalars and quantiles then have the same targets."""
    values = jnp.array([[0.5], [-0.5]])  # on atoms
    logits = jnp.where(Z[None] == values, 0.0, -1e9)
    reward, discount = jnp.float32(0.25), jnp.float32(0.5)  # 0.5 and 0, on atoms again
    found = {}
    for name, outputs in (("c51", logits), ("scalar", values), ("quantile", values.repeat(5, 1))):
        critic = CRITICS[name].on(Z)
        target = critic.target(outputs, reward, discount, combine)
        found[name] = critic.target_value(target)
        np.testing.assert_allclose(critic.value(outputs), values[:, 0], atol=1e-6)
    expected = {"own": [0.5, 0.0]}.get(combine, [0.0, 0.0])
    np.testing.assert_allclose(found["scalar"], expected, atol=1e-6)
    np.testing.assert_allclose(found["quantile"], expected, atol=1e-6)
    if combine != "elementwise-min":  # two points that do not meet have no minimum
        np.testing.assert_allclose(found["c51"], expected, atol=1e-6)


def test_elementwise_minimum_of_distributions():
    p = jnp.array([[0.1, 0.2, 0.4, 0.2, 0.1], [0.3, 0.3, 0.2, 0.1, 0.1]])
    args = Z, jnp.log(p), jnp.float32(0.0), jnp.float32(1.0)
    target = critics.c51_target(*args, "elementwise-min")
    least = np.minimum(p[0], p[1])
    np.testing.assert_allclose(target, np.tile(least / least.sum(), (2, 1)), rtol=1e-4)


def test_lower_mean_of_quantiles_is_one_critic_s():
    theta = jnp.array([[0.0, 1.0, 2.0], [-5.0, 1.0, 1.0]])
    args = theta, jnp.float32(1.0), jnp.float32(0.5)
    lower = critics.quantile_target(*args, "lower-mean")
    np.testing.assert_allclose(lower, np.tile([-1.5, 1.5, 1.5], (2, 1)))
    least = critics.quantile_target(*args, "elementwise-min")
    np.testing.assert_allclose(least, np.tile([-1.5, 1.5, 1.5], (2, 1)))


def test_quantile_loss_finds_the_quantiles():
    """Gradient descent on samples of a known distribution ends at its quantiles."""
    samples = jnp.linspace(0.0, 1.0, 201)[1:-1:2] * 400  # uniform; Huber's 1 is small beside it
    step = jax.jit(lambda t, _: (t - jax.grad(critics.quantile_huber)(t, samples), None))
    theta, _ = jax.lax.scan(step, jnp.zeros(4), length=4000)
    np.testing.assert_allclose(theta, [50, 150, 250, 350], atol=5)


@pytest.mark.parametrize(("kind", "num_critics"), [("c51", 1), ("scalar", 3), ("quantile", 2)])
def test_every_kind_and_ensemble_learns_a_batch(kind, num_critics):
    agent = jaxtd3.fast_td3(SPEC, make_config(critic=kind, num_critics=num_critics))
    state = agent.init(jax.random.key(0))
    update = jax.jit(lambda s, k: agent.update(s, make_batch(), k, policy=True))
    losses = []
    for i in range(30):
        state, metrics, td_error = update(state, jax.random.key(i))
        losses.append(float(metrics["critic_loss"]))
    assert losses[-1] < losses[0]
    assert int(state.skipped) == 0
    assert td_error.shape == (8,)
    assert len(state.critic) == num_critics


def test_td_error_is_what_the_update_reports():
    agent = jaxtd3.fast_td3(SPEC, make_config(critic="scalar", policy_noise=0.0, num_critics=1))
    state, batch = agent.init(jax.random.key(0)), make_batch()
    update = jax.jit(lambda s, k: agent.update(s, batch, k, policy=False)[2])
    reported = update(state, jax.random.key(1))
    found = jax.jit(agent.td_error)(state, batch, jax.random.key(2))
    np.testing.assert_allclose(found, reported, rtol=1e-5)


# --- networks and the lagging policy ------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_acts_within_bounds(network):
    cfg = make_config(network=network, layer_norm=True, activation="silu", compute="bf16")
    nets = NETWORKS[network](SPEC, cfg, 7)
    params = jax.jit(lambda a, c: (nets.init_actor(a), nets.init_critic(c)))(
        jax.random.key(0), jax.random.key(1)
    )
    obs = 100 * jax.random.normal(jax.random.key(2), (6, 3))
    action = nets.actor(params[0], obs)
    assert action.shape == (6, 2)
    assert float(jnp.abs(action).max()) <= 1
    assert nets.critic(params[1], jnp.zeros((6, 5)), action).shape == (2, 6, 7)


def test_simnorm_is_a_softmax_within_groups():
    cfg = make_config(network="simnorm", simnorm_groups=3, simnorm_dim=4)
    nets = NETWORKS["simnorm"](SPEC, cfg)
    assert nets.init_actor(jax.random.key(0))["out"]["kernel"].shape == (12, 2)
    import flax.linen as nn

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Trunk(16, simnorm=(3, 4))(x)

    x = jax.random.normal(jax.random.key(0), (5, 3))
    out = Body().init_with_output(jax.random.key(1), x)[0]
    np.testing.assert_allclose(out.reshape(5, 3, 4).sum(-1), np.ones((5, 3)), rtol=1e-5)


@pytest.mark.parametrize("where", ["actor", "critic", "both"])
def test_simnorm_stands_where_it_is_asked_for(where):
    nets = NETWORKS["simnorm"](SPEC, make_config(network="simnorm", simnorm_in=where))
    has = "simnorm" in nets.init_actor(jax.random.key(0))
    assert has == (where != "critic")
    has = "simnorm" in nets.init_critic(jax.random.key(0))["q0"]
    assert has == (where != "actor")


def test_simba_starts_with_the_published_scales():
    cfg = make_config(network="simbav2", critic_hidden=32, critic_blocks=2)
    encoder = NETWORKS["simbav2"](SPEC, cfg).init_critic(jax.random.key(0))["q0"]["encoder"]
    np.testing.assert_allclose(encoder["scale"]["scale"], (2 / 32) ** 0.5, rtol=1e-6)
    np.testing.assert_allclose(encoder["block1"]["scale"]["scale"], (2 / 128) ** 0.5, rtol=1e-6)
    np.testing.assert_allclose(encoder["block1"]["alpha"]["scale"], 32**-0.5, rtol=1e-6)
    kernel = np.asarray(encoder["block0"]["up"]["kernel"])  # [32, 128]
    np.testing.assert_allclose(kernel @ kernel.T, np.eye(32), atol=1e-5)


def test_reprojection_keeps_weights_on_the_sphere():
    cfg = make_config(network="simbav2", reproject=True, critic_lr=1e-2, critic_blocks=1)
    agent = jaxtd3.fast_td3(SPEC, cfg)
    plain = NETWORKS["simbav2"](SPEC, make_config(network="simbav2"))
    update = jax.jit(lambda s, k: agent.update(s, make_batch(), k, policy=True)[0])
    state = agent.init(jax.random.key(0))
    for i in range(3):
        state = update(state, jax.random.key(i))
    for tree in (state.actor, state.critic["q1"]):
        kernel = tree["encoder"]["block0"]["up"]["kernel"]
        np.testing.assert_allclose(np.linalg.norm(kernel, axis=0), 1.0, atol=1e-5)
    moved = jax.tree.map(lambda x: 2 * x, state.actor)
    assert plain.project(moved) is moved, "FastTD3's SimbaV2 lets them grow"


def test_the_lagging_policy_makes_the_targets():
    agent = jaxtd3.fast_td3(SPEC, make_config(target_actor=True, policy_noise=0.0, tau=0.25))
    state, batch = agent.init(jax.random.key(0)), make_batch()
    update = jax.jit(lambda s: agent.update(s, batch, jax.random.key(1), policy=True)[0])
    td_error = jax.jit(lambda s: agent.td_error(s, batch, jax.random.key(2)))
    after = update(state)
    expected = jax.tree.map(lambda t, p: t + 0.25 * (p - t), state.target_actor, after.actor)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), after.target_actor, expected
    )
    other = state.replace(actor=jax.tree.map(lambda x: x + 1.0, state.actor))
    same = [td_error(s) for s in (state, other)]
    np.testing.assert_array_equal(*same)
    lagging = state.replace(target_actor=other.actor)
    assert not np.allclose(td_error(lagging), same[0])
    assert jaxtd3.fast_td3(SPEC, make_config()).init(jax.random.key(0)).target_actor is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"critic": "c52"}, "c51"),
        ({"network": "simba"}, "simbav2"),
        ({"activation": "reul"}, "relu"),
        ({"cdq_target": "elementwise"}, "elementwise-min"),
        ({"compute": "bf32"}, "f32|bf16"),
        ({"algo": "pq"}, "pql"),
        ({"collect_steps": 2, "critic_updates": 3, "policy_updates": 1}, "divide"),
    ],
)
def test_a_wrong_name_or_ratio_is_refused(changes, said):
    with pytest.raises(jaxtd3.UserError, match=said):
        jaxtd3.preset("Pendulum", profile="cpu", **changes)


# --- rates --------------------------------------------------------------------------------------


class Counts(NamedTuple):
    """What an agent was asked for."""

    critic: jax.Array
    policy: jax.Array
    collected: jax.Array


def counting_agent(action_size):
    """An agent that learns nothing and counts everything that has weight."""

    def zeros():
        return [jnp.zeros((), jnp.int32) for _ in range(3)]

    def update(state, batch, key, *, policy):
        used = (jnp.sum(batch.weight) > 0).astype(jnp.int32)
        state = state._replace(critic=state.critic + used, policy=state.policy + policy * used)
        return state, {}, None

    return jaxtd3.Agent(
        init=lambda key: Counts(*zeros()),
        act=lambda state, obs: jnp.zeros((obs.shape[0], action_size)),
        observe=lambda state, tr, returns: state._replace(collected=state.collected + 1),
        update=update,
        discount=lambda state: jnp.float32(0.9),
    )


def to_host_and_back(state):
    """As a checkpoint does."""
    leaves, tree = jax.tree.flatten(state)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    pairs = list(zip(leaves, keys, strict=True))
    saved = [np.array(jax.random.key_data(x) if key else x) for x, key in pairs]
    pairs = zip(saved, keys, strict=True)
    read = [jax.random.wrap_key_data(jnp.asarray(x)) if key else jnp.asarray(x) for x, key in pairs]
    return jax.tree.unflatten(tree, read)


@pytest.mark.parametrize(
    "rate", [(1, 8, 4), pytest.param((8, 1, 1), marks=SLOW), pytest.param((4, 8, 2), marks=SLOW)]
)
def test_rates_are_exact_over_a_thousand_iterations_and_a_resume(rate):
    """collect_steps : critic_updates : policy_updates, counted; a restart changes nothing."""
    names = ("collect_steps", "critic_updates", "policy_updates")
    changes = SMALL | dict(zip(names, rate, strict=True))
    cfg = jaxtd3.preset("Pendulum", profile="cpu", warmup=2, **changes)
    env = jaxtd3.make_env(cfg.env)
    ring = jaxtd3.make_replay(env.spec, cfg.replay)
    agent = counting_agent(env.spec.action_size)
    init, _, train_step = jaxtd3.make_train_step(env, agent, ring, cfg.loop)
    chunk = jaxtd3.make_chunk(train_step, 250)
    state, _ = chunk(init(jax.random.key(0)))
    state, _ = chunk(state)
    state, _ = chunk(to_host_and_back(state))
    state, _ = chunk(state)
    learnt = 1000 - cfg.loop.warmup
    collects, updates, policies = rate
    found = state.agent
    assert int(found.collected) == int(state.noise.age) == 1000 * collects
    assert int(found.critic) == learnt * updates
    assert int(found.policy) == learnt * policies


# --- presets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("env", ["Pendulum", "CartpoleBalance", "G1JoystickFlatTerrain"])
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_every_algorithm_has_settings_for_every_environment(algo, env, profile):
    cfg = jaxtd3.preset(env, algo, profile)
    assert cfg.algo == algo
    for name, value in ALGORITHMS[algo].items():
        sections = (cfg.agent, cfg.replay, cfg.loop)
        assert next(getattr(s, name) for s in sections if hasattr(s, name)) == value


@pytest.mark.parametrize(
    "algo", ["apex", pytest.param("fasttd3-simnorm", marks=SLOW), "fasttd3-simbav2"]
)
def test_every_algorithm_takes_steps(algo):
    cfg = jaxtd3.preset("Pendulum", algo, "cpu", **SMALL, warmup=2)
    env = jaxtd3.make_env(cfg.env)
    agent = jaxtd3.fast_td3(env.spec, cfg.agent)
    ring = jaxtd3.make_replay(env.spec, cfg.replay)
    init, _, train_step = jaxtd3.make_train_step(env, agent, ring, cfg.loop)
    state, metrics = jaxtd3.make_chunk(train_step, 6)(init(jax.random.key(0)))
    assert int(state.agent.updates) == 4 * cfg.loop.critic_updates
    assert all(np.isfinite(x) for x in metrics.values())


def reached(now):
    return now["return"] >= 900


@SLOW
@pytest.mark.parametrize(
    "algo", ["pql", "pql-d", "apex", "gorila", "fasttd3-simnorm", "fasttd3-simbav2"]
)
def test_the_rest_balance_the_cartpole(algo):
    now, spent = learn("CartpoleBalance", reached, seconds=180, algo=algo)
    assert now["return"] >= 900, f"after {spent:.0f} s"
