"""The tree is the architecture: which package may import which, and how large things may grow."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from jaxtd3 import thirdparty
from jaxtd3.deploy.robot import load_robot
from jaxtd3.errors import UserError

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "jaxtd3"

# A package imports only from those above it in this list; within a package everything may.
ORDER = [
    ("errors", "runtime", "durable", "thirdparty"),
    ("config",),
    ("core",),
    ("envs",),
    ("nets",),
    ("agent",),
    ("replay",),
    ("loop",),
    ("output",),
    ("run",),
    ("sweep", "bench", "play", "deploy", "new"),
    ("cli",),
    ("train", "__main__"),
]
LEVEL = {name: i for i, row in enumerate(ORDER) for name in row}


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def package(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, package) of everything that is imported from jaxtd3, for types alone too."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtd3":
            names = [alias.name for alias in node.names]
            found += [(node.lineno, name) for name in names if name in LEVEL]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxtd3."):
            found.append((node.lineno, str(node.module).split(".")[1]))
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found += [(node.lineno, n[1]) for n in names if n[0] == "jaxtd3" and len(n) > 1]
        found += imported(node)
    return found


def upward(path: Path, text: str) -> list[str]:
    own = LEVEL[package(path)]
    where = path.relative_to(SOURCE)
    return [
        f"{where}:{line} imports {name}"
        for line, name in imported(ast.parse(text))
        if LEVEL[name] > own or (LEVEL[name] == own and name != package(path) and own)
    ]


def test_no_module_imports_upward():
    found = [line for path in modules() for line in upward(path, path.read_text())]
    assert not found, "\n".join(found)


def test_an_upward_import_is_seen():
    path = SOURCE / "core" / "types.py"
    assert upward(path, "def f():\n    from jaxtd3.run import session\n")
    assert upward(path, "from jaxtd3 import cli\n")
    assert upward(path, "import jaxtd3.agent.td3\n")
    assert not upward(path, "from jaxtd3.config import sections\n")


def test_every_package_has_its_place():
    assert {package(path) for path in modules()} == set(LEVEL)


def test_folders_are_small():
    for folder in {path.parent for path in modules()}:
        count = len([p for p in folder.glob("*.py") if p.name != "__init__.py"])
        assert count <= 18, f"{folder.name} has {count} modules"


# --- how much there is --------------------------------------------------------------------------

MOST_LINES = 13_000  # of what stood here before the packages did, commit 8694a76

# What came with other issues since: driving, deploying, one's own robots, native physics, layouts
# and mirrors of observations. Folders and modules ...
ADDED = {
    "": ["deploy", "new", "play"],
    "bench": ["physics.py"],
    "cli": ["new.py", "play.py", "recipe.py", "robustness.py"],
    "envs": ["physics", "balance.py", "brax.py", "checks.py", "gymnasium.py", "gymnax.py"],
    "envs/": [
        "hidden.py",
        "history.py",
        "robot.py",
        "source.py",
        "tables.py",
        "task.py",
        "view.py",
    ],
    "envs/playground": ["bounds.py", "layout.py", "mirror.py"],
    "replay": ["symmetry.py"],
    "run": ["policy.py"],
}
# ... and lines of older modules, by `git blame -w -M -C 8694a76..`.
GROWN = {
    "envs/registry.py": 119,
    "envs/playground/adapter.py": 127,
    "cli/policy.py": 113,
    "run/session.py": 54,
    "envs/metrics.py": 50,
    "config/presets.py": 96,
    "config/sections.py": 33,
    "run/artifacts.py": 21,
    "cli/train.py": 41,
    "cli/main.py": 66,  # play, robustness, new
    "replay/ring.py": 32,
    "run/nonfinite.py": 12,
    "envs/batch.py": 8,
    "core/types.py": 24,
    "core/tracing.py": 13,  # native physics left the mirror's check the longest part of a start
}


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_the_trainer_stays_small():
    """Templates count as the code that they are."""
    added = [SOURCE / folder / name for folder, names in ADDED.items() for name in names]
    assert all(path.exists() for path in [*added, *map(SOURCE.joinpath, GROWN)])
    files = [*modules(), SOURCE / "__init__.py", *(SOURCE / "output/templates").glob("*.html")]
    own = [p for p in files if not any(p == a or a in p.parents for a in added)]
    total = sum(map(lines_of, own)) - sum(GROWN.values())
    assert total <= MOST_LINES, f"{total:,} lines, of which no other issue is the reason"


RUN = 11  # lines


def repeated(texts: dict[str, str]) -> list[str]:
    """Where `RUN` lines with something in them stand a second time, in order."""
    first: dict[tuple[str, ...], str] = {}
    found = []
    for name, text in texts.items():
        kept = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        for at in range(len(kept) - RUN + 1):
            block = tuple(line for _, line in kept[at : at + RUN])
            here = f"{name}:{kept[at][0]}"
            if block in first:
                found.append(f"{first[block]} and {here}")
            first.setdefault(block, here)
    return found


def test_no_block_stands_twice():
    texts = {str(path.relative_to(SOURCE)): path.read_text() for path in modules()}
    assert not repeated(texts)
    block = "\n".join(f"x = {i}" for i in range(RUN))
    assert repeated({"a": block, "b": f"y = 1\n\n{block}"}) == ["a:1 and b:3"]


LISTS = {"make_train_step", "fast_td3", "batch_env"}  # lists of short closures over the same parts


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= (170 if node.name in LISTS else 100), f"{node.name}: {lines} lines"


# --- other libraries ----------------------------------------------------------------------------


def test_private_names_of_others_are_there():
    assert thirdparty.missing() == []
    for name, known in thirdparty.PRIVATE.items():
        assert thirdparty.private(name) is not None
        assert known.why
        assert known.seen


def test_what_has_private_names_has_an_upper_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounded = {re.split(r"[<>=]", line)[0] for line in project["dependencies"] if "<" in line}
    assert {known.package for known in thirdparty.PRIVATE.values()} <= bounded


def test_a_private_name_that_is_gone_is_named(monkeypatch):
    gone = thirdparty.Private("mujoco.batch:_NOT_THERE", "mujoco", "1.2.3", "for a test")
    monkeypatch.setitem(thirdparty.PRIVATE, "gone", gone)
    with pytest.raises(UserError, match=r"mujoco.batch:_NOT_THERE is not in mujoco .* 1\.2\.3"):
        thirdparty.private("gone")
    assert len(thirdparty.missing()) == 1


def test_private_attributes_are_there():
    env = load_robot("G1JoystickFlatTerrain")
    assert all(thirdparty.attribute(env, name) is not None for name in thirdparty.ATTRIBUTES)
    del env._config
    with pytest.raises(UserError, match=r"of playground .* has no _config: what an environment"):
        thirdparty.attribute(env, "_config")
    assert thirdparty.attribute(env, "_config", {}) == {}


OWN = {"_replace", "_fields", "_asdict", "_exit"}  # of NamedTuples and of os, for all to use


def hidden(tree: ast.AST) -> list[str]:
    """Underscores in imports of other libraries, and in attributes of anything but `self`."""
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("jaxtd3"):
            names = [*(node.module or "").split("."), *(a.name for a in node.names)]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr"):
            names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
        single = (n for n in names if n.startswith("_") and not n.startswith("__"))
        found += [f"{node.lineno}: {name}" for name in single if name not in OWN]
    return found


def test_nothing_private_is_used_elsewhere():
    for path in modules():
        if path.name != "thirdparty.py":
            assert not hidden(ast.parse(path.read_text())), path.relative_to(SOURCE)
    for text in ("from jax._src import core", "env._config", "getattr(env, '_config')"):
        assert hidden(ast.parse(text))
