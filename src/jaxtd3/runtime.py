"""What must be set, and can be known, before JAX starts: a compiler fix, the compile cache,
Python's own collector, what the CPU can do."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import logging
import os
import re
import sys
import time
import warnings
from pathlib import Path

from jaxtd3.thirdparty import private

STARTED = time.perf_counter()  # near enough the start of the process

# jaxlib 0.10 miscompiles a vmapped mat-vec + reduce on CPU at some sizes (jax issue 39103).
CPU_FIX = "--xla_cpu_experimental_ynn_fusion_type="
COUNT_FLAG = "--xla_force_host_platform_device_count"


def prepare() -> None:
    """Set the environment variables that JAX reads when it starts; what the user set stays."""
    gc.set_threshold(100_000, 20, 100)  # tracing makes objects by the million, nearly all to stay
    flags = os.environ.get("XLA_FLAGS", "")
    fix_compiler()
    fake = re.search(rf"{COUNT_FLAG}=(\d+)", flags)
    if fake:
        room_for(int(fake[1]))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(default_cache()))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # many small ones
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax: a failed save is told in one line
    # XLA reports at length on the console when a cached program comes from a like machine.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def fix_compiler() -> None:
    """Have jaxlib 0.10 compile rightly for the CPU, or say that it is too late for that.

    XLA reads its flags when JAX starts its back end. The command line is early enough; so is a
    program that fetches anything from `jaxtd3` before it makes its first array.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if CPU_FIX in flags or not is_jaxlib_010():  # unknown flags would abort other versions
        return
    if not backend_started():
        os.environ["XLA_FLAGS"] = f"{flags} {CPU_FIX}".strip()
    elif sys.modules["jax"].default_backend() == "cpu":
        warnings.warn(
            "JAX started before jaxtd3 could set a compiler flag without which jaxlib 0.10 "
            f"computes some sums wrongly on a CPU: set XLA_FLAGS={CPU_FIX} beforehand",
            RuntimeWarning,
            stacklevel=3,
        )


def backend_started() -> bool:
    """Whether JAX has read its flags already."""
    if "jax" not in sys.modules:
        return False
    return private("xla_bridge")()


def split_cpu(devices: int) -> None:
    """Let the CPU count as `devices` devices, where JAX has not started and nobody else said so."""
    import jax

    if devices > 1 and COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
        room_for(devices)
        jax.config.update("jax_num_cpu_devices", devices)


def room_for(devices: int) -> None:
    """Threads enough for fake devices: MJX's batched Cholesky waits for threads of the pool that it
    runs in, and with as many devices as threads all wait for ever (G1 on two cores). Native physics
    has threads of its own, but nobody knows yet which of them will run."""
    threads = max(os.cpu_count() or 1, 2 * devices + 2)
    os.environ.setdefault("PJRT_NPROC", str(threads))


def default_cache() -> Path:
    """Where compiled programs are kept between runs, unless JAX_COMPILATION_CACHE_DIR says."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path(os.path.expanduser("~")) / ".cache"
    return root / "jaxtd3" / "jax"


BF16_UNITS = ("avx512_bf16", "amx_bf16")


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 numbers by itself."""
    return not cpu_flags().isdisjoint(BF16_UNITS)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What Linux says that the CPU can do; elsewhere nothing."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


def is_jaxlib_010() -> bool:
    """The series whose CPU compiler these settings are for."""
    return importlib.metadata.version("jaxlib").split(".")[:2] == ["0", "10"]
