"""Pages that need no other file, no network and no script: templates in which all is escaped."""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from matplotlib.figure import Figure

from jaxtd3.output import plots
from jaxtd3.output.rundir import STATUSES

REPORT_FILE = "report.html"
KINDS = {".mp4": "video/mp4", ".gif": "image/gif", ".png": "image/png"}
MAX_VIDEO = 64 << 20


class Picture(NamedTuple):
    """A figure, drawn for light pages and for dark ones."""

    title: str
    light: str  # data URIs
    dark: str
    note: str


class Video(NamedTuple):
    name: str
    data: str  # empty where it is too large for a page


def render(template: str, **values: Any) -> str:
    """A page of `templates/` with these values."""
    return templates().get_template(template).render(**values)


@functools.cache
def templates() -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals["STATUSES"] = STATUSES
    env.filters |= {"words": words, "setting": setting, "duration": duration}
    return env


def picture(title: str, draw: Callable[[plots.Theme], Figure], note: str = "") -> Picture:
    """`draw(theme)` in both themes."""
    light, dark = (
        data_uri(plots.png(draw(theme), 120), KINDS[".png"]) for theme in (plots.LIGHT, plots.DARK)
    )
    return Picture(title, light, dark, note)


def video(path: Path) -> Video:
    """A film that stands in the page itself."""
    if path.stat().st_size > MAX_VIDEO:
        return Video(path.name, "")
    return Video(path.name, data_uri(path.read_bytes(), KINDS[path.suffix]))


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# --- values in words ----------------------------------------------------------------------------


def number(value: Any) -> bool:
    """True for a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def words(name: Any) -> str:
    return str(name).replace("_", " ")


def setting(value: Any) -> str:
    """A setting's value."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{words(k)} {setting(v)}" for k, v in value.items()) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(setting(v) for v in value) or "–"
    return str(value)


def short(value: Any) -> str:
    """A number in at most four digits and a letter: 12.3k, 4.05M; empty for what is none."""
    if not number(value):
        return ""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if letter == "k" else size
            return f"{value / scale:.3g}{letter}" if abs(value) < 1e3 * scale else f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: Any) -> str:
    """8.4 s, 3 min 20 s, 2 h 5 min; empty for what is none."""
    if not number(seconds):
        return ""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
