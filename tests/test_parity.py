"""Numbers of FastTD3's own modules, reproduced (JAXTD3_PARITY: another file, same keys)."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxtd3.agent import distributional as dist
from jaxtd3.agent import normalize as norm
from jaxtd3.agent.critics import c51_target
from jaxtd3.agent.td3 import fast_td3
from jaxtd3.config.sections import AgentConfig, ReplayConfig
from jaxtd3.core.types import Batch, EnvSpec, Transition
from jaxtd3.nets.mlp import NETWORKS, mlp_networks
from jaxtd3.replay import ring

FILE = os.environ.get("JAXTD3_PARITY", Path(__file__).parent / "data" / "fasttd3_parity.npz")
DATA = np.load(FILE)
ACTOR = {"net.0": ("layer0", "dense"), "net.2": ("layer1", "dense")}
ACTOR |= {"fc_head.0": ("layer2", "dense"), "fc_mu.0": ("out",)}
CRITIC = {"net.0": ("layer0", "dense"), "net.2": ("layer1", "dense")}
CRITIC |= {"fc_head.0": ("layer2", "dense"), "fc_head.2": ("out", "dense")}
SIMNORM_ACTOR = {"net.0": ("layer0", "dense"), "net.2": ("layer1", "dense")}
SIMNORM_ACTOR |= {"fc_head.linear": ("simnorm", "linear", "dense"), "fc_mu.0": ("out",)}
SIMNORM_CRITIC = {"net.0": ("layer0", "dense"), "net.2": ("layer1", "dense")}
SIMNORM_CRITIC |= {"fc_head.0.linear": ("simnorm", "linear", "dense")}
SIMNORM_CRITIC |= {"fc_head.1": ("out", "dense")}
MODES = ["cdq", "mean"]


def close(ours, theirs, tolerance=1e-5):
    """Equal within 1e-5 relative, and within 1e-5 of the array's size near zero."""
    theirs = np.asarray(theirs)
    scale = max(np.abs(theirs).max(), 1e-3) if theirs.size else 1.0
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=tolerance, atol=tolerance * scale)


SIMBA = {  # theirs -> ours, of actor and critic; kernels are transposed
    r"embedder\.w\.w\.weight": "encoder/embed/kernel",
    r"embedder\.scaler\.scaler": "encoder/scale/scale",
    r"encoder\.(\d)\.mlp\.w1\.w\.weight": r"encoder/block\1/up/kernel",
    r"encoder\.(\d)\.mlp\.scaler\.scaler": r"encoder/block\1/scale/scale",
    r"encoder\.(\d)\.mlp\.w2\.w\.weight": r"encoder/block\1/down/kernel",
    r"encoder\.(\d)\.alpha_scaler\.scaler": r"encoder/block\1/alpha/scale",
    r"predictor\.(mean_)?bias": "head/bias",
    r"predictor\.(mean_)?w1\.w\.weight": "head/dense/kernel",
    r"predictor\.(mean_)?scaler\.scaler": "head/scale/scale",
    r"predictor\.(mean_)?w2\.w\.weight": "head/out/kernel",
}


def hp(name):
    return DATA[f"hp/{name}"].item()


def put(tree, path, value):
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def layers(prefix, table, at=()):
    tree = {}
    for theirs, ours in table.items():
        put(tree, (*at, *ours, "kernel"), jnp.asarray(DATA[f"{prefix}{theirs}.weight"].T))
        put(tree, (*at, *ours, "bias"), jnp.asarray(DATA[f"{prefix}{theirs}.bias"]))
    return tree


def actor_params(prefix):
    return layers(f"{prefix}/", ACTOR)


def critic_params(prefix):
    return {f"q{i}": layers(f"{prefix}/qnet{i + 1}.", CRITIC) for i in range(2)}


def norms(tree, prefix, theirs):
    """Add a SimNorm's LayerNorm to its parameters."""
    values = (jnp.asarray(DATA[f"{prefix}{theirs}.norm.{part}"]) for part in ("weight", "bias"))
    tree["simnorm"]["norm"] = dict(zip(("scale", "bias"), values, strict=True))
    return tree


def simnorm_params(prefix):
    actor = norms(layers(f"{prefix}/actor/", SIMNORM_ACTOR), f"{prefix}/actor/", "fc_head")
    critic = {}
    for i in range(2):
        at = f"{prefix}/critic/qnet{i + 1}."
        critic[f"q{i}"] = norms(layers(at, SIMNORM_CRITIC), at, "fc_head.0")
    return actor, critic


