"""A whole run as data on disk, and back.

    <run_dir>/checkpoints/000012000/
        state/           the arrays, written by Orbax (arrays.py)
        meta.json        config, counters, versions, and the table of leaves: name -> [dtype, shape]
        manifest.json    size and sha256 of every other file, written last (durable.py)

A checkpoint is built under a temporary name, written through to the disk and then renamed, so a
kill at any moment leaves the one before or the new one. Nothing is pickled, and sizes are compared
with those of the run before any array is read.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtd3 import durable
from jaxtd3.core import processes
from jaxtd3.durable import RunLock, verify
from jaxtd3.errors import UserError
from jaxtd3.run.arrays import (
    describe,
    named_leaves,
    place,
    raw,
    read_arrays,
    state_sha256,
    stored_spec,
    to_host,
    write_arrays,
)
from jaxtd3.run.memory import give_back

__all__ = [
    "CheckpointStore",
    "Restored",
    "RunLock",
    "locate",
    "read_meta",
    "restore_agent",
    "restore_from",
    "state_sha256",
    "verify",
]

FORMAT = 1
STATE, META = "state", "meta.json"
MOVED = {"weights": "env.weights"}
"""Leaf -> its name in checkpoints from before it moved."""
LIBRARIES = "jaxtd3 jax jaxlib flax optax numpy orbax-checkpoint mujoco mujoco-mjx playground"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held."""

    state: Any
    meta: dict[str, Any]
    path: Path
    replay: bool
    """False: saved without the replay; `state.replay` is the template's."""
    skipped: list[str]
    """What is wrong with newer checkpoints, which were passed over: file and reason."""

    @property
    def iteration(self) -> int:
        return self.meta["iteration"]


def at_phase(phase: str, temp: Path) -> None:
    """Called as a save comes to: before, arrays, manifest, after. The fault drill kills there."""


