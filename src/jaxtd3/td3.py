"""FastTD3: distributional twin critics, a delayed deterministic policy. `fast_td3(...) -> Agent`.

Networks (`networks.NETWORKS`) and critics (`critics.CRITICS`) are chosen by name or passed in.

Hyper-parameters that may differ between the members of a vmapped population are leaves of the
agent's state (`Hyper`); those that change shapes are static (`AgentConfig`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.flatten_util import ravel_pytree

from jaxtd3 import distributional as dist
from jaxtd3 import normalize as norm
from jaxtd3.critics import COMBINES, CRITICS, CriticKind
from jaxtd3.errors import nearest
from jaxtd3.networks import ACTIVATIONS, NETWORKS, Networks
from jaxtd3.optim import adamw, all_finite, as_vector, cosine, polyak, select, step_params
from jaxtd3.sharding import mean_over
from jaxtd3.types import Agent, Array, Batch, EnvSpec, Metrics, Transition


@dataclass(frozen=True)
class AgentConfig:
    """The learner."""

    gamma: float = 0.97
    """Discount per step."""
    v_min: float = -10.0
    """Lowest atom of the value distribution."""
    v_max: float = 10.0
    """Highest atom of the value distribution."""
    num_atoms: int = 101
    """Atoms of the value distribution, or quantiles."""
    tau: float = 0.1
    """Polyak rate of the target critics, per critic update."""
    actor_lr: float = 3e-4
    """Learning rate of the actor at the start."""
    actor_lr_end: float = 3e-4
    """Learning rate of the actor at the end (cosine)."""
    critic_lr: float = 3e-4
    """Learning rate of the critics at the start."""
    critic_lr_end: float = 3e-4
    """Learning rate of the critics at the end (cosine)."""
    schedule_updates: int = 200_000
    """Critic updates over which the learning rates go from start to end."""
    weight_decay: float = 0.1
    """AdamW weight decay, on every parameter."""
    policy_noise: float = 0.001
    """Standard deviation of the noise on the target action."""
    noise_clip: float = 0.5
    """Bound of the noise on the target action."""
    critic: str = "c51"
    """What critics learn: c51 (distribution over atoms), scalar (squared error) or quantile."""
    cdq: bool = True
    """Clipped double Q: all critics learn the lower target (off: each its own)."""
    cdq_target: str = "lower-mean"
    """The lower target: lower-mean (that of the lower mean) or elementwise-min (PQL-D)."""
    target_actor: bool = False
    """Targets follow a policy that lags behind by tau (off: the policy itself)."""
    network: str = "mlp"
    """Kind of networks: mlp, simnorm or simbav2."""
    activation: str = "relu"
    """Of the mlp and simnorm networks: relu, elu or silu."""
    layer_norm: bool = False
    """LayerNorm before every activation of the mlp and simnorm networks."""
    simnorm_in: str = "both"
    """Where the third hidden layer is a SimNorm: actor, critic or both."""
    simnorm_groups: int = 8
    """Groups of a SimNorm."""
    simnorm_dim: int = 64
    """Units within each group of a SimNorm."""
    actor_blocks: int = 1
    """Residual blocks of a SimbaV2 actor."""
    critic_blocks: int = 2
    """Residual blocks of a SimbaV2 critic."""
    reproject: bool = False
    """Bring SimbaV2's weights back to the unit sphere after every step, as its authors do."""
    actor_hidden: int = 512
    """Width of the actor's first layer; the next two are 1/2 and 1/4 of it."""
    critic_hidden: int = 1024
    """Width of the critics' first layer; the next two are 1/2 and 1/4 of it."""
    num_critics: int = 2
    """Critics in the ensemble."""
    max_grad_norm: float = 0.0
    """Clip gradients to this global norm (0: off)."""
    normalize_obs: bool = True
    """Normalise observations by running statistics of collected data."""
    normalize_reward: bool = False
    """Divide rewards by the spread of the running discounted return."""
    compute: str = "f32"
    """Precision of the networks' matrix products, f32 or bf16; parameters and losses stay f32."""
    max_bad_updates: int = 100
    """Stop the run when so many updates in a row were not finite (each is skipped)."""

    def __post_init__(self):
        if not self.v_min < self.v_max:
            raise ValueError(f"v_min={self.v_min} is not below v_max={self.v_max}")
        checks = {
            "gamma": 0 <= self.gamma <= 1,
            "tau": 0 < self.tau <= 1,
            "num_atoms": self.num_atoms >= 2,
            "num_critics": self.num_critics >= 1,
            "actor_lr": self.actor_lr > 0,
            "critic_lr": self.critic_lr > 0,
            "actor_lr_end": self.actor_lr_end >= 0,
            "critic_lr_end": self.critic_lr_end >= 0,
            "schedule_updates": self.schedule_updates >= 1,
            "weight_decay": self.weight_decay >= 0,
            "policy_noise": self.policy_noise >= 0,
            "noise_clip": self.noise_clip >= 0,
            "max_grad_norm": self.max_grad_norm >= 0,
            "actor_hidden": self.actor_hidden >= 4,
            "critic_hidden": self.critic_hidden >= 4,
            "simnorm_groups": self.simnorm_groups >= 1,
            "simnorm_dim": self.simnorm_dim >= 2,
            "actor_blocks": self.actor_blocks >= 1,
            "critic_blocks": self.critic_blocks >= 1,
            "max_bad_updates": self.max_bad_updates >= 1,
        }
        for name, ok in checks.items():
            if not ok:
                raise ValueError(f"agent {name}={getattr(self, name)} is out of range")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(nearest(name, getattr(self, name), known))


