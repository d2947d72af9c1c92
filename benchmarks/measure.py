"""One bench: the real program beside its limits and others, in turns, as one result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import counts as count
from benchmarks.programs import (
    Held,
    copy_task,
    env_task,
    full_state,
    gemm_task,
    learner_tasks,
)
from jaxtd3.bench.timing import Range, Task, compile_cold, constant, interleave, spread
from jaxtd3.config.config import Config
from jaxtd3.run.memory import tree_bytes
from jaxtd3.run.program import Program, build, chunk_of

HEADLINES = (
    "eta",
    "eta_env",
    "eta_learn",
    "iterations_per_second",
    "sketch_iterations_per_second",
    "compile_seconds",
    "bytes_per_transition",
    "temp_over_buffer",
    "traces",
)


def measure(
    program: Program,
    rounds: int,
    *,
    length: int = 10,
    seconds: float = 0.5,
    beside: Sequence[Callable[[Program, int], Task]] = (),
    compiles: int = 3,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Everything `jaxtd3 bench` tells: HEADLINES and what they are made of.

    `beside`: tasks of others' iterations at the same sizes, made of the program and a length.
    """
    tell("compiling the training program, the cache left aside")
    compiled, compile_seconds = compile_cold(
        lambda: chunk_of(program, length),
        program.shapes,
        most=compiles,
    )
    facts = count.program_facts(compiled, program.shapes.replay)
    del compiled
    dots = count.learner_dots(program)
    counts = {
        "flops": count.flops(dots),
        "replay_bytes": count.replay_bytes(program.env.spec, program.config),
        "param_bytes": count.param_bytes(program.shapes.agent, program.config.loop),
        "state_bytes": tree_bytes(program.shapes),
    }
    traced = [0]

    def train_step(state: Any) -> Any:
        traced[0] += 1
        return program.fns.train_step(state)

    watched = program._replace(fns=program.fns._replace(train_step=train_step))
    held = Held(full_state(program))
    tasks = learner_tasks(watched, held, length)
    tasks += [env_task(program, held, length), gemm_task(program), copy_task()]
    tasks += [make(program, length) for make in beside]
    tell(f"timing {', '.join(task.name for task in tasks)}: {rounds} rounds in turns")
    times = interleave(tasks, rounds, seconds)
    result = ratios(times, counts, program.config.loop.collect_steps)
    result |= {
        "compile_seconds": spread(compile_seconds),
        "bytes_per_transition": constant(count.bytes_per_transition(program)),
        "temp_over_buffer": constant(facts["temp_over_buffer"]),
        "traces": constant(traced[0]),
    }
    ordered = {name: result.pop(name) for name in HEADLINES if name in result}
    return ordered | {"details": result | {"counts": counts, "program": facts}}


