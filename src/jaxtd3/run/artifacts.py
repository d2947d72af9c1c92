"""What a run leaves behind: rows, summary, curves, video, policy, report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtd3 import __version__, durable
from jaxtd3.core import processes, sharding
from jaxtd3.core.types import TrainState
from jaxtd3.loop.step import make_learn, update_plan
from jaxtd3.output.logs import dumps
from jaxtd3.output.rundir import CRASH_FILE, POLICY_FILE, SUMMARY_FILE, VIDEO_FILE
from jaxtd3.run.checkpoint import state_sha256
from jaxtd3.run.program import Program, run_keys
from jaxtd3.run.progress import Progress

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "mujoco", "mujoco-mjx", "playground")


class Snapshot(NamedTuple):
    """A run at one moment, beside its state."""

    program: Program
    run_dir: Path
    ui: Progress
    seconds: dict[str, float]  # by what they went to
    start_seconds: float
    iteration: int
    env_steps: int
    first: float | None  # the return of the weights it began with
    rows: list[dict[str, Any]]  # those with an evaluation of trained weights
    error: str | None


def chunk_row(metrics: dict[str, float]) -> dict[str, float]:
    """Sums over finished episodes to means; a chunk in which none finished has no mean."""
    row = {k: v for k, v in metrics.items() if not k.endswith("_sum")}
    count = metrics.get("episode/count", 0.0)
    for name, total in metrics.items():
        if name.endswith("_sum") and count > 0:
            row[name.removesuffix("_sum")] = total / count
    return row


def thresholds(best: float, worst: float) -> list[float]:
    """Round returns between the worst and the best: five or so, multiples of 1, 2 or 5."""
    span = best - min(worst, 0.0)
    if not span > 0:
        return []
    rough = span / 7
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.floor(min(worst, 0.0) / step) + 1
    return [round(i * step, 9) for i in range(first, math.floor(best / step) + 1)]


def seconds_to_return(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Training seconds until an evaluation first returned so much."""
    curve = [(row["seconds"], row["eval/return"]) for row in rows]
    curve = [(s, r) for s, r in curve if r is not None and math.isfinite(r)]
    if not curve:
        return {}
    returns = [r for _, r in curve]
    levels = thresholds(max(returns), min(returns))
    return {f"{t:g}": next(s for s, r in curve if r >= t) for t in levels}


def summarize(run: Snapshot, state: TrainState | None, status: str) -> dict[str, Any]:
    """The content of summary.json (see rundir.SUMMARY); without a state, after a crash."""
    config, seconds, rows = run.program.config, run.seconds, run.rows
    times = dict(seconds)
    if state is not None and status in ("completed", "time_limit"):
        times |= split_train(run, state)
    last = rows[-1] if rows else {}
    returns = [row["eval/return"] for row in rows]
    return {
        "env": config.env.name,
        "algo": config.algo,
        "profile": config.profile,
        "seed": config.run.seed,
        "status": status,
        "iterations": run.iteration,
        "env_steps": run.env_steps,
        "first_return": run.first,
        "final_return": last.get("eval/return"),
        "best_return": max(returns) if returns else None,
        "final_length": last.get("eval/length"),
        "walks": bool(last["eval/walks"]) if "eval/walks" in last else None,
        "start_seconds": run.start_seconds,
        "compile_seconds": seconds["compile"],
        "train_seconds": seconds["train"],
        "env_steps_per_second": run.env_steps / seconds["train"] if seconds["train"] else 0.0,
        "seconds_to_return": seconds_to_return(rows),
        "times": times,
        "devices": [device.device_kind for device in jax.devices()],
        "versions": versions(),
        "state_sha256": whole_sha256(state) if state is not None else None,
        "params_sha256": params_sha256(state.agent) if state is not None else None,
        "error": run.error,
    }


def whole_sha256(state: TrainState) -> str | None:
    """Of the whole state; none where several processes hold parts of it."""
    return None if processes.several() else state_sha256(state)


def params_sha256(agent: Any) -> str:
    return state_sha256((agent.actor, agent.critic, agent.target))


