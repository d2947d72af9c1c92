"""The program of a run: its parts loaded, bound together and laid out on the devices.

    program = build(config)
    state = program.start()
    state, metrics = program.advance(state)     # log_every iterations, as `jaxtd3 train` runs them

Nothing is allocated before `start`, nothing compiled before the first `advance`. `build_population`
does the same for several runs as one program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxtd3.agent.td3 import fast_td3
from jaxtd3.config.config import Config
from jaxtd3.config.sections import EnvConfig
from jaxtd3.core import sharding
from jaxtd3.core.types import Agent, Array, BatchEnv, Metrics, Replay, TrainState
from jaxtd3.envs import make_env
from jaxtd3.envs.batch import undisturbed
from jaxtd3.errors import UserError
from jaxtd3.loop.chunk import make_chunk
from jaxtd3.loop.population import PopulationFns, check_members, make_population
from jaxtd3.loop.step import StepFn, TrainFns, make_noise, make_train_step
from jaxtd3.nets.dense import compiler_options
from jaxtd3.replay.ring import make_replay
from jaxtd3.run.rollout import make_evaluate


class Keys(NamedTuple):
    """One key per purpose."""

    init: Array
    refresh: Array
    evaluate: Array
    render: Array


def run_keys(seed: int) -> Keys:
    """All random numbers of a run come from these."""
    return Keys(*jax.random.split(jax.random.key(seed), len(Keys._fields)))


def pool_key(seed: int, iteration: int) -> Array:
    """The key of the reset pool with which the chunk after `iteration` begins."""
    return jax.random.fold_in(run_keys(seed).refresh, iteration)


def refresh_pool(
    refresh: Callable[[Any, Array], Any], state: TrainState, iteration: int, seed: int | list[int]
) -> TrainState:
    """The state with a new reset pool, as every chunk but the first begins with one.

    `refresh(env_state, key)`; of a population, a list of seeds, it takes a key of every member.
    """
    if not iteration:
        return state
    if isinstance(seed, int):
        return state.replace(env=refresh(state.env, pool_key(seed, iteration)))
    keys = jnp.stack([pool_key(one, iteration) for one in seed])
    return state.replace(env=refresh(state.env, keys))


def make_envs(config: EnvConfig, mesh: Mesh | None = None) -> tuple[BatchEnv, BatchEnv]:
    """Those that a run trains in, and those of its evaluations: without pushes and the like."""
    env, quiet = make_env(config, mesh), undisturbed(config)
    return env, env if quiet == config else make_env(quiet, mesh)


class Parts(NamedTuple):
    """What a run, and every member of a population, consists of."""

    env: BatchEnv
    eval_env: BatchEnv
    agent: Agent
    replay: Replay


def load_parts(
    config: Config, mesh: Mesh | None = None, make_agent: Callable[..., Agent] = fast_td3
) -> Parts:
    """The parts that a config describes, on the devices of a mesh or on no particular one; a
    setting that does not fit them is the user's error."""
    axis, sync = (None, 1) if mesh is None else (sharding.AXIS, config.loop.sync_every)
    try:
        ring = config.replay if mesh is None else sharding.local_replay(config.replay, mesh)
        env, eval_env = make_envs(config.env, mesh)
        agent = make_agent(env.spec, config.agent, axis, learn_apart=sync > 1)
        if sync > 1:
            agent = sharding.bundles(agent, sync, sharding.AXIS)
        return Parts(env, eval_env, agent, make_replay(env.spec, ring, axis))
    except ValueError as error:
        raise UserError(str(error)) from error


class Program(NamedTuple):
    """A run's parts, and how they go on together."""

    config: Config
    mesh: Mesh
    layout: TrainState  # of jax.sharding.NamedSharding
    env: BatchEnv
    eval_env: BatchEnv
    agent: Agent
    replay: Replay
    fns: TrainFns
    shapes: TrainState  # of jax.ShapeDtypeStruct
    evaluate: Callable[[Any, Array, Array], Metrics]
    chunk: StepFn  # run.log_every iterations

    def start(self) -> TrainState:
        """The first state of the run."""
        return self.fns.init(run_keys(self.config.run.seed).init)

    def refresh(self, state: TrainState, iteration: int) -> TrainState:
        """The state as the chunk after `iteration` begins with it."""
        return refresh_pool(self.env.refresh, state, iteration, self.config.run.seed)

    def advance(
        self, state: TrainState, iteration: int | None = None
    ) -> tuple[TrainState, Metrics]:
        """One chunk of the run; the old state is gone. `iteration`: that of the state, where the
        caller knows it without asking the device."""
        now = int(state.iteration if iteration is None else iteration)
        return self.chunk(self.refresh(state, now))


