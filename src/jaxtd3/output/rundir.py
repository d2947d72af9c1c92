"""The run directory: names of its files, what they hold, who may write into it.

    runs/G1JoystickFlatTerrain-fasttd3-0-20250101-120000/
        config.json     every setting; `--config` reproduces the run
        metrics.jsonl   one object per chunk (METRICS)
        checkpoints/    whole states to resume from
        summary.json    one object at the end (SUMMARY)
        curves.png  report.html  video.mp4 (or .gif)  policy.onnx
        fault/          the state in which updates stopped being finite, for `jaxtd3 doctor --fault`
        crash.txt       what nobody expected

Numbers that are not finite are written as null. Times are in seconds; `seconds` and
`train_seconds` count collecting and learning alone, `compile_seconds` all compilation so far.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from jaxtd3.errors import UserError

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
POLICY_FILE = "policy.onnx"
VIDEO_FILE = "video.mp4"
CRASH_FILE = "crash.txt"

STATUSES = ("completed", "time_limit", "interrupted", "failed")

# A line of metrics.jsonl has these always ...
METRICS: dict[str, Any] = {
    "iteration": int,  # iterations done
    "env_steps": int,  # over all environments
    "seconds": float,
    "compile_seconds": float,
    "time/env_steps_per_second": float,  # of this chunk
    "time/iterations_per_second": float,
    "time/eval": float,  # so far, as the next two
    "time/checkpoint": float,
    "time/other": float,
}
# ... and any number under these prefixes: means over the chunk (`count`, `terminated`,
# `quarantined`, `skipped`: sums); `eval/*` only where an evaluation followed. The
# first line, of iteration 0, has nothing but that: the weights that training began with.
METRIC_PREFIXES = ("train/", "episode/", "env/", "time/", "eval/")

SUMMARY: dict[str, Any] = {
    "env": str,
    "algo": str,
    "profile": str,
    "seed": int,
    "status": str,  # one of STATUSES
    "iterations": int,
    "env_steps": int,
    "first_return": float,  # of the weights it began with, or null without evaluations
    "final_return": float,  # of the last evaluation, under the environment's own reward, or null
    "best_return": float,
    "final_length": float,  # mean episode length of the last evaluation
    "walks": bool,  # whether a robot on two feet then walked as commanded; null for others
    "start_seconds": float,  # from the start of the command to the first chunk
    "compile_seconds": float,
    "train_seconds": float,
    "env_steps_per_second": float,
    "seconds_to_return": dict,  # "20": training seconds until an evaluation returned 20 or more
    "times": dict,  # seconds: compile, train (= collect + update), eval, checkpoint, other
    "devices": list,  # names, one per device
    "versions": dict,
    "state_sha256": str,  # of the whole TrainState: equal exactly when two runs are (crash: null)
    "params_sha256": str,  # of actor, critics and targets
    "error": str,  # why a run failed, or null
}


def default_run_dir(env: str, algo: str, seed: int) -> Path:
    """runs/<env>-<algo>-<seed>-<time>; of file.py:Class, the class."""
    env = env.rpartition(":")[2]
    return Path("runs") / f"{env}-{algo}-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_run_dir(path: Path, resume: bool) -> None:
    """Refuse a folder that is occupied or cannot be written; nothing is created."""
    if path.exists() and not path.is_dir():
        raise UserError(f"run dir {path} is not a folder")
    if path.is_dir() and any(p.name != ".lock" for p in path.iterdir()) and not resume:
        hint = "--resume goes on with it" if (path / CONFIG_FILE).exists() else "choose another"
        raise UserError(f"run dir {path} is not empty: {hint}")
    near = path.absolute()
    while not near.exists():
        near = near.parent
    if not near.is_dir() or not os.access(near, os.W_OK | os.X_OK):
        raise UserError(f"run dir {path} cannot be created: {near} is not a writable folder")


def create_run_dir(path: Path) -> None:
    """Make the folder, or say in one line why not."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run dir {path} cannot be created: {error.strerror}") from error


def require_run(path: Path) -> Path:
    """The folder of a run, or one line that says it is none."""
    if not (path / CONFIG_FILE).is_file():
        raise UserError(f"{path} is not a run: it has no {CONFIG_FILE}")
    return path
