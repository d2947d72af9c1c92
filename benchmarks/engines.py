"""One control step in C MuJoCo and in MJX, from the same states: how far apart they end.

python -m benchmarks.engines                        every environment that has physics
python -m benchmarks.engines CheetahRun Go1Getup    these
python -m benchmarks.engines --out benchmarks/engines.md    rows are added as they come

Of a table that is there whole rows are kept; those that were not done in time are tried again.

Each environment has a process of its own and `--limit` seconds, because MJX compiles for minutes,
even without optimisations. States, 16 of them or `--states`, are of a rollout with random actions.
A difference is over the spread that the number has among the states: the median of all observed
numbers, what 99 % stay below, the largest; the same for the reward and its terms (99 %); and the
share of states whose end the engines judge otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtd3.config.sections import EnvConfig
from jaxtd3.durable import write_whole
from jaxtd3.envs.playground.adapter import load_playground, playground_names

TABLE = Path(__file__).with_name("engines.md")  # the one that is kept, if any
KEPT = 3  # of so many steps of a rollout one state is compared
STEPS = 4 * KEPT
LATE = "not done after"
UNOPTIMISED = "--xla_backend_optimization_level"
PARTS = ("typical", "most", "largest", "reward", "terms", "done")
HEAD = "| environment | states | " + " | ".join(PARTS) + " | seconds: native, MJX |\n"
HEAD += "| --- " * (len(PARTS) + 3) + "|\n"
HEAD_BARS = len(PARTS) + 4


def rollout(env: Any, num: int, steps: int, scale: float = 0.5) -> tuple[Any, Any, Any]:
    """Every third state of a rollout with random actions, the actions, and what they led to."""

    def body(state: Any, key: Any) -> tuple[Any, Any]:
        action = jax.random.uniform(key, (num, env.spec.action_size), minval=-scale, maxval=scale)
        out = jax.vmap(env.step)(state, action)
        return out.state, (state, action, out)

    @jax.jit
    def run(key: Any) -> Any:
        state, _ = jax.vmap(env.reset)(jax.random.split(key, num))
        kept = jax.lax.scan(body, state, jax.random.split(key, steps))[1]
        third = jax.tree.map(lambda x: x[KEPT - 1 :: KEPT], kept)
        return jax.tree.map(lambda x: x.reshape(len(x) * num, *x.shape[2:]), third)

    return run(jax.random.key(1))


def differences(env: Any, state: Any, action: Any, out: Any, alike: Any = True) -> dict[str, float]:
    """How far from `out`, native's next step, MJX gets from the same states, where `alike`."""
    import mujoco.mjx

    other_env = load_playground(EnvConfig(name=env.name, impl="jax"))
    model = other_env.unwrapped.mj_model

    @jax.jit
    @jax.vmap
    def theirs(native: Any, action: Any) -> Any:
        given = {field: getattr(native.state.data, field) for field in env.physics.inputs}
        given = {field: x for field, x in given.items() if x is not None}
        data = mujoco.mjx.make_data(model, impl="jax").replace(**given)
        return other_env.step(native._replace(state=native.state.replace(data=data)), action)

    other = theirs(state, action)
    rows = np.flatnonzero(np.broadcast_to(alike, len(out.reward)))

    def far(a: Any, b: Any, least: float) -> Any:
        return (jnp.abs(a - b) / (jnp.std(a, axis=0, keepdims=True) + least))[rows]

    obs = far(out.obs, other.obs, 0.05)
    found = {
        "typical": jnp.median(obs),
        "most": jnp.quantile(obs, 0.99),
        "largest": jnp.max(obs),
        "reward": jnp.quantile(far(out.reward, other.reward, 1e-3), 0.99),
        "terms": jnp.quantile(far(out.terms, other.terms, 1e-3), 0.99) if out.terms.size else 0.0,
        "done": jnp.mean(out.terminated != other.terminated),
    }
    return {part: float(x) for part, x in found.items()}


def compare(name: str, states: int = 16) -> dict[str, Any]:
    """The row of one environment, from `states` states or a few more."""
    begun, steps = time.perf_counter(), STEPS
    num = -(-states * KEPT // steps)
    env = load_playground(EnvConfig(name=name, impl="native"))
    state, action, out = jax.block_until_ready(rollout(env, num, steps))
    native = time.perf_counter() - begun
    found = differences(env, state, action, out)
    seconds = native, time.perf_counter() - begun - native
    return {"states": len(out.reward), **found, "seconds": seconds}


def row_of(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"| {name} | not compared: {found['error']} |" + " |" * (len(PARTS) + 1)
    numbers = " | ".join(f"{found[part]:.0e}" for part in PARTS)
    seconds = ", ".join(f"{x:.0f}" for x in found["seconds"])
    return f"| {name} | {found['states']} | {numbers} | {seconds} |"


def rows_in(text: str) -> dict[str, str]:
    """The rows of a table by environment, but for what a kill cut off."""
    lines = [line for line in text.splitlines(keepends=True) if line.count("|") == HEAD_BARS]
    rows = [line.rstrip("\n") for line in lines if line.endswith("|\n")]
    named = {row.split("|")[1].strip(): row for row in rows}
    return {name: row for name, row in named.items() if name not in ("environment", "---")}


def values_of(row: str) -> dict[str, float] | None:
    """The numbers of a row; None where the environment was not compared."""
    cells = [cell.strip() for cell in row.split("|")][2:]
    if cells[0].startswith("not compared"):
        return None
    return dict(zip(PARTS, map(float, cells[1:]), strict=False))


def in_own_process(name: str, limit: float, states: int = 16) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.engines", "--one", name, "--states", str(states)]
    given = os.environ.get("XLA_FLAGS", "")
    flags = given if UNOPTIMISED in given else f"{given} {UNOPTIMISED}=0".strip()
    options: Any = {"capture_output": True, "text": True, "env": {**os.environ, "XLA_FLAGS": flags}}
    try:
        done = subprocess.run(command, timeout=limit, **options)
    except subprocess.TimeoutExpired:
        return {"error": f"{LATE} {limit:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.engines")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--one", metavar="NAME", help="one environment, in this process, as JSON")
    parser.add_argument("--limit", type=float, default=1200.0)
    parser.add_argument("--states", type=int, default=16, help="of each environment; 16 or more")
    parser.add_argument("--out", type=Path, help=f"a table to go on with ({TABLE.name} is kept)")
    args = parser.parse_args(argv)
    if args.states < 16:
        parser.error(f"--states {args.states} is below 16")
    if args.one:
        print(json.dumps(compare(args.one, args.states)))
        return 0
    rows = rows_in(args.out.read_text()) if args.out and args.out.exists() else {}
    done = {name for name, row in rows.items() if LATE not in row}
    print(HEAD, end="", flush=True)
    for name in args.names or playground_names():
        if name in done:
            continue
        rows[name] = row_of(name, in_own_process(name, args.limit, args.states))
        print(rows[name], flush=True)
        if args.out:
            write_whole(args.out, HEAD + "".join(f"{row}\n" for row in rows.values()))
    return 0


if __name__ == "__main__":
    from jaxtd3.runtime import prepare

    prepare()
    sys.exit(main())