def simba_tree(prefix):
    """All arrays below `prefix` as a SimbaV2 network's parameters."""
    tree = {}
    for key in DATA.files:
        if not key.startswith(prefix):
            continue
        name, value = key.removeprefix(prefix), jnp.asarray(DATA[key])
        ours = next(re.sub(a, b, name) for a, b in SIMBA.items() if re.fullmatch(a, name))
        put(tree, ours.split("/"), value.T if ours.endswith("kernel") else value)
    return tree


def simba_params(prefix, part):
    if part == "actor":
        return simba_tree(f"{prefix}/actor/")
    return {f"q{i}": simba_tree(f"{prefix}/{part}/qnet{i + 1}.") for i in range(2)}


@pytest.fixture(scope="module")
def spec():
    return EnvSpec(
        "parity", hp("n_obs"), hp("n_act"), 1000, hp("n_critic_obs"), critic_sees_obs=False
    )


def config(**changes):
    base = {
        "gamma": hp("gamma"),
        "tau": hp("tau"),
        "v_min": hp("v_min"),
        "v_max": hp("v_max"),
        "num_atoms": hp("num_atoms"),
        "actor_lr": hp("lr"),
        "actor_lr_end": hp("lr"),
        "critic_lr": hp("lr"),
        "critic_lr_end": hp("lr"),
        "weight_decay": hp("weight_decay"),
        "noise_clip": hp("noise_clip"),
        "policy_noise": 1.0,
        "actor_hidden": hp("actor_hidden"),
        "critic_hidden": hp("critic_hidden"),
        "normalize_obs": False,
    }
    return AgentConfig(**(base | changes))


def flat(obs, critic_obs):
    return jnp.concatenate([jnp.asarray(DATA[obs]), jnp.asarray(DATA[critic_obs])], axis=-1)


@pytest.fixture(scope="module")
def batch():
    bootstrap = (DATA["batch/truncated"] != 0) | (DATA["batch/done"] == 0)
    discount = hp("gamma") ** DATA["batch/n"] * bootstrap
    return Batch(
        obs=flat("batch/obs", "batch/critic_obs"),
        action=jnp.asarray(DATA["batch/action"]),
        reward=jnp.asarray(DATA["batch/reward"]),
        discount=jnp.asarray(discount, jnp.float32),
        next_obs=flat("batch/next_obs", "batch/next_critic_obs"),
        weight=jnp.ones(hp("batch")),
    )


@pytest.fixture(scope="module")
def nets(spec):
    return mlp_networks(spec, config())


def test_forward(nets, spec, batch):
    close(
        nets.actor(actor_params("mlp/init/actor"), spec.actor_obs(batch.obs)), DATA["mlp/actor_out"]
    )
    logits = nets.critic(critic_params("mlp/init/critic"), spec.critic_obs(batch.obs), batch.action)
    close(logits[0], DATA["mlp/logits1"])
    close(logits[1], DATA["mlp/logits2"])


def test_support():
    close(dist.support(hp("v_min"), hp("v_max"), hp("num_atoms")), DATA["mlp/support"])


@pytest.mark.parametrize("mode", MODES)
def test_targets(mode, nets, spec, batch):
    noise = jnp.clip(jnp.asarray(DATA["batch/noise"]), -hp("noise_clip"), hp("noise_clip"))
    action = nets.actor(actor_params("mlp/init/actor"), spec.actor_obs(batch.next_obs)) + noise
    action = jnp.clip(action, -1, 1)
    close(action, DATA[f"mlp/{mode}/next_action"])
    close(batch.discount, DATA[f"mlp/{mode}/discount"] * DATA[f"mlp/{mode}/bootstrap"])
    z = dist.support(hp("v_min"), hp("v_max"), hp("num_atoms"))
    logits = nets.critic(critic_params("mlp/init/target"), spec.critic_obs(batch.next_obs), action)
    moved = jax.vmap(dist.bellman_atoms, (None, 0, 0))(z, batch.reward, batch.discount)
    for i in range(2):
        for project in (dist.project_scatter, dist.project_dense, dist.project):
            p = jax.vmap(project, (None, 0, 0))(z, moved, jax.nn.softmax(logits[i]))
            close(p, DATA[f"mlp/{mode}/proj{i + 1}"])
        close(p @ z, DATA[f"mlp/{mode}/value{i + 1}"])
    targets = jax.vmap(c51_target, (None, 1, 0, 0, None))(
        z, logits, batch.reward, batch.discount, "lower-mean" if mode == "cdq" else "own"
    )
    close(targets[:, 0], DATA[f"mlp/{mode}/target1"])
    close(targets[:, 1], DATA[f"mlp/{mode}/target2"])


