"""Peers on the same environment, machine and run: brax SAC and PPO; if installed, sbx and EnvPool.

brax runs its own trainers, unchanged, on Playground's environment in Playground's wrapper, with
Playground's settings for that environment. Two cores cannot hold all of them, so `SCALED` says what
was made smaller; where the settings already fit (SAC's 128 environments, batch 512), they stay.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.counts import setup
from jaxtd3.bench.timing import Range, attempt, interleave, spread
from jaxtd3.config.config import Config
from jaxtd3.config.sections import EnvConfig
from jaxtd3.errors import UserError
from jaxtd3.run.program import Program, build
from jaxtd3.run.timing import compile_log

# Playground's PPO settings are for a GPU: environments and minibatch become an eighth (the number
# of minibatches, epochs, unroll and all else stay), and evaluations come after every training step.
SCALED = {
    "ppo": "num_envs and batch_size / 8, an evaluation after every training step",
    "sac": "max_replay_size at most 2^20 (2^18 for rates), the rest as Playground has it",
}
PPO_SHARE = 8
REPLAY = {"race": 2**20, "throughput": 2**18}
EPOCH_STEPS = 40  # actor steps per timed epoch of SAC


def stand_in() -> None:
    """JAX 0.10 has no `device_put_replicated`; brax 0.14 calls it."""
    if not hasattr(jax, "device_put_replicated"):

        def replicated(tree: Any, devices: Sequence[Any]) -> Any:
            return jax.tree.map(lambda x: jnp.stack([x] * len(devices)), tree)

        setattr(jax, "device_put_replicated", replicated)  # noqa: B010, the checker knows no such name


def playground_env(name: str) -> Any:
    """Playground's environment as brax takes it, with the meshes that training uses."""
    from jaxtd3.envs.playground.adapter import load_playground, playground_names

    if name not in playground_names():
        raise UserError(f"{name} is not one of Playground's environments: brax cannot train on it")
    return load_playground(EnvConfig(name=name, impl="jax")).unwrapped


def playground_settings(name: str, algo: str) -> dict[str, Any]:
    """Playground's own settings of an environment, as keyword arguments of brax's trainer."""
    from jaxtd3.envs.registry import suite_of

    suites = {"dm_control": "dm_control_suite", "locomotion": "locomotion"}
    module = f"mujoco_playground.config.{suites.get(suite_of(name), 'manipulation')}_params"
    make = getattr(importlib.import_module(module), f"brax_{algo}_config", None)
    if make is None:
        raise UserError(f"Playground has no {algo.upper()} settings for {name}")
    found = make(name).to_dict()
    networks = importlib.import_module(f"brax.training.agents.{algo}.networks")
    factory = getattr(networks, f"make_{algo}_networks")
    given = found.pop("network_factory", {})
    found["network_factory"] = functools.partial(factory, **given)
    return found


def sac_settings(name: str, purpose: str) -> dict[str, Any]:
    """Playground's SAC, its replay cut."""
    found = playground_settings(name, "sac")
    found.pop("num_resets_per_eval", None)
    found["max_replay_size"] = min(found["max_replay_size"], REPLAY[purpose])
    return found


