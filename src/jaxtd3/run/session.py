"""The host loop: chunks, evaluations, checkpoints, logs, signals. Sole owner of I/O in training.

Whatever decides the course of a run depends on the seed and the iteration alone, never on the
clock: so a resumed run, and a run with other evaluations or logs, ends with the same bits.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtd3.core import processes, sharding
from jaxtd3.core.types import TrainState
from jaxtd3.envs.metrics import walks
from jaxtd3.errors import UserError
from jaxtd3.loop.traced import retune, traced_values
from jaxtd3.output import logs
from jaxtd3.output.rundir import CONFIG_FILE, METRICS_FILE, create_run_dir
from jaxtd3.run import artifacts, memory, nonfinite
from jaxtd3.run.arrays import preload
from jaxtd3.run.checkpoint import CheckpointStore, RunLock, read_meta, restore_agent, restore_from
from jaxtd3.run.chunks import Chunks
from jaxtd3.run.program import Program, chunk_of, run_keys
from jaxtd3.run.progress import Progress, duration
from jaxtd3.run.signals import StopSignals
from jaxtd3.run.timing import Clock, compile_log
from jaxtd3.runtime import STARTED

LONG = 300.0  # seconds of training worth a word beforehand
FIRST_REPORT, REPORT_PAUSE = 60.0, 20  # seconds; times what the last one took
REFILL = 64  # slabs collected before learning, where a checkpoint had no replay


@dataclass(frozen=True)
class Options:
    """What a run does beside training; none of it changes a bit of the result."""

    resume: bool = False
    resume_from: Path | None = None
    init_from: Path | None = None
    checkpoint_replay: bool = True
    video: bool = True
    video_every: int = 0
    wandb: bool = False
    tensorboard: bool = False


def saved_devices(meta: dict[str, Any]) -> int:
    """The number of devices a checkpoint was saved on; 0 where it tells none to believe."""
    described = meta["leaves"].get("env.cursor")
    shape = described[1] if isinstance(described, list) and len(described) == 2 else None
    count = shape[0] if isinstance(shape, list) and len(shape) == 1 else None
    return count if type(count) is int and 0 < count <= 2**16 else 0


class Session:
    """One run on the host, from the first compilation to the last file."""

    def __init__(
        self,
        program: Program,
        run_dir: Path,
        options: Options,
        ui: Progress,
        evaluate_robust: Callable[[Any], dict[str, Any]] | None = None,
    ):
        """`evaluate_robust` tries an agent's state in many worlds; its `score` ranks it."""
        self.program, self.options, self.ui = program, options, ui
        self.evaluate_robust = evaluate_robust
        self.run_dir = run_dir.absolute()  # Orbax takes no other
        self.config = program.config
        self.clock, self.keys = Clock(), run_keys(program.config.run.seed)
        self.chunks = Chunks(program.config, self.clock)
        self.skipped = 0
        self.rows: list[dict[str, Any]] = []  # those with an evaluation of trained weights
        self.first: float | None = None  # the return of the weights it began with
        self.saved: int | None = None
        self.error: str | None = None
        self.robustness: dict[str, Any] = {}  # of the last evaluation
        self.measure = "eval/return" if evaluate_robust is None else "eval/robust_score"
        self.start_seconds = 0.0
        self.next_report = time.perf_counter() + FIRST_REPORT
        self.sized = False  # the size of a checkpoint has been told
        self.announced_time = False
        self.announced_loss = False  # environment steps that are left out
        self.announced_episodes = False  # episodes of evaluations that were lost

    def run(self) -> dict[str, Any]:
        """Train, and leave a complete run directory; the summary."""
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(StopSignals(self.ui.note))
            if self.options.resume:
                self.open_run_dir(stack)
            earlier = self.earlier_state()
            compiled = self.compile()
            if not self.options.resume:
                if processes.is_first():
                    create_run_dir(self.run_dir)
                self.open_run_dir(stack)
            state = self.start(earlier)
            self.logs = self.open_logs()
            self.start_seconds = time.perf_counter() - STARTED
            self.ui.note(f"training begins {self.start_seconds:.1f} s after the start")
            try:
                state, status = self.loop(compiled, state, stop)
                return self.finish(state, status)
            except Exception as error:  # what was trained is in the checkpoints: say so and end
                return artifacts.crash(self.snapshot(), error, self.store.last_good)

    def open_run_dir(self, stack: contextlib.ExitStack) -> None:
        """Own the directory; an interrupted replacement of a checkpoint is put right here."""
        if processes.is_first():
            stack.enter_context(RunLock(self.run_dir))
        processes.barrier("run directory")
        self.store = CheckpointStore(self.run_dir, self.config.run.keep)
        stack.callback(self.store.close)

    # --- before ---------------------------------------------------------------------------------

    def compile(self) -> Callable[[TrainState], tuple[TrainState, Any]]:
        """The chunk, compiled ahead of any allocation; refused if it would not fit."""
        self.ui.stage("compiling")
        if self.config.run.checkpoint_every:
            preload()
        before, hits = self.clock["compile"], compile_log().hits
        chunk: Any = chunk_of(self.program, self.config.run.log_every)
        with self.clock("compile"):
            compiled = chunk.lower(self.program.shapes).compile()
        seconds = self.clock["compile"] - before
        how = "from the cache" if compile_log().hits > hits else "not in the cache yet"
        self.ui.note(f"compiled the training program in {duration(seconds)} ({how})")
        memory.give_back()
        usage = compiled.memory_analysis()
        workspace = getattr(usage, "temp_size_in_bytes", 0)
        memory.check(self.config, self.program.shapes, workspace)
        return compiled

    def earlier_state(self) -> Any:
        """What this run or another one left, read before anything is compiled or written.

        A whole state to go on with, an agent's state to take weights from, or None.
        """
        options = self.options
        if options.resume and any((self.run_dir / "checkpoints").glob("[0-9]*")):
            return self.restore(self.run_dir)
        if options.resume_from is not None:
            return self.restore(options.resume_from.absolute())
        if options.init_from is not None:
            return restore_agent(options.init_from.absolute(), self.program.shapes.agent)
        return None

    def restore(self, path: Path) -> TrainState:
        """The state of the newest good checkpoint, under this run's traced settings."""
        template = self.program.shapes
        meta = read_meta(path)
        cursor = template.env.cursor
        saved = saved_devices(meta)
        if saved:
            saved_cursor = jax.ShapeDtypeStruct((saved,), cursor.dtype)
            template = template.replace(env=template.env.replace(cursor=saved_cursor))
        if not meta["replay"]:
            template = template.replace(replay=self.program.replay.init(self.config.env.num_envs))
        found = restore_from(path, template)
        for line in found.skipped:
            self.ui.note(f"passed over {line}")
        self.clock.add(found.meta.get("clock"))
        self.chunks.iteration = found.iteration
        fresh = found.state.env.cursor
        if fresh.shape != cursor.shape:  # every device begins its pool anew
            fresh = jnp.zeros(cursor.shape, cursor.dtype)
            self.ui.note(f"saved on {saved} devices, goes on with {self.program.mesh.size}")
        state = found.state.replace(env=found.state.env.replace(cursor=fresh))
        state = retune(state, traced_values(self.config, self.program.env.spec))
        state = sharding.place(state, self.program.layout)
        self.ui.note(f"resumed at iteration {self.iteration:,} from {found.path}")
        return state if found.replay else self.refill(state)

    def refill(self, state: TrainState) -> TrainState:
        """Collect with the restored policy until there is something to learn from."""
        steps = min(self.config.replay.length, max(REFILL, self.config.loop.warmup))
        self.ui.note(f"the checkpoint has no replay: collecting {steps} steps per environment")
        with self.clock("other"):
            return chunk_of(self.program, steps, self.program.fns.collect_step)(state)[0]

    def start(self, earlier: Any) -> TrainState:
        """The first state: new, resumed, or with another run's weights."""
        self.ui.stage("warming up")
        state = earlier
        if not isinstance(earlier, TrainState):
            with self.clock("other"):
                state = self.program.start()
            if earlier is not None:
                names = ("actor", "critic", "target", "target_actor", "obs_stats", "return_stats")
                taken = {name: getattr(earlier, name) for name in names}
                state = state.replace(agent=state.agent.replace(**taken))
                self.ui.note(f"weights from {self.options.init_from}")
        self.skipped = int(self.program.agent.health(state.agent).skipped)
        if not processes.is_first():
            return state
        try:
            self.config.save(self.run_dir / CONFIG_FILE)
            rows = logs.truncate_rows(self.run_dir / METRICS_FILE, self.iteration)
        except OSError as error:
            raise UserError(f"cannot write to {self.run_dir}: {error.strerror}") from error
        evaluated = [row for row in rows if row.get("eval/return") is not None]
        self.rows = [row for row in evaluated if row["iteration"]]
        self.first = next((r["eval/return"] for r in evaluated if not r["iteration"]), None)
        return state

    def open_logs(self) -> list[Any]:
        if not processes.is_first():
            return []
        opened: list[Any] = [logs.JsonlLog(self.run_dir / METRICS_FILE)]
        if self.options.tensorboard:
            opened.append(logs.TensorboardLog(self.run_dir))
        if self.options.wandb:
            wandb = logs.WandbLog(self.run_dir, self.config.to_dict(), self.run_dir.name)
            self.ui.note(f"wandb: {wandb.mode}")
            opened.append(wandb)
        return opened

    # --- during ---------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        return self.chunks.iteration

    @property
    def env_steps(self) -> int:
        return self.chunks.env_steps

    def snapshot(self) -> artifacts.Snapshot:
        """The run now, for what is written about it."""
        return artifacts.Snapshot(
            program=self.program,
            run_dir=self.run_dir,
            ui=self.ui,
            seconds=dict(self.clock.seconds),
            start_seconds=self.start_seconds,
            iteration=self.iteration,
            env_steps=self.env_steps,
            first=self.first,
            rows=self.rows,
            error=self.error,
        )

    def loop(self, compiled: Callable, state: TrainState, stop: StopSignals):
        """Chunks until something ends it: (state, status)."""
        run = self.config.run
        self.show()
        if run.eval_every and not self.iteration and self.first is None:
            self.begin_curve(state)

        program = self.program._replace(chunk=compiled)

        def advance(state: TrainState, iteration: int) -> tuple[TrainState, Any]:
            state, metrics = program.advance(state, iteration)
            return state, (metrics, self.program.agent.health(state.agent))

        def after(state: TrainState, found: Any) -> str | None:
            row = self.chunk_row(state, *found)
            return self.after_chunk(state, row, "failed" if self.error else self.over(stop))

        return self.chunks.loop(advance, state, after, self.over(stop))

    def after_chunk(self, state: TrainState, row: dict[str, Any], status: str | None) -> str | None:
        """Evaluate, log, save and show what is due; the status, unchanged."""
        run, due = self.config.run, self.chunks.due
        ended = status in ("completed", "time_limit")
        best = False
        if ended or (not self.error and due(run.eval_every)):
            row |= self.evaluate(state)
            best = self.is_best(row[self.measure]) and run.checkpoint_every > 0
            self.rows.append(row)
        self.write(row)
        if not self.error and (status or best or due(run.checkpoint_every)):
            self.save(state, row.get(self.measure))
        if not status:
            self.show_so_far(state, evaluated="eval/return" in row)
        return status

    def show_so_far(self, state: TrainState, evaluated: bool) -> None:
        """A film where one is due, and a report after an evaluation, so that a run can be watched.

        Reports take no more than a twentieth of the run's time.
        """
        every = self.config.run.log_every
        film = self.chunks.due(math.ceil(self.options.video_every / every) * every)
        begin = time.perf_counter()
        if not film and not (evaluated and begin >= self.next_report):
            return
        with self.clock("other"):
            artifacts.show_so_far(self.snapshot(), state, film)
            memory.give_back()
        end = time.perf_counter()
        self.next_report = end + REPORT_PAUSE * (end - begin)

    def begin_curve(self, state: TrainState) -> None:
        """What the first weights do: where the curves begin. No checkpoint is called best by it."""
        row = self.times() | self.evaluate(state)
        self.first = row["eval/return"]
        self.write(row)
        memory.give_back()  # evaluations were compiled

    def is_best(self, score: float) -> bool:
        """True for an evaluation above all earlier ones: its checkpoint is worth keeping."""
        known = (row.get(self.measure) for row in self.rows)
        earlier = (x for x in known if x is not None)
        return math.isfinite(score) and score > max(earlier, default=-math.inf)

    def over(self, stop: StopSignals) -> str | None:
        """The status to end with, if it is time to: one process's signal or clock ends all."""
        run = self.config.run
        late = run.max_time is not None and self.clock["train"] >= run.max_time
        reasons = [None, "time_limit", "interrupted", "completed"]
        done = [True, late, stop.asked, self.iteration >= run.iterations]
        return reasons[processes.highest(max(i for i, true in enumerate(done) if true))]

    def chunk_row(self, state: TrainState, metrics: Any, health: Any) -> dict[str, Any]:
        """One chunk as a row; what it did wrong becomes the run's error."""
        row = artifacts.chunk_row({k: float(v) for k, v in metrics.items()})
        row["train/skipped"] = int(health.skipped) - self.skipped
        self.skipped = int(health.skipped)
        length = self.chunks.length
        steps = self.chunks.steps_each * length
        quarantined = row["env/quarantined"]
        trouble = nonfinite.trouble_of(self.program.env)
        lost = nonfinite.all_lost(quarantined, steps, length, trouble)
        if quarantined and not (lost or self.announced_loss):
            self.ui.note(nonfinite.some_lost(quarantined, trouble))
            self.announced_loss = True
        bad = nonfinite.reached(health, self.config.agent.max_bad_updates) or lost
        if bad is not None:
            kept = nonfinite.dump(self.snapshot(), state)
            self.error = f"{bad}; {self.store.last_good()}; {kept}"
        return self.times() | row

    def times(self) -> dict[str, Any]:
        """What every row begins with."""
        rate = self.chunks.rate
        return {
            **self.chunks.head(),
            "time/env_steps_per_second": rate * self.chunks.steps_each,
            "time/iterations_per_second": rate,
            **{f"time/{name}": self.clock[name] for name in ("eval", "checkpoint", "other")},
        }

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """The run's evaluation: always the same episodes, no bit of the run's state changed."""
        self.ui.update(stage="evaluating")
        with self.clock("eval"):
            metrics = self.program.evaluate(state.agent, state.weights, self.keys.evaluate)
            metrics = jax.device_get(metrics)
        found = {name: float(value) for name, value in metrics.items()}
        lost = found.get("lost", 0.0)
        if lost and not self.announced_episodes:
            trouble = nonfinite.trouble_of(self.program.eval_env)
            said = nonfinite.episodes_lost(lost, self.config.run.eval_episodes, trouble)
            self.ui.note(f"evaluation: {said}")
            self.announced_episodes = True
        verdict = walks(found)
        if verdict is not None:
            found["walks"] = float(verdict)
        if self.evaluate_robust is not None:
            found |= self.in_worlds(state)
        return {f"eval/{name}": value for name, value in found.items()}

    def in_worlds(self, state: TrainState) -> dict[str, float]:
        """How the policy fares in many worlds: one process tries it and tells the others."""
        said = "{}"
        with self.clock("eval"):
            if processes.is_first():
                found = self.evaluate_robust(jax.device_get(state.agent))  # type: ignore[misc]
                said = json.dumps(found)
            self.robustness = json.loads(processes.from_first(said))
        names = ("score", "survival", "tracking_error")
        return {f"robust_{name}": float(self.robustness[name]) for name in names}

    def write(self, row: dict[str, Any]) -> None:
        with self.clock("other"):
            for log in self.logs:
                log.write(row)
        if self.logs and self.logs[0].error:
            self.ui.note(f"metrics not written: {self.logs[0].error}; kept for later")
        self.show(row)

    def show(self, row: dict[str, Any] | None = None) -> None:
        """Tell the progress display."""
        run = self.config.run
        changes: dict[str, Any] = {"iteration": self.iteration, "env_steps": self.env_steps}
        if row is not None and row["time/iterations_per_second"]:
            left = (run.iterations - self.iteration) / row["time/iterations_per_second"]
            if run.max_time is not None:
                left = min(left, run.max_time - self.clock["train"])
            changes |= {"rate": row["time/env_steps_per_second"], "left": max(left, 0.0)}
            self.tell_time(left)
        if row is not None and "eval/return" in row:
            changes |= {"returned": row["eval/return"], "length": row["eval/length"]}
        stage = "warming up" if self.iteration < self.config.loop.warmup else "training"
        self.ui.update(iterations=run.iterations, stage=stage, **(changes if row else {}))

    def tell_time(self, left: float) -> None:
        """Once, after the first chunk: how long it will take, where somebody might walk away."""
        if not self.announced_time and left >= LONG:
            self.ui.note(
                f"training will take about {duration(left)} at this rate; Ctrl-C ends it with all "
                "files written, --resume goes on"
            )
        self.announced_time = True

    def save(self, state: TrainState, score: float | None) -> None:
        """Start writing a checkpoint; whether the last one was written is told now."""
        self.store.wait()
        self.check_saved()
        self.check_processes(state)
        with self.clock("checkpoint"):
            meta = {
                "config": self.config.to_dict(),
                "env_steps": self.env_steps,
                "clock": dict(self.clock.seconds),
            }
            if self.robustness and score is not None:
                meta["robustness"] = self.robustness
            self.store.save(
                state,
                iteration=self.iteration,
                meta=meta,
                best=score,
                with_replay=self.options.checkpoint_replay,
            )
        self.saved = self.iteration

    def check_processes(self, state: TrainState) -> None:
        """Refuse to save what the processes disagree on; nothing else would notice."""
        if not processes.several():
            return
        if not processes.same_everywhere(artifacts.params_sha256(state.agent)):
            raise RuntimeError("parameters differ between processes")
        if self.saved is None:
            self.ui.note(f"parameters equal in {jax.process_count()} processes")

    def check_saved(self) -> bool:
        if self.store.last_error:
            if self.saved is not None:  # not told yet
                self.ui.note(f"checkpoint not written: {self.store.last_error}; training goes on")
            self.saved = None
        elif self.saved is not None and not self.sized:
            self.sized = True
            self.ui.note(f"each checkpoint takes {self.store.last_bytes / 2**20:,.1f} MiB")
        return not self.store.last_error

    # --- after ----------------------------------------------------------------------------------

    def finish(self, state: TrainState, status: str) -> dict[str, Any]:
        """Everything that is left when training ends."""
        self.ui.update(stage="saving")
        with self.clock("checkpoint"):
            self.store.wait()
        if status != "failed" and not (self.check_saved() and self.saved == self.iteration):
            self.save(state, None)
            self.store.wait()
            if not self.check_saved():
                status = "failed"
                error, good = self.store.last_error, self.store.last_good()
                self.error = f"the end was not saved: {error}; {good}"
        run = self.snapshot()
        summary = artifacts.summarize(run, state, status)
        if not processes.is_first():
            return summary
        video = artifacts.write_artifacts(run, state, status, summary, self.options.video)
        for log in self.logs:
            with contextlib.suppress(Exception):  # a logger's end never fails the run
                log.close(summary, video)
        return summary
