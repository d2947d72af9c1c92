"""Times that can be compared: tasks take turns, round after round, and tell median and range.

On a shared machine one long measurement of A and then one of B compares two moments. Here every
round runs all tasks once (A B C, A B C, ...), so what slows one round slows all of them.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxtd3.errors import UserError

Range = dict[str, float]
"""{"median": .., "low": .., "high": ..} over rounds"""


class Task(NamedTuple):
    """Something to time."""

    name: str
    run: Callable[[], Any]
    """does the work once and returns when it is done"""
    units: float = 1.0
    """what one run amounts to (iterations, steps, bytes): times are told per unit"""
    prepare: Callable[[], Any] = lambda: None
    """called before every sample, not timed"""


def spread(values: Sequence[float]) -> Range:
    """Median and range of some rounds."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def constant(value: float) -> Range:
    """A figure that does not vary, such as a count."""
    return spread([value])


def repeats(task: Task, seconds: float, most: int = 10_000) -> int:
    """How often to run a task so that one sample takes about `seconds`; it warms up on the way."""
    task.prepare()
    task.run()
    task.prepare()
    begun = time.perf_counter()
    task.run()
    once = max(time.perf_counter() - begun, 1e-6)
    return max(1, min(most, math.ceil(seconds / once)))


def interleave(tasks: Sequence[Task], rounds: int, seconds: float = 0.5) -> dict[str, list[float]]:
    """Seconds per unit of every task, one figure per round."""
    counts = {task.name: repeats(task, seconds) for task in tasks}
    taken: dict[str, list[float]] = {task.name: [] for task in tasks}
    for _ in range(rounds):
        for task in tasks:
            task.prepare()
            begun = time.perf_counter()
            for _ in range(counts[task.name]):
                task.run()
            spent = time.perf_counter() - begun
            taken[task.name].append(spent / (counts[task.name] * task.units))
    return taken


@contextlib.contextmanager
def no_compile_cache() -> Iterator[None]:
    """Within it, compiling is what it is on a machine that never compiled this before."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is on
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def compile_cold(make: Callable[[], Any], *args: Any, most: int = 3, budget: float = 10.0):
    """(compiled, seconds of each time): `make()` traced and compiled up to `most` times."""
    seconds: list[float] = []
    with no_compile_cache():
        while not seconds or (len(seconds) < most and sum(seconds) < budget):
            function = make()  # a new one is traced anew
            begun = time.perf_counter()
            compiled = function.lower(*args).compile()
            seconds.append(time.perf_counter() - begun)
    return compiled, seconds


def attempt(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What it returns, or its error in one line."""
    try:
        return function(*args)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return {"error": f"{kind}{text}"}
