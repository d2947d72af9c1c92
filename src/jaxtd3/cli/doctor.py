"""`jaxtd3 doctor`: what this machine offers, and what to do about what is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtd3.cli.main import Doctor


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    ok: bool
    found: str
    advice: str = ""
    """What to do, where `ok` is False."""


def backend() -> Finding:
    import jax

    kinds = ", ".join(sorted({d.device_kind for d in jax.devices()}))
    found = f"{jax.default_backend()}: {len(jax.devices())} x {kinds}, {os.cpu_count()} cores"
    wasted = jax.default_backend() == "cpu" and Path("/dev/nvidia0").exists()
    return Finding("devices", not wasted, found, 'an NVIDIA GPU is idle: pip install "jax[cuda12]"')


def precision() -> Finding:
    """The matrix-vector product that some CPU builds get wrong (jax issue 39103)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    a = np.random.default_rng(0).normal(size=(64, 33, 47)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(64, 47)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        got = jax.jit(jax.vmap(lambda a, x: jnp.sum(a @ x)))(a, x)
    worst = float(np.max(np.abs(got - np.einsum("bij,bj->b", a.astype(float), x))))
    flags = os.environ.get("XLA_FLAGS", "")
    found = f"error {worst:.1e} of a batched product; XLA_FLAGS {flags or 'not set'}"
    return Finding("precision", worst < 1e-2, found, "import jaxtd3 before anything starts JAX")


def cache() -> Finding:
    import jax

    given = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    path = Path(str(given or ""))
    near = path
    while not near.exists():
        near = near.parent
    files = [f for f in path.glob("*") if f.is_file()] if path.is_dir() else []
    size = sum(f.stat().st_size for f in files) / 2**20
    ok = bool(given) and os.access(near, os.W_OK)
    advice = "set JAX_COMPILATION_CACHE_DIR to a writable folder"
    return Finding("compile cache", ok, f"{path}: {len(files)} programs, {size:.0f} MiB", advice)


def memory() -> Finding:
    from jaxtd3.run.memory import GiB, free_device

    free, where = free_device()
    if free is None:
        return Finding("memory", True, "unknown")
    advice = "lower --num-envs and --length"
    return Finding("memory", free > 2 * GiB, f"{free / GiB:.1f} GiB free on {where}", advice)


def playground() -> Finding:
    from jaxtd3.envs import env_names

    return Finding("environments", len(env_names()) > 1, f"{len(env_names())} known")


def private_names() -> Finding:
    from jaxtd3.thirdparty import PRIVATE, missing

    gone = missing()
    found = "; ".join(gone) or f"{len(PRIVATE)} private names of other packages, all there"
    return Finding("other packages", not gone, found, "install the versions of requirements/")


def meshes(env: str) -> Callable[[], Finding]:
    def check() -> Finding:
        from jaxtd3.envs.playground.meshes import STANDINS, menagerie_for

        with menagerie_for(env) as source:
            advice = "training is unaffected; for videos set MENAGERIE_ROOT to a mujoco_menagerie"
            return Finding(f"meshes of {env[:2]}", source.kind != STANDINS, source.kind, advice)

    return check


def renderer() -> Finding:
    from jaxtd3.output.video import HINT, choose_gl

    gl = choose_gl()
    return Finding("renderer", gl is not None, gl or "none works", f"no videos: {HINT}")


def video() -> Finding:
    from jaxtd3.output.video import find_ffmpeg

    path = find_ffmpeg()
    advice = "videos will be gif: pip install imageio-ffmpeg"
    return Finding("ffmpeg", path is not None, "found" if path else "none", advice)


def package(module: str, extra: str, use: str) -> Callable[[], Finding]:
    def check() -> Finding:
        found = find_spec(module) is not None
        advice = f'{use} needs it: pip install "jaxtd3[{extra}]"'
        return Finding(module, found, "installed" if found else "not installed", advice)

    return check


def wandb_key() -> Finding:
    from jaxtd3.output.logs import has_wandb_key

    found = "key found" if has_wandb_key() else "no key: runs are kept offline"
    return Finding("wandb login", True, found)


CHECKS: dict[str, Callable[[], Finding]] = {
    "devices": backend,
    "precision": precision,
    "compile cache": cache,
    "memory": memory,
    "environments": playground,
    "other packages": private_names,
    "meshes of G1": meshes("G1JoystickFlatTerrain"),
    "meshes of T1": meshes("T1JoystickFlatTerrain"),
    "renderer": renderer,
    "ffmpeg": video,
    "onnx": package("onnx", "export", "export"),
    "onnxruntime": package("onnxruntime", "export", "export"),
    "tensorboardX": package("tensorboardX", "tensorboard", "--tensorboard"),
    "wandb": package("wandb", "wandb", "--wandb"),
    "wandb login": wandb_key,
}


def examine(name: str, check: Callable[[], Finding]) -> Finding:
    """A check that breaks is a finding too."""
    try:
        return check()
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}", "reinstall jaxtd3")


def doctor_command(args: Doctor, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 doctor`; 0 even with crosses, for none of them stops a training run."""
    if args.fault is not None:
        from jaxtd3.run.nonfinite import fault_command

        return fault_command(args.fault, args.from_checkpoint)
    findings = []
    for name, check in CHECKS.items():
        finding = examine(name, check)
        findings.append(finding)
        if not args.json:
            mark = "✓" if finding.ok else "✗"
            print(f"{mark} {finding.what:<14} {' '.join(finding.found.split())}", flush=True)
            if not finding.ok and finding.advice:
                print(f"    -> {finding.advice}", flush=True)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return 0
