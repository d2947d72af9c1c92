"""The host loop: whole run directories, exact resumes, signals, one trace."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

from jaxtd3.cli import main as cli
from jaxtd3.config.config import load_config
from jaxtd3.envs.registry import preset
from jaxtd3.errors import UserError
from jaxtd3.output import rundir
from jaxtd3.output.logs import JsonlLog, WandbLog, read_rows, truncate_rows, wandb_mode
from jaxtd3.run import artifacts, session
from jaxtd3.run.checkpoint import RunLock
from jaxtd3.run.program import build, whole_chunks
from jaxtd3.run.progress import Plain, Quiet, Status, duration, numbers
from jaxtd3.run.session import Options, Session

SETTINGS = {
    "num_envs": 4,
    "batch_size": 32,
    "actor_hidden": 16,
    "critic_hidden": 16,
    "length": 64,
    "warmup": 4,
    "episode_length": 15,
    "iterations": 40,
    "log_every": 10,
    "eval_every": 20,
    "eval_episodes": 4,
    "checkpoint_every": 20,
    "max_bad_updates": 20,
}
TINY = ["--env", "Pendulum", "--profile", "cpu", "--no-video", "--quiet"]
TINY += [f"--{name}={value}" for name, value in SETTINGS.items()]


def train(run_dir: Path, *more: str) -> dict:
    """A run through the command line."""
    assert cli.main(["train", *TINY, "--run-dir", str(run_dir), *more]) == 0
    return summary(run_dir)


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def tiny(**changes):
    return preset("Pendulum", profile="cpu", **(SETTINGS | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of four chunks, not interrupted."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    train(run_dir)
    return run_dir


class Fast(Session):
    """A session that shares its compiled program with the others."""

    programs: ClassVar[dict] = {}

    def compile(self):
        if self.program.fns not in self.programs:
            self.programs[self.program.fns] = super().compile()
        return self.programs[self.program.fns]


@pytest.fixture(scope="module")
def parts():
    return build(tiny())


@pytest.fixture
def run(parts, tmp_path, bare_ends):
    """run(name, settings, options) -> summary."""

    def start(name: str = "run", settings: dict | None = None, ui=None, **options) -> dict:
        config = parts.config.override(settings or {})
        own = Options(video=False, **options)
        return Fast(parts._replace(config=config), tmp_path / name, own, ui or Quiet()).run()

    return start


# --- what a run leaves --------------------------------------------------------------------------


def test_run_directory_is_whole(whole):
    names = {path.name for path in whole.iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "checkpoints", "summary.json"}
    assert names >= {"curves.png", "report.html", "policy.onnx"}
    assert not [name for name in names if name.endswith(".part")]
    config = load_config(whole / "config.json")
    assert (config.env.name, config.env.num_envs, config.run.iterations) == ("Pendulum", 4, 40)


def test_metrics_schema(whole):
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 10, 20, 30, 40]
    for row in rows:
        for name, kind in rundir.METRICS.items():
            assert isinstance(row[name], kind), name
        others = [name for name in row if name not in rundir.METRICS]
        assert all(name.startswith(rundir.METRIC_PREFIXES) for name in others)
        assert all(row[name] is None or isinstance(row[name], int | float) for name in others)
        assert row["env_steps"] == 4 * row["iteration"]
        assert ("eval/return" in row) == (row["iteration"] % 20 == 0)
    assert "train/critic_loss" in rows[-1]
    assert {"eval/length", "eval/return_weighted", "eval/term/angle"} <= set(rows[-1])
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)


def test_episode_metrics_are_means(whole):
    rows = read_rows(whole / "metrics.jsonl")
    rows = rows[1:]  # the first one is of untrained weights
    done = [row for row in rows if row["episode/count"]]
    assert done
    assert all(row["episode/length"] == 15 for row in done)
    assert not any("sum" in name for row in rows for name in row)
    assert all("episode/return" not in row for row in rows if not row["episode/count"])


def test_summary_schema(whole):
    found = summary(whole)
    assert set(found) == set(rundir.SUMMARY)
    for name, kind in rundir.SUMMARY.items():
        assert found[name] is None or isinstance(found[name], kind), name
    assert found["status"] == "completed"
    assert found["status"] in rundir.STATUSES
    assert (found["iterations"], found["env_steps"]) == (40, 160)
    assert found["error"] is None
    assert len(found["state_sha256"]) == len(found["params_sha256"]) == 64
    rows = read_rows(whole / "metrics.jsonl")
    returns = [row["eval/return"] for row in rows if "eval/return" in row]
    assert found["final_return"] == returns[-1]
    assert found["best_return"] == max(returns[1:])
    assert found["first_return"] == returns[0]
    times = found["times"]
    parts = {"compile", "train", "collect", "update", "eval", "checkpoint", "other"}
    assert times.keys() == parts
    assert times["collect"] + times["update"] == pytest.approx(times["train"])


def test_saved_config_reproduces_the_run(whole, tmp_path, bare_ends):
    args = ["train", "--config", str(whole / "config.json"), "--run-dir", str(tmp_path / "again")]
    assert cli.main([*args, "--no-video", "--quiet"]) == 0
    assert summary(tmp_path / "again")["state_sha256"] == summary(whole)["state_sha256"]


def test_json_is_all_that_is_printed(tmp_path, capfd, bare_ends):
    train(tmp_path / "run", "--json", "--iterations", "10")
    printed = capfd.readouterr().out
    assert json.loads(printed)["iterations"] == 10


# --- the same bits ------------------------------------------------------------------------------


def test_a_long_run_can_be_watched(run, monkeypatch):
    """Films and reports on the way, none after the last chunk, and no bit of the run changed."""
    made = []
    monkeypatch.setattr(artifacts, "make_video", lambda session, state: made.append("video"))
    plain = run("plain")
    monkeypatch.setattr(artifacts, "make_report", lambda run_dir: made.append("report"))
    chunk = SETTINGS["log_every"]
    watched = run("watched", video_every=2 * chunk)
    times = SETTINGS["iterations"] // (2 * chunk) - 1  # the end has its own
    assert made == ["video", "report"] * times + ["report"]
    assert watched["state_sha256"] == plain["state_sha256"]


def test_evaluations_do_not_disturb_training(whole, run):
    found = run("without", {"eval_every": 0, "checkpoint_every": 0})
    assert found["state_sha256"] == summary(whole)["state_sha256"]
    assert run("other", {"seed": 1})["state_sha256"] != found["state_sha256"]


def test_resume_equals_uninterrupted(whole, run, tmp_path):
    half = run(settings={"iterations": 20})
    assert half["state_sha256"] != summary(whole)["state_sha256"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with open(metrics, "a") as file:  # a chunk that was not saved, then a kill
        file.write('{"iteration": 30, "env_steps": 120}\n{"iteration": 4')
    full = run(resume=True)
    assert full["state_sha256"] == summary(whole)["state_sha256"]
    assert full["params_sha256"] == summary(whole)["params_sha256"]
    rows, expected = read_rows(metrics), read_rows(whole / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [0, 10, 20, 30, 40]
    assert full["first_return"] == summary(whole)["first_return"]
    assert rows[-1]["train/critic_loss"] == expected[-1]["train/critic_loss"]
    assert rows[-1]["seconds"] > half["train_seconds"]  # time counts on


def test_resume_before_the_first_checkpoint_starts_over(whole, run, tmp_path):
    (tmp_path / "run").mkdir()
    tiny().save(tmp_path / "run" / "config.json")
    metrics = tmp_path / "run" / "metrics.jsonl"
    first = (whole / "metrics.jsonl").read_text().splitlines()[0]
    metrics.write_text(first + "\n")  # evaluated, then killed: not evaluated again
    assert run(resume=True)["state_sha256"] == summary(whole)["state_sha256"]
    assert [row["iteration"] for row in read_rows(metrics)] == [0, 10, 20, 30, 40]


def test_resume_passes_over_a_broken_checkpoint(whole, run, tmp_path, capsys):
    run()
    newest = tmp_path / "run" / "checkpoints" / "000000040"
    (newest / "meta.json").write_text("{")
    found = run(resume=True, ui=Plain())
    assert found["state_sha256"] == summary(whole)["state_sha256"]
    printed = capsys.readouterr().out
    assert "passed over 000000040/meta.json" in printed
    assert "resumed at iteration 20" in printed


def test_resume_from_another_run(whole, run):
    first = min((whole / "checkpoints").iterdir())
    assert run(resume_from=first)["state_sha256"] == summary(whole)["state_sha256"]


def test_resume_without_replay_refills(run, capsys):
    run(settings={"iterations": 20}, checkpoint_replay=False)
    found = run(resume=True, ui=Plain())
    assert "collecting 64 steps" in capsys.readouterr().out
    assert found["status"] == "completed"


def test_a_changed_learning_rate_takes_effect_on_resume(whole, run):
    run(settings={"iterations": 20})
    found = run(settings={"actor_lr": 1e-2}, resume=True)
    assert found["params_sha256"] != summary(whole)["params_sha256"]


def test_init_from_takes_weights_and_nothing_else(whole, run):
    found = run("warm", {"iterations": 10}, init_from=whole)
    assert found["iterations"] == 10
    assert found["params_sha256"] != run("cold", {"iterations": 10})["params_sha256"]


def test_evaluate_agrees_with_the_run(whole, capsys):
    assert cli.main(["evaluate", str(whole), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["return"] == summary(whole)["final_return"]
    assert cli.main(["evaluate", str(whole), "--json", "--seed", "7"]) == 0
    assert json.loads(capsys.readouterr().out)["return"] != found["return"]


def test_evaluate_best(whole, capsys):
    assert cli.main(["evaluate", str(whole), "--json", "--best"]) == 0
    assert json.loads(capsys.readouterr().out)["return"] == summary(whole)["best_return"]


def test_export(whole, tmp_path, capsys):
    assert cli.main(["export", str(whole), "--out", str(tmp_path / "policy.onnx")]) == 0
    assert "differs from JAX by" in capsys.readouterr().out


# --- one trace, faults, stops -------------------------------------------------------------------


def test_everything_is_traced_once(parts, tmp_path, run):
    traces = []
    step = parts.fns.train_step
    counted = parts.fns._replace(train_step=lambda s: (traces.append(1), step(s))[1])
    session = Fast(parts._replace(fns=counted), tmp_path / "run", Options(video=False), Quiet())
    assert session.run()["iterations"] == 40
    assert len(traces) == 1


def test_updates_that_are_never_finite_end_the_run(parts, tmp_path, run):
    bad = parts.fns._replace(init=lambda key: _poisoned(parts.fns.init(key)))
    session = Fast(parts._replace(fns=bad), tmp_path / "run", Options(video=False), Quiet())
    found = session.run()
    assert found["status"] == "failed"
    assert "critic_loss not finite: " in found["error"]
    assert "no checkpoint yet" in found["error"]
    assert summary(tmp_path / "run")["status"] == "failed"
    assert not list((tmp_path / "run").glob("checkpoints/0*"))
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN is written as null


def test_a_long_run_tells_its_length_once_at_the_start(run, monkeypatch, capsys):
    monkeypatch.setattr(session, "LONG", 1e-6)
    run(ui=Plain())
    assert capsys.readouterr().out.count("training will take about") == 1
    monkeypatch.setattr(session, "LONG", 1e6)
    run("short", ui=Plain())
    assert "will take" not in capsys.readouterr().out


def test_what_cannot_be_drawn_does_not_fail_the_run(run, monkeypatch, capsys):
    def broken(run_dir):
        raise RuntimeError("no\npaper")

    monkeypatch.setattr(artifacts, "make_report", broken)
    assert run(settings={"iterations": 10}, ui=Plain())["status"] == "completed"
    assert "no paper\n" in capsys.readouterr().out


def test_a_disk_that_stays_full_fails_the_run(run, monkeypatch, capsys, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxtd3.durable.seal", full)
    found = run(ui=Plain())
    assert found["status"] == "failed"
    assert found["iterations"] == 40  # it went on training
    assert "checkpoint not written" in capsys.readouterr().out


def _poisoned(state):
    critic = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.agent.critic)
    return state.replace(agent=state.agent.replace(critic=critic))


def test_max_time(run):
    found = run(settings={"max_time": 1e-6})
    assert (found["status"], found["iterations"]) == ("time_limit", 10)
    assert found["final_return"] is not None


def test_two_runs_in_one_folder(run, tmp_path):
    with RunLock(tmp_path / "run"), pytest.raises(UserError, match="in use"):
        run(resume=True)


def test_signal_stops_saves_and_resumes(run, tmp_path):
    run_dir = tmp_path / "run"
    long = ["--iterations", "1000000", "--eval-every", "0", "--checkpoint-every", "0"]
    command = [sys.executable, "-m", "jaxtd3.train", *TINY, *long, "--run-dir", str(run_dir)]
    cache = jax.config.jax_compilation_cache_dir
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            if (run_dir / "metrics.jsonl").exists() and read_rows(run_dir / "metrics.jsonl"):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found = summary(run_dir)
    assert found["status"] == "interrupted"
    assert 0 < found["iterations"] < 1_000_000
    saved = [int(path.name) for path in (run_dir / "checkpoints").glob("0*")]
    assert saved == [found["iterations"]]
    again = run(settings={"iterations": found["iterations"] + 10}, resume=True)
    assert again["status"] == "completed"


# --- small parts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"iterations": 45}, (10, 50, 20, 20)),
        ({"iterations": 5}, (5, 5, 20, 20)),
        ({"eval_every": 7}, (7, 42, 7, 21)),
        ({"eval_every": 0, "checkpoint_every": 0}, (10, 40, 0, 0)),
        ({}, (10, 40, 20, 20)),
    ],
)
def test_whole_chunks(given, expected):
    config, notes = whole_chunks(tiny(**given))
    run = config.run
    assert (run.log_every, run.iterations, run.eval_every, run.checkpoint_every) == expected
    assert bool(notes) == (given not in ({}, {"eval_every": 0, "checkpoint_every": 0}))
    assert whole_chunks(config) == (config, [])


def test_thresholds_are_round():
    assert artifacts.thresholds(31.4, 0.2) == [5, 10, 15, 20, 25, 30]
    assert artifacts.thresholds(980.0, 3.0) == [200, 400, 600, 800]
    assert artifacts.thresholds(-150.0, -1200.0) == [-1000, -800, -600, -400, -200]
    assert artifacts.thresholds(0.0, 0.0) == []
    rows = [{"seconds": float(i), "eval/return": r} for i, r in enumerate((1.0, 12.0, 9.0, 31.0))]
    assert artifacts.seconds_to_return(rows)["10"] == 1.0
    assert artifacts.seconds_to_return(rows)["15"] == 3.0
    assert artifacts.seconds_to_return([]) == {}


def test_jsonl_keeps_what_a_full_disk_refuses(tmp_path, monkeypatch):
    log = JsonlLog(tmp_path / "metrics.jsonl")
    log.write({"iteration": 1, "x": math.nan})
    path, log.path = log.path, Path("/dev/full")
    log.write({"iteration": 2})
    assert log.error
    log.path = path
    log.write({"iteration": 3})
    assert log.error is None
    assert [row["iteration"] for row in read_rows(path)] == [1, 2, 3]
    assert read_rows(path)[0]["x"] is None
    assert [row["iteration"] for row in truncate_rows(path, 2)] == [1, 2]
    assert len(read_rows(path)) == 2


def test_wandb_is_offline_without_a_key(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode() == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() == "disabled"


def test_loggers(run, tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    found = run(settings={"iterations": 20}, tensorboard=True, wandb=True)
    assert found["status"] == "completed"
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    assert list((tmp_path / "run").rglob("offline-run*/*.wandb"))


def test_members_of_a_sweep_are_one_group(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = WandbLog(tmp_path, {"seed": 0}, "000", "walking-weights")
    log.write({"iteration": 1, "eval/return": 2.0})
    log.close({"tracking_error": 0.5}, None)
    (file,) = tmp_path.rglob("offline-run*/*.wandb")
    deadline = time.monotonic() + 120  # a process of wandb's own writes it, when it comes to it
    while b"walking-weights" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"walking-weights" in file.read_bytes()


def test_progress_texts():
    assert [duration(s) for s in (2.25, 75, 3720)] == ["2.2s", "1m15s", "1h02m"]
    shown = dict(numbers(Status(iteration=5, iterations=10, rate=1234.5, returned=-1.0, left=61)))
    assert shown["env steps/s"] == "1,234"
    assert shown["return"] == "-1.00"
    assert shown["time left"] == "1m01s"
