"""A run as one page: report.html needs no other file, no network and no script.

Everything is read from the run directory; whatever is missing there is left out.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxtd3.errors import UserError
from jaxtd3.output import plots
from jaxtd3.output.logs import read_rows
from jaxtd3.output.rundir import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, require_run

CURVES_FILE = "curves.png"
REPORT_FILE = "report.html"
VIDEOS = {"video.mp4": "video/mp4", "video.gif": "image/gif"}
MAX_VIDEO = 64 << 20
POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
UNITS = (
    "Falls: share of the episodes. Tracking errors in m/s and rad/s, energy in J/m, slip of "
    "standing feet in m/s. Asymmetry: mean difference of an action and its mirror image. "
    "Walks: 1 or 0."
)
TIMES = {
    "compile": "compiling",
    "train": "training (collecting and learning)",
    "collect": "collecting",
    "update": "learning",
    "eval": "evaluating",
    "checkpoint": "saving checkpoints",
    "other": "all else",
}


# --- reading ------------------------------------------------------------------------------------


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, none if there is no such file."""
    return read_rows(Path(run_dir) / METRICS_FILE)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file is missing or broken."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


# --- writing ------------------------------------------------------------------------------------


def write_curves(run_dir: Path) -> Path:
    """curves.png: return and length against steps and time, losses, reward terms."""
    run_dir = require_run(Path(run_dir))
    rows = read_metrics(run_dir)
    panels = plots.learning_panels(rows)
    panels += plots.small_panels(rows, "train/") + plots.small_panels(rows, "eval/term/")
    return _write(run_dir / CURVES_FILE, plots.png(plots.draw(panels, columns=2)))


def write_report(run_dir: Path) -> Path:
    """curves.png and report.html from what the run directory holds."""
    run_dir = require_run(Path(run_dir))
    config = read_object(run_dir / CONFIG_FILE)
    if not config:
        raise UserError(f"{run_dir / CONFIG_FILE} is not a JSON object")
    write_curves(run_dir)
    summary, rows = read_object(run_dir / SUMMARY_FILE), read_metrics(run_dir)
    env = config.get("env") if isinstance(config.get("env"), dict) else {}
    title = str(summary.get("env") or env.get("name") or run_dir.name)  # type: ignore[union-attr]
    body = [
        heading(title, config, summary, run_dir.name),
        headline(summary, rows),
        pair(film(run_dir), times(summary, rows)),
        figure("Learning curves", plots.learning_panels(rows), 2, "Bands: one standard deviation."),
        figure("Behaviour in evaluations", plots.behaviour_panels(rows), 3, UNITS),
        terms(rows, env.get("weights") or {}),  # type: ignore[union-attr]
        figure("Learner", plots.small_panels(rows, "train/"), 3),
        settings(config),
        machine(summary),
    ]
    return _write(run_dir / REPORT_FILE, page(title, body).encode())


def _write(path: Path, data: bytes) -> Path:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    return part.replace(path)


def page(title: str, body: Iterable[str]) -> str:
    css = Path(__file__).with_name("report.css").read_text()
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} · jaxtd3</title>\n<style>\n{css}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
    )


# --- parts of the page --------------------------------------------------------------------------


def heading(title: str, config: Mapping, summary: Mapping, folder: str) -> str:
    algo = summary.get("algo", config.get("algo", ""))
    run = config.get("run") if isinstance(config.get("run"), dict) else {}
    seed = summary.get("seed", run.get("seed", ""))  # type: ignore[union-attr]
    status = str(summary.get("status", "running"))
    kind = status if status in ("completed", "time_limit", "interrupted", "failed") else "soft"
    error = summary.get("error")
    said = f'<p class="failed">{escape(str(error))}</p>' if error else ""
    return (
        f"<header><h1>{escape(title)}</h1>"
        f'<span class="pill {kind}">{escape(status.replace("_", " "))}</span>'
        f'<span class="soft">{escape(f"{algo} · seed {seed} · {folder}")}</span>'
        f"</header>\n{said}"
    )


def headline(summary: Mapping, rows: Sequence[Mapping]) -> str:
    """The numbers one looks for first, as cards."""
    last: dict[str, Any] = {}
    for row in rows:
        last |= {k: v for k, v in row.items() if v is not None}
    returns = [row["eval/return"] for row in rows if number(row.get("eval/return"))]
    get = lambda name, other: summary[name] if number(summary.get(name)) else other  # noqa: E731
    falls = last.get("eval/falls")
    percent = 100 * falls if isinstance(falls, int | float) else None
    cards = [
        ("return before training", short(summary.get("first_return")), ""),
        ("final return", short(get("final_return", last.get("eval/return"))), ""),
        ("best return", short(get("best_return", max(returns, default=None))), ""),
        ("episode length", short(last.get("eval/length")), "steps"),
        ("episodes that fall", short(percent), "%"),
        ("walks as commanded", {0.0: "no", 1.0: "yes"}.get(last.get("eval/walks", -1), ""), ""),
        ("environment steps", short(get("env_steps", last.get("env_steps"))), ""),
        ("throughput", short(summary.get("env_steps_per_second")), "env steps/s"),
        ("training time", duration(get("train_seconds", last.get("seconds"))), ""),
        ("compile time", duration(get("compile_seconds", last.get("compile_seconds"))), ""),
    ]
    shown = [
        f"<div><span>{label}</span><b>{value}</b> <small>{unit}</small></div>"
        for label, value, unit in cards
        if value
    ]
    return f'<div class="cards">{"".join(shown)}</div>\n' if shown else ""


