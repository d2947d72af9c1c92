"""It learns: the presets of the CPU profile against the clock, compile time apart."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time

import jax
import pytest

import jaxtd3
from conftest import unoptimized
from jaxtd3.run.program import build, run_keys

pytestmark = pytest.mark.as_shipped


def learn(name, reached, seconds=math.inf, iterations=math.inf, chunk=250, **changes):
    """Train by the preset until `reached(now)` or a limit; (now, seconds)."""
    program = build(jaxtd3.preset(name, profile="cpu", log_every=chunk, **changes))
    with unoptimized():
        state = program.start()
    keys = run_keys(program.config.run.seed)
    program = program._replace(chunk=program.chunk.lower(program.shapes).compile())

    def score():
        metrics = program.evaluate(state.agent, state.weights, keys.evaluate)
        return {k: float(metrics[k]) for k in ("return", "length")}

    now = score()
    print(f"{name}: untrained, return {now['return']:.1f}, length {now['length']:.0f}")
    spent, done = 0.0, 0
    while spent < seconds and done < iterations and not reached(now):
        begin = time.perf_counter()
        state, metrics = program.advance(state, done)
        jax.block_until_ready((metrics, state.env.obs))
        spent, done = spent + time.perf_counter() - begin, done + chunk
        now = score()
        print(
            f"{name}: {done} iterations, {spent:.1f} s, "
            f"return {now['return']:.1f}, length {now['length']:.0f}"
        )
    return now, spent


def test_cartpole_is_balanced_within_the_preset():
    now, _ = learn("CartpoleBalance", lambda now: now["return"] >= 950, iterations=2_000, chunk=500)
    assert now["return"] >= 950


@pytest.mark.slow
def test_cheetah_runs_within_five_minutes():
    now, spent = learn("CheetahRun", lambda now: now["return"] >= 600, seconds=300)
    assert now["return"] >= 600, f"after {spent:.0f} s"


@pytest.mark.slow
def test_pendulum_swings_up_within_two_minutes():
    now, spent = learn("PendulumSwingup", lambda now: now["return"] >= 700, seconds=120)
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
