"""Pictures of a sweep: curves, parallel coordinates, Pareto front; members coloured by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from jaxtd3.output.plots import Theme

Results = Mapping[str, Any]
Members = Sequence[Mapping[str, Any]]


def colour(rank: int, count: int) -> Any:
    """Bright for the best, dull for the worst."""
    return colormaps["viridis_r"](0.12 + 0.8 * (rank - 1) / max(count - 1, 1))


def figure(theme: Theme, height: float) -> tuple[Figure, Axes]:
    picture = Figure(figsize=(10, height), layout="constrained", facecolor=theme.paper)
    axes = picture.add_subplot()
    axes.set_facecolor(theme.paper)
    axes.tick_params(colors=theme.ink, labelsize=8, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(theme.faint)
    axes.grid(color=theme.faint, linewidth=0.6)
    return picture, axes


def as_float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def curves(results: Results, theme: Theme) -> Figure:
    """The metric against environment steps, a line per member."""
    picture, axes = figure(theme, 3.4)
    members: Members = results["members"]
    for m in reversed(members):  # the best on top
        x = [as_float(row.get("env_steps")) for row in m["curve"]]
        y = [as_float(row.get(results["metric"])) for row in m["curve"]]
        named = f"{m['rank']}: {m['label']}" if m["rank"] <= 8 else None
        width = 2.4 if m["rank"] == 1 else 1.2
        shade = colour(m["rank"], len(members))
        axes.plot(x, y, color=shade, linewidth=width, marker="o", markersize=3, label=named)
    axes.set_xlabel("environment steps", color=theme.ink, fontsize=8)
    axes.set_ylabel(results["metric"].replace("_", " "), color=theme.ink, fontsize=8)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        fontsize=7,
        frameon=False,
        labelcolor=theme.ink,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    return picture


def columns(results: Results) -> list[tuple[str, str]]:
    """The axes of the parallel coordinates: what was swept, then what was measured."""
    swept = dict.fromkeys(name for m in results["members"] for name in m["values"])
    order = [results["metric"], *(n for n in results["metrics"] if n != results["metric"])]
    return [("values", name) for name in swept] + [("metrics", name) for name in order]


def parallel(results: Results, theme: Theme) -> Figure:
    """A line per member through every swept value and every metric."""
    picture, axes = figure(theme, 3.6)
    members: Members = results["members"]
    names = columns(results)
    table = np.array([[as_float(m[kind].get(name)) for kind, name in names] for m in members])
    low, high = np.nanmin(table, axis=0), np.nanmax(table, axis=0)
    span = np.where(high > low, high - low, 1.0)
    scaled = np.where(high > low, (table - low) / span, 0.5)
    at = np.arange(len(names))
    for m, line in reversed(list(zip(members, scaled, strict=True))):
        width = 2.6 if m["rank"] == 1 else 1.1
        axes.plot(at, line, color=colour(m["rank"], len(members)), linewidth=width, alpha=0.9)
    for i in at:
        axes.axvline(i, color=theme.faint, linewidth=1)
        for y, value, side in ((-0.04, low[i], "top"), (1.04, high[i], "bottom")):
            axes.text(i, y, f"{value:.3g}", ha="center", va=side, fontsize=7, color=theme.ink)
    axes.set_xticks(at, [n.replace("_", "\n").replace(".", ".\n") for _, n in names], fontsize=8)
    axes.set_yticks([])
    axes.set_ylim(-0.16, 1.16)
    axes.grid(False)
    return picture


def pareto(results: Results, theme: Theme) -> Figure:
    """Two metrics against each other, and the members that none beats in both."""
    picture, axes = figure(theme, 3.4)
    first, second = results["pareto"]["metrics"]
    members: Members = results["members"]
    point = {
        m["index"]: (as_float(m["metrics"][first]), as_float(m["metrics"][second])) for m in members
    }
    front = np.array([point[i] for i in results["pareto"]["members"]]).reshape(-1, 2)
    axes.plot(front[:, 0], front[:, 1], color=theme.lines[1], linewidth=1.6, label="Pareto front")
    for m in members:
        x, y = point[m["index"]]
        axes.scatter(x, y, s=46, color=colour(m["rank"], len(members)), edgecolors=theme.paper)
        axes.annotate(
            str(m["rank"]), (x, y), (5, 4), textcoords="offset points", fontsize=7, color=theme.ink
        )
    for name, put in ((first, axes.set_xlabel), (second, axes.set_ylabel)):
        about = results["metrics"][name]
        unit = f" ({about['unit']})" if about["unit"] else ""
        words = f"{name.replace('_', ' ')}{unit}: {about['better']} is better"
        put(words, color=theme.ink, fontsize=8)
    axes.legend(fontsize=7, frameon=False, labelcolor=theme.ink)
    return picture
