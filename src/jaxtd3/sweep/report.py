"""A sweep as one page: report.html needs no other file, no network and no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtd3.config.sections import EnvConfig
from jaxtd3.core.types import Array, EnvState
from jaxtd3.envs.batch import batch_env
from jaxtd3.envs.playground.meshes import STANDINS
from jaxtd3.loop.population import stack
from jaxtd3.output import plots, video
from jaxtd3.output.report import (
    REPORT_FILE,
    VIDEOS,
    data_uri,
    duration,
    page,
    section,
    short,
    table,
)
from jaxtd3.run.checkpoint import restore_agent
from jaxtd3.run.program import run_keys
from jaxtd3.sweep.plan import label
from jaxtd3.sweep.plots import curves, parallel, pareto
from jaxtd3.sweep.results import write_text

if TYPE_CHECKING:
    from jaxtd3.sweep.waves import Parts

Results = Mapping[str, Any]
BEST = 3
SHOWN = 64  # rows of the table


def write_sweep_report(directory: Path, results: Results, videos: Sequence[Path]) -> Path:
    """DIR/report.html."""
    body = [
        heading(results, directory.name),
        cards(results),
        films(results, videos),
        ranking(results),
        picture("Learning curves", curves, results, "A line per member."),
        picture(
            "Weights and metrics",
            parallel,
            results,
            "A line per member, from what was swept on the left to what it led to. "
            "Bright: ranked first; each axis runs from the lowest to the highest value found.",
        ),
        picture("Pareto front", pareto, results, "Numbers are ranks."),
        seeds(results),
    ]
    path = directory / REPORT_FILE
    write_text(path, page(f"{results['env']} sweep", body))
    return path


def heading(results: Results, folder: str) -> str:
    status = results["status"]
    return (
        f"<header><h1>{escape(results['env'])}</h1>"
        f'<span class="pill {escape(status)}">{escape(status)}</span>'
        f'<span class="soft">{escape("sweep · " + folder)}</span></header>\n'
    )


def cards(results: Results) -> str:
    """What one looks for first: the best, and how to have it."""
    best, metric = results["best"], results["metric"]
    times = results["times"]
    shown = [
        ("best " + metric.replace("_", " "), short(best["metrics"][metric])),
        ("members", str(len(results["members"]))),
        ("at once", str(results["at_once"])),
        ("iterations each", short(results["iterations"])),
        ("training time", duration(times["train"])),
        ("compile time", duration(times["compile"])),
        ("traces", str(results["traces"])),
    ]
    boxes = "".join(f"<div><span>{escape(k)}</span><b>{v}</b></div>" for k, v in shown if v)
    line = f"jaxtd3 train --env {results['env']} {best['flags']}"
    return f'<div class="cards">{boxes}</div>\n' + section(
        "The best", f"<p>{escape(line)}</p><p class='note'>Or: jaxtd3 train --config best.json</p>"
    )


def films(results: Results, videos: Sequence[Path]) -> str:
    """The best members side by side."""
    boxes = []
    for file, entry in zip(videos, results["weightings"], strict=False):
        data = data_uri(file.read_bytes(), VIDEOS["video" + file.suffix])
        show = f'<img alt="" src="{data}">'
        if file.suffix == ".mp4":
            show = f'<video controls autoplay loop muted playsinline src="{data}"></video>'
        caption = f"{entry['rank']}: {entry['label']}"
        boxes.append(f"<div>{show}<p class='note'>{escape(caption)}</p></div>")
    style = "display:grid;gap:12px;grid-template-columns:repeat(3,minmax(0,1fr))"
    return section(
        "The best three", f'<div style="{style}">{"".join(boxes)}</div>' if boxes else ""
    )


def ranking(results: Results) -> str:
    """The ranked table: a row per combination, means over its seeds."""
    groups = results["weightings"]
    swept = list(dict.fromkeys(name for g in groups for name in g["values"]))
    order = [results["metric"], *(n for n in results["metrics"] if n != results["metric"])]
    names = [*order, "own_reward"]
    named = any(g["label"] != label(g["values"]) for g in groups)
    head = ["rank", *(["name"] if named else []), *swept, *names]
    rows = []
    for g in groups[:SHOWN]:
        values = [f"{g['values'][n]:g}" if n in g["values"] else "–" for n in swept]
        cells = [number(g["metrics"].get(n), g["spread"].get(n), len(g["members"])) for n in names]
        rows.append([str(g["rank"]), *([escape(g["label"])] if named else []), *values, *cells])
    note = (
        f"Ranked by {results['metric'].replace('_', ' ')}, which does not depend on the weights. "
        "own reward, the return under a member's own weights, is not comparable between members."
    )
    more = f" {len(groups) - SHOWN} more in results.csv." if len(groups) > SHOWN else ""
    body = table(rows, [escape(name.replace("_", " ")) for name in head])
    return section(
        "Ranking",
        f'<div style="overflow-x:auto">{body}</div><p class="note">{escape(note + more)}</p>',
    )


def number(value: Any, spread: Any, count: int) -> str:
    if value is None:
        return "not finite"
    text = short(value) + (f" ± {short(spread)}" if count > 1 and spread is not None else "")
    return f'<span style="white-space:nowrap">{text}</span>'


def picture(title: str, draw: Callable[..., Any], results: Results, note: str) -> str:
    """A figure in the colours that the reader's system asks for."""
    light, dark = (
        data_uri(plots.png(draw(results, theme), 120), "image/png")
        for theme in (plots.LIGHT, plots.DARK)
    )
    return section(
        title,
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img alt="{escape(title)}" src="{light}"></picture><p class="note">{escape(note)}</p>',
    )


