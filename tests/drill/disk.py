"""A disk that is full for a while, and one that stays full.

As root the run directory lies on a small tmpfs; elsewhere, and where mounting is not allowed, the
process gets a limit on the size of its files, which refuses the same writes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.drill.base import Drill, Life, Line

REFUSED = "checkpoint not written: "
SIZE: dict[str, Any] = {"length": 4096, "iterations": 4000}  # a checkpoint of some 100 KiB
ROOM = 96 << 10  # too little for it


class Disk(NamedTuple):
    """A way to run out of space."""

    name: str
    fill: Callable[[Life], None]
    free: Callable[[Life], None]


def ballast(life: Life) -> Path:
    return life.run_dir.parent / "ballast"


def fill_tmpfs(life: Life) -> None:
    with contextlib.suppress(OSError), open(ballast(life), "ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def free_tmpfs(life: Life) -> None:
    ballast(life).unlink()


def limit(bytes_: int) -> Callable[[Life], None]:
    """Let the process write no file beyond so many bytes, from now on."""

    def apply(life: Life) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(life.process.pid or 0, resource.RLIMIT_FSIZE, (bytes_, hard))

    return apply


TMPFS = Disk("a tmpfs", fill_tmpfs, free_tmpfs)
LIMIT = Disk("a limit on file sizes", limit(12 << 10), limit(resource.RLIM_INFINITY))


@contextlib.contextmanager
def mounted(path: Path, size: int) -> Iterator[bool]:
    """A tmpfs of `size` bytes at `path`; False where that is not allowed."""
    path.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    allowed = os.geteuid() == 0 and not subprocess.run(words, capture_output=True).returncode
    try:
        yield allowed
    finally:
        if allowed:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def disk(drill: Drill) -> Iterator[Line]:
    """Full for a while: told, tried again, the same bits; full to the end: a non-zero exit."""
    plain = drill.run("plain", checkpoint_every=0, **SIZE)
    drill.digest(plain.run_dir, **SIZE)  # the first look takes seconds, later ones do not
    with mounted(drill.work / "small", 64 << 20) as allowed:
        yield for_a_while(drill, TMPFS if allowed else LIMIT, plain.digests)
    with mounted(drill.work / "tiny", ROOM) as allowed:
        yield to_the_end(drill, TMPFS if allowed else LIMIT)


def newest(life: Life) -> int:
    names = (life.run_dir / "checkpoints").glob("[0-9]*")
    return max((int(path.name) for path in names), default=0)


def for_a_while(drill: Drill, way: Disk, expected: tuple[Any, Any]) -> Line:
    life = drill.start("small/run", **SIZE)
    life.wait_for(lambda: newest(life) > 0, 300.0)
    way.fill(life)
    told = life.wait_for(lambda: life.said.count(REFUSED) >= 3, 120.0, every=0.05)
    kept = newest(life)
    good = drill.digest(life.run_dir, **SIZE)[0] == kept  # loads while the disk is full
    way.free(life)
    again = life.wait_for(lambda: newest(life) > kept, 120.0)
    ended = life.end()
    refused = ended.said.count(REFUSED)
    ok = told and good and again and ended.code == 0 and ended.digests == expected
    ok &= "Traceback" not in ended.said
    return Line(
        f"disk full for a while ({way.name})",
        ok,
        f"told {refused} times, kept iteration {kept}, went on to {newest(life)}, same bits"
        if ok
        else f"told {told}, kept {kept}: {good}, again {again}, {ended.code}: {ended.said[-200:]}",
    )


def to_the_end(drill: Drill, way: Disk) -> Line:
    life = drill.start("tiny/run", **(SIZE | {"iterations": 400, "checkpoint_every": 40}))
    if way is LIMIT:
        life.wait_for(lambda: (life.run_dir / "config.json").exists(), 300.0)
        way.fill(life)
    ended = life.end()
    ok = ended.code == 1 and REFUSED in ended.said and "400 iterations" in ended.said
    ok &= "error: the end was not saved" in ended.said and "Traceback" not in ended.said
    return Line(
        f"disk full to the end ({way.name})",
        ok,
        f"trained all iterations, said so {ended.said.count(REFUSED)} times, exit code {ended.code}"
        if ok
        else ended.said[-300:],
    )
