"""The documents are true: code runs, commands parse, links exist, no setting is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import types
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtd3
from conftest import ROOT
from jaxtd3.agent import critics, exploration
from jaxtd3.cli import flags
from jaxtd3.cli.main import COMMANDS, Bench, Sweep, Train
from jaxtd3.config.sections import SECTIONS
from jaxtd3.envs import registry
from jaxtd3.nets import mlp
from jaxtd3.output.rundir import CONFIG_FILE
from jaxtd3.run.checkpoint import CheckpointStore

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
GENERATED = ("settings.md", "api.md", "changelog.md", "contributing.md")  # by scripts/docs_hooks.py
EXEMPT = re.compile(r"<!-- not run: \S.*-->\s*$")
TINY = {"num_envs": 8, "batch_size": 32, "length": 64, "critic_hidden": 16, "actor_hidden": 16}
SMALL = {  # the same code, at a size for a test
    "length=1000": "length=10",
    "num_envs=8)": "num_envs=8, log_every=20)",
    'preset("Pendulum")': f'preset("Pendulum", **{TINY | {"log_every": 10, "eval_episodes": 4}})',
}


def ids(value):
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else None


def script(name: str):
    """A Python file of scripts/ as a module."""
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def blocks(path: Path, language: str) -> list[str]:
    """The code blocks of a page, without those that say why they are not run."""
    text = path.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [m[1] for m in found if not EXEMPT.search(text[: m.start()])]


# --- python -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the run that the documents speak of, runs/mine, as it is before training."""
    folder = tmp_path_factory.mktemp("docs")
    mine = folder / "runs" / "mine"
    mine.mkdir(parents=True)
    config = jaxtd3.preset("Pendulum", profile="cpu", **TINY)
    (mine / CONFIG_FILE).write_text(json.dumps(config.to_dict()))
    store = CheckpointStore(mine)
    store.save(jaxtd3.build(config).start(), iteration=0, meta={"config": config.to_dict()})
    store.close()
    assert store.last_error is None
    return folder


@pytest.fixture
def tables():
    """The tables of parts, as they were, after a test that adds to them."""
    known = [exploration.LADDERS, critics.CRITICS, mlp.NETWORKS, registry._OWN]
    before = [dict(table) for table in known]
    yield
    for table, rows in zip(known, before, strict=True):
        table.clear()
        table.update(rows)


def run(code: str, name: str) -> dict:
    for large, small in SMALL.items():
        code = code.replace(large, small)
    module = sys.modules["docs_block"] = types.ModuleType("docs_block")  # dataclasses look for it
    exec(compile(code, name, "exec"), module.__dict__)
    return module.__dict__


WITH_CODE = [path for path in PAGES if blocks(path, "python")]


@pytest.mark.parametrize("path", WITH_CODE, ids=ids)
def test_code_runs(path, home, tables):
    with contextlib.chdir(home):
        scopes = [run(code, path.name) for code in blocks(path, "python")]
    for scope in scopes:  # what was trained is finite
        for name, value in scope.get("metrics", {}).items():
            if name.startswith("train/"):
                assert np.all(np.isfinite(value)), name


def test_the_readme_shows_what_it_says():
    first, second = blocks(ROOT / "README.md", "python")
    assert "length=1000" in first
    assert "jaxtd3.build(" in second
    assert "program.advance(" in second
    assert "jaxtd3.load(" in second


def test_blocks_that_are_not_run_are_few():
    for path in PAGES:
        fenced = len(re.findall(r"^```python$", path.read_text(), re.MULTILINE))
        assert fenced - len(blocks(path, "python")) <= 1, path.name


# --- a researcher, with docs/extending.md alone -------------------------------------------------


def own_files() -> dict[str, str]:
    """my_noise.py and the others, as they are printed."""
    found = [re.match(r"# (my_\w+\.py)\n", code) for code in blocks_of_extending()]
    return {m[1]: code for m, code in zip(found, blocks_of_extending(), strict=True) if m}