def seeds(results: Results) -> str:
    """Every member where there are several per combination."""
    members = results["members"]
    if len(members) == len(results["weightings"]):
        return ""
    metric = results["metric"]
    rows = [
        [str(m["rank"]), escape(m["label"]), str(m["seed"]), short(m["metrics"][metric])]
        for m in members[:SHOWN]
    ]
    return section("Members", table(rows, ["rank", "values", "seed", escape(metric)]))


# --- videos -------------------------------------------------------------------------------------


def film_best(parts: Parts, directory: Path, results: Results) -> list[Path]:
    """Videos of the best three combinations, from one rollout program."""
    env, spec = parts.eval_env, parts.eval_env.spec
    model, draw = video.model_of(env), getattr(env.env, "draw", None)
    if model is None and draw is None:
        raise video.RenderUnavailable(f"no video: {spec.name} has nothing to draw")
    software = model is not None and draw is None and video.in_software(video.require_gl())
    steps = max(1, min(spec.episode_length, round(video.SECONDS / spec.dt)))
    skip, fps = video.real_time(spec.dt, video.SOFTWARE_FPS if software else video.MAX_FPS)
    best = [g["members"][0] for g in results["weightings"][:BEST]]
    paths = {m["index"]: directory / m["path"] for m in results["members"]}
    template = jax.eval_shape(parts.agent.init, jax.random.key(0))
    states = stack([restore_agent(paths[index], template) for index in best])
    keep = (lambda inner: inner) if draw else video.trajectory_fields
    shown = record(parts, states, keep, steps)
    videos = []
    for i in range(len(best)):
        one = jax.tree.map(lambda x, i=i: x[i, ::skip], shown)
        frames = draw_states(draw, one) if draw else draw_model(env, model, one)
        videos.append(video.write_video(frames, directory / f"best-{i + 1}.mp4", fps))
    return videos


def draw_states(draw: Callable[[Any], Any], states: Any) -> Any:
    count = jax.tree.leaves(states)[0].shape[0]
    return (np.asarray(draw(jax.tree.map(lambda x: x[t], states))) for t in range(count))  # noqa: B023


def draw_model(env: Any, model: Any, trajectory: dict[str, np.ndarray]) -> Any:
    shapes = getattr(getattr(env.env, "meshes", None), "kind", "") == STANDINS
    camera = video.find_camera(model, None)
    return video.draw_frames(model, trajectory, camera, height=360, width=480, shapes=shapes)


def record(parts: Parts, agents: Any, keep: Callable[[Any], Any], steps: int) -> Any:
    """`keep(state)` of one environment per member at every step, on the host: [M, steps, ..]."""
    env, agent = parts.eval_env, parts.agent
    limit = env.spec.episode_length
    few = batch_env(env.env, EnvConfig(num_envs=video.COPIES, episode_length=limit))
    key_init, key_run = jax.random.split(run_keys(parts.config.run.seed).render)
    start = few.init(key_init)  # all members are filmed from the same first state

    def run(agent_state: Any) -> Any:
        def step(state: EnvState, key: Array) -> tuple[EnvState, Any]:
            shown = jax.tree.map(lambda x: x[0], keep(state.inner))
            state, *_ = few.step(state, agent.act(agent_state, state.obs), key)
            return state, shown

        return jax.lax.scan(step, start, jax.random.split(key_run, steps))[1]

    return jax.device_get(jax.jit(jax.vmap(run))(agents))
