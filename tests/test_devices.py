"""Many devices and many processes, from outside: fake devices, real processes over gloo."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from benchmarks.processes import free_port

from jaxtd3.cli import main as cli
from jaxtd3.core import processes
from jaxtd3.run import artifacts

ROOT = Path(__file__).parent.parent
SMALL = ["--num-envs", "16", "--length", "64", "--batch-size", "32", "--critic-hidden", "16"]


def environ(devices: int | None = None) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_"))}
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    # Nothing here asks how fast the programs are: plain code is compiled in half the time.
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    if devices:
        flag = f"--xla_force_host_platform_device_count={devices}"
        env["XLA_FLAGS"] += f" {flag}"
        env["PJRT_NPROC"] = str(2 * devices + 2)  # startup.room_for
    return env


def train(*words: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jaxtd3.train", *words],
        capture_output=True,
        text=True,
        env=environ(),
        timeout=900,
        **kwargs,
    )


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_eight_devices(marks):
    """test_sharding.py, in a process that has eight devices."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", marks, "tests/test_sharding.py"],
        cwd=ROOT,
        env=environ(8),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_devices(tmp_path):
    """Sizes per device on four, then the same global sizes on two."""
    run = tmp_path / "run"
    words = ["--env", "Pendulum", "--run-dir", str(run), "--log-every", "10"]
    words += ["--no-video"]
    done = train(*words, *SMALL, "--devices", "4", "--per-device", "--iterations", "20")
    assert done.returncode == 0, done.stderr
    assert "per device on 4: 64 envs, batch 128, ring of 4,096 transitions in all" in done.stdout
    assert len(summary(run)["devices"]) == 4
    done = train(*words, "--resume", "--devices", "2", "--iterations", "40")
    assert done.returncode == 0, done.stderr
    assert "saved on 4 devices, goes on with 2" in done.stdout
    assert summary(run)["iterations"] == 40
    assert json.loads((run / "config.json").read_text())["env"]["num_envs"] == 64


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--coordinator", "localhost:1"], "--coordinator given without --num-processes"),
        (
            ["--coordinator", "localhost:1", "--num-processes", "2", "--process-id", "2"],
            "--process-id 2 is not among 0 ... 1",
        ),
        (
            ["--coordinator", "localhost", "--num-processes", "2", "--process-id", "0"],
            "write HOST:PORT",
        ),
    ],
)
def test_half_a_description_is_refused(words, said, tmp_path, capsys):
    run = ["train", "--env", "Pendulum", "--run-dir", str(tmp_path / "run")]
    assert cli.main([*run, *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_sizes_that_devices_do_not_divide_are_refused(tmp_path):
    done = train("--env", "Pendulum", "--run-dir", str(tmp_path / "run"), "--devices", "3")
    assert done.returncode == 2
    assert "num_envs=64 is not divisible by 3 devices: 63 or 66" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed"), True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer"), True),
        (ValueError("shapes (3,) and (4,) differ"), False),
    ],
)
def test_a_lost_process_is_told_from_other_errors(error, lost):
    assert processes.is_loss(error) == lost


@pytest.mark.parametrize(
    ("said", "line", "pictures"),
    [
        ("UNKNOWN: Gloo all-reduce failed", "another process is gone", False),
        ("RESOURCE_EXHAUSTED: 8 GiB", "out of memory", True),  # the others live: there is time
    ],
)
def test_only_a_lost_process_costs_the_report(said, line, pictures, tmp_path, monkeypatch):
    drawn = []
    run = artifacts.Snapshot(*[None] * len(artifacts.Snapshot._fields))._replace(run_dir=tmp_path)
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(artifacts, "summarize", lambda run, *_: {"error": run.error})
    monkeypatch.setattr(artifacts, "write_artifacts", lambda *args: drawn.append(args))
    error = jax.errors.JaxRuntimeError(said)
    assert artifacts.crash(run, error, lambda: "no checkpoint")["error"].startswith(line)
    assert bool(drawn) == pictures
    assert (tmp_path / "summary.json").exists() != pictures  # else written with the pictures


# --- two processes ------------------------------------------------------------------------------


class Pair:
    """Two processes that train together."""

    def __init__(self, folder: Path, *words: str):
        meet = ["--coordinator", f"localhost:{free_port()}", "--num-processes", "2"]
        self.logs = [folder / f"{i}.log" for i in range(2)]
        self.processes = []
        for i, log in enumerate(self.logs):
            command = [sys.executable, "-m", "jaxtd3.train", *words, *meet, "--process-id", str(i)]
            with log.open("w") as out:
                process = subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, env=environ()
                )
            self.processes.append(process)

    def text(self, i: int) -> str:
        return self.logs[i].read_text()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def pairs():
    started: list[Pair] = []
    yield started
    for pair in started:
        pair.stop()


def best_return(run: Path) -> float:
    path = run / "metrics.jsonl"
    rows = path.read_text().splitlines() if path.exists() else []
    whole = [json.loads(row) for row in rows if row.endswith("}")]
    return max((row.get("eval/return") or 0.0 for row in whole), default=0.0)


def checkpoints(run: Path) -> list[int]:
    """Iterations whose checkpoint is whole: only then is it renamed to its number."""
    return sorted(int(path.name) for path in run.glob("checkpoints/*") if path.name.isdigit())


@pytest.mark.parametrize(
    ("env", "goal", "every"),
    [
        (["Pendulum", *SMALL, "--log-every", "10"], -math.inf, 50),
        pytest.param(["CartpoleBalance"], 900, 250, marks=pytest.mark.slow),
    ],
    ids=["short", "learning"],
)
def test_two_processes_learn_and_one_may_die(tmp_path, pairs, env, goal, every, capsys):
    """Two processes train until there is a checkpoint; one is killed, one ends; another goes on."""
    run = tmp_path / "run"
    words = ["--run-dir", str(run), "--no-video", "--env", *env]
    pair = Pair(tmp_path, *words, "--iterations", "100000", "--checkpoint-every", str(every))
    pairs.append(pair)

    def reached() -> bool:
        return len(checkpoints(run)) > 0 and best_return(run) >= goal

    limit = time.monotonic() + 600
    while not reached() and time.monotonic() < limit:
        assert all(p.poll() is None for p in pair.processes), pair.text(0) + pair.text(1)
        time.sleep(0.5)
    assert reached(), pair.text(0)
    assert "parameters equal in 2 processes" in pair.text(0)
    assert "iteration" not in pair.text(1)  # only the first one speaks

    pair.processes[1].send_signal(signal.SIGKILL)
    code = pair.processes[0].wait(timeout=60)
    assert code != 0
    assert "another process is gone" in pair.text(0), pair.text(0)[-2000:]
    assert "Traceback" not in pair.text(0)
    assert summary(run)["status"] == "failed"
    assert not (run / "report.html").exists()  # it has no time for pictures: see artifacts.crash

    until = checkpoints(run)[-1] + every
    assert cli.main(["train", *words, "--resume", "--iterations", str(until)]) == 0
    assert "saved on 2 devices, goes on with 1" in capsys.readouterr().out
    assert summary(run)["iterations"] == until
    assert summary(run)["final_return"] >= goal
    assert (run / "report.html").exists()


@pytest.mark.slow
def test_bundles_of_four_devices_balance_the_pole(tmp_path):
    """Gorila's bundles: each device learns alone for eight updates."""
    run = tmp_path / "run"
    words = ["--env", "CartpoleBalance", "--run-dir", str(run), "--no-video", "--devices", "4"]
    done = train(*words, "--sync-every", "8")
    assert done.returncode == 0, done.stderr
    assert summary(run)["best_return"] >= 900
