"""Exploration noise: how far each environment strays from the policy.

    sigma_e = ladder(rung_e) * decay(steps)      which environment explores how much
    noise_e = sigma_e * x_e                      x white, or correlated in time

A `Ladder` says how sigma differs between environments; `LADDERS` lists them by name, and a new one
is a function and a row. `make_noise` makes a `Noise` of it. Whatever belongs to one environment is
an `[E, ..]` array of the noise state, so it may be split over devices after `init`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtd3.config.sections import LoopConfig, hyper_type
from jaxtd3.core.types import Array, Noise


class NoiseHyper(hyper_type(LoopConfig)):  # type: ignore[misc]
    """Traced settings of the noise, all scalars: sigma_min, sigma_max, alpha (steepness of the
    geometric ladder), decay (share of sigma left at the end), steps (until then), correlation (of x
    from step to step), white (sigma of white noise beside it)."""


class NoiseState(NamedTuple):
    rung: Array  # [E] place on the ladder, in [0, 1]
    x: Array  # [E, U] correlated noise of unit variance; [E, 0] where noise is white
    left: Array  # [E] int32, steps until held noise is drawn anew; [0] where it is not held
    age: Array  # [] float32, steps so far
    hyper: NoiseHyper


# --- ladders ------------------------------------------------------------------------------------


class Ladder(NamedTuple):
    """How sigma differs between environments."""

    rungs: Callable[[Array, int], Array]
    """rungs(key, num_envs) -> place of each on the ladder, in [0, 1]: [E]"""
    sigma: Callable[[Array, NoiseHyper], Array]
    """sigma(rung [E], hyper) -> [E]"""
    resample: bool = False
    """An environment takes a new rung when its episode ends."""


def random_rungs(key: Array, num_envs: int) -> Array:
    return jax.random.uniform(key, (num_envs,))


def even_rungs(key: Array, num_envs: int) -> Array:
    """i / (N - 1)."""
    del key
    return jnp.arange(num_envs, dtype=jnp.float32) / max(num_envs - 1, 1)


def top_rung(key: Array, num_envs: int) -> Array:
    del key
    return jnp.ones(num_envs)


def linear(rung: Array, h: NoiseHyper) -> Array:
    """sigma_min + rung * (sigma_max - sigma_min)."""
    return h.sigma_min + (h.sigma_max - h.sigma_min) * rung


def geometric(rung: Array, h: NoiseHyper) -> Array:
    """eps^(1 + alpha * rung) with eps = sigma_max."""
    return h.sigma_max ** (1 + h.alpha * rung)


LADDERS: dict[str, Ladder] = {
    "mixed": Ladder(random_rungs, linear, resample=True),  # FastTD3: U(min, max) per episode
    "constant": Ladder(top_rung, linear),  # sigma_max everywhere
    "linear": Ladder(even_rungs, linear),  # PQL: min ... max over the environments
    "geometric": Ladder(even_rungs, geometric),  # Ape-X: every actor its own eps
}


# --- noise --------------------------------------------------------------------------------------


def sigmas(ladder: Ladder, state: NoiseState) -> Array:
    """Each environment's sigma now: [E]."""
    h = state.hyper
    left = 1 + (h.decay - 1) * jnp.clip(state.age / h.steps, 0.0, 1.0)
    return ladder.sigma(state.rung, h) * left


def zeta_steps(key: Array, num_envs: int, most: int) -> Array:
    """How long to hold: k = 1 ... most with probability proportional to 1 / k^2: [E]."""
    share = 1.0 / jnp.arange(1, most + 1, dtype=jnp.float32) ** 2
    return 1 + jax.random.categorical(key, jnp.log(share), shape=(num_envs,)).astype(jnp.int32)


def make_noise(ladder: Ladder, hyper: NoiseHyper, hold: int = 0) -> Noise:
    """Gaussian noise by a ladder: white, correlated in time where `hyper.correlation` is not 0, or
    held for a random number of steps, at most `hold`.

    Correlated: x' = rho * x + sqrt(1 - rho^2) * N(0, 1), of unit variance at all times and drawn
    anew with every episode; rho = 1 holds one offset for the whole episode.
    Held: x stays for a time of its own in every environment (`zeta_steps`), then is drawn anew.
    """
    correlated = bool(hold) or hyper.correlation != 0

    def init(key: Array, num_envs: int, action_size: int) -> NoiseState:
        x = jnp.zeros((num_envs, 0))
        if correlated:
            key, key_x = jax.random.split(key)
            x = jax.random.normal(key_x, (num_envs, action_size))
        left = jnp.zeros(0, jnp.int32)
        if hold:
            key, key_left = jax.random.split(key)
            left = zeta_steps(key_left, num_envs, hold)
        return NoiseState(
            rung=ladder.rungs(key, num_envs),
            x=x,
            left=left,
            age=jnp.zeros(()),
            hyper=jax.tree.map(jnp.float32, hyper),
        )

    def apply(state: NoiseState, action: Array, key: Array) -> Array:
        """clip(action + sigma_e * x_e, -1, 1): [E, U]."""
        white = jax.random.normal(key, action.shape, action.dtype)
        sigma = sigmas(ladder, state)[:, None]
        noise = sigma * state.x + state.hyper.white * white if correlated else sigma * white
        return jnp.clip(action + noise, -1.0, 1.0)

    def resample(state: NoiseState, done: Array, key: Array) -> NoiseState:
        state = state._replace(age=state.age + 1)
        if hold:
            key, key_x, key_left = jax.random.split(key, 3)
            over = done | (state.left <= 1)
            fresh = jax.random.normal(key_x, state.x.shape)
            left = zeta_steps(key_left, done.shape[0], hold)
            state = state._replace(
                x=jnp.where(over[:, None], fresh, state.x),
                left=jnp.where(over, left, state.left - 1),
            )
        elif correlated:
            key, key_x = jax.random.split(key)
            rho = jnp.where(done, 0.0, state.hyper.correlation)[:, None]
            fresh = jax.random.normal(key_x, state.x.shape)
            state = state._replace(x=rho * state.x + jnp.sqrt(1 - rho**2) * fresh)
        if ladder.resample:
            rung = ladder.rungs(key, done.shape[0])
            state = state._replace(rung=jnp.where(done, rung, state.rung))
        return state

    return Noise(init, apply, resample)


class WarmupState(NamedTuple):
    inner: Any
    left: Array  # [] int32, random steps to come


def random_warmup(noise: Noise, steps: int) -> Noise:
    """`noise` after `steps` steps of uniform actions."""

    def init(key: Array, num_envs: int, action_size: int) -> WarmupState:
        return WarmupState(noise.init(key, num_envs, action_size), jnp.int32(steps))

    def apply(state: WarmupState, action: Array, key: Array) -> Array:
        key_uniform, key_noise = jax.random.split(key)
        uniform = jax.random.uniform(key_uniform, action.shape, action.dtype, -1.0, 1.0)
        noisy = noise.apply(state.inner, action, key_noise)
        return jnp.where(state.left > 0, uniform, noisy)

    def resample(state: WarmupState, done: Array, key: Array) -> WarmupState:
        return WarmupState(noise.resample(state.inner, done, key), jnp.maximum(state.left - 1, 0))

    return Noise(init, apply, resample)


def with_hyper(state: Any, hyper: NoiseHyper) -> Any:
    """The noise state under other settings, for a run that is resumed with them."""
    if isinstance(state, WarmupState):
        return state._replace(inner=with_hyper(state.inner, hyper))
    return state._replace(hyper=jax.tree.map(jnp.float32, hyper))