CHOICES: dict[str, Collection[str]] = {
    "compute": ("f32", "bf16"),
    "critic": CRITICS,
    "cdq_target": COMBINES[:2],
    "network": NETWORKS,
    "activation": ACTIVATIONS,
    "simnorm_in": ("actor", "critic", "both"),
}


class Hyper(NamedTuple):
    """Traced hyper-parameters, all scalars."""

    gamma: Array
    v_min: Array
    v_max: Array
    tau: Array
    actor_lr: Array
    actor_lr_end: Array
    critic_lr: Array
    critic_lr_end: Array
    weight_decay: Array
    policy_noise: Array
    noise_clip: Array
    schedule_updates: Array


class AgentState(struct.PyTreeNode):
    actor: Any
    critic: Any
    target: Any
    target_actor: Any  # None where targets follow the policy itself
    actor_opt: Any  # over all parameters as one vector [P]
    critic_opt: Any
    obs_stats: norm.Stats  # over the flat observation [D]
    return_stats: norm.ReturnStats
    hyper: Hyper
    updates: Array  # [] int32, critic updates so far
    skipped: Array  # [] int32, updates refused because they were not finite
    bad_streak: Array  # [2] int32, of those how many in a row: critics, actor
    bad_metric: Array  # [] int32, what the first of them failed by: index into FAULTS


# What is looked at in every update, in this order: critics, then actor.
LOOKED_AT = ("loss", "grad_norm", "params")
FAULTS = tuple(f"{net}_{what}" for net in ("critic", "actor") for what in LOOKED_AT)


# --- losses -------------------------------------------------------------------------------------


def actor_loss(value: Array, weight: Array, cdq: bool) -> Array:
    """Minus the mean value of the policy's action, by the critics `value [N, B]`: []."""
    value = jnp.min(value, axis=0) if cdq else jnp.mean(value, axis=0)
    return -jnp.mean(weight * value)


# --- refusing what is not finite ----------------------------------------------------------------


class Looked(NamedTuple):
    """What decides whether an update may enter the state."""

    loss: Array
    grad_norm: Array
    params: Any
    weight: Array  # [] of the batch; 0: there was nothing to learn from


class Step(NamedTuple):
    """What an optimiser made of a network; its old self where the step was refused."""

    ok: Array
    params: Any
    opt: Any
    grad_norm: Array


def guard(state: AgentState, at: Looked, net: int, limit: int) -> tuple[Array, AgentState]:
    """(whether an update may enter the state, the state with the update counted).

    Refused are updates that are not finite, which are counted, and those of a batch without weight.
    A streak that has reached its limit stays, so that the host sees it at the chunk's end.
    """
    good = jnp.stack([all_finite(x) for x in at[:3]])
    used, finite = at.weight > 0, jnp.all(good)
    ok, bad = used & finite, used & ~finite
    streak = state.bad_streak[net]
    ended = jnp.where(streak < limit, 0, streak)
    first = bad & (jnp.max(state.bad_streak) == 0)
    return ok, state.replace(
        updates=state.updates + (ok if net == 0 else 0),
        skipped=state.skipped + bad,
        bad_streak=state.bad_streak.at[net].set(jnp.where(ok, ended, streak + bad)),
        bad_metric=jnp.where(first, len(LOOKED_AT) * net + jnp.argmin(good), state.bad_metric),
    )


