"""It learns: the presets of the CPU profile against the clock, compile time apart."""

from __future__ import annotations

import time

import jax
import pytest

import jaxtd3


def learn(name, limit, reached, chunk=250, **changes):
    """Train by the preset until `reached(first, now)` or `limit` seconds; (first, now, seconds)."""
    cfg = jaxtd3.preset(name, profile="cpu", **changes)
    env = jaxtd3.make_env(cfg.env)
    agent = jaxtd3.fast_td3(env.spec, cfg.agent)
    replay = jaxtd3.make_replay(env.spec, cfg.replay)
    init, _, train_step = jaxtd3.make_train_step(env, agent, replay, cfg.loop)
    evaluate = jaxtd3.make_evaluate(env, agent, cfg.run.eval_episodes)
    state = init(jax.random.key(cfg.run.seed))
    advance = jaxtd3.make_chunk(train_step, chunk).lower(state).compile()

    def score():
        metrics = evaluate(state.agent, state.env.weights, jax.random.key(1))
        return {k: float(metrics[k]) for k in ("return", "length")}

    first = now = score()
    print(f"{name}: untrained, return {now['return']:.1f}, length {now['length']:.0f}")
    spent, iteration = 0.0, 0
    while spent < limit and not reached(first, now):
        begin = time.perf_counter()
        state, metrics = advance(state)
        iteration += chunk
        refreshed = env.refresh(state.env, jax.random.fold_in(jax.random.key(2), iteration))
        state = state.replace(env=refreshed)
        jax.block_until_ready((metrics, state.env.obs))
        spent += time.perf_counter() - begin
        now = score()
        print(
            f"{name}: {iteration} iterations, {spent:.1f} s, "
            f"return {now['return']:.1f}, length {now['length']:.0f}"
        )
    return first, now, spent


def test_cartpole_is_balanced_within_a_minute():
    _, now, spent = learn("CartpoleBalance", 60, lambda first, now: now["return"] >= 950)
    assert now["return"] >= 950, f"after {spent:.0f} s"


@pytest.mark.slow
def test_cheetah_runs_within_five_minutes():
    _, now, spent = learn("CheetahRun", 300, lambda first, now: now["return"] >= 600)
    assert now["return"] >= 600, f"after {spent:.0f} s"


@pytest.mark.slow
def test_pendulum_swings_up_within_two_minutes():
    _, now, spent = learn("PendulumSwingup", 120, lambda first, now: now["return"] >= 700)
    assert now["return"] >= 700, f"after {spent:.0f} s"


@pytest.mark.slow
def test_g1_gains_three_points_within_fifteen_minutes():
    def reached(first, now):
        return now["return"] >= first["return"] + 3

    first, now, spent = learn("G1JoystickFlatTerrain", 900, reached, chunk=100)
    assert reached(first, now), f"{first} -> {now} after {spent:.0f} s"


@pytest.mark.slow
def test_t1_stays_up_longer_within_fifteen_minutes():
    def reached(first, now):
        return now["length"] >= 2.5 * first["length"]

    first, now, spent = learn("T1JoystickFlatTerrain", 900, reached, chunk=100)
    assert reached(first, now), f"{first} -> {now} after {spent:.0f} s"
