"""What mkdocs makes itself: the pages of settings and API, and the files that lie outside docs/.

`mkdocs.yml` names this file. Nothing here needs JAX: the config package and the table of public
names import the standard library alone.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import jaxtd3  # noqa: E402
from jaxtd3.config import presets, sections  # noqa: E402

GROUPS = {  # package -> heading of the API page, in the order in which people need them
    "run": "Runs and policies",
    "config": "Settings",
    "loop": "Training step, chunk, population",
    "agent": "Agent and exploration",
    "replay": "Replay",
    "envs": "Environments and metrics",
    "core": "Types",
    "errors": "Errors",
}


def text(value: Any) -> str:
    """A value as it stands in a table."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {text(v)}" for k, v in value.items()) or "–"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return [*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in rows), ""]


def flag(section: str, name: str) -> str:
    """What the command line calls a field."""
    given = {("env", "name"): "env", ("env", "weights"): "reward"}.get((section, name), name)
    return '<code class="flag">--' + given.replace("_", "-") + "</code>"


def default(f: dataclasses.Field) -> Any:
    made = f.default_factory
    return f.default if made is dataclasses.MISSING else made()


def settings_page() -> str:
    """Every field of every section, and what the presets change."""
    lines = [
        "# Settings",
        "",
        "This page is made from `src/jaxtd3/config` when the site is built. Every field is a flag "
        "of `jaxtd3 train`, `jaxtd3 sweep` and `jaxtd3 bench`, and an argument of "
        "`jaxtd3.preset(env, ...)`. `jaxtd3 train --env NAME --help` shows the values that the "
        "preset of an environment chooses.",
        "",
        "- **traced**: a number inside the compiled program. Members of a population may differ in "
        "it.",
        "- **kept**: a resumed run cannot change it, because it shapes the state or decides what "
        "the state means.",
        "- A default of – means none, or that the value is found when the program is built; the "
        "text says which.",
        "",
    ]
    for section, cls in sections.SECTIONS.items():
        rows = []
        for f in dataclasses.fields(cls):
            marks = [what for what in ("traced", "kept") if f.metadata[what]]
            value = text(default(f))
            rows.append([flag(section, f.name), value, ", ".join(marks), f.metadata["help"]])
        lines += [f"## {section}", "", f"`{cls.__name__}`. {cls.__doc__}", ""]
        lines += table(["flag", "default", "marks", "what it does"], rows)
    return "\n".join([*lines, *presets_part()])


def changes(row: Any) -> str:
    return ", ".join(f"`{name}` {text(value)}" for name, value in row.items()) or "the defaults"


def presets_part() -> list[str]:
    """The tables of presets, row by row as they apply."""
    lines = [
        "## Presets",
        "",
        "A preset is the defaults above, changed by the rows whose pattern matches `suite/env`. "
        "The suites are `locomotion`, `manipulation`, `dm_control` and `own`. Later rows win: "
        "environments first, then the hardware profile, then the algorithm, then your flags.",
        "",
        "### By environment",
        "",
        *table(["pattern", "changes"], [[f"`{p}`", changes(r)] for p, r in presets.ENVIRONMENTS]),
    ]
    for profile, rows in presets.PROFILES.items():
        lines += [f"### By hardware: `--profile {profile}`", ""]
        lines += table(["pattern", "changes"], [[f"`{p}`", changes(r)] for p, r in rows])
    lines += ["### By algorithm: `--algo`", ""]
    lines += table(["algorithm", "changes"], algorithm_rows())
    lines += ["### Tuned rewards: `--reward-preset tuned`", ""]
    rewards = [[f"`{p}`", changes(r)] for p, r in presets.TUNED_REWARDS.items()]
    return [*lines, *table(["pattern", "weights"], rewards)]


def algorithm_rows() -> list[list[str]]:
    rows = [[f"`{name}`", changes(row)] for name, row in presets.ALGORITHMS.items()]
    for (name, profile), row in presets.ALGORITHM_SIZES.items():
        rows.append([f"`{name}`, profile `{profile}`", changes(row)])
    return rows


def api_page() -> str:
    """The public names of the package, by the package that they live in."""
    lines = [
        "# API",
        "",
        "The public names of `jaxtd3`, made from the docstrings. Each is `jaxtd3.NAME`; the "
        "heading of a group says which package it lives in. In shapes, `E` are environments, `T` "
        "the ring's length, `B` the batch, `D` an observation, `U` an action, `K` reward terms.",
        "",
    ]
    for package, heading in GROUPS.items():
        lines += [f"## {heading}: `jaxtd3.{package}`", ""]
        for module, names in jaxtd3._HOMES.items():
            if module.split(".")[0] == package:
                for name in names.split():
                    lines += [f"::: jaxtd3.{module}.{name}", ""]
    missing = {home.split(".")[0] for home in jaxtd3._HOMES} - set(GROUPS)
    assert not missing, f"no heading for {missing}"
    return "\n".join(lines)


def from_root(name: str) -> str:
    """A page that lies in the root of the repository."""
    return (ROOT / name).read_text().replace("](docs/", "](")


PAGES = {
    "settings.md": settings_page,
    "api.md": api_page,
    "changelog.md": lambda: from_root("CHANGELOG.md"),
    "contributing.md": lambda: from_root("CONTRIBUTING.md"),
}
PICTURES = {"bench/scaling.png": "scaling.png"}


# --- what mkdocs calls --------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    for source, name in PICTURES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    for source, name in PICTURES.items():
        markdown = markdown.replace(f"../{source}", name)
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Flags within a line of text are not broken after their first hyphens."""

    def whole(code: re.Match[str]) -> str:
        return re.sub(r"--[\w-]+", r'<span class="flag">\g<0></span>', code[0])

    return re.sub(r"<code>[^<\n]*</code>", whole, html)


def on_post_build(config: Any) -> None:
    """Refuse a site that loads anything from the network."""
    from mkdocs.exceptions import PluginError

    loads = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=\"?(?:https?:)?//[^>]*>")
    sheets = re.compile(r"<link[^>]*rel=\"?(?:stylesheet|preconnect)[^>]*(?:https?:)?//[^>]*>")
    for path in Path(config["site_dir"]).rglob("*.html"):
        found = loads.search(path.read_text()) or sheets.search(path.read_text())
        if found:
            raise PluginError(f"{path.name} loads from the network: {found[0]}")


if __name__ == "__main__":
    print(settings_page())
