"""Flipped bits and cut files in a checkpoint."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from tests.drill.base import Drill, Line

COMMANDS = 2  # of each kind of damage, so many through the command


def flip(path: Path, rng: Random) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: Random) -> None:
    """Lose the end of a file, or all of it."""
    os.truncate(path, rng.randrange(path.stat().st_size))


def bits(drill: Drill) -> Iterator[Line]:
    """Damage the newest checkpoint: found, named, and the one before is taken."""
    whole = drill.run("bits", iterations=40)
    older, newer = sorted((whole.run_dir / "checkpoints").glob("[0-9]*"))
    expected = drill.digest(older)[:2]
    jobs = (
        ("flipped bits", flip, drill.settings.flips),
        ("cut files", cut, drill.settings.truncations),
    )
    for what, harm, count in jobs:
        yield damaged(drill, newer, expected, what, harm, count)
    for what, harm, count in jobs:
        good = True
        for i in range(min(COMMANDS, count)):
            copy = drill.work / f"{what.split()[0]}{i}"
            shutil.copytree(whole.run_dir, copy)
            name = drill.rng.choice(names_in(newer))
            harm(copy / "checkpoints" / newer.name / name, drill.rng)
            ended = drill.run(copy.name, resume=True, iterations=40)
            good &= ended.code == 0 and ended.digests == whole.digests
            good &= f"passed over {newer.name}/{name}" in ended.said
        found = f"{min(COMMANDS, count)} of {min(COMMANDS, count)} passed over by name, same bits"
        yield Line(f"{what}, by the command", good, found if good else ended.said[-200:])


def names_in(checkpoint: Path) -> list[str]:
    """Every file that has bytes to harm."""
    files = (p for p in checkpoint.rglob("*") if p.is_file() and p.stat().st_size)
    return sorted(p.relative_to(checkpoint).as_posix() for p in files)


def damaged(
    drill: Drill,
    newer: Path,
    expected: tuple[int, str],
    what: str,
    harm: Callable[[Path, Random], None],
    count: int,
) -> Line:
    """Harm, load, put right, `count` times over all files in turn."""
    names, seen, found = names_in(newer), Counter[str](), 0
    for i in range(count):
        name = names[i] if i < len(names) else drill.rng.choice(names)
        original = (newer / name).read_bytes()
        harm(newer / name, drill.rng)
        iteration, digest, skipped = drill.digest(newer.parent.parent)
        named = any(line.startswith(f"{newer.name}/{name}: ") for line in skipped)
        found += named and (iteration, digest) == expected
        seen[name] += 1
        (newer / name).write_bytes(original)
        drill.tick(i + 1, count)
    whole = drill.digest(newer)[2] == []
    line = f"{found} of {count} found, named and passed over, in {len(seen)} files"
    return Line(f"{count} {what}", found == count and whole, line)
