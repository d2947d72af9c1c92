"""SIGKILL at random moments, and at every phase of a save."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from tests.drill.base import Drill, Ended, Life, Line

from jaxtd3.errors import UserError

ITERATIONS = 2000
EVALUATE = 50  # a multiple of the chunk
WINDOW = 2.0  # seconds of training before a kill, at most
PHASES = ("before", "arrays", "manifest", "after")


def kills(drill: Drill) -> Iterator[Line]:
    """Killed again and again, resumed each time: the same bits as undisturbed."""
    count = drill.settings.kills
    size: dict[str, Any] = {"iterations": ITERATIONS}
    plain = drill.run("plain", checkpoint_every=0, **size)
    evaluated = drill.run("evaluated", eval_every=EVALUATE, checkpoint_every=0, **size)
    same = plain.code == 0 and plain.digests == evaluated.digests and None not in plain.digests
    yield Line("evaluations on or off: same bits", same, f"state {str(plain.digests[0])[:12]}")
    killed = inside = loading = number = 0
    ends: list[Ended] = []
    resume = False
    while killed < count or resume:
        evaluating = drill.rng.choice((0, EVALUATE))
        life = drill.start(f"killed{number}", resume=resume, eval_every=evaluating, **size)
        aimed = killed < count and strike(drill, life)
        ended = life.end()
        if aimed and ended.code == -9:
            killed += 1
            inside += life.saving()
            loading += "training begins" not in ended.said
            resume = (life.run_dir / "config.json").exists()
            number += not resume  # nothing was written yet: a new folder
        else:
            ends.append(ended)
            number, resume = number + 1, False
            if ended.code != 0:
                break
        drill.tick(killed, count)
    equal = sum(end.code == 0 and end.digests == plain.digests for end in ends)
    yield Line(
        f"{killed} SIGKILLs, resumed each time",
        bool(ends) and equal == len(ends) and killed == count,
        f"{equal} of {len(ends)} runs end with the same bits; {inside} kills in a save, "
        f"{loading} before training",
    )


def strike(drill: Drill, life: Life) -> bool:
    """Wait for a random moment of a life and kill; False if it ended before."""
    how = drill.rng.random()
    if how < 0.15:  # while it starts
        life.process.join(drill.rng.uniform(0.0, 4.0))
    else:
        life.wait_for(lambda: "training begins" in life.said, 600.0, every=0.05)
        life.process.join(drill.rng.uniform(0.0, WINDOW))
        if how < 0.5:  # in a save
            life.wait_for(life.saving, 10.0, every=0.0005)
            time.sleep(drill.rng.uniform(0.0, 0.02))
    alive = life.process.is_alive()
    life.process.kill()
    return alive


def phases(drill: Drill) -> Iterator[Line]:
    """Killed at a phase of its N-th save: the checkpoint before or the new one, never a mixture."""
    size: dict[str, Any] = {"iterations": 40, "keep": 9}
    whole = drill.run("phases", **size)
    digests = {}
    for path in (whole.run_dir / "checkpoints").glob("[0-9]*"):
        digests[int(path.name)] = drill.digest(path)[1]
    numbers = (1, 3)
    for i, phase in enumerate(PHASES):
        good, loaded = True, []
        for number in numbers:
            ended = drill.run(f"{phase}{number}", fault=f"{phase}:{number}", **size)
            iteration, digest = 0, None
            with contextlib.suppress(UserError):  # killed before there was any
                iteration, digest, _ = drill.digest(ended.run_dir)
            loaded.append(iteration)
            expected = 10 * (number - (phase != "after"))
            good &= ended.code == -9 and iteration == expected
            good &= digest == digests.get(iteration)
            again = drill.run(f"{phase}{number}", resume=True, **size)
            good &= again.code == 0 and again.digests == whole.digests
            good &= not list((ended.run_dir / "checkpoints").glob(".*"))
        drill.tick(i + 1, len(PHASES))
        found = f"save {numbers[0]}, {numbers[1]} -> loads iteration {loaded[0]}, {loaded[1]}"
        yield Line(f"SIGKILL in a save: {phase}", good, f"{found}; resumed to the same bits")
