"""Files and directories that are whole or not there.

A file is written under another name and renamed (`whole_file`, `write_whole`), so are files that
belong together (`whole_files`). A directory is sealed by a manifest and published by a rename.

A sealed directory is good if its manifest tells of exactly the files that are there: flipped bits,
cut, missing and added files all show. The files are found by walking, links are not followed, and
no name that is read from a manifest is ever used as a path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxtd3.errors import UserError

MANIFEST = "manifest.json"
TEMP, ASIDE = ".tmp-", ".old-"
JSON_LIMIT = 64 << 20
NO_ROOM = ("No space left on device", "quota exceeded", "File too large")
UNREADABLE = (OSError, ValueError, LookupError, TypeError, RecursionError)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write, which gets its name at the end; nothing is left of it where that fails."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file at once: a reader finds the old one or the new one."""
    with whole_file(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@contextlib.contextmanager
def whole_files(target: Path) -> Iterator[Path]:
    """A folder to write into, whose files move to `target` together at the end, or not at all."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=TEMP, dir=target))
    except OSError as error:
        raise UserError(f"cannot write into {target}: {error.strerror}") from error
    try:
        yield folder
        for path in folder.iterdir():
            path.replace(target / path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def seal(path: Path) -> None:
    """Write everything through to the disk, the manifest last."""
    _sync_tree(path)
    (path / MANIFEST).write_text(_manifest(_entries(path)))
    _sync(path / MANIFEST)
    _sync(path)


def publish(temp: Path, final: Path) -> None:
    """Give a sealed directory its name; what had it is put aside first, and `tidy` puts it back."""
    aside = final.with_name(ASIDE + final.name)
    remove(aside)
    if final.exists():
        final.rename(aside)
    temp.rename(final)
    _sync(final.parent)
    remove(aside)


def tidy(directory: Path) -> None:
    """Clear away what a killed process left."""
    for aside in directory.glob(f"{ASIDE}*"):
        final = directory / aside.name.removeprefix(ASIDE)
        if not final.exists():  # killed between the two renames of `publish`
            aside.rename(final)
    for left in [*directory.glob(f"{ASIDE}*"), *directory.glob(f"{TEMP}*")]:
        remove(left)


def discard(path: Path) -> None:
    """Remove a directory without ever leaving half of it under its name."""
    temp = path.with_name(TEMP + path.name)
    remove(temp)
    path.rename(temp)
    remove(temp)


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def verify(path: Path) -> list[str]:
    """What is wrong with a sealed directory, as `file: reason`; nothing when it is good."""
    path = Path(path)
    try:
        manifest = path / MANIFEST
        if not manifest.exists():
            return [f"{MANIFEST}: missing"]
        said = read_json(manifest)["files"]
        if manifest.read_text() != _manifest(said):
            return [f"{MANIFEST}: altered"]
        found, names = _entries(path), {*said.keys()}
    except (*UNREADABLE, AttributeError) as error:
        return [f"{MANIFEST}: {explain(error)}"]
    problems = []
    for name in sorted(names | {*found}):
        if name not in names:
            problems.append(f"{shown(name)}: not in the manifest")
        elif name not in found:
            problems.append(f"{shown(name)}: no such file here")
        elif said[name] != found[name]:
            problems.append(f"{shown(name)}: size or sha256 is not the manifest's")
    return problems


def size_of(path: Path) -> int:
    """Bytes of all files below."""
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())


def read_json(path: Path, follow: bool = False) -> Any:
    """Parse a file that may be anybody's; a link only if it may be followed."""
    if not stat.S_ISREG(path.stat().st_mode if follow else path.lstat().st_mode):
        raise ValueError(f"{path.name} is not a regular file")
    with open(path, "rb") as file:
        data = file.read(JSON_LIMIT + 1)
    if len(data) > JSON_LIMIT:
        raise ValueError(f"{path.name} is larger than {JSON_LIMIT} bytes")
    return json.loads(data)


def shown(name: str) -> str:
    """A name that may be anybody's, short and on one line."""
    return name[:200] if name.isprintable() else ascii(name[:200])


def explain(error: BaseException) -> str:
    """An error in one line; a full disk is called so."""
    line = (str(error).strip().splitlines() or [""])[0][:300]
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"disk full: {line}"
    phrase = next((p for p in NO_ROOM if p in str(error)), None)
    return f"disk full: {phrase}" if phrase else f"{type(error).__name__}: {line}"


def _entries(path: Path) -> dict[str, Any]:
    """Size and sha256 of every file below, by relative name; links are named, never followed."""
    entries: dict[str, Any] = {}
    for folder, folders, files in os.walk(path):
        for file in (Path(folder, name) for name in [*folders, *files]):
            name, mode = file.relative_to(path).as_posix(), file.lstat().st_mode
            if stat.S_ISREG(mode) and name != MANIFEST:
                with open(file, "rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                entries[name] = {"bytes": file.stat().st_size, "sha256": digest}
            elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                entries[name] = "a link or a device"
    return entries


def _manifest(entries: Any) -> str:
    """The one spelling of a manifest, with a digest of itself, so that its own damage shows."""
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": entries, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(path: Path) -> None:
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))


class RunLock:
    """The right to write into a run directory; it ends with its owner, however that ends."""

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)
        self._handle = -1

    def __enter__(self) -> RunLock:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"cannot write to {self.run_dir}: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(handle, 20).decode("ascii", "replace").strip()
            os.close(handle)
            reason = f"run directory {self.run_dir} is in use by process {owner or 'unknown'}"
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                reason = f"cannot lock {self.run_dir}: {error.strerror}"
            raise UserError(reason) from error
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._handle = handle
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)
