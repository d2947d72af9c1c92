"""Environments of one's own by reference: `file.py:Class`, `package.module:Class`, entry points.

Whatever is wrong with a reference, or with the code that it names, becomes one line with the file
and the line number. Running the code is the user's wish: it is imported as `python file.py` would.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import stat
import sys
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from jaxtd3.errors import UserError, nearest

GROUP = "jaxtd3.envs"
"""Entry points of installed packages: `my_env = "package.module:Class"`."""


class Found(NamedTuple):
    """What a reference names."""

    module: ModuleType
    make: Any  # a class or a function that makes an Env; None where the module has no such name
    file: Path | None


_loaded: dict[Path, tuple[str, ModuleType]] = {}


def is_reference(name: str) -> bool:
    """True for `file.py:Class` and `package.module:Class`."""
    return ":" in name


def short_name(name: str) -> str:
    """`Class` of a reference; other names as they are."""
    return name.rpartition(":")[2]


def entry_points() -> dict[str, str]:
    """Environments of installed packages: name -> reference."""
    return _entry_points(tuple(sys.path))


@functools.lru_cache(maxsize=4)
def _entry_points(path: tuple[str, ...]) -> dict[str, str]:
    # reading what all packages on the path declare takes a tenth of a second
    return {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}


def find(reference: str) -> Found:
    """Load what a reference names."""
    place, _, attribute = reference.rpartition(":")
    if not place or not attribute:
        raise UserError(f"--env {reference}: write file.py:Class or package.module:Class")
    named = names_file(place)
    module = load_file(Path(place), reference) if named else load_module(place, reference)
    file = getattr(module, "__file__", None)
    return Found(module, getattr(module, attribute, None), Path(file) if file else None)


def names_file(place: str) -> bool:
    """Whether the part before the colon is a file, not a module."""
    return place.endswith(".py") or "/" in place or "\\" in place


def located(reference: str, run: Path) -> str:
    """A reference to a file as it is found from here, or else from the folders above a run.

    What was moved together is found together. The run's own folder is not searched: it holds no
    code. Nor is any from the first one on that everybody may write to.
    """
    place, _, attribute = reference.rpartition(":")
    if not names_file(place) or Path(place).is_absolute() or Path(place).is_file():
        return reference
    for folder in run.resolve().parents:
        if folder.stat().st_mode & stat.S_IWOTH:
            break
        if (folder / place).is_file():
            return f"{folder / place}:{attribute}"
    return reference


def load_file(path: Path, reference: str) -> ModuleType:
    """The module of a file, run once as long as the file stays the same.

    What runs are the bytes that were read here: Python's own bytecode files are told from an older
    text by whole seconds and the size alone, and would litter the folder.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        where = "" if path.is_absolute() else f" (from {Path.cwd()})"
        raise UserError(f"--env {reference}: {path}: {error.strerror}{where}") from error
    path, digest = path.resolve(), hashlib.sha256(text).hexdigest()
    if path in _loaded and _loaded[path][0] == digest:
        return _loaded[path][1]
    name = f"jaxtd3_env_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise UserError(f"--env {reference}: {path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:  # what stands beside it can be imported
        sys.path.append(str(path.parent))
    try:
        with blaming(path):
            exec(compile(text, path, "exec", dont_inherit=True), vars(module))
    except UserError:
        sys.modules.pop(name, None)
        raise
    _loaded[path] = digest, module
    return module


def load_module(name: str, reference: str) -> ModuleType:
    """An importable module; the working folder's are too, as with `python -m`."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        found = None
    if found is None:
        raise UserError(f"--env {reference}: no module {name!r} can be imported here")
    with blaming(Path(found.origin) if found.origin else None):
        return importlib.import_module(name)


def candidates(module: ModuleType) -> list[str]:
    """Names in a module that may be meant: its own classes with a `step`, or what it lists."""
    listed = {n: getattr(module, n) for n in dir(module) if not n.startswith("_")}
    if "__getattr__" in vars(module):  # makes them when asked for (the adapters do)
        return list(listed)
    own = lambda x: getattr(x, "__module__", "") == module.__name__  # noqa: E731
    return [n for n, x in listed.items() if hasattr(x, "step") and own(x)]


def unknown(reference: str, found: Found, more: tuple[str, ...] = ()) -> UserError:
    """A line about a name that the module does not have."""
    known = [*candidates(found.module), *more]
    where = found.file.name if found.file else found.module.__name__
    if not known:
        return UserError(f"{where}: no environment {short_name(reference)!r}, nor any other")
    return UserError(f"{where}: " + nearest("environment", short_name(reference), known))


def source_sha256(found: Found) -> str:
    """A digest of the file that defines an environment, and of the MJCF with all that it names."""
    digest = hashlib.sha256()
    mjcf = getattr(found.make, "mjcf", None)
    for path in (found.file, *(mjcf_files(Path(mjcf)) if mjcf else ())):
        if path and path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def mjcf_files(main: Path) -> list[Path]:
    """An MJCF, then every file that it names and that is there: included XML, meshes, textures."""
    top = main.absolute().parent
    names, folders, found = {main.name}, {top}, dict.fromkeys([top / main.name])
    unread = [*found]
    while unread:
        for path in unread:
            read_names(path, top, names, folders)
        near = {Path(os.path.normpath(f / name)) for f in folders for name in names}
        unread = sorted(path for path in near if path not in found and path.is_file())
        found |= dict.fromkeys(unread)
    return [*found]


def read_names(path: Path, top: Path, names: set[str], folders: set[Path]) -> None:
    """Add what an XML file names, and the folders that it may mean; other files name nothing."""
    try:
        tree = ET.fromstring(path.read_bytes())
    except (ET.ParseError, OSError, ValueError):
        return
    kept = {""}
    for element in tree.iter():
        kept |= {element.get(key, "") for key in ("meshdir", "texturedir", "assetdir")}
        named = {value for key, value in element.attrib.items() if key.startswith("file")}
        names |= {value.replace("\\", "/") for value in named if value}
    folders |= {base / folder for base in (top, path.parent) for folder in kept}


# --- errors -------------------------------------------------------------------------------------


@contextlib.contextmanager
def blaming(file: Path | None, about: Any = None) -> Iterator[None]:
    """Whatever is raised becomes one line: `file.py:12: what`.

    The line is the last one of the file's own that ran, or else where `about` is defined.
    """
    try:
        yield
    except SyntaxError as error:
        where = Path(error.filename).name if error.filename else file and file.name
        line = f":{error.lineno}" if error.lineno else ""
        raise UserError(f"{where}{line}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        message = first_line(error)
        raise UserError(f"{place_of(error, file, about)}{message}") from error


def first_line(error: BaseException) -> str:
    """What an exception says, on one line and not long."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = text if len(text) <= 300 else text[:280] + " ..."
    if isinstance(error, UserError):
        return text
    kind = type(error).__name__
    return f"{kind}: {text}" if text else kind


def place_of(error: BaseException, file: Path | None, about: Any = None) -> str:
    """`file.py:12: ` of the last frame in the file or beside it, or of where `about` is defined."""
    if file is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).resolve() == file.resolve()]
    beside = [f for f in frames if Path(f.filename).resolve().parent == file.resolve().parent]
    if own or beside:
        last = (own or beside)[-1]
        return f"{Path(last.filename).name}:{last.lineno}: "
    line = line_of(about, file)
    return f"{file.name}:{line}: " if line else f"{file.name}: "


def line_of(about: Any, file: Path) -> int | None:
    """Where a class or function of the file is defined."""
    with contextlib.suppress(TypeError, OSError):
        if Path(inspect.getsourcefile(about) or "").resolve() == file.resolve():
            return inspect.getsourcelines(about)[1]
    return None