def build(config: Config, make_agent: Callable[..., Agent] = fast_td3) -> Program:
    """Load the parts and bind them together. `make_agent`: `fast_td3` with a part of your own, as
    `functools.partial(fast_td3, actor_loss=mine)`."""
    given, config = config, config.resolved()
    try:
        mesh = sharding.make_mesh(config.run.devices)
        sharding.share(config.env.num_envs, mesh, "num_envs")
    except ValueError as error:
        raise UserError(str(error)) from error
    env, eval_env, agent, replay = load_parts(config, mesh, make_agent)
    noise, ring = make_noise(config.loop), replay
    agent, replay = sharding.spread_inits(agent, replay, mesh)
    fns = make_train_step(env, agent, replay, config.loop, sharding.AXIS, noise=noise)
    init = fns.init
    shapes = jax.eval_shape(init, jax.random.key(0))
    layout = sharding.make_layout(shapes, env, ring, noise, mesh)
    shapes = sharding.place(shapes, layout)
    fns = fns._replace(init=lambda key: sharding.place(init(key), layout))
    evaluate = make_evaluate(eval_env, agent, config.run.eval_episodes, mesh)
    program = Program(
        given, mesh, layout, env, eval_env, agent, replay, fns, shapes, evaluate, fns.train_step
    )
    return program._replace(chunk=chunk_of(program, config.run.log_every))


class Population(NamedTuple):
    """Several runs as one program, and how they go on. Another list of as many `configs` may take
    the place of this one: nothing is compiled again."""

    configs: Sequence[Config]
    parts: Parts
    fns: PopulationFns
    chunk: StepFn  # run.log_every iterations

    def start(self) -> TrainState:
        """The first state of the members: every leaf is [P, ...]."""
        try:
            return self.fns.init(self.configs)
        except ValueError as error:  # an unknown reward term
            raise UserError(str(error)) from error

    def advance(
        self, state: TrainState, iteration: int | None = None
    ) -> tuple[TrainState, Metrics]:
        """One chunk of every member; `iteration` as in `Program.advance`."""
        now = int(state.iteration[0] if iteration is None else iteration)
        seeds = [config.run.seed for config in self.configs]
        return self.chunk(refresh_pool(jax.vmap(self.parts.env.refresh), state, now, seeds))


def build_population(
    configs: Sequence[Config],
    parts: Parts | None = None,
    mesh: Mesh | None = None,
    on_trace: Callable[[], None] = lambda: None,
) -> Population:
    """Bind the parts together for members that differ in traced settings; each one's random numbers
    are those of its single run. With a mesh, each device holds whole members; `run.devices` counts
    for single runs alone. `on_trace()` is called whenever the step is traced."""
    check_members(configs)
    config = configs[0].resolved()
    parts = parts or load_parts(config)
    fns = make_population(
        parts.env,
        parts.agent,
        parts.replay,
        configs,
        key_of=lambda seed: run_keys(seed).init,
        mesh=mesh,
    )

    def step(state: TrainState) -> tuple[TrainState, Metrics]:
        on_trace()
        return fns.train_step(state)

    options = compiler_options(config.agent.compute)
    chunk = make_chunk(step, config.run.log_every, options=options)
    return Population(configs, parts, fns, chunk)


def chunk_of(program: Program, length: int, step: StepFn | None = None) -> Any:
    """`length` iterations (or other steps) as one program, by the settings of the run."""
    return make_chunk(
        step or program.fns.train_step,
        length,
        program.layout,
        settle=program.config.loop.sync_every > 1,
        options=compiler_options(program.config.agent.compute),
    )


def whole_chunks(config: Config) -> tuple[Config, list[str]]:
    """Settings under which everything happens between chunks of one length, and what changed."""
    run = config.run
    bounds = [run.iterations, run.eval_every, run.checkpoint_every, run.log_every]
    chunk = min(n for n in bounds if n)
    changes = {"log_every": chunk}
    for name in ("iterations", "eval_every", "checkpoint_every"):
        changes[name] = math.ceil(getattr(run, name) / chunk) * chunk
    changes = {k: v for k, v in changes.items() if v != getattr(run, k)}
    notes = [f"{k}: {getattr(run, k)} -> {v}, for whole chunks" for k, v in changes.items()]
    return config.override(changes), notes
