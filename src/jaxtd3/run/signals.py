"""Stopping a run politely."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any


class StopSignals:
    """SIGINT or SIGTERM once: `asked` becomes true; twice: the process ends at once."""

    def __init__(self, say: Callable[[str], None]):
        self.asked, self._say = False, say

    def __enter__(self) -> StopSignals:
        self._old = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not the main thread
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: Any) -> None:
        if self.asked:
            os._exit(128 + number)
        self.asked = True
        self._say("stopping after this chunk; once more to stop at once")
