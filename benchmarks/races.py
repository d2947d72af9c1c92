"""Wall time to a return: one contender, one environment, one seed, in a process of its own.

    python -m benchmarks.races CONTENDER ENV GOAL SEED LIMIT      prints one JSON object

Training seconds leave compilation and evaluations out; both are told apart. `race` runs many such
processes one after the other, contenders taking turns, each with an empty compile cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxtd3.bench.timing import spread
from jaxtd3.cli.main import complain
from jaxtd3.errors import UserError, nearest
from jaxtd3.runtime import STARTED, prepare


class Race(NamedTuple):
    env: str
    goal: float
    seed: int
    limit: float  # seconds of training


class Seconds(NamedTuple):
    train: float
    compile: float
    evaluate: float


Over = Callable[[Seconds, float, int], bool]
"""over(seconds, return, env_steps) -> True once the race has ended"""

# The sketch's sizes: FastTD3's own settings, cut to what two cores can hold.
SKETCH_SIZES: dict[str, Any] = {
    "num_envs": 128,
    "batch_size": 2048,
    "length": 2048,
    "critic_hidden": 256,
    "actor_hidden": 128,
    "compute": "f32",
}
EVALUATIONS = 64  # episodes


def nothing(*_: Any) -> Any:
    """What an evaluation never calls."""


def seconds_of(clock: Any) -> Seconds:
    return Seconds(clock["train"], clock["compile"], clock["eval"])


def ours(race: Race, over: Over) -> None:
    """The preset for this machine, as `jaxtd3 train` runs it, without files."""
    import jax

    from jaxtd3.envs.registry import preset
    from jaxtd3.run.program import build, run_keys, whole_chunks
    from jaxtd3.run.timing import Clock

    config, _ = whole_chunks(preset(race.env, seed=race.seed, eval_episodes=EVALUATIONS))
    program, keys, clock = build(config), run_keys(race.seed), Clock()
    with clock("other"):
        state = jax.block_until_ready(program.start())
    done = 0
    while True:
        with clock("train"):
            state, metrics = program.advance(state, done)
            jax.block_until_ready(metrics)
        done += config.run.log_every
        if done % config.run.eval_every:
            continue
        with clock("eval"):
            found = program.evaluate(state.agent, state.weights, keys.evaluate)
            returned = float(found["return"])
        steps = done * config.loop.collect_steps * config.env.num_envs
        if over(seconds_of(clock), returned, steps):
            return


def sketch(race: Race, over: Over) -> None:
    """The plain sketch with FastTD3's own settings, evaluated as often as ours."""
    import jax

    from benchmarks.sketch import make_sketch
    from jaxtd3.core.types import Agent
    from jaxtd3.envs import make_env
    from jaxtd3.envs.registry import preset
    from jaxtd3.run.rollout import make_evaluate
    from jaxtd3.run.timing import Clock

    pace = preset(race.env).run
    config = preset(race.env, profile="gpu", **SKETCH_SIZES)
    env, clock = make_env(config.env), Clock()
    init, step, act = make_sketch(env, config)
    evaluate = make_evaluate(env, Agent(nothing, act, nothing, nothing, nothing), EVALUATIONS)
    chunk = jax.jit(
        lambda s: jax.lax.scan(lambda s, _: (step(s), None), s, length=pace.log_every)[0],
        donate_argnums=0,
    )
    key, key_env, key_evaluate, key_refresh = jax.random.split(jax.random.key(race.seed), 4)
    with clock("other"):
        state = jax.block_until_ready(jax.jit(init)(key, env.init(key_env)))
    done = 0
    while True:
        with clock("train"):
            if done:
                fresh = env.refresh(state.env, jax.random.fold_in(key_refresh, done))
                state = state._replace(env=fresh)
            state = jax.block_until_ready(chunk(state))
        done += pace.log_every
        if done % pace.eval_every:
            continue
        with clock("eval"):
            small = state._replace(ring={}, env=None)  # what acting reads
            returned = float(evaluate(small, state.weights, key_evaluate)["return"])
        if over(seconds_of(clock), returned, done * config.env.num_envs):
            return


