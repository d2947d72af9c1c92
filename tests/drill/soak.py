"""One long run: its memory and its speed stay what they are, and nothing is compiled again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.drill.base import Drill, Line

from jaxtd3.output.logs import read_rows

WARM_UP = 0.2  # of the time
FLAT = 0.05
START_LIMIT = 600.0
"""Seconds until the first row of metrics."""


def resident(pid: int) -> int | None:
    """Bytes of memory that a process holds; None where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGESIZE")


def rise(samples: list[tuple[float, float]]) -> float:
    """How far the least of the last third is above the least of the first, as a share.

    The least, because a save copies the state for a while.
    """
    begin, end = samples[0][0], samples[-1][0]
    third = (end - begin) / 3
    first = min(x for t, x in samples if t <= begin + third)
    return min(x for t, x in samples if t >= end - third) / first - 1


def drift(values: list[float]) -> float:
    """How much the last third differs from the first, as a share: medians, for single ones jump."""
    third = max(1, len(values) // 3)
    return median(values[-third:]) / median(values[:third]) - 1


def soak(drill: Drill) -> Iterator[Line]:
    """Train for so many seconds and look on from outside."""
    seconds, run_dir = drill.settings.soak, drill.work / "run"
    env, devices = drill.settings.soak_env, drill.settings.soak_devices
    words = [sys.executable, "-m", "jaxtd3.train", "--env", env, "--no-video", "--quiet"]
    words += ["--devices", str(devices)] if devices else []
    words += ["--iterations", "1000000000", "--max-time", str(seconds), "--run-dir", str(run_dir)]
    samples: list[tuple[float, int]] = []
    with open(drill.work / "run.log", "w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        begun = time.monotonic()
        while not read_rows(run_dir / "metrics.jsonl") and process.poll() is None:
            if time.monotonic() - begun > START_LIMIT:
                process.kill()
                process.wait()
                yield Line(
                    f"{seconds:.0f} s of {env}", False, f"no metrics after {START_LIMIT:.0f} s"
                )
                return
            time.sleep(0.2)
        begun = time.monotonic()
        while process.poll() is None and time.monotonic() - begun < 2 * seconds + 600:
            size = resident(process.pid)
            if size is not None:
                samples.append((time.monotonic() - begun, size))
                with open(drill.work / "memory.csv", "a") as kept:  # seconds, MiB
                    kept.write(f"{samples[-1][0]:.1f},{size / 2**20:.1f}\n")
            drill.tick(round(time.monotonic() - begun), round(seconds))
            time.sleep(min(2.0, seconds / 100))
        if process.poll() is None:
            process.kill()
        code = process.wait()
    yield from verdicts(code, seconds, samples, read_rows(run_dir / "metrics.jsonl"), env)


def verdicts(
    code: int, seconds: float, samples: list[tuple[float, int]], rows: list, env: str = "it"
) -> Iterator[Line]:
    """The lines about a run that has ended."""
    end = rows[-1]["seconds"] if rows else 0.0
    whole = code == 0 and end >= seconds
    yield Line(f"{seconds:.0f} s of {env}", whole, f"exit code {code}, trained {end:.0f} s")
    # Without the end: its evaluation, policy and report are not training.
    sizes = [(t, s / 2**20) for t, s in samples if WARM_UP * seconds < t < 0.98 * seconds]
    risen = rise(sizes) if sizes else float("inf")
    shown = "not told here"
    if sizes:
        least, most = min(s for _, s in sizes), max(s for _, s in sizes)
        shown = f"{least:.0f} MiB, {most:.0f} while saving, the least rose by {100 * risen:.1f} %"
    yield Line("memory of the process is flat", risen <= FLAT, f"{shown} after warm-up")
    steady = [r for r in rows[:-1] if r["seconds"] > WARM_UP * seconds]
    rates = [r["time/iterations_per_second"] for r in steady]
    moved = drift(rates) if rates else float("inf")
    shown = f"{median(rates):.1f}/s, last third against first {100 * moved:+.1f} %" if rates else ""
    yield Line("iterations per second are flat", abs(moved) <= FLAT, shown)
    compiled = {r["compile_seconds"] for r in steady}
    found = f"{len(steady)} chunks, compile seconds rose {max(len(compiled) - 1, 0)} times"
    yield Line("nothing is traced again", len(compiled) == 1, found)
