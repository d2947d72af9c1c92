"""When updates stop being finite: what is left behind, and how to look at it again.

    <run_dir>/fault/checkpoints/000012000/    the whole state in which the run stopped

A refused update never enters the state, so the networks in the dump are those from before the
first bad update. `first_bad` goes on from there; `rerun` starts at the last good checkpoint instead
and comes to the very first bad update, for a run is the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtd3.agent.td3 import FAULTS
from jaxtd3.config.config import config_from_dict
from jaxtd3.core.types import BatchEnv, Health, TrainState
from jaxtd3.errors import UserError
from jaxtd3.loop.step import StepFn
from jaxtd3.run.arrays import named_leaves
from jaxtd3.run.checkpoint import CheckpointStore, read_meta, restore_from

if TYPE_CHECKING:
    from jaxtd3.run.artifacts import Snapshot
    from jaxtd3.run.program import Program

FOLDER = "fault"
NETWORKS = ("critic", "actor")


class Found(NamedTuple):
    """The first update that was not finite."""

    iteration: int  # iterations that were complete before it
    network: str  # one of NETWORKS
    update: int  # its number among that network's updates of the iteration, from 1
    of: int  # so many there are
    metric: str  # one of FAULTS
    causes: list[str]  # arrays of the networks and the replay that were not finite before it

    def __str__(self) -> str:
        causes = (
            f"not finite before it: {', '.join(self.causes)}"
            if self.causes
            else ("networks and replay were finite before it")
        )
        return (
            f"{self.metric} was the first that was not finite, in {self.network} update "
            f"{self.update} of {self.of} of iteration {self.iteration + 1:,}; {causes}"
        )


def reached(health: Health, limit: int) -> str | None:
    """What to say where a streak of refused updates has reached the limit; else None."""
    longest = health.streak.max()
    if longest < limit:
        return None
    network = NETWORKS[int(health.streak.argmax())]
    return f"{FAULTS[int(health.fault)]} not finite: {longest} {network} updates in a row skipped"


def some_lost(quarantined: float, trouble: str) -> str:
    """What to say of the first environment steps that are left out; `trouble` by the physics."""
    return (
        f"{quarantined:,.0f} environment steps were not finite and are left out (from now on see "
        f"env/quarantined){trouble and f'; physics: {trouble}'}"
    )


def episodes_lost(lost: float, episodes: int, trouble: str) -> str:
    """What to say of an evaluation's episodes that ended before their time."""
    return (
        f"{lost:.0f} of {episodes} episodes ended because their numbers were not finite"
        f"{trouble and f'; physics: {trouble}'}"
    )


def trouble_of(env: BatchEnv) -> str:
    """What went wrong in the physics of an environment so far; empty: nothing, or nobody knows."""
    return getattr(getattr(env.env, "physics", None), "trouble", "")


def all_lost(quarantined: float, steps: int, iterations: int, trouble: str = "") -> str | None:
    """What to say where not one environment step of a chunk was finite; else None."""
    if quarantined < steps:
        return None
    return (
        f"not one of {steps:,} environment steps in the last {iterations:,} iterations was finite "
        f"(actions, physics or rewards{trouble and f'; {trouble}'}): there is nothing to learn from"
    )


def dump(run: Snapshot, state: TrainState) -> str:
    """Keep the state for `jaxtd3 doctor --fault`; what to say about it."""
    folder = run.run_dir / FOLDER
    store = CheckpointStore(folder)
    meta = {"config": run.program.config.to_dict(), "env_steps": run.env_steps}
    store.save(state, iteration=run.iteration, meta=meta)
    store.wait()
    if store.last_error:
        return f"no dump: {store.last_error}"
    return f"to replay it: jaxtd3 doctor --fault {folder}"


def load(path: Path) -> tuple[Program, TrainState]:
    """The program of the run that a dump or a checkpoint is of, and the state."""
    from jaxtd3.run.program import build

    program = build(config_from_dict(read_meta(path).get("config"), f"{path}: config"))
    return program, restore(path, program)


def restore(path: Path, program: Program) -> TrainState:
    if not read_meta(path)["replay"]:
        raise UserError(f"{path} holds no replay: nothing can be re-run")
    return restore_from(path, program.shapes).state


def copying_chunk(program: Program, length: int) -> StepFn:
    """So many iterations as the run has them, without taking the state away."""
    from jaxtd3.run.program import chunk_of

    chunk = chunk_of(program, length)
    return lambda state: chunk(jax.tree.map(jnp.copy, state))


def first_bad(program: Program, state: TrainState, iterations: int) -> Found | None:
    """Go on from a state to the first update that is not finite."""
    step = copying_chunk(program, 1)
    agent = state.agent.replace(bad_streak=jnp.zeros_like(state.agent.bad_streak))
    state = state.replace(agent=agent)
    loop, health = program.config.loop, program.agent.health
    counts = loop.critic_updates, loop.policy_updates
    for _ in range(iterations):
        new, _ = step(state)
        now = health(new.agent)
        if int(now.skipped) > int(health(state.agent).skipped):
            metric = FAULTS[int(now.fault)]
            net = int(metric.startswith("actor"))
            update = counts[net] - int(now.streak[net]) + 1
            causes = not_finite({"agent": state.agent, "replay": state.replay})
            return Found(int(state.iteration), NETWORKS[net], update, counts[net], metric, causes)
        state = new
    return None


def rerun(
    program: Program, state: TrainState, until: int, tell: Callable[[int], None]
) -> Found | None:
    """From a good state by the run's own chunks to the first bad update."""
    length = program.config.run.log_every
    chunk, health = copying_chunk(program, length), program.agent.health
    while int(state.iteration) < until:
        state = program.refresh(state, int(state.iteration))
        new, _ = chunk(state)
        tell(int(new.iteration))
        if int(health(new.agent).skipped) > int(health(state.agent).skipped):
            return first_bad(program, state, length)
        state = new
    return None


def not_finite(tree: Any) -> list[str]:
    """Names of the arrays in which a number is not finite."""
    floats = {
        name: leaf
        for name, leaf in named_leaves(tree).items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    return [name for name, leaf in floats.items() if not bool(jnp.all(jnp.isfinite(leaf)))]


def fault_command(path: Path, from_checkpoint: bool) -> int:
    """Run `jaxtd3 doctor --fault`: 0 if the fault came back, 1 if not."""
    path = path.absolute()
    program, state = load(path)
    stopped = int(state.iteration)
    print(f"{program.config.env.name}, seed {program.config.run.seed}: stopped after {stopped:,}")
    if from_checkpoint:
        state = last_good(path.parent, program)
        print(f"from iteration {int(state.iteration):,}, up to {stopped:,}", flush=True)
        found = rerun(program, state, stopped, lambda i: print(f"{i:,} of {stopped:,}", flush=True))
    else:
        found = first_bad(program, state, program.config.run.log_every)
    print(found or "the fault did not come back: every update was finite")
    return 0 if found else 1


def last_good(run_dir: Path, program: Program) -> TrainState:
    """The run's newest good checkpoint, or its first state where it has none."""
    from jaxtd3.run.program import run_keys

    if any((run_dir / "checkpoints").glob("[0-9]*")):
        return restore(run_dir, program)
    return program.fns.init(run_keys(program.config.run.seed).init)
