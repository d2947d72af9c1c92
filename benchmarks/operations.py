"""What the compiled updates spend their time on, operation by operation, put together by kind.

One thread runs them one after the other: where several do, operations overlap, and no time is one's
own. The compiler names operations after what they end in; `KINDS` tells by that name, and by what a
fusion holds, what they are for.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.counts import flops, learner_dots, setup, update_step
from benchmarks.programs import Held, full_state
from jaxtd3.config.config import Config
from jaxtd3.errors import UserError
from jaxtd3.run.program import Program, build, chunk_of

PRODUCTS, OTHER = "matrix products", "everything else"

# The first whose pattern is found in `opcodes | name of the JAX operation` wins.
KINDS = {
    PRODUCTS: r"\bdot\b",
    "projection onto the atoms": r"scatter|branch_\d+_fun",
    "random numbers": r"threefry|_normal|_uniform|_randint|_bits",
    "sums and maxima (softmax, biases, norms)": r"\breduce(-window)?\b",
    "softmax and cross-entropy": r"softmax|\b(exponential|log)\b",
    "bias, activation and their gradients": r"relu|elu|silu|select_n|Ensemble|Actor",
    "sampling": r"gather|dynamic_(update_)?slice",
    "optimiser and targets": r"\b(sqrt|rsqrt|divide)\b|concatenate",
    OTHER: "",
}


class Event(NamedTuple):
    """Something that a thread did."""

    name: str
    start: float
    seconds: float


def kind_of(description: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, description))


def describe(text: str) -> dict[str, str]:
    """For every instruction of a compiled program `opcodes | name of the JAX operation`."""
    inside: dict[str, set[str]] = {}  # opcodes of each computation
    found: dict[str, tuple[str, str, str]] = {}  # opcode, computation that it calls, JAX's name
    current: set[str] = set()
    for line in text.splitlines():
        begun = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if begun:
            current = inside.setdefault(begun[1], set())
        made = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = .*?\s([a-z][a-z\-]*)\(", line)
        if not made:
            continue
        name, opcode = made.groups()
        current.add(opcode)
        calls = re.search(r"calls=%?([\w.\-]+)", line)
        said = re.search(r'op_name="([^"]*)"', line)
        found[name] = (opcode, calls[1] if calls else "", said[1] if said else "")
    return {
        name: f"{' '.join(sorted({opcode} | inside.get(calls, set())))} | {said}"
        for name, (opcode, calls, said) in found.items()
    }


def own_seconds(events: Iterable[Event]) -> dict[str, float]:
    """Seconds of each name in one thread, without what ran within it under another name."""
    spent: dict[str, float] = defaultdict(float)
    open_: list[Event] = []
    for event in sorted(events, key=lambda e: (e.start, -e.seconds)):
        while open_ and event.start >= open_[-1].start + open_[-1].seconds:
            open_.pop()
        if open_:
            spent[open_[-1].name] -= event.seconds
        spent[event.name] += event.seconds
        open_.append(event)
    return spent


def recorded(folder: Path, known: Mapping[str, str]) -> dict[str, float]:
    """Seconds of every instruction of a program in the trace that JAX wrote into a folder."""
    spent: dict[str, float] = defaultdict(float)
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                events = (Event(e.name, e.start_ns / 1e9, e.duration_ns / 1e9) for e in line.events)
                for name, seconds in own_seconds(e for e in events if e.name in known).items():
                    spent[name] += seconds
    return spent


def operations(program: Program, length: int = 10, calls: int = 3) -> dict[str, Any]:
    """Milliseconds an iteration of every kind of operation in its updates."""
    if jax.default_backend() != "cpu":
        raise UserError("--operations reads a CPU's trace; on a GPU: jax.profiler and xprof")
    chunk = chunk_of(program, length, update_step(program))
    known = describe(chunk.lower(program.shapes).compile().as_text())
    held = Held(full_state(program))
    held.through(chunk)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                held.through(chunk)
        spent = recorded(Path(folder), known)
    if not spent:
        raise UserError("--operations: this jaxlib's trace does not name the program's operations")
    kinds = dict.fromkeys(KINDS, 0.0)
    for name, seconds in spent.items():
        kinds[kind_of(known[name])] += 1e3 * seconds / (calls * length)
    return {
        "env": program.config.env.name,
        "milliseconds": kinds,
        "product_gflops": flops(learner_dots(program)) / max(kinds[PRODUCTS], 1e-9) / 1e6,
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The kinds as a table, the dearest first."""
    ms = result["milliseconds"]
    whole = sum(ms.values())
    body = [f"{'one thread':<44}{'ms an iteration':>16}{'share':>8}"]
    for kind, value in sorted(ms.items(), key=lambda item: -item[1]):
        rate = f"   {result['product_gflops']:.3g} GFLOP/s" if kind == PRODUCTS else ""
        body.append(f"{kind:<44}{value:>16.3g}{100 * value / whole:>7.1f}%{rate}")
    return [*body, f"{'all updates':<44}{whole:>16.3g}"]


def command(args: Any, config: Config, tell: Callable[[str], None]) -> tuple[dict, list[str]]:
    """`jaxtd3 bench --operations`."""
    tell("compiling, then tracing some calls")
    result = operations(build(config), args.chunk)
    return result, [setup(config), *lines(result)]
