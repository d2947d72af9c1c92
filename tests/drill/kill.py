"""A kill at a chosen moment of a save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path


def kill_at(fault: str) -> Callable[[str, Path], None]:
    """A hook for `checkpoint.at_phase` that kills this process in the N-th save.

    `fault`: before, arrays (their first file is there), manifest or after; and :N.
    """
    wanted, _, number = fault.partition(":")
    saves = 0

    def at_phase(phase: str, temp: Path) -> None:
        nonlocal saves
        saves += phase == wanted
        if phase != wanted or saves != int(number or 1):
            return
        if phase == "arrays":
            threading.Thread(target=kill_when_begun, args=(temp,), daemon=True).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    return at_phase


def kill_when_begun(temp: Path) -> None:
    while not any(files for _, _, files in os.walk(temp)):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