def ratios(
    times: dict[str, list[float]], counts: dict[str, Any], collect_steps: int
) -> dict[str, Any]:
    """Rates and shares of the limits, of times per iteration (`collect`, `env`: per step).

    eta = (t_env + FLOPs / peak + bytes / bandwidth) / t_iteration, round by round.
    """
    moved = counts["replay_bytes"] + counts["param_bytes"]

    def each(function: Callable[..., float], *names: str) -> Range:
        return spread([function(*row) for row in zip(*(times[n] for n in names), strict=True)])

    def limit(env: float, dots: float, byte: float) -> float:
        return collect_steps * env + dots + moved * byte

    result = {
        "eta": each(lambda t, *parts: limit(*parts) / t, "iteration", "env", "gemms", "memory"),
        "eta_env": each(lambda t, e: e / t, "collect", "env"),
        "eta_learn": each(lambda t, g: g / t, "update", "gemms"),
        "iterations_per_second": each(lambda t: 1 / t, "iteration"),
    }
    for name in (name for name in ("sketch", "torch") if name in times):
        result[f"{name}_iterations_per_second"] = each(lambda t: 1 / t, name)
        result[f"over_{name}"] = each(lambda t, s: s / t, "iteration", name)
    milliseconds = {name: spread([1e3 * t for t in times[name]]) for name in times}
    del milliseconds["memory"]
    milliseconds["limit"] = each(lambda *parts: 1e3 * limit(*parts), "env", "gemms", "memory")
    milliseconds["bytes"] = each(lambda byte: 1e3 * moved * byte, "memory")
    return result | {
        "peak_gflops": each(lambda g: counts["flops"] / g / 1e9, "gemms"),
        "bandwidth_gb": each(lambda byte: 1e-9 / byte, "memory"),
        "milliseconds": milliseconds,
        "rounds": len(times["iteration"]),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The result as a table for people."""
    details = result["details"]
    ms, counts, facts = details["milliseconds"], details["counts"], details["program"]

    def row(name: str, value: Range, unit: str, note: str = "", form: str = ",.3g") -> str:
        low, mid, high = (format(value[k], form) for k in ("low", "median", "high"))
        return f"{name:<24}{mid:>10} {unit:<8}{low + ' .. ' + high:<24}{note}".rstrip()

    head = f"{'':<24}{'median':>10} {'unit':<8}{'range':<24}"
    body: list[str] = [f"{head}{details['rounds']} rounds, in turns"]
    body += [
        row("whole iteration", ms["iteration"], "ms", "collect and learn, one donated program"),
        row("  its limit", ms["limit"], "ms", "physics + FLOPs/peak + bytes/bandwidth"),
        row("collect, one step", ms["collect"], "ms", "policy, noise, physics, reset, ring"),
        row("  physics alone", ms["env"], "ms", "the same environments, nothing else"),
        row("updates, ring full", ms["update"], "ms", "sampling and learning"),
        row("  their products alone", ms["gemms"], "ms", f"{counts['flops'] / 1e9:,.3g} GFLOP"),
        row("  their bytes alone", ms["bytes"], "ms", moved_text(counts)),
    ]
    if "sketch" in ms:
        body.append(row("the sketch's iteration", ms["sketch"], "ms", "benchmarks/sketch.py"))
    for name in HEADLINES:
        if name in result:
            unit = {"bytes_per_transition": "B", "compile_seconds": "s"}.get(name, "")
            body.append(row(name, result[name], unit, form=",.4g"))
    if "torch" in ms:
        body.append(row("PyTorch's iteration", ms["torch"], "ms", "the same work, eager"))
    for name, whose in (("sketch", "the sketch's"), ("torch", "PyTorch's")):
        if f"over_{name}" in details:
            body.append(row(f"times {whose} rate", details[f"over_{name}"], ""))
    body += [
        row("peak on these products", details["peak_gflops"], "GFLOP/s", form=",.4g"),
        row("memory bandwidth", details["bandwidth_gb"], "GB/s", "read + written"),
        f"ring {facts['ring_bytes'] / 2**20:,.1f} MiB, scratch {facts['temp_bytes'] / 2**20:,.1f} "
        f"MiB, copies of the ring {facts['ring_copies']:.0f}, host transfers "
        f"{facts['host_transfers']:.0f}",
        f"compiled: {facts['hlo_flops'] / 1e9:,.3g} GFLOP and {facts['hlo_bytes'] / 1e6:,.4g} MB "
        "accessed per iteration, physics included, by XLA's own count (inner loops once)",
    ]
    return body


def moved_text(counts: dict[str, Any]) -> str:
    """What one iteration must move, in short."""
    return (
        f"replay {counts['replay_bytes'] / 1e6:,.3g} MB, "
        f"parameters {counts['param_bytes'] / 1e6:,.3g} MB"
    )


def command(args: Any, config: Config, tell: Callable[[str], None]) -> tuple[dict, list[str]]:
    """`jaxtd3 bench`."""
    from benchmarks.sketch import sketch_task

    tell(count.setup(config))
    program = build(config)
    beside: list[Callable[[Program, int], Task]] = []
    if args.sketch and program.mesh.size == 1:  # it knows one device
        beside.append(sketch_task)
    if args.torch:
        from benchmarks.torch_eager import torch_task

        beside.append(torch_task)
    result = measure(
        program, args.rounds, length=args.chunk, seconds=args.seconds, beside=beside, tell=tell
    )
    result["details"]["setup"] = count.setup(config)
    return result, [count.setup(config), *lines(result)]
