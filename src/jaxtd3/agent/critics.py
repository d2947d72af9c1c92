"""What a critic learns: its targets, its loss, its value. Written for ONE example; callers vmap.

A `Critic` is a small tuple of functions. `CRITICS` lists the kinds by name; a new one, or an old
one with another loss (`CRITICS["c51"].with_loss(mine)`), is a function and a row.

Axes: `N` critics, `A` outputs of each. How the critics' next values become targets, by `combine`:

    lower-mean         all learn the target of the lower mean (clipped double Q)
    elementwise-min    all learn the minimum, output by output (PQL-D)
    own                each learns its own
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxtd3.agent import distributional as dist
from jaxtd3.core.types import Array

if TYPE_CHECKING:
    from jaxtd3.config.sections import AgentConfig


class Critic(NamedTuple):
    """What critics make of their outputs."""

    target: Callable[[Array, Array, Array, str], Array]
    """target(next_outputs [N, A], reward [], discount [], combine) -> targets [N, A]"""
    loss: Callable[[Array, Array], Array]
    """loss(outputs [N, A], targets [N, A]) -> [], summed over critics"""
    value: Callable[[Array], Array]
    """value(outputs [.., A]) -> expected return [..]"""
    target_value: Callable[[Array], Array]
    """target_value(targets [.., A]) -> expected return [..]"""


class CriticKind(NamedTuple):
    """How wide critics are, and what they do once it is known where their atoms lie."""

    outputs: Callable[[AgentConfig], int]
    """outputs(cfg) -> A"""
    on: Callable[[Array], Critic]
    """on(atoms [num_atoms], from v_min to v_max) -> the critic, which need not use them"""

    def with_loss(self, loss: Callable[[Array, Array], Array]) -> CriticKind:
        """The same critics with another loss."""
        return self._replace(on=lambda z: self.on(z)._replace(loss=loss))


def combined(y: Array, means: Array, combine: str) -> Array:
    """The targets of all critics `[N, A]`, of what each would take alone and its mean `[N]`."""
    chex.assert_rank([y, means], [2, 1])
    if combine == "own":
        return y
    chosen = y[jnp.argmin(means)] if combine == "lower-mean" else jnp.min(y, axis=0)
    return jnp.broadcast_to(chosen[None], y.shape)


# --- C51 ----------------------------------------------------------------------------------------


def c51_target(z: Array, logits: Array, reward: Array, discount: Array, combine: str) -> Array:
    """Projected distributions: next-state logits [N, A] -> targets [N, A].

    The projection preserves the mean, so under `lower-mean` only the chosen one is projected. The
    element-wise minimum is scaled back to a distribution, which leaves its best answer as it is.
    """
    chex.assert_rank([z, logits, reward, discount], [1, 2, 0, 0])
    p = jax.nn.softmax(logits)  # [N, A]
    moved = dist.bellman_atoms(z, reward, discount)  # [A]
    if combine == "lower-mean":
        lowest = p[jnp.argmin(p @ moved)]
        return jnp.broadcast_to(dist.project(z, moved, lowest)[None], p.shape)
    projected = jax.vmap(lambda q: dist.project(z, moved, q))(p)
    if combine == "own":
        return projected
    least = jnp.min(projected, axis=0, keepdims=True) + 1e-12
    return jnp.broadcast_to(least / jnp.sum(least), p.shape)


def c51_loss(logits: Array, targets: Array) -> Array:
    """Cross-entropy, summed over critics: []."""
    return jnp.sum(jax.vmap(dist.cross_entropy)(targets, logits))


def c51(z: Array) -> Critic:
    return Critic(
        target=partial(c51_target, z),
        loss=c51_loss,
        value=lambda logits: jax.nn.softmax(logits) @ z,
        target_value=lambda targets: targets @ z,
    )


# --- scalar -------------------------------------------------------------------------------------


def scalar_target(q: Array, reward: Array, discount: Array, combine: str) -> Array:
    """r + discount * Q: [N, 1]."""
    y = reward + discount * q
    return combined(y, y[:, 0], combine)


def scalar_loss(q: Array, targets: Array) -> Array:
    """Squared error, summed over critics: []."""
    return jnp.sum((q - targets) ** 2)


def scalar_value(q: Array) -> Array:
    return q[..., 0]


SCALAR = Critic(scalar_target, scalar_loss, scalar_value, scalar_value)


# --- quantiles ----------------------------------------------------------------------------------


def quantile_target(theta: Array, reward: Array, discount: Array, combine: str) -> Array:
    """r + discount * theta, quantile by quantile: [N, A]."""
    y = reward + discount * theta
    return combined(y, jnp.mean(y, axis=1), combine)


def quantile_huber(theta: Array, targets: Array) -> Array:
    """QR-DQN's loss of ONE critic, kappa = 1 (https://arxiv.org/abs/1710.10044): []."""
    chex.assert_rank([theta, targets], 1)
    size = theta.shape[0]
    tau = (jnp.arange(size) + 0.5) / size
    u = targets[None, :] - theta[:, None]  # [A, A]
    huber = jnp.where(jnp.abs(u) <= 1, 0.5 * u**2, jnp.abs(u) - 0.5)
    return jnp.sum(jnp.mean(jnp.abs(tau[:, None] - (u < 0)) * huber, axis=1))


def quantile_loss(theta: Array, targets: Array) -> Array:
    """`quantile_huber`, summed over critics: []."""
    return jnp.sum(jax.vmap(quantile_huber)(theta, targets))


def quantile_value(theta: Array) -> Array:
    return jnp.mean(theta, axis=-1)


QUANTILE = Critic(quantile_target, quantile_loss, quantile_value, quantile_value)

CRITICS: dict[str, CriticKind] = {
    "c51": CriticKind(lambda cfg: cfg.num_atoms, c51),
    "scalar": CriticKind(lambda cfg: 1, lambda z: SCALAR),
    "quantile": CriticKind(lambda cfg: cfg.num_atoms, lambda z: QUANTILE),
}