class CheckpointStore:
    """The checkpoints of one run directory; whoever makes a store holds the directory's RunLock."""

    def __init__(self, run_dir: Path, keep: int = 2):
        if keep < 2:
            raise UserError(f"keep={keep} is below 2")
        self.directory = Path(run_dir).absolute() / "checkpoints"  # Orbax wants no relative paths
        self.keep = keep
        self.last_error: str | None = None
        """Why the last save failed; None after one that did not."""
        self.last_bytes = 0
        """Size of the last checkpoint that was written."""
        self._thread: threading.Thread | None = None
        if processes.is_first():
            durable.tidy(self.directory)

    def save(
        self,
        state: Any,
        *,
        iteration: int,
        meta: dict[str, Any],
        best: float | None = None,
        with_replay: bool = True,
    ) -> None:
        """Copy the state to the host, then write it in the background; `state` may be donated.

        Checkpoints of later iterations belong to a course that the run has left: they go once this
        one is on disk.
        """
        self.wait()
        leaves = {n: x for n, x in named_leaves(state).items() if with_replay or not _in_replay(n)}
        own = {
            "format": FORMAT,
            "iteration": int(iteration),
            "best": float(best) if best is not None and math.isfinite(best) else None,
            "replay": with_replay,
            "versions": _versions(),
            "leaves": {name: describe(leaf) for name, leaf in leaves.items()},
        }
        text = json.dumps({**meta, **own}, indent=1, default=_plain)
        if processes.several():
            self._write(int(iteration), {name: raw(leaf) for name, leaf in leaves.items()}, text)
            return
        arrays = {name: to_host(leaf) for name, leaf in leaves.items()}
        what = [int(iteration), arrays, text]
        del arrays
        self._thread = threading.Thread(target=self._write_beside, args=(what,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written; `last_error` tells how it went."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Finish the save in flight; call it before the process ends."""
        self.wait()

    def last_good(self) -> str:
        """Where the newest good checkpoint is, for people."""
        self.wait()
        good = (path for path in _checkpoints(self.directory) if not verify(path))
        return next((f"last good checkpoint: {path}" for path in good), "no checkpoint yet")

    def _write_beside(self, what: list[Any]) -> None:
        self._write(*what)
        what.clear()  # the thread holds its arguments until it has ended
        give_back()

    def _write(self, iteration: int, arrays: dict[str, Any], text: str) -> None:
        """Write and publish a checkpoint; several processes write their parts, the first seals."""
        final = self.directory / f"{iteration:09d}"
        temp = final.with_name(durable.TEMP + final.name)
        try:
            at_phase("before", temp)
            if processes.is_first():
                durable.remove(temp)
                temp.mkdir(parents=True)
            processes.barrier("checkpoint begins")
            at_phase("arrays", temp)
            write_arrays(temp / STATE, arrays)
            processes.barrier("checkpoint written")
            if not processes.is_first():
                return
            (temp / META).write_text(text)
            at_phase("manifest", temp)
            durable.seal(temp)
            durable.publish(temp, final)
            at_phase("after", temp)
            self.last_bytes = durable.size_of(final)
            self._retire(iteration)
            self.last_error = None
        except Exception as error:  # the run goes on, and may try again later
            self.last_error = durable.explain(error)
            durable.remove(temp)

    def _retire(self, iteration: int) -> None:
        """Remove all but the newest `keep` and the best."""
        everything = _checkpoints(self.directory)
        paths = [p for p in everything if int(p.name) <= iteration]
        scored = [(score, p) for p in paths if (score := _best(p)) is not None]
        kept = {*paths[: self.keep], *(p for _, p in sorted(scored)[-1:])}
        for path in everything:
            if path not in kept:
                with contextlib.suppress(OSError):
                    durable.discard(path)


def restore_from(path: Path, template: Any) -> Restored:
    """A state like `template` from a checkpoint, or from the newest good one of a run directory.

    The template is a state or its shapes (`jax.eval_shape`); arrays come back on its devices.
    """
    found, skipped = locate(path)
    meta = _read_meta(found)
    return Restored(_load(found, meta, template), meta, found, meta["replay"], skipped)


def restore_agent(path: Path, agent_template: Any) -> Any:
    """The agent's state alone; no other array of the checkpoint is read."""
    found, _ = locate(path)
    return _load(found, _read_meta(found), agent_template, prefix="agent.")


def read_meta(path: Path) -> dict[str, Any]:
    """The meta.json of a checkpoint, or of the newest good one of a run directory."""
    return _read_meta(locate(path)[0])


def locate(path: Path) -> tuple[Path, list[str]]:
    """A checkpoint or the newest good one of a run directory, and what is wrong with newer ones."""
    path = Path(path).absolute()
    if (path / META).exists() or (path / durable.MANIFEST).exists():
        paths = [path]
    else:
        paths = _checkpoints(path / "checkpoints") or _checkpoints(path)
    if not paths:
        raise UserError(f"no checkpoint in {path}")
    skipped: list[str] = []
    for candidate in paths:
        problems = verify(candidate)
        if not problems:
            return candidate, skipped
        skipped += [f"{candidate.name}/{problem}" for problem in problems]
    raise UserError(f"no good checkpoint in {path}: {_first(skipped)}")


def _load(path: Path, meta: dict[str, Any], template: Any, prefix: str = "") -> Any:
    """The leaves under `prefix` as a tree like `template`, if the table of leaves agrees."""
    leaves = {prefix + name: leaf for name, leaf in named_leaves(template).items()}
    mine = {n: x for n, x in leaves.items() if meta["replay"] or not _in_replay(n)}
    saved = {n: x for n, x in meta["leaves"].items() if n.startswith(prefix)}
    there = {n: n if n in saved else MOVED.get(n, n) for n in mine}
    _check_table(path, saved, {there[n]: describe(x) for n, x in mine.items()})
    if any(isinstance(x, jax.ShapeDtypeStruct) for n, x in leaves.items() if n not in mine):
        raise ValueError(f"{path} holds no replay: the template's must be arrays, not shapes")
    try:
        arrays = read_arrays(path / STATE, {there[n]: stored_spec(x) for n, x in mine.items()})
    except Exception as error:  # whatever Orbax makes of a stranger's files
        raise UserError(f"{path / STATE}: {durable.explain(error)}") from error
    new = [place(arrays.pop(there[n]), x) if n in mine else x for n, x in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(template), new)


def _check_table(path: Path, saved: dict[str, Any], mine: dict[str, Any]) -> None:
    """Refuse a checkpoint whose leaves are not those of this run, with the first differences."""

    def show(table: dict[str, Any], name: str) -> str:
        entry = table.get(name)
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list):
            return f"{entry[0]}[{','.join(map(str, entry[1]))}]"[:80]
        return "nonsense" if name in table else "nothing"

    names = sorted(n for n in {*saved, *mine} if n not in mine or saved.get(n) != mine[n])
    if names:
        lines = [
            f"{durable.shown(n)}: saved {durable.shown(show(saved, n))}, this run {show(mine, n)}"
            for n in names
        ]
        raise UserError(f"{path} does not fit this run: {_first(lines)}")


def _in_replay(name: str) -> bool:
    return name == "replay" or name.startswith("replay.")


def _checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, good or not, newest first."""
    if not directory.is_dir():
        return []
    found = [p for p in directory.iterdir() if p.name.isascii() and p.name.isdigit()]
    found = [p for p in found if p.is_dir() and not p.is_symlink()]
    return sorted(found, key=lambda p: int(p.name), reverse=True)


def _read_meta(path: Path) -> dict[str, Any]:
    kinds = {"format": int, "iteration": int, "replay": bool, "leaves": dict}
    try:
        meta = durable.read_json(path / META)
        wrong = [name for name, kind in kinds.items() if type(meta[name]) is not kind]
    except durable.UNREADABLE as error:
        raise UserError(f"{path / META}: {durable.explain(error)}") from error
    if wrong:
        raise UserError(f"{path / META}: {', '.join(wrong)} of another kind")
    if meta["format"] != FORMAT:
        raise UserError(f"{path} has format {meta['format']}, this program reads {FORMAT}")
    return meta


def _best(path: Path) -> float | None:
    try:
        best = durable.read_json(path / META)["best"]
    except durable.UNREADABLE:
        return None
    return float(best) if isinstance(best, int | float) and math.isfinite(best) else None


def _versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _plain(value: Any) -> Any:
    """What JSON does not know: the numbers of numpy and jax, paths."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _first(lines: list[str], count: int = 3) -> str:
    more = f"; and {len(lines) - count} more" if len(lines) > count else ""
    return "; ".join(lines[:count]) + more
