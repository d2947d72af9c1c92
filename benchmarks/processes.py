"""The same training, two cores divided three ways: one process, two devices, two processes."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxtd3.bench.timing import spread
from jaxtd3.errors import UserError
from jaxtd3.output.logs import read_rows

FLAGS = "--eval-every 0 --checkpoint-every 0 --eval-episodes 2 --log-every 50 --no-video --quiet"
WAYS = ("one process, two cores", "two devices, two cores", "two processes, a core each")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(words: list[str], cores: set[int]) -> subprocess.Popen:
    """`jaxtd3 train WORDS` on some cores."""
    return subprocess.Popen(
        [sys.executable, "-m", "jaxtd3", "train", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(os.sched_setaffinity, 0, cores),
    )


def iterations_per_second(way: str, flags: str, cores: list[int], run: Path) -> list[float]:
    """The rate of every chunk but the first, of one training run."""
    words = [*shlex.split(f"{flags} {FLAGS}"), "--run-dir", str(run)]
    if way == WAYS[0]:
        processes = [start([*words, "--devices", "1"], set(cores))]
    elif way == WAYS[1]:
        processes = [start([*words, "--devices", "2"], set(cores))]
    else:
        meet = ["--coordinator", f"localhost:{free_port()}", "--num-processes", "2"]
        processes = [
            start([*words, *meet, "--process-id", str(i)], {core}) for i, core in enumerate(cores)
        ]
    for process in processes:
        _, said = process.communicate()
        if process.returncode:
            raise UserError(f"{way}: {said.strip()[-300:]}")
    return [row["time/iterations_per_second"] for row in read_rows(run / "metrics.jsonl")][1:]


def compare(flags: str, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Iterations per second of each way, total work the same, ways taking turns."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise UserError("two cores are needed")
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for i, way in enumerate(WAYS):
                tell(f"round {number + 1} of {rounds}: {way}")
                found = iterations_per_second(way, flags, cores, Path(folder) / f"{number}-{i}")
                rates[way].append(spread(found)["median"])
    base = rates[WAYS[0]]
    return {
        "command": f"jaxtd3 train {flags} {FLAGS}",
        **{f"{way}, iterations/s": spread(values) for way, values in rates.items()},
        **{
            f"{way}, of the first": spread([v / b for v, b in zip(values, base, strict=True)])
            for way, values in list(rates.items())[1:]
        },
    }