def crash(run: Snapshot, error: Exception, last_good: Callable[[], str]) -> dict[str, Any]:
    """What nobody expected: a summary with one line about it, the rest in crash.txt.

    `last_good()` says which checkpoint there is to go on from.
    """
    line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    full = "RESOURCE_EXHAUSTED" in line
    lost = not full and processes.several() and processes.is_loss(error)
    if full:
        line = "out of memory: lower --num-envs, --length or --batch-size"
    elif lost:
        line = f"another process is gone: go on with --resume ({line[:120]})"
    if not processes.is_first():
        return summarize(run._replace(error=line), None, "failed")
    with contextlib.suppress(OSError):
        (run.run_dir / CRASH_FILE).write_text("".join(traceback.format_exception(error)))
    run = run._replace(error=f"{line} (see {CRASH_FILE}); {last_good()}")
    summary = summarize(run, None, "failed")
    if lost:  # JAX ends this process soon, with a trace: be gone before, curves come on resuming
        with contextlib.suppress(OSError):
            write_summary(run.run_dir, summary)
    else:
        write_artifacts(run, None, "failed", summary)
    return summary


def split_train(run: Snapshot, state: TrainState, repeats: int = 10) -> dict[str, float]:
    """Training seconds as collect and update.

    In the fused program they have no border: an iteration's updates are timed alone, on the final
    state, and the rest of the time was collecting.
    """
    program, config = run.program, run.program.config
    learn = make_learn(program.agent, program.replay, config.loop)
    plan = update_plan(config.loop)
    mapped = jax.shard_map(
        lambda state, key: learn(
            state, sharding.local_key(key, sharding.AXIS), plan, state.weights
        )[0],
        mesh=program.mesh,
        in_specs=(jax.tree.map(lambda x: x.spec, program.layout), sharding.WHOLE),
        out_specs=sharding.WHOLE,
        check_vma=False,
    )
    updates = jax.jit(mapped)
    key = jax.random.key(config.run.seed)
    jax.block_until_ready(updates(state, key))
    begin = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(updates(state, key))
    alone = (time.perf_counter() - begin) / repeats * run.iteration
    total = run.seconds["train"]
    return {"update": min(alone, total), "collect": max(total - alone, 0.0)}


def versions() -> dict[str, str]:
    return {"jaxtd3": __version__} | {n: importlib.metadata.version(n) for n in LIBRARIES}


def try_to_make(run: Snapshot, what: str, make: Callable[[], Any]) -> Any:
    """What `make` returns; where it fails, one line and None."""
    run.ui.update(stage=what)
    try:
        return make()
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        run.ui.note(said if said.startswith("no ") else f"no {what}: {said}")
        return None


def on_one_device(state: TrainState) -> TrainState:
    """A state whose agent one device films and exports, whatever others do."""
    return state.replace(agent=jax.tree.map(jnp.asarray, jax.device_get(state.agent)))


def show_so_far(run: Snapshot, state: TrainState, film: bool) -> None:
    """A report of a run that goes on, and a video where it is asked for."""
    if processes.is_first():
        if film:
            now = on_one_device(state)
            try_to_make(run, "video", lambda: make_video(run, now))
        try_to_make(run, "report", lambda: make_report(run.run_dir))


def write_artifacts(
    run: Snapshot,
    state: TrainState | None,
    status: str,
    summary: dict[str, Any],
    film: bool = False,
) -> Path | None:
    """Video, policy, summary, curves, report; what cannot be made is told in one line each."""
    run_dir, video = run.run_dir, None
    attempt = partial(try_to_make, run)
    if state is not None:
        state = on_one_device(state)
    if state is not None and status in ("completed", "time_limit"):  # else nobody wants to wait
        if film:
            video = attempt("video", lambda: make_video(run, state))
        if find_spec("onnx") and find_spec("onnxruntime"):
            attempt("policy.onnx", lambda: make_policy(run, state))
    attempt("summary.json", lambda: write_summary(run_dir, summary))
    attempt("report", lambda: make_report(run_dir))
    return video


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    text = json.dumps(json.loads(dumps(summary)), indent=2) + "\n"
    durable.write_whole(run_dir / SUMMARY_FILE, text)


def make_video(run: Snapshot, state: TrainState) -> Path:
    from jaxtd3.output.video import render_video

    program, key = run.program, run_keys(run.program.config.run.seed).render
    return render_video(program.eval_env, program.agent, state.agent, key, run.run_dir / VIDEO_FILE)


def make_policy(run: Snapshot, state: TrainState) -> float:
    from jaxtd3.output.onnx import export_onnx

    program = run.program
    return export_onnx(program.env, state.agent, program.config.agent, run.run_dir / POLICY_FILE)


def make_report(run_dir: Path) -> None:
    """curves.png and report.html."""
    from jaxtd3.output.report import write_report

    write_report(run_dir)
