"""How much memory a run takes and how much there is, told before anything is allocated."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path
from typing import Any

import jax

from jaxtd3.config.config import Config
from jaxtd3.core.types import EnvSpec, TrainState
from jaxtd3.errors import UserError
from jaxtd3.replay import ring as replay

GiB = 2**30


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays, or of the arrays that shapes stand for."""
    leaves = jax.tree.leaves(tree)
    return sum(x.size * getattr(x.dtype, "itemsize", 8) for x in leaves if hasattr(x, "dtype"))


def free_host() -> int | None:
    """Bytes this process may still take: the machine's, or the container's if fewer."""
    free = [n for n in (_meminfo(), _cgroup()) if n is not None]
    return min(free) if free else None


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _cgroup() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get("inactive_file", 0))  # the page cache gives way
    except (OSError, ValueError):  # no such file, or "max"
        return None


def give_back() -> None:
    """Return what nobody uses any more to the system.

    Saving and drawing leave cycles that hold large buffers until Python looks for them, which is
    seldom; glibc keeps what is freed, for all threads that saved or compiled.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def free_device() -> tuple[int | None, str]:
    """Free bytes where arrays are put, and what to call the place."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0), str(device.device_kind)
    return free_host(), "this machine"


def describe(config: Config, spec: EnvSpec, shapes: TrainState) -> list[str]:
    """Lines for people: what takes how much."""
    ring = replay.describe(spec, config.replay, config.env.num_envs)
    env, agent = tree_bytes(shapes.env), tree_bytes(shapes.agent)
    free, where = free_device()
    free_text = f", {free / GiB:.1f} GiB free on {where}" if free is not None else ""
    total = tree_bytes(shapes)
    return [
        ring,
        f"memory: networks {agent / 2**20:,.0f} MiB, environments {env / 2**20:,.0f} MiB, "
        f"in all {total / GiB:.2f} GiB{free_text}",
    ]


def check(config: Config, shapes: TrainState, workspace: int = 0) -> None:
    """Refuse what does not fit, and name the flag to lower."""
    free, where = free_device()
    parts = {
        "--length": tree_bytes(shapes.replay),
        "--num-envs": tree_bytes(shapes.env),
        "--batch-size": workspace + tree_bytes(shapes.agent),
    }
    need = sum(parts.values())
    if free is None or need <= free:
        return
    flag = max(parts, key=lambda name: parts[name])
    hint = f"lower {flag}"
    spare = free - (need - parts["--length"])
    if flag == "--length" and spare > 0:
        fits = int(config.replay.length * 0.9 * spare / parts["--length"])
        hint += f" {config.replay.length} (to {fits}, say)"
    raise UserError(f"needs {need / GiB:.1f} GiB, {where} has {free / GiB:.1f} GiB free: {hint}")
