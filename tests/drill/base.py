"""What the parts of the drill share: settings, lives of the command, one table of results."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.drill.kill import kill_at

from jaxtd3.run.progress import duration

# A run so small that saving it takes as long as training it.
SMALL: dict[str, Any] = {
    "num_envs": 4,
    "episode_length": 15,
    "length": 64,
    "batch_size": 32,
    "warmup": 4,
    "critic_updates": 2,
    "policy_updates": 1,
    "actor_hidden": 16,
    "critic_hidden": 16,
    "num_atoms": 11,
    "log_every": 10,
    "eval_every": 0,
    "eval_episodes": 4,
    "checkpoint_every": 10,
}
# Imported once, before every life is forked: a life then begins with its arguments.
PRELOAD = ["jaxtd3.run.session", "jaxtd3.cli.train", "jaxtd3.output.report"]
PRELOAD += ["jaxtd3.output.onnx", "orbax.checkpoint", "mujoco_playground"]


class Line(NamedTuple):
    """One line of the table."""

    what: str
    ok: bool
    found: str


class Ended(NamedTuple):
    """How a life of the command ended."""

    code: int | None
    said: str
    run_dir: Path

    @property
    def summary(self) -> dict[str, Any]:
        try:
            return json.loads((self.run_dir / "summary.json").read_text())
        except (OSError, ValueError):
            return {}

    @property
    def digests(self) -> tuple[Any, Any]:
        """What must be equal between runs of one seed."""
        return self.summary.get("state_sha256"), self.summary.get("params_sha256")


class Life:
    """The command in a process of its own, forked from one that has imported everything."""

    def __init__(self, argv: list[str], run_dir: Path, log: Path, fault: str = ""):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.run_dir, self.log = run_dir, log
        self.process = context.Process(target=_live, args=(argv, str(log), fault))
        self.process.start()

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def saving(self) -> bool:
        return any((self.run_dir / "checkpoints").glob(".tmp-*"))

    def wait_for(self, condition: Any, seconds: float, every: float = 0.005) -> bool:
        """Wait until the condition holds (True), the process ended or time is over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.is_alive():
            if condition():
                return True
            time.sleep(every)
        return bool(condition())

    def kill(self) -> Ended:
        self.process.kill()
        return self.end()

    def end(self, seconds: float = 600.0) -> Ended:
        """Wait for the end; whoever takes too long is killed and has no exit code."""
        self.process.join(seconds)
        late = self.process.is_alive()
        if late:
            self.process.kill()
            self.process.join()
        code = None if late else self.process.exitcode
        return Ended(code, self.said, self.run_dir)


def _live(argv: list[str], log: str, fault: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    from jaxtd3.cli.main import main
    from jaxtd3.run import checkpoint

    if fault:
        checkpoint.at_phase = kill_at(fault)
    sys.exit(main(argv))


class Saved(NamedTuple):
    """One checkpoint of a store."""

    iteration: int
    path: Path
    good: bool
    best: float | None


def listed(store: Any) -> list[Saved]:
    """Every checkpoint, newest first, each verified."""
    from jaxtd3.durable import read_json, verify

    store.wait()
    paths = sorted(store.directory.glob("[0-9]*"), reverse=True)
    best = [read_json(p / "meta.json").get("best") if not verify(p) else None for p in paths]
    return [Saved(int(p.name), p, not verify(p), b) for p, b in zip(paths, best, strict=True)]


@cache
def small_parts(**changes: Any) -> Any:
    """The small run's parts in this process."""
    from jaxtd3.envs.registry import preset
    from jaxtd3.run.program import build

    return build(preset("Pendulum", profile="cpu", **(SMALL | changes)))


@dataclass(frozen=True)
class Settings:
    """Kill, starve, corrupt and poison small runs, and see that none comes to harm."""

    kills: int = 100
    """SIGKILLs at random moments."""
    flips: int = 200
    """Single bits to flip in checkpoint files."""
    truncations: int = 50
    """Checkpoint files to cut short."""
    fuzz: int = 500
    """Mutated config.json, manifest.json, meta.json and array files."""
    soak: float = 1800.0
    """Seconds of the long run."""
    soak_env: str = "CartpoleBalance"
    """Environment of the long run."""
    soak_devices: int = 0
    """Devices of the long run (as many as there are)."""
    only: str = ""
    """Parts to run, separated by commas (all)."""
    seed: int = 0
    """Seed of the drill's own choices."""
    out: Path | None = None
    """Folder for the runs and faults.json (a temporary one, removed at the end)."""


@dataclass
class Drill:
    """A part's surroundings."""

    settings: Settings
    work: Path
    part: str
    rng: random.Random
    told: float = 0.0
    counting: tuple[int, int, float] = (0, 0, 0.0)  # total, done and time when it was first told

    def start(self, name: str, fault: str = "", resume: bool = False, **flags: Any) -> Life:
        """Begin a life of the small run `name`."""
        return self.command(self.argv(resume, **flags), name, fault)

    def command(self, words: list[str], name: str, fault: str = "") -> Life:
        """Begin a life of any command that takes a run directory."""
        words = [*words, "--run-dir", str(self.work / name)]
        return Life(words, self.work / name, self.log(name), fault)

    def log(self, name: str) -> Path:
        return self.work / f"{name.replace('/', '-')}.log"

    def run(self, name: str, fault: str = "", resume: bool = False, **flags: Any) -> Ended:
        """A whole life of the small run `name`."""
        return self.start(name, fault, resume, **flags).end()

    def argv(self, resume: bool = False, **flags: Any) -> list[str]:
        words = ["train", "--env", "Pendulum", "--profile", "cpu", "--no-video"]
        words += [f"--{k.replace('_', '-')}={v}" for k, v in (SMALL | flags).items()]
        return [*words, *(["--resume"] if resume else [])]

    def digest(self, path: Path, **changes: Any) -> tuple[int, str, list[str]]:
        """Iteration and digest of what a resume would load, and what it would pass over."""
        from jaxtd3.run.checkpoint import restore_from, state_sha256

        found = restore_from(path, small_parts(**changes).shapes)
        return found.iteration, state_sha256(found.state), found.skipped

    def tick(self, done: int, total: int) -> None:
        """Progress, now and then."""
        now = time.monotonic()
        if self.counting[0] != total:
            self.counting = total, done, now
        _, first, begun = self.counting
        if now - self.told < 5.0 or done <= first:
            return
        self.told = now
        left = (now - begun) / (done - first) * max(total - done, 0)
        text = f"{self.part}: {done} of {total}, {duration(left)} left"
        print(text, file=sys.stderr, flush=True)