def blocks_of_extending() -> list[str]:
    return blocks(ROOT / "docs" / "extending.md", "python")


def test_parts_of_ones_own_train_together(tables):
    """A noise schedule, a critic loss, a network and an environment: no edit of the package."""
    files = own_files()
    assert list(files) == ["my_noise.py", "my_critic.py", "my_network.py", "my_env.py"]
    for name, code in files.items():
        run(code, name)
    parts = {"noise": "halves", "critic": "brier", "network": "linear"}
    ranges = {"v_min": -50.0, "v_max": 50.0, "log_every": 30}
    program = jaxtd3.build(jaxtd3.preset("Corridor", profile="cpu", **TINY, **parts, **ranges))
    state = program.start()
    np.testing.assert_array_equal(state.noise.rung, [0, 0, 0, 0, 1, 1, 1, 1])
    assert len(jax.tree.leaves(state.agent.actor)) == 2, "a linear actor: one kernel, one bias"
    state, metrics = program.advance(state)
    assert int(state.iteration) == 30
    assert int(state.agent.updates) > 0
    assert float(metrics["train/critic_loss"]) < 2 * 2.0, "a Brier score of two critics"
    assert program.env.spec.reward_terms == ("position", "effort")


@pytest.mark.slow
def test_a_file_of_ones_own_is_a_command_line(tmp_path):
    (tmp_path / "my_env.py").write_text(own_files()["my_env.py"])
    words = "train --env Corridor --reward effort=-0.1 --iterations 4 --log-every 2 --num-envs 8"
    small = "--batch-size 32 --critic-hidden 16 --actor-hidden 16 --eval-episodes 4 --no-video"
    done = subprocess.run(
        [sys.executable, "my_env.py", *words.split(), *small.split(), "--run-dir", "run"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").is_file()


# --- commands -----------------------------------------------------------------------------------


def command_lines(path: Path) -> list[str]:
    """Lines of bash blocks, and inline code that is a command."""
    text = path.read_text()
    lines = []
    for code in blocks(path, "bash"):
        lines += code.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose)]
    starts = r"(\w+=\S+ )*(jaxtd3 \w+ \S|scripts/|python )"  # `jaxtd3 play` alone is a name
    return lines + [x for x in inline if re.match(starts, x)]


def check_command(line: str) -> None:
    """Refuse a command that ours would refuse, and a script that is not there."""
    words = shlex.split(line.replace("<", "").replace(">", ""), comments=True)
    for i, word in enumerate(words):
        if word == "jaxtd3" and i + 1 < len(words) and words[i + 1] in COMMANDS:
            return check_flags(words[i + 1], words[i + 2 :])
        if word == "scripts/train":
            return check_flags("train", words[i + 1 :])
        if word.startswith(("scripts/", "experiments/")):
            assert (ROOT / word).is_file(), f"{word} is not there"
            return check_script(ROOT / word, words[i + 1 :])
        if re.fullmatch(r"benchmarks\.\w+", word):
            return check_script(ROOT / f"{word.replace('.', '/')}.py", words[i + 1 :])
        if re.fullmatch(r"my_\w+\.py", word):
            assert word in own_files()
            return check_flags(words[i + 1], words[i + 2 :])
    assert words[:1] in ([], ["git"], ["docker"], ["source"]), f"what is {line!r}?"
    return None


def check_flags(name: str, words: list[str]) -> None:
    cls = COMMANDS[name].args
    if cls in (Train, Sweep, Bench):
        cls = flags.with_sections(cls)
    if "--help" in words:
        words = [word for word in words if word != "--help"]
    flags.parse(cls, words, prog=f"jaxtd3 {name}")


def check_script(path: Path, words: list[str]) -> None:
    """Long flags of a script stand in its own words or in pytest's."""
    known = path.read_text()
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in known, f"{path.name} says nothing of {word}"


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_commands_are_understood(path):
    for line in command_lines(path):
        try:
            check_command(line)
        except (jaxtd3.UserError, AssertionError) as error:
            pytest.fail(f"{line}: {error}")


