"""`jaxtd3 robustness`: a table on the terminal, robustness.json and robustness.png."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtd3.deploy.package import ROBUSTNESS_FILE, controller_of, known_robot, playground_of
from jaxtd3.durable import write_whole
from jaxtd3.errors import UserError

if TYPE_CHECKING:
    from jaxtd3.cli.main import Robustness
    from jaxtd3.deploy.runtime import Controller

PICTURE_FILE = "robustness.png"
EPISODES = 16
MOST = 65536  # simulations at once


def robustness_command(args: Robustness, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 robustness`."""
    import jax

    from jaxtd3.deploy.worlds import choose_worlds

    worlds = choose_worlds(args.worlds)
    episodes = EPISODES if args.episodes is None else args.episodes
    folder = check(args, episodes, len(worlds))
    jax.config.update("jax_platforms", "cpu")  # C MuJoCo runs there
    from jaxtd3.deploy.robustness import evaluate_worlds, summarize

    controller, model, name = load(args.run, args.best)
    begin = time.monotonic()
    quiet = args.json or not sys.stderr.isatty()
    verdicts = evaluate_worlds(
        controller,
        model,
        worlds,
        episodes,
        args.seconds,
        args.seed,
        progress=None if quiet else progress,
    )
    about = controller.about
    whose = {"policy": about.get("source"), "policy_sha256": about.get("policy_sha256")}
    results = {
        "env": about["env"],
        "robot": about["robot"],
        "policy": name,
        "episodes": episodes,
        "seconds": args.seconds,
        "seed": args.seed,
        "took_seconds": round(time.monotonic() - begin, 2),
        "summary": summarize(verdicts, episodes, args.seconds) | whose,
        "worlds": [v._asdict() | {"error": v.error} for v in verdicts],
    }
    write(folder, results)
    if args.json:
        print(json.dumps(results))
    else:
        print(table(results))
        print(f"{folder / ROBUSTNESS_FILE}, {folder / PICTURE_FILE}")
    return 0


def check(args: Robustness, episodes: int, worlds: int) -> Path:
    """The folder to write into; what can be seen to be wrong is refused before loading."""
    if episodes < 1:
        raise UserError(f"--episodes {episodes} is below 1")
    if episodes * worlds > MOST:
        raise UserError(f"{episodes} episodes in {worlds} worlds are more than {MOST} at once")
    if not 0 < args.seconds <= 3600:
        raise UserError(f"--seconds {args.seconds:g} is not above 0 and at most 3600")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed} is negative")
    folder = args.out or (args.run if args.run.is_dir() else Path())
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} cannot be written to")
    return folder


def load(run: Path, best: bool) -> tuple[Controller, Any, str]:
    """The controller, the robot's model, and what it was read from."""
    from jaxtd3.deploy.robot import load_robot
    from jaxtd3.deploy.runtime import load_controller
    from jaxtd3.run.load import load as load_trained

    if run.suffix == ".onnx":
        if best:
            raise UserError("--best chooses a run's checkpoint: leave it away for a controller")
        controller = load_controller(run)
        return controller, load_robot(controller.about["env"]).mj_model, run.name
    known_robot(run)
    trained = load_trained(run, best, impl="native", num_envs=1)
    model = playground_of(trained).mj_model
    return controller_of(trained), model, named(run, trained.source)


def named(run: Path, source: str) -> str:
    return source if run.name == source else f"{run.name} ({source})"


def progress(share: float) -> None:
    end = "\n" if share >= 1 else ""
    print(f"\r{100 * share:3.0f} %", end=end, file=sys.stderr, flush=True)


def table(results: Mapping[str, Any]) -> str:
    """One line per world."""
    lines = [
        f"{results['env']}, {results['policy']}: {results['episodes']} episodes of "
        f"{results['seconds']:g} s in each of {len(results['worlds'])} worlds, seed "
        f"{results['seed']}, {results['took_seconds']:.0f} s",
        f"  {'world':<18}{'survival':>10}{'seconds':>10}{'error m/s':>12}{'error rad/s':>13}",
    ]
    for v in results["worlds"]:
        lines.append(
            f"  {v['world']:<18}{v['survival']:>9.0%} {v['seconds']:>9.1f}"
            f"{v['error_lin']:>12.3f}{v['error_ang']:>13.3f}"
        )
    s = results["summary"]
    worst = f"worst: {s['worst_world']} ({s['worst_survival']:.0%})"
    lines.append(f"  {'mean':<18}{s['survival']:>9.0%}; {worst}; score {s['score']:.2f}")
    return "\n".join(lines)


# --- files --------------------------------------------------------------------------------------


def write(folder: Path, results: Mapping[str, Any]) -> None:
    """robustness.json and robustness.png, each whole or not at all."""
    text = (json.dumps(results, indent=2) + "\n").encode()
    for name, content in ((ROBUSTNESS_FILE, text), (PICTURE_FILE, picture(results))):
        try:
            write_whole(folder / name, content)
        except OSError as error:
            raise UserError(f"cannot write {folder / name}: {error.strerror}") from error


def picture(results: Mapping[str, Any]) -> bytes:
    """Survival and tracking error by world, as PNG."""
    import io

    from matplotlib.figure import Figure

    from jaxtd3.output.plots import LIGHT as THEME

    rows = list(results["worlds"])[::-1]  # the first on top
    figure = Figure(
        figsize=(10, 1.3 + 0.3 * len(rows)), layout="constrained", facecolor=THEME.paper
    )
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row["world"] for row in rows]
    left.barh(names, [100 * row["survival"] for row in rows], color=THEME.lines[2], height=0.65)
    lin, ang = ([row[key] for row in rows] for key in ("error_lin", "error_ang"))
    right.barh(names, lin, color=THEME.lines[0], height=0.65, label="m/s")
    right.barh(names, ang, left=lin, color=THEME.lines[1], height=0.65, label="rad/s")
    for i, row in enumerate(rows):
        label = f" {row['survival']:.0%}"
        left.text(100 * row["survival"], i, label, va="center", fontsize=8, color=THEME.ink)
        label = f" {row['error']:.2f}"
        right.text(row["error"], i, label, va="center", fontsize=8, color=THEME.ink)
    left.set_xlim(0, 112)
    right.set_xlim(0, 1.15 * max(0.1, *(row["error"] for row in rows)))
    left.set_title(f"episodes without a fall, % (of {results['episodes']})", fontsize=9, loc="left")
    right.set_title("tracking error, linear + angular", fontsize=9, loc="left")
    right.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=THEME.ink, labelsize=8, length=0)
        axes.grid(axis="x", color=THEME.faint, linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(
        f"{results['env']}, {results['policy']}, episodes of {results['seconds']:g} s", fontsize=10
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
