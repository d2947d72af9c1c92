"""Shared by all tests: strict numerics and a persistent compile cache."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

FLAG = "--xla_cpu_experimental_ynn_fusion_type="
if FLAG not in os.environ.get("XLA_FLAGS", ""):  # before jax is imported: see test_numerics.py
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

ROOT = Path(__file__).parent.parent
SHARED_MESHES = ROOT.parent / "shared" / "mujoco_menagerie"

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax")),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.25)  # else writing costs more


@pytest.fixture(scope="module", autouse=True)
def optimizations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Most of LLVM's optimisations are off, but in files that are `as_shipped` as a whole."""
    off = getattr(request.module, "pytestmark", None) != pytest.mark.as_shipped
    with pytest.MonkeyPatch.context() as patch:
        if off:
            patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        with unoptimized(off):
            yield


@contextlib.contextmanager
def unoptimized(off: bool = True) -> Iterator[None]:
    """What is compiled here is compiled soon and runs slowly."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", off)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def meshes() -> Path:
    """Real G1 and T1 meshes, where they are."""
    if not SHARED_MESHES.is_dir():
        pytest.skip("no real meshes beside the project")
    return SHARED_MESHES


@pytest.fixture
def bare_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end without what takes longer than their training: a report, a policy file, and the
    split of their time, for which the learner is compiled once more."""
    from jaxtd3.run import artifacts

    monkeypatch.setattr(artifacts, "make_report", lambda run_dir: None)
    monkeypatch.setattr(artifacts, "make_policy", lambda run, state: None)
    monkeypatch.setattr(artifacts, "split_train", lambda run, state: {})


def pytest_collection_finish() -> None:
    """Spare the garbage collector all that was imported."""
    gc.collect()
    gc.freeze()


# Longest first: no worker of `scripts/test` shall begin a long file at the end.
FIRST = ["devices", "faults", "native", "trainer", "source", "lineage", "docs", "deploy_program"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}": i for i, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))