def every_flag() -> set[str]:
    """The flags of all commands, with their negations, and what the scripts say of themselves."""
    kinds: dict = {}
    for command in COMMANDS.values():
        kinds |= flags.flag_kinds(flags.with_sections(command.args))
    names = {"--" + name.replace("_", "-") for name in kinds}
    files = [p for p in (ROOT / "scripts").iterdir() if p.is_file()]
    files += (ROOT / "deploy").glob("*.py")
    said = " ".join(p.read_text() for p in files)
    scripts = set(re.findall(r"--[a-z][\w-]+", said))
    return names | {name.replace("--", "--no-", 1) for name in names} | scripts | {"--help"}


def test_flags_in_the_text_exist():
    known = every_flag()
    for path in PAGES:
        prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`([^`]+)`", prose):
            for name in re.findall(r"(?:^|\s)(--[a-z][\w-]*)", code):
                assert name in known, f"{path.name}: {name}"


def test_a_wrong_flag_is_seen():
    with pytest.raises(jaxtd3.UserError, match="--numenvs"):
        check_command("jaxtd3 train --env Pendulum --numenvs 8")
    with pytest.raises(jaxtd3.UserError, match="keep"):
        check_command("jaxtd3 train --keep three  # comments are left out")
    with pytest.raises(AssertionError):
        check_command("scripts/nothing")
    with pytest.raises(AssertionError):
        check_command("scripts/bench --nothing")


# --- links, pictures, lengths -------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_links_lead_somewhere(path):
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'<img src="([^"]+)"', prose)
    for link in links:
        target = link.partition("#")[0]
        if re.match(r"\w+:", link) or not target:
            continue
        if path.parent == ROOT / "docs" and target in GENERATED:
            continue
        assert (path.parent / target).is_file(), f"{path.name}: {link}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "docs").rglob("*.md"):
        assert f" {path.relative_to(ROOT / 'docs')}\n" in menu, path.name
    for name in GENERATED:
        assert f" {name}\n" in menu, name


# --- what is generated --------------------------------------------------------------------------


def test_the_page_of_settings_has_every_field():
    hooks = script("docs_hooks.py")
    page = hooks.settings_page()
    for section, cls in SECTIONS.items():
        rows = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0].splitlines()
        for f in dataclasses.fields(cls):
            row = [line for line in rows if line.startswith(f"| {hooks.flag(section, f.name)} |")]
            assert len(row) == 1, f.name
            assert f.metadata["help"].replace("|", "\\|") in row[0]
            for what in ("traced", "kept"):
                assert (what in row[0].split("|")[3]) == f.metadata[what], f.name
    for algo in ("fasttd3", "pql-d", "gorila"):
        assert f"| `{algo}` |" in page


def test_the_page_of_the_api_has_every_public_name():
    page = script("docs_hooks.py").api_page()
    for name in jaxtd3.__all__:
        assert re.search(rf"^::: jaxtd3\.[\w.]+\.{name}$", page, re.MULTILINE), name


def test_the_notebook_is_up_to_date():
    module = script("notebook")
    assert module.TARGET.read_text() == module.notebook(module.SOURCE.read_text()), (
        "run scripts/notebook"
    )


def test_the_wheel_has_what_is_not_python(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    package = ROOT / "src" / "jaxtd3"
    files = [p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert package / "py.typed" in files
    assert package / "output" / "templates" / "page.css" in files
    for path in files:
        assert str(path.relative_to(package.parent)) in names


@pytest.mark.parametrize(
    ("lock", "package"),
    [("cpu", "jax"), ("cuda", "jax"), ("docs", "mkdocs-material"), ("uv", "uv")],
)
def test_locks_name_no_index(lock, package):
    text = (ROOT / "requirements" / f"{lock}.lock").read_text()
    assert "://" not in text
    assert "--index" not in text
    assert "--hash=sha256:" in text
    assert re.search(rf"^{package}==", text, re.MULTILINE)
