"""Where the time goes: named stopwatches, with compilation taken out of each and counted apart."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

COMPILING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


class CompileLog:
    """What JAX tells about its compilations, from the first look on."""

    def __init__(self) -> None:
        import jax.monitoring

        self.spans: list[tuple[float, float]] = []
        self.hits = self.misses = 0
        jax.monitoring.register_event_duration_secs_listener(self._span)
        jax.monitoring.register_event_listener(self._event)

    def _span(self, event: str, duration_secs: float, **_: object) -> None:
        if event in COMPILING:
            now = time.perf_counter()
            self.spans.append((now - duration_secs, now))

    def _event(self, event: str, **_: object) -> None:
        self.hits += event == HIT
        self.misses += event == MISS

    def take(self) -> float:
        """Seconds of compilation since the last call: the union of the spans, for they nest."""
        total, reached = 0.0, float("-inf")
        for start, end in sorted(self.spans):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        self.spans.clear()
        return total


@functools.cache
def compile_log() -> CompileLog:
    """The one listener of this process: JAX keeps listeners for ever."""
    return CompileLog()


class Clock:
    """Seconds by name; `compile` holds what compilation took inside of any of them."""

    def __init__(self) -> None:
        names = ("compile", "train", "eval", "checkpoint", "other")
        self.seconds = dict.fromkeys(names, 0.0)

    def add(self, earlier: Any) -> None:
        """Count what an earlier part of the run took."""
        for name in self.seconds if isinstance(earlier, dict) else ():
            if isinstance(earlier.get(name), int | float):
                self.seconds[name] += earlier[name]

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        log = compile_log()
        log.take()
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            compiled = min(spent, log.take())
            self.seconds["compile"] += compiled
            self.seconds[name] += spent - compiled

    def __getitem__(self, name: str) -> float:
        return self.seconds[name]