# --- the agent ----------------------------------------------------------------------------------


def fast_td3(
    spec: EnvSpec,
    cfg: AgentConfig,
    axis_name: str | None = None,
    *,
    learn_apart: bool = False,
    networks: Networks | None = None,
    critic: CriticKind | None = None,
    actor_loss: Callable[[Array, Array, bool], Array] = actor_loss,
) -> Agent:
    """The agent for an environment. Networks, critics and the actor's loss may be your own.

    `axis_name` names the mapped axis over which gradients and statistics are averaged, if any;
    `learn_apart` leaves gradients to each device (see `sharding.bundles`).
    """
    kind = critic or CRITICS[cfg.critic]
    nets = networks or NETWORKS[cfg.network](spec, cfg, kind.outputs(cfg))
    combine = cfg.cdq_target if cfg.cdq else "own"
    opt = adamw(cfg.max_grad_norm)

    def pmean(tree: Any) -> Any:
        return tree if axis_name is None or learn_apart else mean_over(tree, axis_name)

    def init(key: Array) -> AgentState:
        key_actor, key_critic = jax.random.split(key)
        actor = nets.project(nets.init_actor(key_actor))
        critic = nets.project(nets.init_critic(key_critic))
        hyper = Hyper(**{name: jnp.float32(getattr(cfg, name)) for name in Hyper._fields})
        return AgentState(
            actor=actor,
            critic=critic,
            target=jax.tree.map(jnp.copy, critic),
            target_actor=jax.tree.map(jnp.copy, actor) if cfg.target_actor else None,
            actor_opt=opt.init(as_vector(actor)),
            critic_opt=opt.init(as_vector(critic)),
            obs_stats=norm.init_stats(spec.width),
            return_stats=norm.init_return_stats(),
            hyper=hyper,
            updates=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            bad_streak=jnp.zeros(2, jnp.int32),
            bad_metric=jnp.full((), -1, jnp.int32),
        )

    def normalized(state: AgentState, obs: Array) -> Array:
        return norm.normalize(state.obs_stats, obs) if cfg.normalize_obs else obs

    def act(state: AgentState, obs: Array) -> Array:
        return nets.actor(state.actor, spec.actor_obs(normalized(state, obs)))

    def observe(state: AgentState, tr: Transition, discounted: Array) -> AgentState:
        if cfg.normalize_obs:
            stats = norm.update_stats(state.obs_stats, tr.obs, tr.valid, axis_name)
            state = state.replace(obs_stats=stats)
        if cfg.normalize_reward:
            returns = norm.update_return_stats(state.return_stats, discounted, tr.valid, axis_name)
            state = state.replace(return_stats=returns)
        return state

    def atoms(state: AgentState) -> Array:
        return dist.support(state.hyper.v_min, state.hyper.v_max, cfg.num_atoms)

    def make_targets(state: AgentState, batch: Batch, key: Array) -> Array:
        """What the critics learn of a batch: [B, N, A]."""
        h = state.hyper
        noise = h.policy_noise * jax.random.normal(key, batch.action.shape)
        policy = state.target_actor if cfg.target_actor else state.actor
        next_action = nets.actor(policy, spec.actor_obs(batch.next_obs))
        next_action += jnp.clip(noise, -h.noise_clip, h.noise_clip)
        next_action = jnp.clip(next_action, -1.0, 1.0)
        outputs = nets.critic(state.target, spec.critic_obs(batch.next_obs), next_action)
        return jax.vmap(kind.target, in_axes=(None, 1, 0, 0, None))(
            atoms(state), outputs, batch.reward, batch.discount, combine
        )

    def difference(state: AgentState, outputs: Array, targets: Array) -> Array:
        """|TD error|, mean over the critics: [B]."""
        z = atoms(state)
        return jnp.mean(jnp.abs(kind.value(z, outputs) - kind.target_value(z, targets).T), axis=0)

    def descend(
        state: AgentState,
        net: int,
        params: Any,
        opt_state: Any,
        loss: Array,
        grads: Array,
        weight: Array,
        lr: Array,
    ) -> tuple[AgentState, Step]:
        """One step of a network's parameters along their gradient `grads [P]`, if it is finite.

        Optimiser and checks work on all parameters as one vector: a leaf at a time they are
        hundreds of small operations, each a launch on a GPU.
        """
        vector, as_tree = ravel_pytree(params)
        new, new_opt = step_params(opt, grads, opt_state, vector, lr, state.hyper.weight_decay)
        grad_norm = optax.global_norm(grads)
        at = Looked(loss, grad_norm, (new, state.hyper.tau), weight)
        ok, state = guard(state, at, net, cfg.max_bad_updates)
        made = select(ok, nets.project(as_tree(new)), params)
        return state, Step(ok, made, select(ok, new_opt, opt_state), grad_norm)

    def update_critic(state: AgentState, batch: Batch, key: Array) -> tuple[AgentState, Metrics]:
        h, z = state.hyper, atoms(state)
        targets = make_targets(state, batch, key)
        obs = spec.critic_obs(batch.obs)

        def loss_fn(params: Any) -> tuple[Array, Array]:
            outputs = nets.critic(params, obs, batch.action)
            loss = jax.vmap(kind.loss, in_axes=(None, 1, 0))(z, outputs, targets)
            return jnp.mean(batch.weight * loss), difference(state, outputs, targets)

        (loss, td_error), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.critic)
        value, weight = jnp.mean(kind.target_value(z, targets)), jnp.mean(batch.weight)
        loss, grads, value, weight = pmean((loss, as_vector(grads), value, weight))
        lr = cosine(h.critic_lr, h.critic_lr_end, state.updates / h.schedule_updates)
        state, step = descend(state, 0, state.critic, state.critic_opt, loss, grads, weight, lr)
        target = select(step.ok, polyak(state.target, step.params, h.tau), state.target)
        metrics = {
            "critic_loss": loss,
            "critic_grad_norm": step.grad_norm,
            "target_value": value,
            "td_error": td_error,
        }
        return state.replace(critic=step.params, critic_opt=step.opt, target=target), metrics

    def update_actor(state: AgentState, batch: Batch) -> tuple[AgentState, Metrics]:
        h, z = state.hyper, atoms(state)
        actor_in, critic_in = spec.actor_obs(batch.obs), spec.critic_obs(batch.obs)

        def loss_fn(params: Any) -> Array:
            outputs = nets.critic(state.critic, critic_in, nets.actor(params, actor_in))
            return actor_loss(kind.value(z, outputs), batch.weight, cfg.cdq)

        loss, grads = jax.value_and_grad(loss_fn)(state.actor)
        loss, grads, weight = pmean((loss, as_vector(grads), jnp.mean(batch.weight)))
        lr = cosine(h.actor_lr, h.actor_lr_end, state.updates / h.schedule_updates)
        state, step = descend(state, 1, state.actor, state.actor_opt, loss, grads, weight, lr)
        if cfg.target_actor:
            lagging = polyak(state.target_actor, step.params, h.tau)
            state = state.replace(target_actor=select(step.ok, lagging, state.target_actor))
        metrics = {"actor_loss": loss, "actor_grad_norm": step.grad_norm}
        return state.replace(actor=step.params, actor_opt=step.opt), metrics

    def prepared(state: AgentState, batch: Batch) -> Batch:
        """The batch as the networks see it, rewards scaled."""
        if cfg.normalize_reward:
            g_max = jnp.minimum(jnp.abs(state.hyper.v_min), jnp.abs(state.hyper.v_max))
            scale = norm.reward_scale(state.return_stats, g_max)
            batch = batch._replace(reward=batch.reward / scale)
        return batch._replace(
            obs=normalized(state, batch.obs), next_obs=normalized(state, batch.next_obs)
        )

    def update(state: AgentState, batch: Batch, key: Array, *, policy: bool):
        batch = prepared(state, batch)
        state, metrics = update_critic(state, batch, key)
        if policy:
            state, more = update_actor(state, batch)
            metrics |= more
        return state, metrics

    def td_error(state: AgentState, batch: Batch, key: Array) -> Array:
        batch = prepared(state, batch)
        outputs = nets.critic(state.critic, spec.critic_obs(batch.obs), batch.action)
        return difference(state, outputs, make_targets(state, batch, key))

    return Agent(init, act, observe, update, td_error)
