"""Curves of a run, from the rows of metrics.jsonl; light or dark, without a screen."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Theme:
    """Colours of a picture."""

    paper: str
    ink: str
    faint: str
    lines: tuple[str, ...]


LIGHT = Theme("#ffffff", "#1f2933", "#d9dfe6", ("#2563c9", "#d9730d", "#1d8a5b"))
DARK = Theme("#1b222c", "#e4e9ef", "#3a4552", ("#6ea8ff", "#ffa657", "#5fd39a"))


@dataclass(frozen=True)
class Line:
    x: np.ndarray
    y: np.ndarray
    label: str
    spread: np.ndarray | None = None


@dataclass(frozen=True)
class Panel:
    title: str
    xlabel: str
    lines: tuple[Line, ...]


# --- rows to panels -----------------------------------------------------------------------------


def column(rows: Rows, name: str) -> np.ndarray:
    """Values of one metric, NaN where a row has none."""
    values = (row.get(name) for row in rows)
    return np.array([float(v) if isinstance(v, int | float) else np.nan for v in values])


def names(rows: Rows, prefix: str) -> list[str]:
    """Metrics under a prefix, in the order in which they first appear."""
    found = dict.fromkeys(name for row in rows for name in row if name.startswith(prefix))
    return [name for name in found if np.any(np.isfinite(column(rows, name)))]


def steps_axis(rows: Rows) -> tuple[np.ndarray, str]:
    return column(rows, "env_steps"), "environment steps"


def time_axis(rows: Rows) -> tuple[np.ndarray, str]:
    """Training time in the unit that reads best."""
    seconds = column(rows, "seconds")
    longest = np.nanmax(seconds, initial=0.0)
    unit, size = ("h", 3600) if longest > 2 * 3600 else ("min", 60) if longest > 180 else ("s", 1)
    return seconds / size, f"training time ({unit})"


def line(rows: Rows, x: np.ndarray, name: str, label: str) -> Line | None:
    """One metric against `x`, where it has values; with its spread if `<name>_std` is there."""
    y, spread = column(rows, name), column(rows, f"{name}_std")
    have = np.isfinite(y) & np.isfinite(x)
    if not have.any():
        return None
    return Line(x[have], y[have], label, spread[have] if np.isfinite(spread[have]).any() else None)


def learning_panels(rows: Rows) -> list[Panel]:
    """Return and episode length, each against environment steps and against time."""
    own, weighted = column(rows, "eval/return"), column(rows, "eval/return_weighted")
    reweighted = not np.allclose(own, weighted, rtol=1e-3, equal_nan=True)
    metrics = {
        "Return": [
            ("eval/return", "evaluation, the environment's reward"),
            *([("eval/return_weighted", "evaluation, this run's weights")] if reweighted else []),
            ("episode/return", "training episodes"),
        ],
        "Episode length (steps)": [
            ("eval/length", "evaluation"),
            ("episode/length", "training episodes"),
        ],
    }
    panels = []
    for title, wanted in metrics.items():
        for x, xlabel in (steps_axis(rows), time_axis(rows)):
            lines = [line(rows, x, name, label) for name, label in wanted]
            panels.append(Panel(title, xlabel, tuple(drawn for drawn in lines if drawn)))
    return [panel for panel in panels if panel.lines]


def small_panels(rows: Rows, prefix: str, skip: Sequence[str] = ()) -> list[Panel]:
    """One panel for every metric under a prefix, but for those that begin with one of `skip`."""
    x, xlabel = steps_axis(rows)
    wanted = [name for name in names(rows, prefix) if not name.startswith(tuple(skip))]
    drawn = {name: line(rows, x, name, "") for name in wanted}
    titles = {name: name.removeprefix(prefix).replace("_", " ") for name in drawn}
    return [Panel(titles[name], xlabel, (one,)) for name, one in drawn.items() if one]


def behaviour_panels(rows: Rows) -> list[Panel]:
    """What the policy does, beside return and length: tracking, falls, energy, losses."""
    sound = () if any(row.get("eval/lost") for row in rows) else ("eval/lost",)
    return small_panels(rows, "eval/", ("eval/return", "eval/length", "eval/term/", *sound))


# --- panels to pictures -------------------------------------------------------------------------


def draw(
    panels: Sequence[Panel], columns: int, theme: Theme = LIGHT, height: float = 2.6
) -> Figure:
    """A grid of panels, 10 inches wide."""
    count = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(10, height * count), layout="constrained", facecolor=theme.paper)
    if not panels:
        figure.text(0.5, 0.5, "no metrics yet", color=theme.ink, ha="center", va="center")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(count, columns, i + 1)
        below = panels[i + columns : i + columns + 1]
        _draw_panel(axes, panel, theme, bool(below) and below[0].xlabel == panel.xlabel)
    return figure


def _draw_panel(axes: Axes, panel: Panel, theme: Theme, above: bool) -> None:
    axes.set_title(panel.title, color=theme.ink, fontsize=10, loc="left", fontweight="bold")
    if not above:  # the panel below says it
        axes.set_xlabel(panel.xlabel, color=theme.ink, fontsize=8)
    for color, one in zip(theme.lines, panel.lines, strict=False):
        dots = "o" if len(one.x) <= 30 else None
        axes.plot(
            one.x, one.y, color=color, linewidth=1.6, marker=dots, markersize=3.5, label=one.label
        )
        if one.spread is not None:
            low, high = one.y - one.spread, one.y + one.spread
            axes.fill_between(one.x, low, high, color=color, alpha=0.18, linewidth=0)
    if len(panel.lines) > 1:
        axes.legend(fontsize=7, frameon=False, labelcolor=theme.ink)
    axes.set_facecolor(theme.paper)
    axes.grid(color=theme.faint, linewidth=0.6)
    axes.tick_params(colors=theme.ink, labelsize=8, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(theme.faint)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if "steps" in panel.xlabel:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def png(figure: Figure, dpi: int = 150) -> bytes:
    """The picture as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, facecolor=figure.get_facecolor())
    return file.getvalue()
