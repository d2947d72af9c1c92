"""Mutated files from strangers: each is refused in one line or means what it says; no traceback.

A mutant is made at one of three levels: bytes, tokens of JSON, or the structure of the object. What
reads it here is what the command calls; some go through the command itself.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.drill.base import Drill, Line, small_parts

from jaxtd3 import durable
from jaxtd3.config.config import config_from_dict
from jaxtd3.errors import UserError
from jaxtd3.run import memory
from jaxtd3.run.checkpoint import read_meta, restore_from, state_sha256

BY_COMMAND = 30  # so many go through the command
PATIENCE = 120.0  # seconds for each of them
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2,
    3.5,
    1000,
    2**31,
    2**63,
    10**30,
    -(10**30),
    1e308,
    1e-320,
]
ODD += ["", "x", "\x00", "auto", "../../../etc/passwd", "NaN", "é" * 300, [], [1], {}, {"a": 1}]
ODD += [float("nan"), float("inf")]
TOKEN = re.compile(rb'"[^"]*"|-?[0-9.]+(?:e[+-]?[0-9]+)?|true|false|null|[{}\[\],:]')


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """Flip, insert, remove or repeat bytes."""
    text = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(text) or 1), rng.randint(1, 20)
        change = rng.randrange(4)
        if change == 0 and text:
            text[at % len(text)] ^= 1 << rng.randrange(8)
        elif change == 1:
            text[at:at] = rng.randbytes(size)
        elif change == 2:
            del text[at : at + size]
        else:
            text[at:at] = text[at : at + size] * rng.randint(1, 50)
    return bytes(text)


def mutate_tokens(data: bytes, rng: Random) -> bytes:
    """Put other tokens, or none, in the place of some."""
    tokens = list(TOKEN.finditer(data))
    if not tokens:
        return mutate_bytes(data, rng)
    for token in sorted(
        rng.sample(tokens, min(len(tokens), rng.randint(1, 3))), key=lambda m: -m.start()
    ):
        other = rng.choice([*tokens, None])
        new = b"" if other is None else other.group()
        if rng.random() < 0.5:
            new = json.dumps(rng.choice(ODD)).encode()
        data = data[: token.start()] + new + data[token.end() :]
    return data


def mutate_structure(data: bytes, rng: Random) -> bytes:
    """Change, remove, add or move a value somewhere in the object."""
    try:
        tree = json.loads(data)
    except ValueError:
        return mutate_bytes(data, rng)
    spots = list(places(tree))
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(spots)
        change = rng.randrange(4)
        if change == 0 and isinstance(holder, dict):
            holder.pop(key, None)
        elif change == 1 and isinstance(holder, dict):
            holder[str(rng.choice(ODD))] = rng.choice(ODD)
        elif change == 2:
            other, there = rng.choice(spots)
            holder[key] = json.loads(json.dumps(other)) if rng.random() < 0.3 else there
        else:
            holder[key] = rng.choice(ODD)
    return json.dumps(tree).encode()


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of an object."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


LEVELS: tuple[Callable[[bytes, Random], bytes], ...] = (
    mutate_bytes,
    mutate_tokens,
    mutate_structure,
)


def mutate(data: bytes, number: int, rng: Random) -> bytes:
    """Another content than `data`, the levels taking turns."""
    mutant = data
    while mutant == data:
        mutant = LEVELS[number % len(LEVELS)](data, rng)
    return mutant


class Targets:
    """What is mutated, and how it is read; each reader says `run` or `refused`, or raises."""

    def __init__(self, drill: Drill):
        self.run_dir = drill.run("fuzz", iterations=40).run_dir
        self.older, self.newer = sorted((self.run_dir / "checkpoints").glob("[0-9]*"))
        self.digests = {p: drill.digest(p)[1] for p in (self.older, self.newer)}
        self.built: set[Any] = set()

    def config(self, path: Path) -> str:
        """`--config FILE`, up to the point where memory would be taken."""
        from jaxtd3.cli.main import Train
        from jaxtd3.cli.train import settings
        from jaxtd3.run.program import build

        config, _ = settings(Train(config=path), {})
        sizes = json.dumps(
            {k: v for k, v in config.to_dict().items() if k != "run"}, sort_keys=True
        )
        if sizes not in self.built:
            memory.check(config, build(config).shapes)
            self.built.add(sizes)
        return "run"

    def manifest(self, path: Path) -> str:
        """`--resume`: the newest checkpoint is right, or passed over."""
        found = restore_from(self.run_dir, small_parts().shapes)
        if state_sha256(found.state) != self.digests[found.path]:
            raise AssertionError(f"{found.path} loads as something else")
        return "run" if found.path == self.newer else "refused"

    def sealed(self, path: Path) -> str:
        """`--resume-from`: any content under a right manifest."""
        (self.newer / durable.MANIFEST).unlink()
        durable.seal(self.newer)
        config_from_dict(read_meta(self.newer).get("config"))
        found = restore_from(self.newer, small_parts().shapes)
        sizes = [x.shape for x in (found.state.replay.obs, found.state.env.obs)]
        shapes = small_parts().shapes
        if sizes != [x.shape for x in (shapes.replay.obs, shapes.env.obs)]:
            raise AssertionError("another size was loaded")
        return "run"

    def table(self) -> list[tuple[str, Path, Callable[[Path], str], float]]:
        """Name, file, reader, share of the mutants."""
        return [
            ("config.json", self.run_dir / "config.json", self.config, 0.4),
            ("manifest.json", self.newer / durable.MANIFEST, self.manifest, 0.25),
            ("meta.json, resealed", self.newer / "meta.json", self.sealed, 0.2),
            ("array headers, resealed", self.newer / "state" / "_METADATA", self.sealed, 0.15),
        ]


def fuzz(drill: Drill) -> Iterator[Line]:
    """So many mutants of each file, then some through the command."""
    targets = Targets(drill)
    done, total = 0, drill.settings.fuzz
    for name, path, read, share in targets.table():
        count = round(total * share)
        original, manifest = path.read_bytes(), (targets.newer / durable.MANIFEST).read_bytes()
        seen: Counter[str] = Counter()
        wrong = []
        for i in range(count):
            mutant = mutate(original, i, drill.rng)
            path.write_bytes(mutant)
            try:
                seen[read(path)] += 1
            except UserError as error:
                seen["refused"] += 1
                if "\n" in str(error) or len(str(error)) > 1500:
                    wrong.append(f"a long refusal: {str(error)[:200]}")
            except Exception as error:
                keep(drill, name, i, mutant)
                wrong.append(f"mutant {i}: {type(error).__name__}: {error}")
            path.write_bytes(original)
            (targets.newer / durable.MANIFEST).write_bytes(manifest)
            drill.tick(done := done + 1, total)
        found = f"{seen['refused']} refused in one line, {seen['run']} accepted, {len(wrong)} wrong"
        yield Line(f"{count} mutants of {name}", not wrong, f"{found} {'; '.join(wrong[:3])}")
    yield by_command(drill, targets, min(BY_COMMAND, total))


def keep(drill: Drill, name: str, number: int, mutant: bytes) -> None:
    """Leave a mutant that was not taken well for whoever mends it."""
    (drill.work / f"bad-{name.split('.')[0].replace(' ', '-')}-{number}").write_bytes(mutant)


def by_command(drill: Drill, targets: Targets, count: int) -> Line:
    """Mutants through `jaxtd3 train`: exit code 0 or 2, no traceback."""
    codes: Counter[Any] = Counter()
    wrong = []
    for i in range(count):
        name = f"command{i}"
        words = COMMANDS[i % len(COMMANDS)](drill, targets, drill.work / name, i)
        ended = drill.command([*words, "--no-video"], name).end(PATIENCE)
        large = ended.code is None and "compiling" in ended.said  # a run as asked, but a long one
        codes["large" if large else ended.code] += 1
        if not (large or ended.code in (0, 2)) or "Traceback" in ended.said:
            wrong.append(f"{name}: {ended.code}: {ended.said[-200:]}")
        drill.tick(i + 1, count)
    ends = ", ".join(f"{n} x {code}" for code, n in sorted(codes.items(), key=str))
    return Line(
        f"{count} mutants by the command", not wrong, f"exit codes {ends} {wrong[:2] or ''}"
    )


def with_config(drill: Drill, targets: Targets, folder: Path, number: int) -> list[str]:
    """A new run of a mutated config, cut short by flags."""
    mutant = drill.work / f"mutant{number}.json"
    original = (targets.run_dir / "config.json").read_bytes()
    mutant.write_bytes(mutate(original, drill.rng.randrange(3), drill.rng))
    words = ["train", "--config", str(mutant), "--iterations=10", "--log-every=10"]
    return [*words, "--eval-every=0", "--checkpoint-every=0", "--eval-episodes=4", "--max-time=5"]


def with_file(name: str, sealed: bool) -> Callable[[Drill, Targets, Path, int], list[str]]:
    """A resumed run of which one file of the newest checkpoint was mutated."""

    def prepare(drill: Drill, targets: Targets, folder: Path, number: int) -> list[str]:
        shutil.copytree(targets.run_dir, folder)
        checkpoint = folder / "checkpoints" / targets.newer.name
        file = checkpoint / name
        file.write_bytes(mutate(file.read_bytes(), drill.rng.randrange(3), drill.rng))
        if sealed:
            (checkpoint / durable.MANIFEST).unlink()
            durable.seal(checkpoint)
        return ["train", "--resume"]

    return prepare


COMMANDS = (
    with_config,
    with_file(durable.MANIFEST, sealed=False),
    with_config,
    with_file("meta.json", sealed=True),
    with_file("state/_METADATA", sealed=True),
)
