"""A run as one page: report.html, of what its directory holds; what is missing is left out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxtd3.durable import write_whole
from jaxtd3.errors import UserError
from jaxtd3.output import page, plots
from jaxtd3.output.logs import read_rows
from jaxtd3.output.page import REPORT_FILE, duration, number, short
from jaxtd3.output.rundir import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, require_run

CURVES_FILE = "curves.png"
VIDEOS = ("video.mp4", "video.gif")
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
        return mapping(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def mapping(value: Any) -> dict[str, Any]:
    """An object of somebody's JSON, empty where it is something else."""
    return value if isinstance(value, dict) else {}


# --- writing ------------------------------------------------------------------------------------


def write_curves(run_dir: Path) -> Path:
    """curves.png: return and length against steps and time, losses, reward terms."""
    run_dir = require_run(Path(run_dir))
    rows = read_metrics(run_dir)
    panels = plots.learning_panels(rows)
    panels += plots.small_panels(rows, "train/") + plots.small_panels(rows, "eval/term/")
    return write_whole(run_dir / CURVES_FILE, plots.png(plots.draw(panels, columns=2)))


def write_report(run_dir: Path) -> Path:
    """curves.png and report.html from what the run directory holds."""
    run_dir = require_run(Path(run_dir))
    config = read_object(run_dir / CONFIG_FILE)
    if not config:
        raise UserError(f"{run_dir / CONFIG_FILE} is not a JSON object")
    write_curves(run_dir)
    summary, rows = read_object(run_dir / SUMMARY_FILE), read_metrics(run_dir)
    env = mapping(config.get("env"))
    algo = summary.get("algo", config.get("algo", ""))
    seed = summary.get("seed", mapping(config.get("run")).get("seed", ""))
    videos = (run_dir / name for name in VIDEOS)
    loose = {k: v for k, v in config.items() if not isinstance(v, dict)}
    devices = {"devices": summary["devices"]} if summary.get("devices") else {}
    text = page.render(
        "report.html",
        title=str(summary.get("env") or env.get("name") or run_dir.name),
        status=str(summary.get("status", "running")),
        words=f"{algo} · seed {seed} · {run_dir.name}",
        error=summary.get("error"),
        numbers=headline(summary, rows),
        video=next((page.video(path) for path in videos if path.is_file()), None),
        times=times(summary, rows),
        reached=reached(summary),
        pictures=pictures(rows, mapping(env.get("weights"))),
        settings={"general": loose} | {k: v for k, v in config.items() if isinstance(v, dict)},
        machine=devices | mapping(summary.get("versions")),
    )
    return write_whole(run_dir / REPORT_FILE, text)


# --- what the page shows ------------------------------------------------------------------------


def headline(summary: Mapping, rows: Sequence[Mapping]) -> list[tuple[str, str, str]]:
    """The numbers one looks for first: (what, value, unit)."""
    last: dict[str, Any] = {}
    for row in rows:
        last |= {k: v for k, v in row.items() if v is not None}
    returns = [row["eval/return"] for row in rows if number(row.get("eval/return"))]

    def known(name: str, other: Any) -> Any:
        return summary[name] if number(summary.get(name)) else other

    falls = last.get("eval/falls")
    percent = 100 * falls if isinstance(falls, int | float) else None
    return [
        ("return before training", short(summary.get("first_return")), ""),
        ("final return", short(known("final_return", last.get("eval/return"))), ""),
        ("best return", short(known("best_return", max(returns, default=None))), ""),
        ("episode length", short(last.get("eval/length")), "steps"),
        ("episodes that fall", short(percent), "%"),
        ("walks as commanded", {0.0: "no", 1.0: "yes"}.get(last.get("eval/walks", -1), ""), ""),
        ("environment steps", short(known("env_steps", last.get("env_steps"))), ""),
        ("throughput", short(summary.get("env_steps_per_second")), "env steps/s"),
        ("training time", duration(known("train_seconds", last.get("seconds"))), ""),
        ("compile time", duration(known("compile_seconds", last.get("compile_seconds"))), ""),
    ]


def times(summary: Mapping, rows: Sequence[Mapping]) -> list[tuple[str, float, float]]:
    """Where the time went, the most first: (what, seconds, percent); of the summary, else of the
    last row of metrics."""
    last = rows[-1] if rows else {}
    names = ("collect", "update", "eval", "checkpoint", "other")
    spent: dict[str, Any] = {k: last.get(f"time/{k}") for k in names}
    spent |= {"compile": last.get("compile_seconds"), "train": last.get("seconds")}
    spent |= mapping(summary.get("times"))
    if number(spent.get("collect")) and number(spent.get("update")):
        spent.pop("train")  # the two are its parts
    known = {k: v for k, v in spent.items() if number(v) and v > 0}
    total = sum(known.values())
    order = sorted(known, key=lambda k: -known[k])
    return [(TIMES.get(k, k), known[k], 100 * known[k] / total) for k in order]


def reached(summary: Mapping) -> list[tuple[str, str]]:
    """(return, time of training until an evaluation returned so much)."""
    found = mapping(summary.get("seconds_to_return"))
    return [(level, duration(seconds)) for level, seconds in found.items() if number(seconds)]


def pictures(rows: Sequence[Mapping], weights: Mapping) -> list[page.Picture]:
    """Curves of learning, behaviour, reward terms and learner."""
    changed = ", ".join(f"{k} {v}" for k, v in weights.items())
    terms = "Mean per step in evaluations, before weighting."
    terms += f" Weights of this run: {changed}." if changed else ""
    figures = [
        ("Learning curves", plots.learning_panels(rows), 2, "Bands: one standard deviation."),
        ("Behaviour in evaluations", plots.behaviour_panels(rows), 3, UNITS),
        ("Reward terms", plots.small_panels(rows, "eval/term/"), 4, terms),
        ("Learner", plots.small_panels(rows, "train/"), 3, ""),
    ]
    return [
        page.picture(title, partial(draw_panels, panels, columns), note)
        for title, panels, columns, note in figures
        if panels
    ]


def draw_panels(panels: Sequence[plots.Panel], columns: int, theme: plots.Theme) -> plots.Figure:
    """Panels of a page: lower where there are many in a row."""
    return plots.draw(panels, columns, theme, height=2.6 if columns == 2 else 1.9)
