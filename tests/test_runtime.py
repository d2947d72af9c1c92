"""What is set before JAX starts, with the command line and without it."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from jaxtd3 import runtime
from jaxtd3.core.processes import is_loss


def python(code: str, **environ: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | environ
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    "fetch",
    [
        "import jaxtd3; jaxtd3.fast_td3",
        "import jaxtd3; jaxtd3.EnvConfig",
        "from jaxtd3.agent.td3 import fast_td3",
        "from jaxtd3.loop.step import make_train_step",
        "from jaxtd3.run.program import build",
    ],
)
def test_a_researcher_gets_the_compiler_fix_too(fetch):
    """No command line: fetching a name is early enough, wherever from."""
    done = python(f"{fetch}; import os; print(os.environ.get('XLA_FLAGS'))")
    assert runtime.CPU_FIX in done.stdout, done.stderr
    assert "Warning" not in done.stderr


def test_too_late_is_told():
    done = python("import jax; jax.devices(); import jaxtd3; jaxtd3.preset")
    assert "RuntimeWarning: JAX started before jaxtd3" in done.stderr
    assert done.returncode == 0
    early = python(
        "import jax; jax.devices(); import jaxtd3; jaxtd3.preset", XLA_FLAGS=runtime.CPU_FIX
    )
    assert "Warning" not in early.stderr


def test_other_jaxlibs_are_left_alone(monkeypatch):
    monkeypatch.setattr(runtime, "is_jaxlib_010", lambda: False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    runtime.fix_compiler()
    assert "XLA_FLAGS" not in os.environ


def test_devices_without_flags(monkeypatch):
    """Another jaxlib: XLA_FLAGS may not be set at all."""
    asked = []
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(jax.config, "update", lambda name, value: asked.append((name, value)))
    monkeypatch.setenv("PJRT_NPROC", "6")
    runtime.split_cpu(2)
    assert asked == [("jax_num_cpu_devices", 2)]


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ("FAILED_PRECONDITION: Gloo all-reduce failed: Connection closed by peer", True),
        ("UNAVAILABLE: The coordination service is gone", True),
        ("INTERNAL: TypeError: physics cannot take this", False),
        ("RESOURCE_EXHAUSTED: Out of memory", False),
    ],
)
def test_only_a_lost_process_is_told_as_one(said, lost):
    assert is_loss(jax.errors.JaxRuntimeError(said)) is lost
