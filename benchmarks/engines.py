"""One control step in C MuJoCo and in MJX, from the same states: how far apart they end.

python -m benchmarks.engines                        every environment that has physics
python -m benchmarks.engines CheetahRun Go1Getup    these
python -m benchmarks.engines --out engines.md       rows are added as they come, known ones passed

Each environment has a process of its own and `--limit` seconds, because MJX compiles for minutes.
States are of a rollout with random actions. A difference is over the spread that the number has
among the states: the median of all observed numbers, what 99 % stay below, the largest; the same
for the reward and its terms (99 %); and the share of states whose end the engines judge otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtd3.config.sections import EnvConfig
from jaxtd3.envs.playground.adapter import load_playground, playground_names

PARTS = ("typical", "most", "largest", "reward", "terms", "done")
HEAD = "| environment | states | " + " | ".join(PARTS) + " | seconds: native, MJX |\n"
HEAD += "| --- " * (len(PARTS) + 3) + "|\n"


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
        third = lambda x: x[2::3].reshape(num * (steps // 3), *x.shape[2:])  # noqa: E731
        return jax.tree.map(third, kept)

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


def compare(name: str, num: int = 4, steps: int = 12) -> dict[str, Any]:
    """The row of one environment."""
    begun = time.perf_counter()
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


def in_own_process(name: str, limit: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.engines", "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.engines")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--one", metavar="NAME", help="one environment, in this process, as JSON")
    parser.add_argument("--limit", type=float, default=1200.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(compare(args.one)))
        return 0
    known = args.out.read_text() if args.out and args.out.exists() else ""
    text = "" if known else HEAD
    for name in args.names or playground_names():
        if f"| {name} |" in known:
            continue
        text += row_of(name, in_own_process(name, args.limit)) + "\n"
        print(text, end="", flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(text)
        text = ""
    return 0


if __name__ == "__main__":
    from jaxtd3.runtime import prepare

    prepare()
    sys.exit(main())