def make_update(monkeypatch, spec, mode):
    """The agent's own update, fed with the file's noise instead of random numbers."""
    agent = fast_td3(spec, config(cdq=mode == "cdq"))
    state = agent.init(jax.random.key(0)).replace(
        actor=actor_params("mlp/init/actor"),
        critic=critic_params("mlp/init/critic"),
        target=critic_params("mlp/init/target"),
    )
    monkeypatch.setattr(jax.random, "normal", lambda key, shape: jnp.asarray(DATA["batch/noise"]))
    return jax.jit(partial(agent.update, policy=True)), state


def compare_params(state, prefix):
    """Within 2e-6: Adam's first step is a sign, so tiny gradients decide whole steps."""
    for name, theirs in (
        ("actor", actor_params(f"{prefix}/actor")),
        ("critic", critic_params(f"{prefix}/critic")),
        ("target", critic_params(f"{prefix}/target")),
    ):
        same_params(getattr(state, name), theirs)


def same_params(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), ours, theirs)


@pytest.mark.as_shipped
@pytest.mark.parametrize("mode", MODES)
def test_three_rounds(mode, spec, batch, monkeypatch):
    update, state = make_update(monkeypatch, spec, mode)
    for i in range(3):
        state, metrics, _ = update(state, batch, jax.random.key(i))
        close(metrics["critic_loss"], DATA[f"mlp/{mode}/critic_losses/{i}"])
        close(metrics["actor_loss"], DATA[f"mlp/{mode}/actor_losses/{i}"])
        if i in (0, 2):
            compare_params(state, f"mlp/{mode}/after{i + 1}")
    assert state.updates == 3
    assert state.skipped == 0


@pytest.mark.parametrize("mode", MODES)
def test_gradients(mode, spec, batch, monkeypatch):
    """Read off Adam's first moment after one update: m = (1 - 0.9) * g."""
    update, first = make_update(monkeypatch, spec, mode)
    state, metrics, _ = update(first, batch, jax.random.key(0))
    close(metrics["critic_loss"], DATA[f"mlp/{mode}/critic_loss"])
    close(metrics["actor_loss"], DATA[f"mlp/{mode}/actor_loss"])

    grads = like(first.actor, state.actor_opt[0].mu / 0.1)
    jax.tree.map(close, grads, layers(f"mlp/{mode}/actor_grad/", ACTOR))

    critic = like(first.critic, state.critic_opt[0].mu / 0.1)
    prefix = f"mlp/{mode}/critic_grad"
    theirs = {f"q{i}": layers(f"{prefix}/qnet{i + 1}.", CRITIC) for i in range(2)}
    jax.tree.map(close, critic, theirs)


def like(tree, vector):
    """The optimiser's vector in the shape of the parameters."""
    return ravel_pytree(tree)[1](vector)


# --- the variants -------------------------------------------------------------------------------


def simba_config(**changes):
    sizes = {"actor_hidden": DATA["simbav2/hidden"].item()}
    sizes |= {"critic_hidden": sizes["actor_hidden"], "network": "simbav2"}
    sizes |= {name: DATA[f"simbav2/{name}"].item() for name in ("actor_blocks", "critic_blocks")}
    return config(**sizes, **changes)


def same_shapes(made, theirs):
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, theirs)


def test_simnorm_forward(spec, batch):
    cfg = config(
        network="simnorm",
        simnorm_groups=DATA["simnorm/seq_len"].item(),
        simnorm_dim=DATA["simnorm/dim"].item(),
    )
    nets = NETWORKS[cfg.network](spec, cfg)
    actor, critic = simnorm_params("simnorm/init")
    same_shapes(nets.init_actor(jax.random.key(0)), actor)
    same_shapes(nets.init_critic(jax.random.key(0)), critic)
    close(nets.actor(actor, spec.actor_obs(batch.obs)), DATA["simnorm/actor_out"])
    logits = nets.critic(critic, spec.critic_obs(batch.obs), batch.action)
    close(logits[0], DATA["simnorm/logits1"])
    close(logits[1], DATA["simnorm/logits2"])


def test_simba_forward(spec, batch):
    cfg = simba_config()
    nets = NETWORKS[cfg.network](spec, cfg)
    actor, critic = (simba_params("simbav2/init", part) for part in ("actor", "critic"))
    same_shapes(nets.init_actor(jax.random.key(0)), actor)
    same_shapes(nets.init_critic(jax.random.key(0)), critic)
    close(nets.actor(actor, spec.actor_obs(batch.obs)), DATA["simbav2/actor_out"])
    logits = nets.critic(critic, spec.critic_obs(batch.obs), batch.action)
    close(logits[0], DATA["simbav2/logits1"])
    close(logits[1], DATA["simbav2/logits2"])