def brax(algo: str) -> Callable[[Race, Over], None]:
    """brax's trainer with Playground's settings (`peers.SCALED`)."""

    def run(race: Race, over: Over) -> None:
        from benchmarks import peers

        if algo == "ppo":
            settings = peers.ppo_settings(race.env)
        else:
            settings = peers.sac_settings(race.env, "race")
            envs = settings["num_envs"] * settings["action_repeat"]
            settings["num_evals"] = settings["num_timesteps"] // (100 * envs) + 2
        watch = peers.Watch()

        def progress(steps: int, metrics: Any) -> None:
            watch(metrics)
            seconds = Seconds(watch.train, watch.compile, watch.evaluate)
            if over(seconds, float(metrics["eval/episode_reward"]), int(steps)):
                raise peers.Over
            watch.last = time.perf_counter()

        settings |= {"num_eval_envs": EVALUATIONS, "seed": race.seed}
        peers.train_brax(algo, race.env, progress, **settings)

    return run


CONTENDERS: dict[str, Callable[[Race, Over], None]] = {
    "ours": ours,
    "sketch": sketch,
    "brax_sac": brax("sac"),
    "brax_ppo": brax("ppo"),
}


def run(contender: str, race: Race) -> dict[str, Any]:
    """One contender's race, told as one flat row."""
    row: dict[str, Any] = {"contender": contender, **race._asdict(), "reached": False}

    def over(seconds: Seconds, returned: float, steps: int) -> bool:
        row.update(
            reached=returned >= race.goal,
            best=max(returned, row.get("best", returned)),
            env_steps=steps,
            train_seconds=seconds.train,
            compile_seconds=seconds.compile,
            evaluate_seconds=seconds.evaluate,
            wall_seconds=time.perf_counter() - STARTED,
        )
        row.update({"return": returned})
        print(f"{contender} {race.env} {seconds.train:.1f} s {returned:.1f}", file=sys.stderr)
        return row["reached"] or seconds.train >= race.limit

    CONTENDERS[contender](race, over)
    return row


def main(argv: list[str]) -> int:
    """Run one race and print its row."""
    prepare()
    try:
        contender, env, goal, seed, limit = argv
        if contender not in CONTENDERS:
            raise UserError(nearest("contender", contender, CONTENDERS))
        race = Race(env, float(goal), int(seed), float(limit))
        print(json.dumps(run(contender, race)))
        return 0
    except (UserError, ValueError) as error:
        complain(error)
        return 2


# --- many of them -------------------------------------------------------------------------------


def in_process(contender: str, race: Race) -> dict[str, Any]:
    """One race in a process of its own, with an empty compile cache; its row or its error."""
    command = [sys.executable, "-m", "benchmarks.races", contender, race.env]
    command += [str(race.goal), str(race.seed), str(race.limit)]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    said = [line for line in done.stderr.splitlines() if line.strip()]
    error = said[-1][:200] if said else f"exit code {done.returncode}"
    return {"contender": contender, **race._asdict(), "reached": False, "error": error}


def race(
    env: str,
    goal: float,
    limit: float,
    seeds: Iterable[int],
    contenders: Iterable[str] = tuple(CONTENDERS),
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All contenders on one environment, seed by seed, taking turns."""
    rows = []
    for seed in seeds:
        for contender in contenders:
            rows.append(in_process(contender, Race(env, goal, seed, limit)))
            tell(row_text(rows[-1]))
    return {"env": env, "goal": goal, "limit": limit, "rows": rows, "summary": summarize(rows)}


def row_text(row: dict[str, Any]) -> str:
    """One race in one line."""
    head = f"{row['contender']:<10}{row['env']} seed {row['seed']}: "
    if "error" in row:
        return head + f"cannot run: {row['error']}"
    how = f"{row['goal']:g} reached" if row["reached"] else f"best {row['best']:.0f}"
    return head + (
        f"{how} after {row['train_seconds']:.1f} s of training, {row['compile_seconds']:.1f} s of "
        f"compiling, {row['env_steps']:,} steps"
    )


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds per contender over seeds, and how many times longer than ours each took.

    A seed that did not reach the goal counts with the time it was given: a lower bound.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["contender"] for row in rows):
        ran = [row for row in rows if row["contender"] == name and "error" not in row]
        if not ran:
            continue
        found[name] = {
            "train_seconds": spread([row["train_seconds"] for row in ran]),
            "with_compile": spread([row["train_seconds"] + row["compile_seconds"] for row in ran]),
            "compile_seconds": spread([row["compile_seconds"] for row in ran]),
            "reached": sum(row["reached"] for row in ran),
            "seeds": len(ran),
        }
    for name, entry in found.items():
        if name != "ours" and "ours" in found:
            for kind in ("train_seconds", "with_compile"):
                own = found["ours"][kind]["median"]
                entry[f"over_ours_{kind}"] = entry[kind]["median"] / own
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
