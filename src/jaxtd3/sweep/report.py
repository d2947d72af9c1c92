"""A sweep as one page: report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxtd3.durable import write_whole
from jaxtd3.loop.population import stack
from jaxtd3.output import page, video
from jaxtd3.output.page import REPORT_FILE, duration, short, words
from jaxtd3.run.checkpoint import restore_agent
from jaxtd3.run.program import run_keys
from jaxtd3.sweep.plan import label
from jaxtd3.sweep.plots import curves, parallel, pareto

if TYPE_CHECKING:
    from jaxtd3.sweep.waves import SweepProgram

Results = Mapping[str, Any]
BEST = 3
SHOWN = 64  # rows of the table


def write_sweep_report(directory: Path, results: Results, videos: Sequence[Path]) -> Path:
    """DIR/report.html."""
    head, rows, note = ranking(results)
    captions = [f"{entry['rank']}: {entry['label']}" for entry in results["weightings"]]
    films = [page.video(path) for path in videos]
    text = page.render(
        "sweep.html",
        title=f"{results['env']} sweep",
        env=results["env"],
        status=results["status"],
        words=f"sweep · {directory.name}",
        numbers=headline(results),
        flags=results["best"]["flags"],
        films=list(zip(films, captions, strict=False)),
        head=head,
        ranking=rows,
        ranking_note=note,
        pictures=pictures(results),
        members=members(results),
        metric=words(results["metric"]),
    )
    return write_whole(directory / REPORT_FILE, text)


def headline(results: Results) -> list[tuple[str, str, str]]:
    """What one looks for first: (what, value, unit)."""
    metric, times = results["metric"], results["times"]
    return [
        ("best " + words(metric), short(results["best"]["metrics"][metric]), ""),
        ("members", str(len(results["members"])), ""),
        ("at once", str(results["at_once"]), ""),
        ("iterations each", short(results["iterations"]), ""),
        ("training time", duration(times["train"]), ""),
        ("compile time", duration(times["compile"]), ""),
        ("traces", str(results["traces"]), ""),
    ]


def ranking(results: Results) -> tuple[list[str], list[list[str]], str]:
    """The ranked table, a row per combination, means over its seeds: (head, rows, note)."""
    groups = results["weightings"]
    swept = list(dict.fromkeys(name for g in groups for name in g["values"]))
    order = [results["metric"], *(n for n in results["metrics"] if n != results["metric"])]
    names = [*order, "own_reward"]
    named = any(g["label"] != label(g["values"]) for g in groups)
    head = ["rank", *(["name"] if named else []), *swept, *names]
    rows = []
    for g in groups[:SHOWN]:
        values = [f"{g['values'][n]:g}" if n in g["values"] else "–" for n in swept]
        cells = [mean(g["metrics"].get(n), g["spread"].get(n), len(g["members"])) for n in names]
        rows.append([str(g["rank"]), *([g["label"]] if named else []), *values, *cells])
    note = (
        f"Ranked by {words(results['metric'])}, which does not depend on the weights. "
        "own reward, the return under a member's own weights, is not comparable between members."
    )
    more = f" {len(groups) - SHOWN} more in results.csv." if len(groups) > SHOWN else ""
    return [words(name) for name in head], rows, note + more


def mean(value: Any, spread: Any, count: int) -> str:
    """A mean over seeds, with its spread where there are several."""
    if value is None:
        return "not finite"
    return short(value) + (f" ± {short(spread)}" if count > 1 and spread is not None else "")


def pictures(results: Results) -> list[page.Picture]:
    """Curves, parallel coordinates, Pareto front."""
    axes = (
        "A line per member, from what was swept on the left to what it led to. "
        "Bright: ranked first; each axis runs from the lowest to the highest value found."
    )
    figures = [
        ("Learning curves", curves, "A line per member."),
        ("Weights and metrics", parallel, axes),
        ("Pareto front", pareto, "Numbers are ranks."),
    ]
    return [page.picture(title, partial(draw, results), note) for title, draw, note in figures]


def members(results: Results) -> list[list[str]]:
    """Every member where there are several per combination."""
    found, metric = results["members"], results["metric"]
    if len(found) == len(results["weightings"]):
        return []
    return [
        [str(m["rank"]), m["label"], str(m["seed"]), short(m["metrics"][metric])]
        for m in found[:SHOWN]
    ]


def film_best(program: SweepProgram, directory: Path, results: Results) -> list[Path]:
    """Videos of the best three combinations, from one rollout program."""
    best = [g["members"][0] for g in results["weightings"][:BEST]]
    paths = {m["index"]: directory / m["path"] for m in results["members"]}
    template = jax.eval_shape(program.parts.agent.init, jax.random.key(0))
    agents = stack([restore_agent(paths[index], template) for index in best])
    key = run_keys(program.config.run.seed).render
    _, eval_env, agent, _ = program.parts
    films = video.films(eval_env, agent, agents, key, height=360, width=480, several=True)
    return [
        video.write_video(film.frames, directory / f"best-{i + 1}.mp4", film.fps)
        for i, film in enumerate(films)
    ]
