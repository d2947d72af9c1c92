"""FastTD3: distributional twin critics, a delayed deterministic policy. `fast_td3(...) -> Agent`.

Networks (`mlp.NETWORKS`) and critics (`critics.CRITICS`) are chosen by name or passed in.

Hyper-parameters that may differ between the members of a vmapped population are leaves of the
agent's state (`Hyper`); those that change shapes are static (`AgentConfig`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.flatten_util import ravel_pytree

from jaxtd3.agent import distributional as dist
from jaxtd3.agent import normalize as norm
from jaxtd3.agent.critics import CRITICS, Critic, CriticKind
from jaxtd3.agent.optim import adamw, all_finite, as_vector, cosine, polyak, select, step_params
from jaxtd3.config.sections import AgentConfig, hyper_type, hyper_values
from jaxtd3.core.sharding import mean_over
from jaxtd3.core.types import Agent, Array, Batch, EnvSpec, Health, Metrics, Transition
from jaxtd3.nets.mlp import NETWORKS, Networks


class Hyper(hyper_type(AgentConfig)):  # type: ignore[misc]
    """Traced settings of the agent, all scalars: gamma, tau, learning rates, ..."""


class AgentState(struct.PyTreeNode):
    actor: Any
    critic: Any
    target: Any
    target_actor: Any  # None where targets follow the policy itself
    actor_opt: Any  # over all parameters as one vector [P]
    critic_opt: Any
    obs_stats: norm.Stats  # over one observation [frame]
    return_stats: norm.ReturnStats
    hyper: Hyper
    updates: Array  # [] int32, critic updates so far
    skipped: Array  # [] int32, updates refused because they were not finite
    bad_streak: Array  # [2] int32, of those how many in a row: critics, actor
    bad_metric: Array  # [] int32, what the first of them failed by: index into FAULTS


# What is looked at in every update, in this order: critics, then actor.
LOOKED_AT = ("loss", "grad_norm", "params")
FAULTS = tuple(f"{net}_{what}" for net in ("critic", "actor") for what in LOOKED_AT)


def of_window(spec: EnvSpec, stats: norm.Stats) -> norm.Stats:
    """Statistics of one observation [frame] as those of a flat vector [D]."""
    return stats._replace(mean=spec.repeated(stats.mean), var=spec.repeated(stats.var))


# --- losses -------------------------------------------------------------------------------------


def actor_loss(value: Array, weight: Array, cdq: bool) -> Array:
    """Minus the mean value of the policy's action, by the critics `value [N, B]`: []."""
    value = jnp.min(value, axis=0) if cdq else jnp.mean(value, axis=0)
    return -jnp.mean(weight * value)


# --- refusing what is not finite ----------------------------------------------------------------


class Candidate(NamedTuple):
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


def guard(state: AgentState, at: Candidate, net: int, limit: int) -> tuple[Array, AgentState]:
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


