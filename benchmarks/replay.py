"""What prioritised replay costs beside uniform: adding a slab, drawing a batch, judging it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.counts import setup
from jaxtd3.bench.timing import Task, interleave, spread
from jaxtd3.config.config import Config
from jaxtd3.core.types import EnvSpec, Replay, Transition
from jaxtd3.envs import make_env
from jaxtd3.replay.ring import make_replay

KINDS = {"uniform": False, "prioritised": True}
CALLS = 20  # in one program
FILL = 64  # slabs


def slab(spec: EnvSpec, num_envs: int, key: jax.Array) -> Transition:
    """One step of every environment, nothing ending."""
    obs = jax.random.normal(key, (num_envs, spec.width))
    no = jnp.zeros(num_envs, bool)
    return Transition(
        obs=obs,
        action=jnp.zeros((num_envs, spec.action_size)),
        reward=obs[:, 0],
        terms=jnp.zeros((num_envs, 0)),
        terminated=no,
        truncated=no,
        final_obs=obs,
        valid=~no,
    )


def replay_tasks(name: str, replay: Replay, spec: EnvSpec, num_envs: int) -> list[Task]:
    """Its functions, each over and over on a ring that holds something."""
    key, gamma = jax.random.key(0), jnp.float32(0.97)
    tr = slab(spec, num_envs, key)

    def add(carry: Any, key: jax.Array) -> Any:
        return replay.add(carry, tr)

    def sample(carry: Any, key: jax.Array) -> Any:
        state, total = carry
        batch = replay.sample(state, key, gamma)
        return state, total + sum(jnp.sum(x) for x in jax.tree.leaves(batch))

    def times(step: Callable[[Any, jax.Array], Any], calls: int) -> Callable[[Any], Any]:
        def program(carry: Any) -> Any:
            keys = jax.random.split(key, calls)
            return jax.lax.scan(lambda c, k: (step(c, k), None), carry, keys)[0]

        return jax.jit(program, donate_argnums=0)

    def task(what: str, step: Callable[[Any, jax.Array], Any], first: Any) -> Task:
        program, held = times(step, CALLS), [first]

        def run() -> None:
            held[0] = jax.block_until_ready(program(held[0]))

        return Task(f"{name} {what}", run, CALLS)

    def filled() -> Any:
        return times(add, FILL)(replay.init(num_envs))

    tasks = [task("add", add, filled()), task("sample", sample, (filled(), jnp.zeros(())))]
    judge = replay.update_priority
    if judge is not None:
        batch = jax.jit(replay.sample)(filled(), key, gamma)
        tasks.append(task("judge", lambda s, _: judge(s, batch, batch.reward), filled()))
    return tasks


def replay_cost(
    config: Config,
    rounds: int,
    seconds: float,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Microseconds per call of both kinds of replay at the sizes of a config, in turns."""
    spec, num = make_env(config.env).spec, config.env.num_envs
    tasks = []
    for name, prioritized in KINDS.items():
        cfg = config.override({"prioritized": prioritized, "priority_new": "max"}).replay
        tasks += replay_tasks(name, make_replay(spec, cfg), spec, num)
    tell(f"timing {', '.join(task.name for task in tasks)}: {rounds} rounds in turns")
    times = interleave(tasks, rounds, seconds)
    pairs = zip(times["prioritised sample"], times["uniform sample"], strict=True)
    return {
        "env": config.env.name,
        **{f"{name}_us": spread([1e6 * t for t in taken]) for name, taken in times.items()},
        "sample_cost": spread([p / u for p, u in pairs]),
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The comparison for people."""
    told = [
        f"{name.removesuffix('_us'):20s} {value['median']:10.4g} us a call "
        f"({value['low']:.4g} .. {value['high']:.4g})"
        for name, value in result.items()
        if name.endswith("_us")
    ]
    cost = result["sample_cost"]["median"]
    return [*told, f"a prioritised batch costs {cost:.2f} of a uniform one"]


def command(args: Any, config: Config, tell: Callable[[str], None]) -> tuple[dict, list[str]]:
    """`jaxtd3 bench --replay-cost`."""
    result = replay_cost(config, args.rounds, args.seconds, tell)
    return result, [setup(config), *lines(result)]
