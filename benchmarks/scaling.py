"""How time and memory grow: with environments, batch, ring length, updates, fill and devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from benchmarks.counts import setup, update_step
from benchmarks.programs import Held, full_state, with_fill
from jaxtd3.bench.timing import Task, interleave, spread
from jaxtd3.config.config import Config
from jaxtd3.core.sharding import AXIS, WHOLE
from jaxtd3.errors import UserError, nearest
from jaxtd3.output.plots import LIGHT
from jaxtd3.run.program import Program, build, chunk_of

LENGTH = 10  # iterations per timed chunk
SPAN = 8.0  # a picture's least ratio of top to bottom


class Point(NamedTuple):
    x: float
    changes: Mapping[str, Any]


def by_envs(config: Config) -> list[Point]:
    """1 to 8 times the environments, the capacity of the ring kept."""
    capacity = config.env.num_envs * config.replay.length
    sizes = [config.env.num_envs * k for k in (1, 2, 4, 8)]
    return [Point(n, {"num_envs": n, "length": max(8, capacity // n)}) for n in sizes]


def by_batch(config: Config) -> list[Point]:
    sizes = [config.replay.batch_size * k for k in (1, 2, 4, 8)]
    return [Point(n, {"batch_size": n}) for n in sizes]


def by_length(config: Config) -> list[Point]:
    """From 1e5 to 1e7 transitions."""
    envs = config.env.num_envs
    lengths = [max(8, round(n / envs)) for n in (1e5, 1e6, 1e7)]
    return [Point(n * envs, {"length": n}) for n in lengths]


def by_updates(config: Config) -> list[Point]:
    loop = config.loop
    points = []
    for k in (1, 2, 4, 8):
        n = loop.critic_updates * k
        points.append(Point(n, {"critic_updates": n, "policy_updates": loop.policy_updates * k}))
    return points


AXES: dict[str, Callable[[Config], list[Point]]] = {
    "envs": by_envs,
    "batch": by_batch,
    "length": by_length,
    "updates": by_updates,
}


def chosen(names: str) -> list[str]:
    """The axes asked for, in the table's order; `fill` is one more."""
    known = [*AXES, "fill"]
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            raise UserError(nearest("axis", name, known))
    return [name for name in known if not asked or name in asked]


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """k of the fit y ~ x^k."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def scale_axis(config: Config, points: list[Point], rounds: int, seconds: float) -> dict[str, Any]:
    """Time and memory of an iteration at every point, the points taking turns."""
    tasks, memory = [], []
    for point in points:
        program = build(config.override(point.changes))
        chunk = chunk_of(program, LENGTH)
        usage = chunk.lower(program.shapes).compile().memory_analysis()
        memory.append(usage.argument_size_in_bytes + usage.temp_size_in_bytes)
        held = Held(full_state(program))

        def run(held: Held = held, chunk: Any = chunk) -> None:
            held.through(chunk)

        tasks.append(Task(f"{point.x:g}", run, LENGTH))
    times = interleave(tasks, rounds, seconds)
    x = [point.x for point in points]
    milliseconds = [spread([1e3 * t for t in times[task.name]]) for task in tasks]
    return {
        "x": x,
        "milliseconds": milliseconds,
        "memory_bytes": memory,
        "time_exponent": exponent(x, [m["median"] for m in milliseconds]),
        "memory_exponent": exponent(x, memory),
    }


def scale_fill(config: Config, rounds: int, seconds: float) -> dict[str, Any]:
    """Time of a collecting step (its insert with it) and of an iteration, by how full the ring is.

    One compiled program serves them all: how full the ring is, is a number in its state.
    """
    program = build(config)
    held = Held(full_state(program))
    chunks = {
        "collect": chunk_of(program, LENGTH, program.fns.collect_step),
        "iteration": chunk_of(program, LENGTH),
    }
    slabs = sorted({max(2, int(config.replay.length * share)) for share in (0.01, 0.5, 1.0)})
    tasks = []
    for name, chunk in chunks.items():
        for n in slabs:

            def prepare(n: int = n) -> None:
                held.state = jax.block_until_ready(with_fill(held.state, n))

            def run(chunk: Any = chunk) -> None:
                held.through(chunk)

            tasks.append(Task(f"{name} {n}", run, LENGTH, prepare))
    times = interleave(tasks, rounds, seconds)
    told = {
        name: [spread([1e3 * t for t in times[f"{name} {n}"]]) for n in slabs] for name in chunks
    }
    return {
        "x": slabs,
        "milliseconds": told["iteration"],
        "collect_milliseconds": told["collect"],
        "full_over_empty": told["collect"][-1]["median"] / told["collect"][0]["median"],
        "time_exponent": exponent(slabs, [m["median"] for m in told["iteration"]]),
        "programs": {name: chunk._cache_size() for name, chunk in chunks.items()},
    }


def scaling(
    config: Config,
    axes: Sequence[str],
    rounds: int,
    seconds: float,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Every axis, one after the other."""
    found: dict[str, Any] = {}
    for name in axes:
        tell(f"scaling with {name}")
        if name == "fill":
            found[name] = scale_fill(config, rounds, seconds)
        else:
            found[name] = scale_axis(config, AXES[name](config), rounds, seconds)
    return {"env": config.env.name, "axes": found}


