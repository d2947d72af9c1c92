"""What a member of a population costs, beside a single run of the same sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.counts import setup
from benchmarks.programs import Held, chunk_task
from jaxtd3.agent.td3 import fast_td3
from jaxtd3.bench.timing import interleave, spread
from jaxtd3.config.config import Config
from jaxtd3.envs import make_env
from jaxtd3.loop.chunk import make_chunk
from jaxtd3.loop.population import make_population
from jaxtd3.loop.step import StepFn, make_train_step
from jaxtd3.nets.dense import compiler_options
from jaxtd3.replay.ring import make_replay

LENGTH = 10


def population(
    config: Config,
    size: int,
    rounds: int,
    seconds: float,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Iterations of one run and of `size` seeds as one program, in turns."""
    env = make_env(config.env)
    agent, replay = fast_td3(env.spec, config.agent), make_replay(env.spec, config.replay)
    single = make_train_step(env, agent, replay, config.loop)
    members = [config.override({"seed": config.run.seed + i}) for i in range(size)]
    many = make_population(env, agent, replay, members)
    options = compiler_options(config.agent.compute)

    def chunk(step: StepFn) -> StepFn:
        return make_chunk(step, LENGTH, options=options)

    tell(f"compiling one run and a population of {size}")
    tasks = [
        chunk_task(
            "single",
            chunk(single.train_step),
            Held(single.init(jax.random.key(config.run.seed))),
            LENGTH,
        ),
        chunk_task("population", chunk(many.train_step), Held(many.init()), LENGTH),
    ]
    times = interleave(tasks, rounds, seconds)
    pairs = zip(times["population"], times["single"], strict=True)
    return {
        "env": config.env.name,
        "members": size,
        "single_ms": spread([1e3 * t for t in times["single"]]),
        "population_ms": spread([1e3 * t for t in times["population"]]),
        "per_member_cost": spread([p / size / s for p, s in pairs]),
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The comparison for people."""
    cost, n = result["per_member_cost"], result["members"]
    return [
        f"one run           {result['single_ms']['median']:10.3g} ms per iteration",
        f"{n} seeds together {result['population_ms']['median']:9.3g} ms per iteration of all",
        f"a member costs {cost['median']:.2f} of a single run ({cost['low']:.2f} .. "
        f"{cost['high']:.2f})",
    ]


def command(args: Any, config: Config, tell: Callable[[str], None]) -> tuple[dict, list[str]]:
    """`jaxtd3 bench --population SIZE`."""
    result = population(config, args.population, args.rounds, args.seconds, tell)
    return result, [setup(config), *lines(result)]
