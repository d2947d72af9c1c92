"""Where the rest goes: the pieces of an iteration, each timed alone, all taking turns.

    collect = act + noise + physics + resets + statistics + insert
    update  = sample + critics' steps + policy's steps

Pieces that run alone need not add up to the whole: fused, they share passes over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.counts import setup
from benchmarks.programs import Held, chunk_task, env_task, full_state, gemm_task, learner_tasks
from jaxtd3.bench.timing import interleave, spread
from jaxtd3.config.config import Config
from jaxtd3.core.sharding import local_key
from jaxtd3.core.types import Array, Batch, Metrics, TrainState, Transition
from jaxtd3.loop.step import make_noise
from jaxtd3.run.program import Program, build, chunk_of

Piece = Callable[[TrainState, Array], tuple[TrainState, Any]]
"""piece(state, key) -> (state, something that depends on all it computed)"""


def total(tree: Any) -> Array:
    """One number that needs every array of a tree."""
    leaves = [x for x in jax.tree.leaves(tree) if x is not None]
    return jnp.stack([jnp.sum(x, dtype=jnp.float32) for x in leaves]).sum()


def sampled(program: Program, state: TrainState, key: Array) -> Batch:
    """A batch of the ring."""
    return program.replay.sample(
        state.replay, key, program.agent.discount(state.agent), state.weights
    )


def example(program: Program, state: TrainState) -> tuple[Transition, Batch]:
    """A transition of every environment and a batch, as the pieces take them."""

    def make(state: TrainState) -> tuple[Any, Any]:
        key = jax.random.key(0)
        action = jnp.zeros((state.env.obs.shape[0], program.env.spec.action_size))
        _, tr, _ = program.env.step(state.env, action, key)
        return tr, sampled(program, state, key)

    specs = jax.tree.map(lambda sharding: sharding.spec, program.layout)
    mapped = jax.shard_map(
        make, mesh=program.mesh, in_specs=(specs,), out_specs=jax.P(), check_vma=False
    )
    # By way of the host: constants of a sharded program lie on no mesh.
    return jax.tree.map(jnp.asarray, jax.device_get(jax.jit(mapped)(state)))


def pieces(program: Program, state: TrainState) -> dict[str, Piece]:
    """Every piece as a step of the training state, so that scans run it as training does."""
    agent, replay, env = program.agent, program.replay, program.env
    noise = make_noise(program.config.loop)
    tr, batch = example(program, state)

    def act(state: TrainState, key: Array) -> tuple[TrainState, Any]:
        action = agent.act(state.agent, state.env.obs)
        moved = state.env.obs + 1e-9 * jnp.sum(action)  # the next step's input is another
        return state.replace(env=state.env.replace(obs=moved)), ()

    def explore(state: TrainState, key: Array) -> tuple[TrainState, Any]:
        key_apply, key_resample = jax.random.split(key)
        action = noise.apply(state.noise, tr.action, key_apply)
        after = noise.resample(state.noise, tr.done, key_resample)
        return state.replace(noise=after), total(action)

    def step(state: TrainState, key: Array) -> tuple[TrainState, Any]:
        key_action, key_env = jax.random.split(key)
        action = jax.random.uniform(key_action, tr.action.shape, minval=-1.0)
        env_state, made, _ = env.step(state.env, action, key_env)
        return state.replace(env=env_state), total(made)

    def observe(state: TrainState, key: Array) -> tuple[TrainState, Any]:
        return state.replace(agent=agent.observe(state.agent, tr, state.discounted)), ()

    def insert(state: TrainState, key: Array) -> tuple[TrainState, Any]:
        return state.replace(replay=replay.add(state.replay, tr)), ()

    def sample(state: TrainState, key: Array) -> tuple[TrainState, Any]:
        return state, total(sampled(program, state, key))

    def learn(policy: bool) -> Piece:
        def update(state: TrainState, key: Array) -> tuple[TrainState, Any]:
            agent_state, *_ = agent.update(state.agent, batch, key, policy=policy)
            return state.replace(agent=agent_state), ()

        return update

    return {
        "act": act,
        "noise": explore,
        "step with resets": step,
        "statistics": observe,
        "insert": insert,
        "sample": sample,
        "critics": learn(policy=False),
        "critics and policy": learn(policy=True),
    }


def as_step(piece: Piece, axis_name: str) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """A piece with a key of its own every time."""

    def step(state: TrainState) -> tuple[TrainState, Metrics]:
        key, key_piece = jax.random.split(state.key)
        state, used = piece(state.replace(key=key), local_key(key_piece, axis_name))
        return state, {"used": total(used) if jax.tree.leaves(used) else jnp.zeros(())}

    return step


def breakdown(
    program: Program,
    rounds: int,
    seconds: float,
    length: int = 10,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Milliseconds per call of every piece, beside the wholes."""
    held = Held(full_state(program))
    found = pieces(program, held.state)
    tasks = learner_tasks(program, held, length)
    tasks += [env_task(program, held, length), gemm_task(program)]
    axis = program.mesh.axis_names[0]
    for name, piece in found.items():
        chunk = chunk_of(program, length, as_step(piece, axis))
        tasks.append(chunk_task(name, chunk, held, length))
    tell(f"timing {', '.join(task.name for task in tasks)}")
    times = interleave(tasks, rounds, seconds)
    loop = program.config.loop
    return {
        "env": program.config.env.name,
        "milliseconds": {name: spread([1e3 * t for t in taken]) for name, taken in times.items()},
        "calls": calls(loop.collect_steps, loop.critic_updates, loop.policy_updates),
    }


def calls(collects: int, critics: int, policies: int) -> dict[str, int]:
    """How often an iteration does each."""
    of_collect = dict.fromkeys(
        ("collect", "env", "act", "noise", "step with resets", "statistics", "insert"), collects
    )
    return {
        "iteration": 1,
        **of_collect,
        "update": 1,
        "gemms": 1,
        "sample": critics,
        "critics": critics - policies,
        "critics and policy": policies,
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The pieces as a table, with their share of an iteration."""
    ms, often = result["milliseconds"], result["calls"]
    whole = ms["iteration"]["median"]
    body = [f"{'':<22}{'ms a call':>10}{'calls':>7}{'share':>8}   range"]
    for name in often:
        value = ms[name]
        share = value["median"] * often[name] / whole
        times = f"{value['median']:>10.3g}{often[name]:>7}{100 * share:>7.1f}%"
        body.append(f"{name:<22}{times}   {value['low']:.3g} .. {value['high']:.3g}")
    return body


def command(args: Any, config: Config, tell: Callable[[str], None]) -> tuple[dict, list[str]]:
    """`jaxtd3 bench --breakdown`."""
    result = breakdown(build(config), args.rounds, args.seconds, args.chunk, tell)
    return result, [setup(config), *lines(result)]