def test_simba_three_rounds(spec, batch, monkeypatch):
    agent = fast_td3(spec, simba_config())
    parts = {part: simba_params("simbav2/init", part) for part in ("actor", "critic", "target")}
    state = agent.init(jax.random.key(0)).replace(**parts)
    monkeypatch.setattr(jax.random, "normal", lambda key, shape: jnp.asarray(DATA["batch/noise"]))
    update = jax.jit(partial(agent.update, policy=True))
    for i in range(3):
        state, metrics, _ = update(state, batch, jax.random.key(i))
        close(metrics["critic_loss"], DATA[f"simbav2/cdq/critic_losses/{i}"])
        close(metrics["actor_loss"], DATA[f"simbav2/cdq/actor_losses/{i}"])
        if i in (0, 2):
            for part in parts:
                same_params(getattr(state, part), simba_params(f"simbav2/cdq/after{i + 1}", part))


def test_observation_statistics():
    stats = norm.init_stats(hp("n_obs"))
    count = 0
    for i in range(4):
        x = jnp.asarray(DATA[f"obsnorm/{i}/x"])
        stats = norm.update_stats(stats, x)
        count += x.shape[0]
        close(norm.normalize(stats, x), DATA[f"obsnorm/{i}/out"])
        assert stats.total == count
        assert count == DATA[f"obsnorm/{i}/count"]
        close(stats.mean, DATA[f"obsnorm/{i}/mean"][0])
        close(stats.var, DATA[f"obsnorm/{i}/var"][0])


def test_reward_statistics():
    stats, g = norm.init_return_stats(), jnp.zeros(8)
    for i in range(6):
        reward = jnp.asarray(DATA[f"rewnorm/{i}/reward"])
        done = jnp.asarray(DATA[f"rewnorm/{i}/done"]) > 0
        g = norm.discounted_return(g, reward, done, hp("gamma"))
        stats = norm.update_return_stats(stats, g)
        close(jnp.sqrt(stats.stats.var), DATA[f"rewnorm/{i}/std"])
        close(stats.max_abs, DATA[f"rewnorm/{i}/gmax"])
        close(reward / norm.reward_scale(stats, 5.0), DATA[f"rewnorm/{i}/out"])


@pytest.mark.parametrize("case", ["n1", "n3", "n3full"])
def test_replay(case):
    def get(name):
        return jnp.asarray(DATA[f"replay/{case}/{name}"])

    writes, capacity = get("writes").item(), get("capacity").item()
    num_envs = get("write/reward").shape[1]
    spec = EnvSpec(
        "parity", hp("n_obs"), hp("n_act"), 1000, hp("n_critic_obs"), critic_sees_obs=False
    )
    cfg = ReplayConfig(
        length=capacity, n_step=get("n_steps").item(), batch_size=4, store_next_obs=True
    )
    add = jax.jit(partial(ring.add, store_next_obs=True))
    windows = jax.jit(ring.windows, static_argnums=(4, 5))
    state = ring.init(spec, cfg, num_envs)
    for i in range(writes):
        done, truncated = get("write/done")[i] > 0, get("write/truncated")[i] > 0
        state = add(
            state,
            Transition(
                obs=jnp.concatenate([get("write/obs")[i], get("write/critic_obs")[i]], -1),
                action=get("write/action")[i],
                reward=get("write/reward")[i],
                terms=jnp.zeros((num_envs, 0)),
                terminated=done & ~truncated,
                truncated=truncated,
                final_obs=jnp.concatenate(
                    [get("write/next_obs")[i], get("write/next_critic_obs")[i]], -1
                ),
                valid=jnp.ones(num_envs, bool),
            ),
        )
    starts = get("starts")
    oldest = max(0, writes - capacity)
    gamma = hp("gamma")
    for e in range(num_envs):
        batch = windows(
            state, starts - oldest, jnp.full(starts.shape, e), jnp.float32(gamma), spec, cfg
        )
        close(batch.obs, jnp.concatenate([get("sample/obs")[e], get("sample/critic_obs")[e]], -1))
        close(batch.action, get("sample/action")[e])
        close(batch.reward, get("sample/reward")[e])
        done, truncated = get("sample/done")[e] > 0, get("sample/truncated")[e] > 0
        discount = gamma ** get("sample/n")[e] * (truncated | ~done)
        close(batch.discount, discount)
        kept = np.asarray(discount) > 0  # a terminated window needs no next observation
        theirs = jnp.concatenate([get("sample/next_obs")[e], get("sample/next_critic_obs")[e]], -1)
        close(batch.next_obs[kept], theirs[kept])
        assert bool(jnp.all(batch.weight == 1))