def ppo_settings(name: str) -> dict[str, Any]:
    """Playground's PPO, an eighth as wide."""
    found = playground_settings(name, "ppo")
    for key in ("num_envs", "batch_size"):
        found[key] = max(1, found[key] // PPO_SHARE)
    found["num_resets_per_eval"] = 1
    found["num_evals"] = found["num_timesteps"] // ppo_step(found) + 2
    return found


def ppo_step(settings: Mapping[str, Any]) -> int:
    """Environment steps per training step of brax's PPO."""
    names = ("batch_size", "unroll_length", "num_minibatches", "action_repeat")
    return functools.reduce(lambda n, name: n * settings[name], names, 1)


class Watch:
    """Seconds that brax trained, evaluated and compiled, told apart at each call-back."""

    def __init__(self) -> None:
        self.log = compile_log()
        self.log.take()
        self.train = self.evaluate = self.compile = 0.0
        self.calls = 0
        self.last = time.perf_counter()

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """A call-back comes at the end of an evaluation; before the first there is no training."""
        now = time.perf_counter()
        evaluated = float(metrics.get("eval/epoch_eval_time", 0.0))
        spans = list(self.log.spans)
        self.log.spans[:] = [span for span in spans if span[1] <= now - evaluated]
        before = self.log.take()
        self.log.spans[:] = [span for span in spans if span[1] > now - evaluated]
        during = self.log.take()
        self.compile += before + during
        self.evaluate += evaluated - during
        if self.calls:
            self.train += now - evaluated - self.last - before
        self.calls += 1
        self.last = time.perf_counter()


class Over(Exception):
    """Raised out of a call-back: brax's trainers know no other way to stop."""


def train_brax(algo: str, name: str, progress: Callable[[int, Any], None], **settings: Any) -> None:
    """Run brax's trainer until it ends or `progress` raises `Over`."""
    from mujoco_playground import wrapper

    stand_in()
    trainer = importlib.import_module(f"brax.training.agents.{algo}.train")
    with contextlib.suppress(Over), jax.numpy_rank_promotion("allow"):
        trainer.train(
            environment=playground_env(name),
            wrap_env_fn=wrapper.wrap_for_brax_training,
            progress_fn=progress,
            max_devices_per_host=1,
            deterministic_eval=True,
            **settings,
        )


# --- throughput ---------------------------------------------------------------------------------


def epoch_rates(algo: str, name: str, rounds: int, settings: dict[str, Any]) -> list[float]:
    """Environment steps per second, epoch by epoch; the first, which compiles, is left out."""
    rates: list[float] = []

    def progress(steps: int, metrics: Any) -> None:
        if steps:
            rates.append(float(metrics["training/sps"]))
        if len(rates) > rounds:
            raise Over

    train_brax(algo, name, progress, num_eval_envs=8, **settings)
    return rates[1:]


def sac_rates(name: str, rounds: int, full: bool) -> dict[str, Any]:
    """brax SAC with its replay nearly empty, or full."""
    found = sac_settings(name, "throughput")
    if full:
        found["min_replay_size"] = found["max_replay_size"]
    epochs, envs = rounds + 1, found["num_envs"]
    prefill = -(-found["min_replay_size"] // envs) * envs
    found["num_evals"] = epochs + 1
    found["num_timesteps"] = found["action_repeat"] * (prefill + epochs * EPOCH_STEPS * envs)
    rates = epoch_rates("sac", name, rounds, found)
    per_step = found["grad_updates_per_step"] / (envs * found["action_repeat"])
    return rows(rates, per_step, found, ("num_envs", "batch_size", "max_replay_size"))


def ppo_rates(name: str, rounds: int) -> dict[str, Any]:
    found = ppo_settings(name)
    rates = epoch_rates("ppo", name, rounds, found)
    updates = found["num_minibatches"] * found["num_updates_per_batch"]
    names = ("num_envs", "batch_size", "num_minibatches", "num_updates_per_batch", "unroll_length")
    return rows(rates, updates / ppo_step(found), found, names)


def sbx_rates(name: str, rounds: int) -> dict[str, Any]:
    """sbx TD3, whose loop is on the host, over the same batch of environments."""
    if importlib.util.find_spec("sbx") is None:
        raise UserError("not installed (pip install sbx-rl)")
    from benchmarks.sbx import SETTINGS, epoch_rates

    rates = epoch_rates(name, rounds)
    updates = SETTINGS["gradient_steps"] / SETTINGS["num_envs"]
    return rows(rates, updates, SETTINGS, ("num_envs", "batch_size", "buffer_size"))


def envpool_rates(name: str, rounds: int) -> dict[str, Any]:
    """EnvPool's steps, with no learner, at the size that training has: a row of `--peers`."""
    import jaxtd3
    from jaxtd3.bench.physics import ENVPOOL, MOST, envpool_task
    from jaxtd3.envs.physics.native import share_of_cores

    cfg, threads = jaxtd3.preset(name).env, share_of_cores()
    task = envpool_task(replace(cfg, sim_dt=None), threads, MOST)
    rates = [1 / taken for taken in interleave([task], rounds)[ENVPOOL]]
    sizes = {"num_envs": cfg.num_envs, "num_threads": threads}
    return rows(rates, 0.0, sizes, [*sizes])


def rows(
    rates: list[float], updates: float, settings: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Rates as told, with the settings that matter."""
    return {
        "env_steps_per_second": spread(rates),
        "updates_per_second": spread([rate * updates for rate in rates]),
        "settings": {name: settings[name] for name in names},
    }


class Peer(NamedTuple):
    label: str
    run: Callable[[str, int], dict[str, Any]]  # (env, rounds) -> rows


PEERS = {
    "brax_sac": Peer("brax SAC, replay filling", lambda env, n: sac_rates(env, n, full=False)),
    "brax_sac_full": Peer("brax SAC, replay full", lambda env, n: sac_rates(env, n, full=True)),
    "brax_ppo": Peer("brax PPO", ppo_rates),
    "sbx_td3": Peer("sbx TD3", sbx_rates),
    "envpool": Peer("EnvPool, steps alone", envpool_rates),
}


def ours_rates(program: Program, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """This project's rates with a ring that is nearly empty and one that is full, in turns."""
    from benchmarks.programs import Held, full_state, with_fill
    from jaxtd3.bench.timing import Task
    from jaxtd3.run.program import chunk_of

    config, length = program.config, 10
    chunk = chunk_of(program, length)
    held = Held(full_state(program))
    few = min(config.replay.length // 4, 20) or 2

    def fill(slabs: int) -> None:
        held.state = jax.block_until_ready(with_fill(held.state, slabs))

    tasks = [
        Task("ours", lambda: held.through(chunk), length, lambda: fill(few)),
        Task("ours_full", lambda: held.through(chunk), length, lambda: fill(config.replay.length)),
    ]
    times = interleave(tasks, rounds, seconds)
    steps = config.loop.collect_steps * config.env.num_envs
    names = {"num_envs": config.env.num_envs, "batch_size": config.replay.batch_size}
    names["max_replay_size"] = config.env.num_envs * config.replay.length
    return {
        name: rows([steps / t for t in taken], config.loop.critic_updates / steps, names, [*names])
        for name, taken in times.items()
    }


def compare(
    program: Program, rounds: int, seconds: float, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Rates of this project, of every peer, and of this project again."""
    name = program.config.env.name
    found: dict[str, Any] = {}

    def ours(suffix: str) -> None:
        tell(f"jaxtd3{suffix.replace('_', ' ')}")
        found.update({k + suffix: v for k, v in ours_rates(program, rounds, seconds).items()})

    ours("")
    for key, peer in PEERS.items():
        tell(peer.label)
        found[key] = attempt(peer.run, name, rounds)
    ours("_again")
    return {"env": name, "scaled": SCALED, "rates": found}


LABELS = {"ours": "jaxtd3, ring filling", "ours_full": "jaxtd3, ring full"}


def lines(result: Mapping[str, Any]) -> list[str]:
    """The comparison as a table for people."""

    def figures(value: Range) -> str:
        return f"{value['median']:>12,.0f}  ({value['low']:,.0f} .. {value['high']:,.0f})"

    body = [f"{'':<28}{'env steps/s':>12}{'':<28}{'updates/s':>12}"]
    for key, row in result["rates"].items():
        base = key.removesuffix("_again")
        label = PEERS[base].label if base in PEERS else LABELS[base]
        label += ", again" if key != base else ""
        if "error" in row:
            body.append(f"{label:<28}cannot run: {row['error']}")
            continue
        steps, updates = figures(row["env_steps_per_second"]), figures(row["updates_per_second"])
        settings = ", ".join(f"{k} {v:,}" for k, v in row["settings"].items())
        body.append(f"{label:<28}{steps:<40}{updates:<36}{settings}")
    for algo, text in result["scaled"].items():
        body.append(f"brax {algo.upper()}: Playground's settings; {text}")
    return body


def command(args: Any, config: Config, tell: Callable[[str], None]) -> tuple[dict, list[str]]:
    """`jaxtd3 bench --peers`."""
    from benchmarks import races

    result = compare(build(config), args.rounds, args.seconds, tell)
    text = [setup(config), *lines(result)]
    if args.goal is not None:
        seeds = range(args.seeds)
        result["race"] = races.race(config.env.name, args.goal, args.limit, seeds, tell=tell)
        text += [races.row_text(row) for row in result["race"]["rows"]]
    return result, text
