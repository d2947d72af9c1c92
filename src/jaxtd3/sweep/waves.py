"""Training the members of a sweep in waves of one shape: one program for all of them.

DIR/waves/000/            a finished wave: there as a whole, or not there
    wave.json             its members: values, metrics, curves
    007/                  a member: the directory of a run (config, metrics, checkpoint), so that
                          `jaxtd3 render | evaluate | export DIR/waves/000/007` work on it
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtd3 import durable
from jaxtd3.config.config import Config
from jaxtd3.core.types import TrainState
from jaxtd3.envs.batch import reward_weights
from jaxtd3.envs.metrics import Metric, metrics_of
from jaxtd3.errors import UserError
from jaxtd3.loop.population import take_member
from jaxtd3.loop.step import make_train_step
from jaxtd3.output.logs import dumps
from jaxtd3.output.rundir import CONFIG_FILE, METRICS_FILE
from jaxtd3.run import artifacts, memory
from jaxtd3.run.checkpoint import CheckpointStore
from jaxtd3.run.chunks import Chunks
from jaxtd3.run.program import Parts, Population, build_population, load_parts, run_keys
from jaxtd3.run.progress import Progress, duration
from jaxtd3.run.rollout import make_measure
from jaxtd3.run.signals import StopSignals
from jaxtd3.run.timing import Clock
from jaxtd3.sweep.plan import Member, label, member_config
from jaxtd3.sweep.results import write_json

WAVES, WAVE_FILE = "waves", "wave.json"
SHARE = 0.7  # of the free memory is taken where the sweep chooses how many members fit


class SweepProgram(NamedTuple):
    """What all members of a sweep share, nothing allocated yet."""

    config: Config
    parts: Parts
    metrics: dict[str, Metric]
    bytes: int  # of one member's state


def load_sweep(config: Config, extra: dict[str, Metric]) -> SweepProgram:
    """Load the parts, and find out how large a member is."""
    parts = load_parts(config)
    fns = make_train_step(parts.env, parts.agent, parts.replay, config.loop)
    size = memory.tree_bytes(jax.eval_shape(fns.init, jax.random.key(0)))
    return SweepProgram(config, parts, {**metrics_of(parts.eval_env.env), **extra}, size)


def most_members(program: SweepProgram) -> int:
    """How many members fit into memory at once."""
    free, where = memory.free_device()
    batch = program.config.replay.batch_size * (4 * program.parts.env.spec.width + 64) * 4
    need = program.bytes + batch
    fits = math.inf if free is None else SHARE * free / need
    if fits < 1:
        raise UserError(f"one member needs {need / memory.GiB:.1f} GiB, {where} has less")
    return int(min(fits, 4096))


class Waves:
    """Trains waves of `size` members; the first one compiles, the others do not."""

    def __init__(
        self, program: SweepProgram, size: int, directory: Path, ui: Progress, mesh: Any = None
    ):
        self.program, self.size, self.ui, self.mesh = program, size, ui, mesh
        self.directory = directory.absolute() / WAVES
        self.clock = Clock()
        self.traces = 0
        self.total = 0  # iterations to come in all waves, for the time left
        self.done = 0
        self.population: Population | None = None
        durable.tidy(self.directory)

    # --- the program ----------------------------------------------------------------------------

    def compile(self, configs: Sequence[Config]) -> Population:
        """One chunk of the population, and its measure; refused if it would not fit."""
        program, run = self.program, self.program.config.run
        self.ui.stage("compiling")

        def on_trace() -> None:
            self.traces += 1

        runs = build_population(configs, program.parts, self.mesh, on_trace)
        with self.clock("compile"):
            shapes = jax.eval_shape(runs.start)
            if self.mesh is None:
                chunk: Any = runs.chunk
                chunk = chunk.lower(shapes).compile()
                usage = chunk.memory_analysis()
                self.check_memory(shapes, getattr(usage, "temp_size_in_bytes", 0))
                runs = runs._replace(chunk=chunk)
        self.ui.note(f"compiled the program of all waves in {duration(self.clock['compile'])}")
        _, eval_env, agent, _ = runs.parts
        measure = make_measure(eval_env, agent, program.metrics, run.eval_episodes)
        self.measure = jax.jit(jax.vmap(measure, in_axes=(0, 0, None)))
        self.population = runs
        return runs

    def check_memory(self, shapes: Any, workspace: int) -> None:
        free, where = memory.free_device()
        need = memory.tree_bytes(shapes) + workspace
        if free is not None and need > free:
            raise UserError(
                f"{self.size} members at once need {need / memory.GiB:.1f} GiB, {where} has "
                f"{free / memory.GiB:.1f} GiB free: lower --members-at-once"
            )

    # --- one wave -------------------------------------------------------------------------------

    def train(self, number: int, members: Sequence[Member], stop: StopSignals) -> list[dict] | None:
        """Train and store a wave; None where it was interrupted."""
        spec, base = self.program.parts.env.spec, self.program.config
        configs = [member_config(base, spec, m.values, m.seed) for m in members]
        padded = [*configs, *[configs[-1]] * (self.size - len(configs))]
        runs = (self.population or self.compile(padded))._replace(configs=padded)
        chunks = Chunks(base, self.clock)
        rows: list[list[dict[str, Any]]] = [[] for _ in members]
        self.ui.update(stage=f"training wave {number + 1}")
        with self.clock("other"):
            state = runs.start()

        def after(state: TrainState, metrics: Any) -> str | None:
            self.add_rows(chunks, state, metrics, rows)
            if chunks.iteration >= base.run.iterations:
                return "completed"
            return "interrupted" if stop.asked else None

        asked = "interrupted" if stop.asked else None
        state, status = chunks.loop(runs.advance, state, after, asked)
        if status == "interrupted":
            return None
        if self.traces != 1:
            raise RuntimeError(f"the training program was traced {self.traces} times, not once")
        return self.store(number, members, configs, state, rows)

    def add_rows(self, chunks: Chunks, state: Any, metrics: Any, rows: Any) -> None:
        """A chunk as a row of each member, measured where it is due."""
        run = self.program.config.run
        found: dict[str, np.ndarray] = {}
        if chunks.iteration >= run.iterations or chunks.due(run.eval_every):
            self.ui.update(stage="measuring")
            with self.clock("eval"):
                key = run_keys(run.seed).evaluate  # the same episodes for all: a fair comparison
                found = jax.device_get(self.measure(state.agent, state.weights, key))
        for p, row in enumerate(rows):
            own = artifacts.chunk_row({k: float(v[p]) for k, v in metrics.items()})
            row.append(chunks.head() | own | {f"eval/{k}": float(v[p]) for k, v in found.items()})
        self.show(chunks)

    def show(self, chunks: Chunks) -> None:
        """Tell the progress display."""
        self.done += chunks.length
        work = self.clock["train"] + self.clock["eval"] + self.clock["other"]
        left = work / self.done * (self.total - self.done)
        self.ui.update(
            stage="training",
            iteration=self.done,
            iterations=self.total,
            env_steps=self.done * chunks.steps_each * self.size,
            rate=chunks.rate * chunks.steps_each * self.size,
            left=max(left, 0.0),
        )

    # --- storing --------------------------------------------------------------------------------

    def path(self, number: int) -> Path:
        return self.directory / f"{number:03d}"

    def read(self, number: int, members: Sequence[Member]) -> list[dict] | None:
        """A finished wave of these very members, or None."""
        path = self.path(number) / WAVE_FILE
        if not path.exists():
            return None
        try:
            found = durable.read_json(path)["members"]
            same = [(m["index"], m["seed"], m["values"]) for m in found] == [
                (m.index, m.seed, dict(m.values)) for m in members
            ]
        except durable.UNREADABLE as error:
            raise UserError(f"{path}: {durable.explain(error)}") from error
        if not same:
            raise UserError(f"{path} holds other members than this sweep's")
        return found

    def store(self, number, members, configs, state: TrainState, rows) -> list[dict]:
        """Write a wave under a temporary name, then give it its own."""
        self.ui.update(stage="saving")
        final = self.path(number)
        temp = final.with_name(durable.TEMP + final.name)
        durable.remove(temp)
        found = []
        with self.clock("checkpoint"):
            try:
                for p, (member, config) in enumerate(zip(members, configs, strict=True)):
                    folder = temp / f"{member.index:03d}"
                    folder.mkdir(parents=True)
                    self.store_member(folder, config, take_member(state, p), rows[p])
                    place = f"{WAVES}/{final.name}/{folder.name}"
                    found.append(describe(self.program, member, config, rows[p], place))
                write_json(temp / WAVE_FILE, {"members": found, "time": time.time()})
                durable.publish(temp, final)
            except OSError as error:
                raise UserError(f"wave not written: {durable.explain(error)}") from error
        return json.loads((final / WAVE_FILE).read_text())["members"]

    def store_member(self, folder: Path, config: Config, state: TrainState, rows: list) -> None:
        """A member as a run of its own, without its replay."""
        config.save(folder / CONFIG_FILE)
        (folder / METRICS_FILE).write_text("".join(dumps(row) + "\n" for row in rows))
        store = CheckpointStore(folder)
        last = rows[-1]
        meta = {"config": config.to_dict(), "clock": dict(self.clock.seconds)}
        store.save(
            state,
            iteration=last["iteration"],
            meta=meta,
            best=last.get("eval/default_reward"),
            with_replay=False,
        )
        store.close()
        if store.last_error:
            raise OSError(store.last_error)


def describe(program: SweepProgram, member: Member, config: Config, rows: list, place: str) -> dict:
    """A member as results tell it."""
    spec = program.parts.env.spec
    weights = reward_weights(spec, config.env.weights).tolist()
    last, names = rows[-1], [*program.metrics, "own_reward", "length"]
    keep = ("iteration", "env_steps", "seconds")
    curve = [
        {k.removeprefix("eval/"): v for k, v in row.items() if k in keep or k.startswith("eval/")}
        for row in rows
        if any(k.startswith("eval/") for k in row)
    ]
    return {
        "index": member.index,
        "group": member.group,
        "seed": member.seed,
        "label": member.name or label(member.values),
        "values": dict(member.values),
        "weights": {n: float(f"{w:.6g}") for n, w in zip(spec.reward_terms, weights, strict=True)},
        "metrics": {name: last[f"eval/{name}"] for name in names},
        "path": place,
        "curve": curve,
        "config": config.to_dict(),
    }
