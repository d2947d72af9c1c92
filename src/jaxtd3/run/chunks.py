"""The host loop: a compiled program, chunk after chunk, with one transfer each.

A run and a wave of a sweep do different things between chunks; the loop is this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxtd3.config.config import Config
from jaxtd3.run.timing import Clock

Advance = Callable[[Any, int], tuple[Any, Any]]
"""advance(state, its iteration) -> (state after a chunk, what to fetch from the devices)"""
After = Callable[[Any, Any], str | None]
"""after(state, what was fetched) -> what ended the loop, or None"""


class Chunks:
    """How far the loop is, and how fast."""

    def __init__(self, config: Config, clock: Clock):
        self.length = config.run.log_every
        self.steps_each = config.loop.collect_steps * config.env.num_envs
        self.clock, self.before = clock, clock["train"]  # seconds of earlier waves
        self.iteration = 0
        self.spent = 0.0  # seconds of training, of the last chunk

    def loop(
        self, advance: Advance, state: Any, after: After, status: str | None
    ) -> tuple[Any, str]:
        """Chunks until there is a status: (state, status)."""
        while status is None:
            before = self.clock["train"]
            with self.clock("train"):
                state, found = advance(state, self.iteration)
                found = jax.device_get(found)
            self.iteration += self.length
            self.spent = self.clock["train"] - before
            status = after(state, found)
        return state, status

    def due(self, every: int) -> bool:
        """Whether something that happens every so many iterations happens now."""
        return every > 0 and self.iteration % every == 0

    @property
    def env_steps(self) -> int:
        return self.iteration * self.steps_each

    @property
    def rate(self) -> float:
        """Iterations a second, of the last chunk; 0 before the first."""
        return self.length / max(self.spent, 1e-9) if self.spent else 0.0

    def head(self) -> dict[str, Any]:
        """What every row of metrics begins with."""
        return {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "seconds": self.clock["train"] - self.before,
            "compile_seconds": self.clock["compile"],
        }