def film(run_dir: Path) -> str:
    """The video, inside the page."""
    for name, kind in VIDEOS.items():
        path = run_dir / name
        if not path.is_file():
            continue
        if path.stat().st_size > MAX_VIDEO:
            return section("Video", f"<p>See {name}: it is too large to stand in this page.</p>")
        data = data_uri(path.read_bytes(), kind)
        if kind == "image/gif":
            return section("Video", f'<img alt="The policy at work" src="{data}">')
        return section(
            "Video", f'<video controls autoplay loop muted playsinline src="{data}"></video>'
        )
    return ""


def times(summary: Mapping, rows: Sequence[Mapping]) -> str:
    """Where the time went, as a bar and a table; and how long a return took to reach."""
    spent = {k: v for k, v in spent_seconds(summary, rows).items() if number(v) and v > 0}
    total, body = sum(spent.values()), ""
    if total > 0:
        parts = list(enumerate(sorted(spent, key=lambda k: -spent[k])))
        share = {k: 100 * spent[k] / total for k in spent}
        bar = "".join(f'<i class="k{i}" style="width:{share[k]:.2f}%"></i>' for i, k in parts)
        lines = [
            (
                f'<span class="dot k{i}"></span>{escape(TIMES.get(k, k))}',
                duration(spent[k]),
                f"{share[k]:.0f} %" if share[k] >= 1 else "&lt; 1 %",
            )
            for i, k in parts
        ]
        body = f'<div class="bar">{bar}</div>{table(lines)}'
    reached = summary.get("seconds_to_return")
    found = [
        (escape(str(k)), duration(v))
        for k, v in (reached if isinstance(reached, dict) else {}).items()
        if number(v)
    ]
    if found:
        body += f"<br>{table(found, ('return reached', 'after training for'))}"
    return section("Where the time went", body)


def spent_seconds(summary: Mapping, rows: Sequence[Mapping]) -> dict[str, Any]:
    """Seconds by kind: of the summary, else of the last row of metrics."""
    last = rows[-1] if rows else {}
    spent = {k: last.get(f"time/{k}") for k in ("collect", "update", "eval", "checkpoint", "other")}
    spent |= {"compile": last.get("compile_seconds"), "train": last.get("seconds")}
    given = summary.get("times")
    if isinstance(given, dict):
        spent |= {str(k): v for k, v in given.items()}
    if number(spent.get("collect")) and number(spent.get("update")):
        spent.pop("train")  # the two are its parts
    return spent


def figure(title: str, panels: Sequence[plots.Panel], columns: int, note: str = "") -> str:
    """A picture in the colours that the reader's system asks for."""
    if not panels:
        return ""
    height = 2.6 if columns == 2 else 1.9
    light, dark = (
        data_uri(plots.png(plots.draw(panels, columns, theme, height), 120), "image/png")
        for theme in (plots.LIGHT, plots.DARK)
    )
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return section(
        title,
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img alt="{escape(title)}" src="{light}"></picture>{below}',
    )


def terms(rows: Sequence[Mapping], weights: Any) -> str:
    """How each reward term went, and the weights that differ from the environment's own."""
    note = "Mean per step in evaluations, before weighting."
    if isinstance(weights, dict) and weights:
        note += " Weights of this run: " + ", ".join(f"{k} {v}" for k, v in weights.items()) + "."
    return figure("Reward terms", plots.small_panels(rows, "eval/term/"), 4, note)


def settings(config: Mapping) -> str:
    """Every setting, a table per section."""
    loose = {k: v for k, v in config.items() if not isinstance(v, dict)}
    groups = {"general": loose} | {k: v for k, v in config.items() if isinstance(v, dict)}
    tables = {k: table((label(a), show(b)) for a, b in v.items()) for k, v in groups.items() if v}
    blocks = [f"<div><h3>{label(k)}</h3>{v}</div>" for k, v in tables.items()]
    return section("Settings", f'<div class="tables">{"".join(blocks)}</div>' if blocks else "")


def machine(summary: Mapping) -> str:
    """Devices and library versions."""
    devices, versions = summary.get("devices"), summary.get("versions")
    lines = [("devices", show(devices))] if devices else []
    if isinstance(versions, dict):
        lines += [(label(k), show(v)) for k, v in versions.items()]
    return section("Machine", table(lines) if lines else "")


# --- small pieces -------------------------------------------------------------------------------


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n" if body else ""


def pair(left: str, right: str) -> str:
    """Two sections side by side where there is room."""
    return f'<div class="pair">{left}{right}</div>\n' if left or right else ""


def table(lines: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Cells are HTML already."""
    first = f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>" if head else ""
    rest = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in lines)
    return f"<table>{first}{rest}</table>"


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def number(value: Any) -> bool:
    """True for a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def label(name: Any) -> str:
    return escape(str(name).replace("_", " "))


def show(value: Any) -> str:
    """A setting's value in words."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{label(k)} {show(v)}" for k, v in value.items()) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(show(v) for v in value) or "–"
    return escape(str(value))


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