def health(state: AgentState) -> Health:
    """What was refused; `fault` is an index into FAULTS."""
    return Health(state.skipped, state.bad_streak, state.bad_metric)


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
        return AgentState(
            actor=actor,
            critic=critic,
            target=jax.tree.map(jnp.copy, critic),
            target_actor=jax.tree.map(jnp.copy, actor) if cfg.target_actor else None,
            actor_opt=opt.init(as_vector(actor)),
            critic_opt=opt.init(as_vector(critic)),
            obs_stats=norm.init_stats(spec.frame_width),
            return_stats=norm.init_return_stats(),
            hyper=jax.tree.map(jnp.float32, hyper_values(Hyper, cfg)),
            updates=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            bad_streak=jnp.zeros(2, jnp.int32),
            bad_metric=jnp.full((), -1, jnp.int32),
        )

    def normalized(state: AgentState, obs: Array) -> Array:
        return norm.normalize(of_window(spec, state.obs_stats), obs) if cfg.normalize_obs else obs

    def act(state: AgentState, obs: Array) -> Array:
        return nets.actor(state.actor, spec.actor_obs(normalized(state, obs)))

    def observe(state: AgentState, tr: Transition, discounted: Array) -> AgentState:
        if cfg.normalize_obs:
            stats = norm.update_stats(state.obs_stats, spec.newest(tr.obs), tr.valid, axis_name)
            state = state.replace(obs_stats=stats)
        if cfg.normalize_reward:
            returns = norm.update_return_stats(state.return_stats, discounted, tr.valid, axis_name)
            state = state.replace(return_stats=returns)
        return state

    def critic_of(state: AgentState) -> Critic:
        return kind.on(dist.support(state.hyper.v_min, state.hyper.v_max, cfg.num_atoms))

    def make_targets(state: AgentState, batch: Batch, key: Array) -> Array:
        """What the critics learn of a batch: [B, N, A]."""
        h = state.hyper
        noise = h.policy_noise * jax.random.normal(key, batch.action.shape)
        policy = state.target_actor if cfg.target_actor else state.actor
        next_action = nets.actor(policy, spec.actor_obs(batch.next_obs))
        next_action += jnp.clip(noise, -h.noise_clip, h.noise_clip)
        next_action = jnp.clip(next_action, -1.0, 1.0)
        outputs = nets.critic(state.target, spec.critic_obs(batch.next_obs), next_action)
        target = jax.vmap(critic_of(state).target, in_axes=(1, 0, 0, None))
        return target(outputs, batch.reward, batch.discount, combine)

    def difference(state: AgentState, outputs: Array, targets: Array) -> Array:
        """|TD error|, mean over the critics: [B]."""
        q = critic_of(state)
        return jnp.mean(jnp.abs(q.value(outputs) - q.target_value(targets).T), axis=0)

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
        at = Candidate(loss, grad_norm, (new, state.hyper.tau), weight)
        ok, state = guard(state, at, net, cfg.max_bad_updates)
        made = select(ok, nets.project(as_tree(new)), params)
        return state, Step(ok, made, select(ok, new_opt, opt_state), grad_norm)

    def update_critic(
        state: AgentState, batch: Batch, key: Array
    ) -> tuple[AgentState, Metrics, Array]:
        h, q = state.hyper, critic_of(state)
        targets = make_targets(state, batch, key)
        obs = spec.critic_obs(batch.obs)

        def loss_fn(params: Any) -> tuple[Array, Array]:
            outputs = nets.critic(params, obs, batch.action)
            loss = jax.vmap(q.loss, in_axes=(1, 0))(outputs, targets)
            return jnp.mean(batch.weight * loss), difference(state, outputs, targets)

        (loss, td_error), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.critic)
        value, weight = jnp.mean(q.target_value(targets)), jnp.mean(batch.weight)
        loss, grads, value, weight = pmean((loss, as_vector(grads), value, weight))
        lr = cosine(h.critic_lr, h.critic_lr_end, state.updates / h.schedule_updates)
        state, step = descend(state, 0, state.critic, state.critic_opt, loss, grads, weight, lr)
        target = select(step.ok, polyak(state.target, step.params, h.tau), state.target)
        metrics = {
            "critic_loss": loss,
            "critic_grad_norm": step.grad_norm,
            "target_value": value,
        }
        state = state.replace(critic=step.params, critic_opt=step.opt, target=target)
        return state, metrics, td_error

    def update_actor(state: AgentState, batch: Batch) -> tuple[AgentState, Metrics]:
        h, q = state.hyper, critic_of(state)
        actor_in, critic_in = spec.actor_obs(batch.obs), spec.critic_obs(batch.obs)

        def loss_fn(params: Any) -> Array:
            outputs = nets.critic(state.critic, critic_in, nets.actor(params, actor_in))
            return actor_loss(q.value(outputs), batch.weight, cfg.cdq)

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
        state, metrics, td_error = update_critic(state, batch, key)
        if policy:
            state, more = update_actor(state, batch)
            metrics |= more
        return state, metrics, td_error

    def td_error(state: AgentState, batch: Batch, key: Array) -> Array:
        batch = prepared(state, batch)
        outputs = nets.critic(state.critic, spec.critic_obs(batch.obs), batch.action)
        return difference(state, outputs, make_targets(state, batch, key))

    discount = lambda state: state.hyper.gamma  # noqa: E731
    return Agent(jax.jit(init), act, observe, update, discount, td_error, health)
