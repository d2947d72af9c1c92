"""What prioritised replay costs beside uniform: microseconds per add, sample and update.

python experiments/replay_cost.py --envs 1024 --length 10240 --batch 32768
"""

# ruff: noqa: E402
from jaxtd3.startup import prepare

prepare()

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxtd3
from jaxtd3.types import EnvSpec, Transition


def seconds(step: Callable[[Any], Any], state: Any, repeats: int) -> float:
    """Per call, the state donated from call to call; the first two are not counted."""
    step = jax.jit(step, donate_argnums=0)
    for _ in range(2):
        state = jax.block_until_ready(step(state))
    begin = time.perf_counter()
    for _ in range(repeats):
        state = step(state)
    jax.block_until_ready(state)
    return (time.perf_counter() - begin) / repeats


def transition(spec: EnvSpec, num_envs: int, key: jax.Array) -> Transition:
    obs = jax.random.normal(key, (num_envs, spec.width))
    no = jnp.zeros(num_envs, bool)
    return Transition(
        obs=obs,
        action=jnp.zeros((num_envs, spec.action_size)),
        reward=obs[:, 0],
        terms=jnp.zeros((num_envs, 0)),
        env_reward=obs[:, 0],
        terminated=no,
        truncated=no,
        final_obs=obs,
        valid=~no,
    )


def measure(
    spec: EnvSpec, cfg: jaxtd3.ReplayConfig, num_envs: int, repeats: int
) -> dict[str, float]:
    """Microseconds of each function of a replay."""
    replay = jaxtd3.make_replay(spec, cfg)
    key, gamma = jax.random.key(0), jnp.float32(0.97)
    tr = transition(spec, num_envs, key)

    def start() -> Any:
        fill = jax.jit(
            lambda s: jax.lax.scan(lambda s, _: (replay.add(s, tr), None), s, length=64)[0]
        )
        return fill(replay.init(num_envs))

    def sample(carry: Any) -> Any:
        state, key, _ = carry
        key, now = jax.random.split(key)
        batch = replay.sample(state, now, gamma)
        return state, key, batch.obs.sum() + batch.next_obs.sum() + batch.weight.sum()

    judge = replay.update_priority
    found = {
        "add": seconds(lambda s: replay.add(s, tr), start(), repeats),
        "sample": seconds(sample, (start(), jax.random.key(1), jnp.zeros(())), repeats),
    }
    if judge is not None:
        state = start()
        batch = jax.jit(replay.sample)(state, key, gamma)
        found["update"] = seconds(lambda s: judge(s, batch, batch.reward), state, repeats)
    return {name: round(1e6 * value, 1) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (
        ("envs", 64),
        ("length", 2048),
        ("batch", 512),
        ("obs", 48),
        ("repeats", 100),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    spec = EnvSpec("cost", args.obs, 8, 1000)
    for prioritized in (False, True):
        cfg = jaxtd3.ReplayConfig(
            length=args.length, batch_size=args.batch, prioritized=prioritized, priority_new="max"
        )
        row = {"replay": "prioritised" if prioritized else "uniform"}
        row |= {k: v for k, v in vars(args).items() if k != "repeats"}
        print(json.dumps(row | measure(spec, cfg, args.envs, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
