"""What logging, evaluations and checkpoints cost a run: two runs of the same command, in turns.

    scripts/overhead [ENV] [ROUNDS] [SECONDS]

Only one of the two is awake at a time (SIGSTOP, SIGCONT), so that whatever else the machine does
slows both alike.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from jaxtd3.bench.timing import spread
from jaxtd3.cli.main import complain
from jaxtd3.errors import UserError

BARE = ("--eval-every", "0", "--checkpoint-every", "0", "--log-every", "500")  # rows it needs
POLL = 0.005  # seconds
DEFAULTS = ("CartpoleBalance", "3", "1")


class Mark(NamedTuple):
    """A row that a run wrote: after how many seconds awake, at which iteration."""

    awake: float
    iteration: int


class Run:
    """A training run that can be sent to sleep."""

    def __init__(self, env: str, folder: Path, flags: tuple[str, ...]):
        command = [sys.executable, "-m", "jaxtd3.train", "--env", env, "--no-video", "--quiet"]
        self.rows = folder / "metrics.jsonl"
        self.process = subprocess.Popen(
            [*command, "--run-dir", str(folder), *flags], stdout=subprocess.DEVNULL
        )
        self.marks: list[Mark] = []
        self.read = 0
        self.awake = 0.0

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def look(self, now: float) -> None:
        """Mark the rows that have come since the last look."""
        if not self.rows.exists():
            return
        lines = self.rows.read_text().splitlines(keepends=True)
        for line in lines[self.read :]:
            if not line.endswith("\n"):
                break
            self.read += 1
            self.marks.append(Mark(now, json.loads(line)["iteration"]))

    def turn(self, seconds: float, until_row: bool = False) -> None:
        """Awake for some seconds, or until its first row of training."""
        if self.ended:
            return
        os.kill(self.process.pid, signal.SIGCONT)
        begun, before = time.perf_counter(), self.awake
        while not self.ended and self.awake - before < seconds:
            time.sleep(POLL)
            self.awake = before + time.perf_counter() - begun
            self.look(self.awake)
            if until_row and any(mark.iteration for mark in self.marks):
                break
        if not self.ended:
            os.kill(self.process.pid, signal.SIGSTOP)

    def rate(self) -> float:
        """Iterations per second awake, from the first row of training to the last but one.

        The last one always evaluates and saves.
        """
        marks = [mark for mark in self.marks if mark.iteration]
        first, last = marks[0], marks[-2]
        return (last.iteration - first.iteration) / (last.awake - first.awake)


def compare(env: str, seconds: float) -> tuple[float, float]:
    """Iterations per second with and without, of two runs in turns."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            Run(env, Path(folder) / name, flags)
            for name, flags in (("with", ()), ("without", BARE))
        ]
        try:
            for run in runs:
                os.kill(run.process.pid, signal.SIGSTOP)
            for run in runs:
                run.turn(3600.0, until_row=True)
            while not all(run.ended for run in runs):
                for run in runs:
                    run.turn(seconds)
        finally:
            for run in runs:
                if not run.ended:
                    run.process.kill()
                    run.process.wait()
        if any(run.process.returncode for run in runs):
            raise UserError(f"no comparison: a run of {env} failed")
        return runs[0].rate(), runs[1].rate()


def main(argv: list[str]) -> int:
    try:
        env, rounds, seconds = numbers([*argv, *DEFAULTS[len(argv) :]])
        costs = []
        for i in range(rounds):
            on, off = compare(env, seconds)
            costs.append(100 * (off - on) / off)
            told = f"with {on:.1f}, without {off:.1f} iterations/s, cost {costs[-1]:.1f} %"
            print(f"round {i + 1}: {told}", flush=True)
    except UserError as error:
        complain(error)
        return 2
    cost = spread(costs)
    print(f"cost {cost['median']:.1f} % ({cost['low']:.1f} to {cost['high']:.1f})")
    return 0


def numbers(words: list[str]) -> tuple[str, int, float]:
    """ENV ROUNDS SECONDS."""
    try:
        env, rounds, seconds = words[0], int(words[1]), float(words[2])
    except ValueError:
        raise UserError(f"{' '.join(words)}: write ENV ROUNDS SECONDS") from None
    if rounds < 1 or not 0 < seconds < 3600 or len(words) > 3:
        raise UserError(f"{' '.join(words)}: write ENV, ROUNDS of 1 or more, SECONDS below 3600")
    return env, rounds, seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
