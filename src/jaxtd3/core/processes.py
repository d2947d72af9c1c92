"""Several processes, one program: who they are, what they agree on, what happens when one dies.

JAX's own runtime does the work (NCCL between GPUs, gloo between CPUs). Every process runs the same
host loop; process 0 alone prints and writes, and what depends on a clock or a signal is agreed on
between two chunks, so that no process enters a collective that another never reaches.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import zlib
from collections.abc import Mapping
from typing import NoReturn

import jax
import numpy as np

from jaxtd3.errors import UserError

HEARTBEAT = 30  # seconds without a sign of life until a process counts as dead


def asked(coordinator: str | None, processes: int | None, process: int | None) -> bool:
    """Whether flags or surroundings tell of several processes; half a description is refused."""
    given = {
        "--coordinator": coordinator,
        "--num-processes": processes,
        "--process-id": process,
    }
    missing = [flag for flag, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        there = ", ".join(flag for flag in given if flag not in missing)
        raise UserError(f"{there} given without {', '.join(missing)}")
    if coordinator is not None and processes is not None and process is not None:
        if not 0 <= process < processes:
            raise UserError(f"--process-id {process} is not among 0 ... {processes - 1}")
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"--coordinator {coordinator}: write HOST:PORT")
        return processes > 1
    return surrounded(os.environ)


def surrounded(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several that SLURM, MPI or JAX's variables tell of."""
    tasks = environ.get("SLURM_NTASKS", "1") if "SLURM_PROCID" in environ else "1"
    ranks = environ.get("OMPI_COMM_WORLD_SIZE", "1")
    several = any(n.isdigit() and int(n) > 1 for n in (tasks, ranks))
    return several or "JAX_COORDINATOR_ADDRESS" in environ


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Meet the other processes; must come before JAX looks for devices."""
    environ = os.environ
    if coordinator is None and "JAX_COORDINATOR_ADDRESS" in environ:
        coordinator = environ["JAX_COORDINATOR_ADDRESS"]
        processes = int(environ["JAX_NUM_PROCESSES"]) if "JAX_NUM_PROCESSES" in environ else None
        process = int(environ["JAX_PROCESS_ID"]) if "JAX_PROCESS_ID" in environ else None
    try:
        jax.distributed.initialize(
            coordinator, processes, process, heartbeat_timeout_seconds=HEARTBEAT
        )
    except (RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise UserError(f"the processes did not meet: {said}") from error


def is_first() -> bool:
    """True in the process that prints and writes, and where there is only one."""
    return jax.process_index() == 0


def several() -> bool:
    return jax.process_count() > 1


@functools.cache
def processes_here() -> int:
    """How many of the processes share this machine's cores; all must call it."""
    if not several():
        return 1
    from jax.experimental import multihost_utils

    machine = np.uint32(zlib.crc32(socket.gethostname().encode()))
    return int(np.sum(multihost_utils.process_allgather(machine) == machine))


def highest(value: int) -> int:
    """The largest of all processes' values; all must call it."""
    if not several():
        return value
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def same_everywhere(digest: str) -> bool:
    """Whether all processes hold the same digest; all must call it."""
    if not several():
        return True
    from jax.experimental import multihost_utils

    mine = np.frombuffer(bytes.fromhex(digest), np.uint8)
    everyone = multihost_utils.process_allgather(mine)
    return bool(np.all(everyone == mine))


def from_first(text: str) -> str:
    """The first process's text; all must call it."""
    if not several():
        return text
    from jax.experimental import multihost_utils

    room = np.zeros(4096, np.uint8)
    data = np.frombuffer(text.encode(), np.uint8)
    room[: data.size] = data
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(room))).rstrip(b"\0").decode()


def barrier(name: str) -> None:
    """Wait for every process."""
    if several():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


LOST = ("Gloo", "gloo", "NCCL", "coordination service", "CoordinationService", "heartbeat")


def is_loss(error: Exception) -> bool:
    """True for what a collective says when another process is gone."""
    return any(word in str(error) for word in LOST)


def leave(code: int) -> NoReturn:
    """End this process without waiting for the others: one of them is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