# --- devices ------------------------------------------------------------------------------------


def allreduce_task(program: Program, name: str) -> Task:
    """The gradients' all-reduces of one iteration and nothing else."""
    agent, loop = program.shapes.agent, program.config.loop

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

    def once(grads: Any) -> Any:
        """Every average is of something new on every device, so that the compiler drops none."""
        place = jax.lax.axis_index(AXIS).astype(jnp.float32)

        def mean(tree: Any) -> Any:
            return jax.lax.pmean(jax.tree.map(lambda x: x + place, tree), AXIS)

        def average(grads: Any, _: Any) -> tuple[Any, None]:
            critic = grads["critic"]
            for _ in range(loop.critic_updates // loop.policy_updates):
                critic = mean(critic)
            return {"critic": critic, "actor": mean(grads["actor"])}, None

        return jax.lax.scan(average, grads, length=LENGTH * loop.policy_updates)[0]

    mapped = jax.shard_map(
        once, mesh=program.mesh, in_specs=WHOLE, out_specs=WHOLE, check_vma=False
    )
    averaged = jax.jit(mapped)
    grads = {"critic": zeros(agent.critic), "actor": zeros(agent.actor)}
    return Task(name, lambda: jax.block_until_ready(averaged(grads)), LENGTH)


def over_devices(
    config: Config,
    devices: Sequence[int],
    rounds: int,
    seconds: float,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time of collecting, updating and averaging gradients, by number of devices, in turns.

    Sizes are global: the same work is split among more devices.
    """
    tasks = []
    for n in devices:
        tell(f"building for {n} devices")
        program = build(config.override({"devices": n}))
        held = Held(full_state(program))
        steps = {
            "iteration": program.fns.train_step,
            "collect": program.fns.collect_step,
            "update": update_step(program),
        }
        for name, step in steps.items():

            def run(held: Held = held, chunk: Any = chunk_of(program, LENGTH, step)) -> None:
                held.through(chunk)

            tasks.append(Task(f"{name} {n}", run, LENGTH))
        tasks.append(allreduce_task(program, f"allreduce {n}"))
    times = interleave(tasks, rounds, seconds)
    table = {
        name: {str(n): spread([1e3 * t for t in times[f"{name} {n}"]]) for n in devices}
        for name in ("iteration", "collect", "update", "allreduce")
    }
    return {"env": config.env.name, "devices": list(devices), "milliseconds": table}


# --- for people ---------------------------------------------------------------------------------


def lines(result: Mapping[str, Any]) -> list[str]:
    """The axes as tables."""
    body = []
    for name, axis in result["axes"].items():
        grows = f"time ~ {name}^{axis['time_exponent']:.2f}"
        if "memory_exponent" in axis:
            grows += f", memory ~ {name}^{axis['memory_exponent']:.2f}"
        if "full_over_empty" in axis:
            grows += f", a collecting step full / nearly empty: {axis['full_over_empty']:.2f}"
        body.append(f"{name}: {grows}")
        memory = axis.get("memory_bytes", [None] * len(axis["x"]))
        for x, ms, size in zip(axis["x"], axis["milliseconds"], memory, strict=True):
            held = "" if size is None else f"{size / 2**20:>12,.1f} MiB"
            times = f"{ms['median']:>10,.3g} ms ({ms['low']:,.3g} .. {ms['high']:,.3g})"
            body.append(f"  {x:>14,.0f} {times:<36}{held}")
    return body


def device_lines(result: Mapping[str, Any]) -> list[str]:
    """One row per part of an iteration, one column per number of devices."""
    devices = result["devices"]
    body = [f"{'ms per iteration':<18}" + "".join(f"{n:>9} devices" for n in devices)]
    for name, row in result["milliseconds"].items():
        cells = "".join(f"{row[str(n)]['median']:>17,.3g}" for n in devices)
        body.append(f"{name:<18}{cells}")
    return body


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Time and memory against every axis, both on log scales."""
    axes = result["axes"]
    picture = Figure(figsize=(3.2 * len(axes), 5.2), layout="constrained", facecolor=LIGHT.paper)
    grid = picture.subplots(2, len(axes), squeeze=False)
    grid[0][0].set_ylabel("ms per iteration", fontsize=8)
    grid[1][0].set_ylabel("MiB", fontsize=8)
    for column, (name, axis) in enumerate(axes.items()):
        top, bottom = grid[0][column], grid[1][column]
        low, middle, high = (
            [one[key] for one in axis["milliseconds"]] for key in ("low", "median", "high")
        )
        top.fill_between(axis["x"], low, high, color=LIGHT.lines[0], alpha=0.2, linewidth=0)
        draw_growth(top, axis["x"], middle, name, LIGHT.lines[0])
        top.set_title(f"time ~ {name}^{axis['time_exponent']:.2f}", fontsize=9)
        if "memory_bytes" not in axis:
            bottom.axis("off")
            continue
        sizes = [size / 2**20 for size in axis["memory_bytes"]]
        draw_growth(bottom, axis["x"], sizes, name, LIGHT.lines[1])
        bottom.set_title(f"memory ~ {name}^{axis['memory_exponent']:.2f}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=120)


def draw_growth(panel: Axes, x: Sequence[float], y: Sequence[float], name: str, color: str) -> None:
    """One curve on log scales, a tick at every point measured; what is flat looks flat."""
    panel.loglog(x, y, marker="o", color=color)
    panel.set_xticks(x)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.xaxis.set_minor_locator(NullLocator())
    low, high = panel.get_ylim()
    spare = max(1.0, SPAN / (high / low)) ** 0.5
    panel.set_ylim(low / spare, high * spare)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel(name, fontsize=8)
    panel.tick_params(labelsize=8)
    panel.grid(color=LIGHT.faint, linewidth=0.6)


def command(args: Any, config: Config, tell: Callable[[str], None]) -> tuple[dict, list[str]]:
    """`jaxtd3 bench --scaling`."""
    result = scaling(config, chosen(args.axes or ""), args.rounds, args.seconds, tell)
    plot(result, args.plot)
    tell(f"wrote {args.plot}")
    return result, [setup(config), *lines(result)]


def devices_command(
    args: Any, config: Config, tell: Callable[[str], None]
) -> tuple[dict, list[str]]:
    """`jaxtd3 bench --over-devices N,N`."""
    devices = [int(n) for n in args.over_devices.split(",")]
    result = over_devices(config, devices, args.rounds, args.seconds, tell)
    return result, [setup(config), *device_lines(result)]
