"""Our humanoids beside the published ones: return over environment steps and over wall time.

    python experiments/walk.py runs/t1 runs/g1 --out docs/walking

writes `walking.png`, `walking.md` (the table) and, for each run, its evaluations as `<env>.jsonl`;
runs may also be such files. Published points: FastTD3 and PPO, by the FastTD3 authors' logs, on an
A100; each with the environment's default reward, no pushes, no randomisation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

STEPS = (0.5e6, 1e6, 2e6, 5e6)
KEPT = ("iteration", "env_steps", "seconds", "eval/return", "eval/length", "eval/walks")
A100 = "one A100"


class Published(NamedTuple):
    steps: dict[float, float]  # environment steps -> return
    seconds: dict[float, float]  # seconds of training -> return
    colour: str


PUBLISHED = {
    "G1JoystickFlatTerrain": {
        "FastTD3": Published(
            {5e6: 4.5, 10e6: 16.7, 15e6: 23.3, 20e6: 27.6, 30e6: 30.4, 51e6: 31.5},
            {628: 10, 805: 15, 1083: 20, 1471: 25, 2469: 30, 3900: 31.4},
            "tab:orange",
        ),
        "PPO": Published(
            {10e6: -1.7, 20e6: -1.5, 30e6: -1.0, 202e6: 23.4},
            {1381: 10, 1757: 15, 2661: 20, 4269: 23.4},
            "tab:green",
        ),
    },
    "T1JoystickFlatTerrain": {
        "FastTD3": Published(
            {5e6: 17.5, 10e6: 23.4, 15e6: 29.2, 20e6: 32.5, 30e6: 34.1, 46e6: 35.0},
            {192: 10, 288: 15, 480: 20, 767: 25, 1090: 30, 3000: 34.8},
            "tab:orange",
        ),
        "PPO": Published(
            {10e6: 0.8, 20e6: 2.1, 30e6: 9.3, 202e6: 34.4},
            {646: 10, 809: 15, 1044: 20, 1229: 25, 1628: 30, 3120: 34.5},
            "tab:green",
        ),
    },
}


class Run(NamedTuple):
    env: str
    rows: list[dict]


def read_run(path: Path) -> Run:
    """The evaluations of a run's folder, or of a file that `main` wrote."""
    if path.is_file():
        env, lines = path.stem, path.read_text().splitlines()
    else:
        env = json.loads((path / "config.json").read_text())["env"]["name"]
        lines = (path / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("eval/return") is not None]
    return Run(env, [{name: row[name] for name in KEPT if name in row} for row in rows])


def at(rows: list[dict], name: str, limit: float) -> float | None:
    """The return of the last evaluation up to `limit`, if the run came within a tenth of it."""
    known = [row for row in rows if row[name] <= limit]
    if not known or max(row[name] for row in rows) < 0.9 * limit:
        return None
    return known[-1]["eval/return"]


def table(runs: list[Run], machine: str) -> str:
    """Returns at equal environment steps, and at equal training time."""
    show = lambda x: "–" if x is None else f"{x:.1f}"  # noqa: E731
    lines = [f"| robot, by environment steps | {' | '.join(f'{s / 1e6:g} M' for s in STEPS)} |"]
    lines.append("| --- |" + " --- |" * len(STEPS))
    for env, rows in runs:
        ours = [show(at(rows, "env_steps", steps)) for steps in STEPS]
        lines.append(f"| {env}, ours, {machine} | {' | '.join(ours)} |")
        for name, data in PUBLISHED[env].items():
            theirs = [show(data.steps.get(steps)) for steps in STEPS]
            lines.append(f"| {env}, {name}, {A100} | {' | '.join(theirs)} |")
    times = (300, 600, 1200, 2400, 3600)
    lines += ["", f"| robot, by training time | {' | '.join(f'{t // 60} min' for t in times)} |"]
    lines.append("| --- |" + " --- |" * len(times))
    for env, rows in runs:
        ours = [show(at(rows, "seconds", t)) for t in times]
        lines.append(f"| {env}, ours, {machine} | {' | '.join(ours)} |")
        for name, data in PUBLISHED[env].items():
            reached = [
                max((r for s, r in data.seconds.items() if s <= t), default=None) for t in times
            ]
            lines.append(
                f"| {env}, {name}, {A100}: reached by then | {' | '.join(map(show, reached))} |"
            )
    return "\n".join(lines) + "\n"


def plot(runs: list[Run], machine: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    fig, axes = plt.subplots(len(runs), 2, figsize=(10, 3.4 * len(runs)), squeeze=False)
    for row, (env, rows) in zip(axes, runs, strict=True):
        for ax, field, scale, unit in (
            (row[0], "env_steps", 1e6, "environment steps, millions"),
            (row[1], "seconds", 60, "training time, minutes"),
        ):
            seen = [r for r in rows if r[field] > 0]
            ax.plot(
                [r[field] / scale for r in seen],
                [r["eval/return"] for r in seen],
                label=f"jaxtd3, {machine}",
                lw=2,
            )
            for name, data in PUBLISHED[env].items():
                points = data.steps if field == "env_steps" else data.seconds
                x = [key / scale for key in points]
                ax.plot(x, list(points.values()), "o", color=data.colour, label=f"{name}, {A100}")
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xlabel(unit)
            ax.set_ylabel("return, default reward")
            ax.grid(alpha=0.3)
        row[0].set_title(env, loc="left")
        row[0].legend(frameon=False)
    fig.tight_layout()
    fig.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/walking"))
    parser.add_argument("--machine", default="one CPU core")
    args = parser.parse_args()
    runs = [read_run(path) for path in args.runs]
    args.out.mkdir(parents=True, exist_ok=True)
    for env, rows in runs:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"{env}.jsonl").write_text(text)
    (args.out / "walking.md").write_text(table(runs, args.machine))
    plot(runs, args.machine, args.out / "walking.png")
    print(table(runs, args.machine))


if __name__ == "__main__":
    main()
