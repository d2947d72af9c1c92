"""It learns: the presets of the CPU profile against the clock, compile time apart."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import jax
import pytest

import jaxtd3
from jaxtd3.run.program import build


def learn(name, limit, reached, chunk=250, **changes):
    """Train by the preset until `reached(first, now)` or `limit` seconds; (first, now, seconds)."""
    parts = build(jaxtd3.preset(name, profile="cpu", **changes))
    state = parts.fns.init(jax.random.key(parts.config.run.seed))
    program = jaxtd3.make_chunk(parts.fns.train_step, chunk, parts.layout)
    advance = program.lower(parts.shapes).compile()

    def score():
        metrics = parts.evaluate(state.agent, state.weights, jax.random.key(1))
        return {k: float(metrics[k]) for k in ("return", "length")}

    first = now = score()
    print(f"{name}: untrained, return {now['return']:.1f}, length {now['length']:.0f}")
    spent, iteration = 0.0, 0
    while spent < limit and not reached(first, now):
        begin = time.perf_counter()
        state, metrics = advance(state)
        iteration += chunk
        refreshed = parts.env.refresh(state.env, jax.random.fold_in(jax.random.key(2), iteration))
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


def humanoid(name, folder):
    """The command on two cores, a quarter of an hour: its evaluations, the untrained one first."""
    command = [sys.executable, "-m", "jaxtd3.train", "--env", name, "--profile", "cpu"]
    command += [
        "--devices",
        "2",
        "--iterations",
        "20000",
        "--max-time",
        "900",
        "--eval-every",
        "500",
    ]
    command += ["--no-video", "--run-dir", str(folder)]
    subprocess.run(command, check=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "eval/return" in row]
    for row in rows:
        print(
            f"{name}: {row['iteration']} iterations, {row['seconds']:.0f} s, return "
            f"{row['eval/return']:.2f}, length {row['eval/length']:.0f}"
        )
    return rows


@pytest.mark.slow
def test_g1_gains_three_points_within_fifteen_minutes(tmp_path):
    first, *rows = humanoid("G1JoystickFlatTerrain", tmp_path / "run")
    assert max(row["eval/return"] for row in rows) >= first["eval/return"] + 3


@pytest.mark.slow
def test_t1_stays_up_longer_within_fifteen_minutes(tmp_path):
    first, *rows = humanoid("T1JoystickFlatTerrain", tmp_path / "run")
    assert max(row["eval/length"] for row in rows) >= 2.5 * first["eval/length"]
