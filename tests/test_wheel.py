"""The wheel in an empty environment, installed by pip alone: commands work there, and it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_wheel_installs_and_trains(tmp_path):
    """Minutes: pip fetches JAX and MuJoCo."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    venv.create(tmp_path / "env", with_pip=True)
    bin = tmp_path / "env" / "bin"
    wheel = next(tmp_path.glob("*.whl"))
    subprocess.run([bin / "pip", "install", "--quiet", wheel], check=True, timeout=1800)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}

    def jaxtd3(*words: str) -> subprocess.CompletedProcess:
        command = [bin / "jaxtd3", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1800
        )

    assert "train" in jaxtd3("--help").stdout
    findings = json.loads(jaxtd3("doctor", "--json").stdout)
    assert {f["what"]: f["ok"] for f in findings}["precision"]
    short = "--iterations 50 --log-every 25 --eval-every 50 --no-video --json"
    done = jaxtd3("train", "--env", "Pendulum", *short.split(), "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "completed"
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000  # templates are in the wheel
    bench = jaxtd3("bench", "--env", "Pendulum")
    assert (bench.returncode, bench.stdout) == (2, "")
    assert "run this from a checkout" in bench.stderr
