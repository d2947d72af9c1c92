"""NaN forced into physics, reward and gradients: refused and counted; where it does not end, the
run stops and says by what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from tests.drill.base import SMALL, Drill, Life, Line

from jaxtd3.agent.critics import CRITICS, c51_loss
from jaxtd3.agent.td3 import fast_td3
from jaxtd3.core.types import Array, EnvStep, TrainState
from jaxtd3.envs import register_env
from jaxtd3.envs.pendulum import Pendulum, PendulumState
from jaxtd3.envs.registry import preset
from jaxtd3.output.logs import read_rows
from jaxtd3.replay.ring import INVALID
from jaxtd3.run.nonfinite import not_finite
from jaxtd3.run.program import build
from jaxtd3.run.progress import Quiet
from jaxtd3.run.session import Options, Session

ITERATIONS = 60  # all of it fits the ring
LIMIT = 20  # bad updates in a row that end a run


def sick(state: PendulumState) -> Array:
    return jnp.abs(jnp.sin(state.angle)) > 0.97


class SickState(Pendulum):
    """A pendulum whose physics breaks down at some angles."""

    def step(self, state: PendulumState, action: Array) -> EnvStep:
        out = super().step(state, action)
        angle = jnp.where(sick(state), jnp.nan, out.state.angle)
        return out._replace(state=out.state._replace(angle=angle))


class SickReward(Pendulum):
    """A pendulum whose reward breaks down at some angles."""

    def step(self, state: PendulumState, action: Array) -> EnvStep:
        out = super().step(state, action)
        return out._replace(terms=jnp.where(sick(state), jnp.inf, out.terms))


@jax.custom_vjp
def sick_gradient(x: Array, sick: Array) -> Array:
    """`x`, with a gradient that is NaN where `sick`."""
    return x


sick_gradient.defvjp(lambda x, sick: (x, sick), lambda sick, g: (jnp.where(sick, jnp.nan, g), None))


def sick_critic_loss(outputs: Array, targets: Array) -> Array:
    """The critics' loss of one example; now and then it is finite and its gradient is not."""
    loss = c51_loss(outputs, targets)
    return sick_gradient(loss, jnp.sin(1e4 * loss) > 0.9998)


class Watched(Session):
    """A run that looks at its ring after every chunk."""

    bad: list[str]
    last: TrainState

    def chunk_row(self, state: TrainState, metrics: Any, health: Any) -> dict[str, Any]:
        self.bad = [*getattr(self, "bad", []), *not_finite({"replay": state.replay})]
        self.last = state
        return super().chunk_row(state, metrics, health)


def watch(
    drill: Drill, env: str, make_agent: Any = fast_td3
) -> tuple[Watched, dict[str, Any], float]:
    """A watched run; its summary; the quarantined steps that its metrics count."""
    config = preset(env, profile="cpu", **(SMALL | {"iterations": ITERATIONS}))
    session = Watched(build(config, make_agent), drill.work / env, Options(video=False), Quiet())
    summary = session.run()
    rows = read_rows(drill.work / env / "metrics.jsonl")
    return session, summary, sum(row.get("env/quarantined", 0) for row in rows)


def nan(drill: Drill) -> Iterator[Line]:
    """One line per place that NaN is forced into."""
    for what, kind in (("physics", SickState), ("reward", SickReward)):
        register_env(kind.__name__, kind)
        session, summary, counted = watch(drill, kind.__name__)
        invalid = int(jnp.sum(session.last.replay.end == INVALID))
        skipped = int(session.last.agent.skipped)
        ok = summary["status"] == "completed" and counted == invalid > 0
        ok &= not session.bad and skipped == 0
        found = f"{counted:.0f} steps quarantined of {ITERATIONS * SMALL['num_envs']}, all counted"
        yield Line(f"NaN in the {what}", ok, f"{found}; ring finite throughout: {not session.bad}")
    yield gradient(drill)
    yield from endless(drill)


def gradient(drill: Drill) -> Line:
    """Some gradients are NaN: exactly those updates are missing."""
    kind = CRITICS["c51"].with_loss(sick_critic_loss)
    session, summary, _ = watch(drill, "Pendulum", partial(fast_td3, critic=kind))
    agent = session.last.agent
    updates, skipped = int(agent.updates), int(agent.skipped)
    tried = (ITERATIONS - SMALL["warmup"]) * SMALL["critic_updates"]
    bad = session.bad + not_finite({"agent": agent})
    ok = summary["status"] == "completed" and 0 < skipped < tried == updates + skipped
    found = f"{skipped} of {tried} updates skipped and counted, parameters and ring finite"
    return Line("NaN in gradients", ok and not bad, f"{found}: {not bad}")


def endless(drill: Drill) -> Iterator[Line]:
    """A run that diverges for good, by the command; then `jaxtd3 doctor` on what it left."""
    flags: dict[str, Any] = {"iterations": 400, "max_bad_updates": LIMIT, "critic_lr": 1e38}
    ended = drill.run("endless", **flags)
    said = ended.summary.get("error") or ""
    found = re.search(r"(\w+) not finite: (\d+) critic updates in a row", said)
    ok = ended.code == 1 and ended.summary.get("status") == "failed" and found is not None
    ok &= "checkpoint" in said and "Traceback" not in ended.said
    yield Line(f"NaN for good (limit {LIMIT})", ok, f"exit code {ended.code}: {said}")
    for more in ([], ["--from-checkpoint"]):
        words = ["doctor", "--fault", str(ended.run_dir / "fault"), *more]
        looked = Life(words, ended.run_dir, drill.log(f"doctor{len(more)}")).end()
        line = looked.said.strip().splitlines()[-1:] or [""]
        ok = looked.code == 0 and "was the first that was not finite" in line[0]
        yield Line(" ".join(["doctor --fault", *more]), ok, line[0])
