"""What an iteration should take on GPUs that are not here: counts divided by data-sheet rates.

Nothing is run: the program is traced, and lowered for CUDA. What is predicted and what is measured
stands in every line; the assumptions are printed with the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from benchmarks import counts as count
from jaxtd3.config.config import Config
from jaxtd3.core.types import TrainState
from jaxtd3.loop.chunk import make_chunk
from jaxtd3.run.memory import tree_bytes
from jaxtd3.run.program import Program, build

FASTTD3_GFLOP = 1225.0  # of one iteration of FastTD3 with G1's defaults
FASTTD3_MS = 86.7  # an iteration of FastTD3 on an A100, G1 flat, from its authors' logs


@dataclass(frozen=True)
class Gpu:
    """Rates of a data sheet: dense, without sparsity."""

    name: str
    bf16: float  # TFLOP/s
    f32: float  # TFLOP/s, without TF32
    memory: float  # GB/s
    link: float  # GB/s one way, between the GPUs of one machine
    gib: float


GPUS = {
    "a100": Gpu("A100 80 GB SXM", 312, 19.5, 2039, 300, 80),
    "h100": Gpu("H100 80 GB SXM", 989, 66.9, 3350, 450, 80),
    "4090": Gpu("RTX 4090", 165, 82.6, 1008, 32, 24),
}


@dataclass(frozen=True)
class Assumptions:
    """What counts and data sheets do not tell."""

    matmul_share: float = 0.4
    """Share of the peak that these matrix products reach."""
    memory_share: float = 0.7
    """Share of the memory bandwidth that gathers and the optimiser reach."""
    physics_ms: float = 44.0
    """MJX-jax on an A100: milliseconds per step, and ..."""
    physics_us_per_env: float = 16.0
    """... microseconds per environment."""
    devices: int = 8
    """GPUs of one machine, for the all-reduce."""


def counts(program: Program) -> dict[str, float]:
    """What one iteration does, on one device."""
    config, spec, shapes = program.config, program.env.spec, program.shapes
    dots = count.learner_dots(program)
    return {
        "flops": count.flops(dots),
        "flops_by_hand": count.mlp_flops(spec, config) if config.agent.network == "mlp" else 0,
        "replay_bytes": count.replay_bytes(spec, config),
        "param_bytes": count.param_bytes(shapes.agent, config.loop),
        "allreduce_bytes": count.gradient_bytes(shapes.agent, config.loop),
        "ring_bytes": tree_bytes(shapes.replay),
        "state_bytes": tree_bytes(shapes),
    }


def predict(
    found: Mapping[str, float], gpu: Gpu, config: Config, assume: Assumptions = Assumptions()
) -> dict[str, float]:
    """Milliseconds per iteration, part by part."""
    peak = gpu.f32 if config.agent.compute == "f32" else gpu.bf16
    learn = found["flops"] / (peak * 1e12 * assume.matmul_share)
    moved = found["replay_bytes"] + found["param_bytes"]
    memory = moved / (gpu.memory * 1e9 * assume.memory_share)
    n = assume.devices
    ring = 2 * (n - 1) / n * found["allreduce_bytes"] / (gpu.link * 1e9)
    physics = assume.physics_ms + 1e-3 * assume.physics_us_per_env * config.env.num_envs
    physics *= config.loop.collect_steps
    return {
        "matmul_ms": 1e3 * learn,
        "memory_ms": 1e3 * memory,
        "learner_ms": 1e3 * (learn + memory),
        "physics_ms": physics,
        "iteration_ms": 1e3 * (learn + memory) + physics,
        "allreduce_ms": 1e3 * ring,
    }


# --- the program for CUDA -----------------------------------------------------------------------

SCATTER_ADD = re.compile(
    r'"stablehlo\.scatter"[^\n]*\(\{\s*\^bb0\([^\n]*tensor<f32>[^\n]*\):\s*'
    r"%\S+ = stablehlo\.add [^\n]*tensor<f32>"
)


def lower(program: Program, step: Any) -> str:
    """A chunk of a step as StableHLO for CUDA."""
    chunk: Any = make_chunk(step, 2, program.layout)
    return chunk.trace(program.shapes).lower(lowering_platforms=("cuda",)).as_text()


def is_highest(dot: count.Dot) -> bool:
    return "HIGHEST" in dot.precision


def is_default(dot: count.Dot) -> bool:
    """TF32 on a GPU. (MJX asks for `high` itself in a box-box collision: that is no default.)"""
    return dot.precision == "None" or "DEFAULT" in dot.precision


def cuda_facts(program: Program) -> dict[str, int]:
    """What the whole chunk, its learner and its environments look like on a GPU."""

    def env_step(state: TrainState) -> Any:
        action = jnp.zeros((state.env.obs.shape[0], program.env.spec.action_size))
        return program.env.step(state.env, action, state.key)

    env = count.count_dots(count.trace(program, env_step))
    learner = count.count_dots(count.trace(program, count.update_step(program)))
    whole = count.count_dots(count.trace(program, program.fns.train_step))
    return {
        "learner_scatter_adds_f32": len(
            SCATTER_ADD.findall(lower(program, count.update_step(program)))
        ),
        "chunk_scatter_adds_f32": len(SCATTER_ADD.findall(lower(program, program.fns.train_step))),
        "env_dots": sum(env.values()),
        "env_dots_default": sum(n for dot, n in env.items() if is_default(dot)),
        "env_dots_highest": sum(n for dot, n in env.items() if is_highest(dot)),
        "learner_dots": sum(learner.values()),
        "learner_dots_highest": sum(n for dot, n in learner.items() if is_highest(dot)),
        "chunk_dots_highest": sum(n for dot, n in whole.items() if is_highest(dot)),
    }


def verdicts(facts: Mapping[str, int], collect_steps: int = 1) -> dict[str, bool]:
    """What must hold of the program for CUDA."""
    return {
        "no f32 scatter-add in the learner": facts["learner_scatter_adds_f32"] == 0,
        "no dot of the physics is of default precision": facts["env_dots_default"] == 0,
        "no dot of the learner is `highest`": facts["learner_dots_highest"] == 0,
        "`highest` nowhere else in the chunk": facts["chunk_dots_highest"]
        == collect_steps * facts["env_dots_highest"],
    }


def roofline(program: Program, gpu: str, lowered: bool = True) -> dict[str, Any]:
    """The prediction for one GPU, its counts, and the checks of the program for CUDA."""
    found = counts(program)
    result: dict[str, Any] = {
        "env": program.config.env.name,
        "gpu": GPUS[gpu].name,
        "counts": found,
        "predicted": predict(found, GPUS[gpu], program.config),
        "assumptions": vars(Assumptions()),
        "gflop_over_fasttd3": found["flops"] / 1e9 / FASTTD3_GFLOP,
    }
    if lowered:
        facts = cuda_facts(program)
        result["cuda"] = facts
        result["checks"] = verdicts(facts, program.config.loop.collect_steps)
    return result


def lines(result: Mapping[str, Any], config: Config) -> list[str]:
    """The page for people."""
    found, told = result["counts"], result["predicted"]
    assume = Assumptions(**result["assumptions"])
    sheet = next(gpu for gpu in GPUS.values() if gpu.name == result["gpu"])
    rate = 1e3 / told["iteration_ms"]
    steps = config.env.num_envs * config.loop.collect_steps

    def row(name: str, value: float, unit: str, note: str) -> str:
        return f"  {name:<18}{value:9.2f} {unit:<4} {note}"

    def mb(name: str) -> str:
        return f"{found[name] / 1e6:,.1f} MB"

    body = [
        f"{result['env']} on one {sheet.name}: PREDICTED from counts, not measured",
        row("matrix products", told["matmul_ms"], "ms", explain(found, result)),
        row("memory", told["memory_ms"], "ms", f"replay {mb('replay_bytes')}, "
            f"parameters and optimiser {mb('param_bytes')}"),
        row("physics", told["physics_ms"], "ms", "MJX-jax as measured on an A100"),
        row("iteration", told["iteration_ms"], "ms", f"{rate:,.1f} a second, {rate * steps:,.0f} "
            f"env steps a second (FastTD3 on an A100, by its authors' logs: {FASTTD3_MS} ms)"),
        row("all-reduce", told["allreduce_ms"], "ms", f"{mb('allreduce_bytes')} of gradients a "
            f"device, {assume.devices} devices; not in the iteration above"),
        row("memory needed", found["state_bytes"] / 2**30, "GiB",
            f"ring {found['ring_bytes'] / 2**30:,.2f} GiB, of {sheet.gib:g} GB"),
        *assumed(assume, sheet),
    ]  # fmt: skip
    for text, holds in result.get("checks", {}).items():
        body.append(f"  lowered for CUDA: {'yes' if holds else 'NO '}  {text}")
    if "cuda" in result:
        body.append("  " + ", ".join(f"{k} {v}" for k, v in result["cuda"].items()))
    return body


def assumed(assume: Assumptions, gpu: Gpu) -> list[str]:
    """The assumptions, as the prediction used them."""
    return [
        f"  assumed: {100 * assume.matmul_share:.0f} % of {gpu.bf16:g} (bf16) or {gpu.f32:g} (f32) "
        f"TFLOP/s, {100 * assume.memory_share:.0f} % of {gpu.memory:,g} GB/s,",
        f"  physics {assume.physics_ms:g} ms + {assume.physics_us_per_env:g} us per env on every "
        f"GPU, all-reduce as a ring at {gpu.link:g} GB/s one way, nothing overlaps",
    ]


def explain(found: Mapping[str, float], result: Mapping[str, Any]) -> str:
    """The FLOPs beside FastTD3's own, and why they differ where they do."""
    told = f"{found['flops'] / 1e9:,.1f} GFLOP"
    if found["flops_by_hand"]:
        told += f" (by hand {found['flops_by_hand'] / 1e9:,.1f})"
    differs = result["gflop_over_fasttd3"] - 1
    why = "the same products" if abs(differs) < 0.05 else "other sizes than its G1 defaults"
    return f"{told}; FastTD3's G1 defaults {FASTTD3_GFLOP:,.0f}: {100 * differs:+.1f} %, {why}"


def command(args: Any, config: Config, tell: Callable[[str], None]) -> tuple[dict, list[str]]:
    """`jaxtd3 bench --roofline GPU`."""
    tell("tracing, and lowering for CUDA; nothing is run")
    result = roofline(build(config), args.roofline)
    return result, [count.setup(config), *lines(result, config)]
