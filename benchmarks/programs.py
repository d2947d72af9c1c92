"""The programs that a bench times, over one shared training state.

iteration   the real chunk: collect and learn, donated
collect     its environment steps alone        against    env      physics and nothing else
update      its updates alone, ring full       against    gemms    its matrix products alone
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.counts import Dot, learner_dots, update_step
from jaxtd3.bench.timing import Task
from jaxtd3.core.types import Array, TrainState
from jaxtd3.errors import UserError
from jaxtd3.nets.dense import compiler_options
from jaxtd3.replay.ring import ReplayState
from jaxtd3.run.program import Program, chunk_of, run_keys


class Held:
    """The state that chunks hand to each other: each donates it and puts its own back."""

    def __init__(self, state: TrainState):
        self.state = state

    def through(self, chunk: Callable[[TrainState], tuple[TrainState, Any]]) -> None:
        self.state, metrics = chunk(self.state)
        jax.block_until_ready((self.state, metrics))


def full_state(program: Program, seed: int = 0) -> TrainState:
    """A run's first state, past its warm-up, with a ring that is full of random numbers.

    Zeros would not do: pages never written to all map to the same page of memory.
    """
    keys = run_keys(seed)
    state = program.fns.init(keys.init)
    if not isinstance(state.replay, ReplayState):
        raise UserError("bench measures the uniform ring; for a prioritised one: --replay-cost")
    warm = jnp.asarray(program.config.loop.warmup, jnp.int32)
    state = state.replace(iteration=jax.device_put(warm, state.iteration.sharding))
    ring = jax.jit(fill_ring, donate_argnums=0)(state.replay, jax.random.key(seed + 1))
    ring = jax.tree.map(jax.device_put, ring, program.layout.replay)
    return state.replace(replay=ring)


def fill_ring(ring: ReplayState, key: Array) -> ReplayState:
    """Every slab written."""
    key_obs, key_action, key_label = jax.random.split(key, 3)
    length = ring.obs.shape[0]
    obs = jax.random.normal(key_obs, ring.obs.shape, ring.obs.dtype)
    action = jax.random.uniform(key_action, ring.action.shape, ring.action.dtype, -1.0, 1.0)
    ring = ring.replace(obs=obs, action=action, size=jnp.full_like(ring.size, length))
    if ring.terms is not None:
        return ring.replace(terms=jax.random.normal(key_label, ring.terms.shape))
    return ring.replace(reward=jax.random.normal(key_label, ring.reward.shape))


def with_fill(state: TrainState, slabs: int) -> TrainState:
    """The same state, whose ring says that it holds `slabs` slabs."""
    ring = state.replay
    length = ring.obs.shape[0]

    def counter(value: int, like: Array) -> Array:
        return jax.device_put(jnp.asarray(value, like.dtype), like.sharding)

    size, head = counter(slabs, ring.size), counter(slabs % length, ring.head)
    return state.replace(replay=ring.replace(size=size, head=head))


# --- tasks --------------------------------------------------------------------------------------


def chunk_task(name: str, chunk: Callable, held: Held, length: int) -> Task:
    return Task(name, lambda: held.through(chunk), length)


def learner_tasks(program: Program, held: Held, length: int) -> list[Task]:
    """Whole iterations, and their two halves."""
    steps = {
        "iteration": program.fns.train_step,
        "collect": program.fns.collect_step,
        "update": update_step(program),
    }
    return [
        chunk_task(name, chunk_of(program, length, step), held, length)
        for name, step in steps.items()
    ]


def env_task(program: Program, held: Held, length: int) -> Task:
    """The physics of the same environments and nothing else.

    Every sample starts from the states that training is in, with actions out of the ring.
    """
    step = jax.vmap(program.env.env.step)

    @jax.jit
    def scan(inner: Any, actions: Array) -> Any:
        def body(out: Any, action: Array) -> tuple[Any, None]:
            return step(out.state, action), None

        return jax.lax.scan(body, step(inner, actions[0]), actions[1:])[0]

    given: list[Any] = []

    def prepare() -> None:
        state = held.state
        rows = np.arange(length) % state.replay.action.shape[0]
        actions = jnp.clip(state.replay.action[rows].astype(jnp.float32), -1.0, 1.0)
        given[:] = jax.block_until_ready((jax.tree.map(jnp.copy, state.env.inner), actions))

    return Task("env", lambda: jax.block_until_ready(scan(*given)), length, prepare)


def gemm_task(program: Program) -> Task:
    """The matrix products of one iteration's updates, each on operands of its own."""
    options = compiler_options(program.config.agent.compute)
    return dots_task("gemms", learner_dots(program), options)


def dots_task(name: str, dots: Counter[Dot], options: dict[str, str] | None = None) -> Task:
    """All products of a count, as one program.

    Results go to donated buffers, so that no time is spent on fresh pages. Of each pair the smaller
    operand is its own (or the compiler would compute equal products once), the larger is shared.
    """
    todo = [dot for dot, count in dots.items() for _ in range(count)]
    shared: dict[Any, Array] = {}

    def operand(shape: tuple[int, ...], dtype: str, own: bool, index: int) -> Array:
        make = partial(jax.random.normal, jax.random.key(index), shape, dtype)
        return make() if own else shared.setdefault((shape, dtype), make())

    def operands(dot: Dot, index: int) -> tuple[Array, Array]:
        left_own = math.prod(dot.lhs) < math.prod(dot.rhs)
        lhs = operand(dot.lhs, dot.dtypes[0], left_own, index)
        return lhs, operand(dot.rhs, dot.dtypes[1], not left_own, index)

    @partial(jax.jit, donate_argnums=1, keep_unused=True, compiler_options=options)
    def products(pairs: list[Any], outs: list[Array]) -> list[Array]:
        return [
            jax.lax.dot_general(a, b, dot.dims, preferred_element_type=dot.result)
            for dot, (a, b) in zip(todo, pairs, strict=True)
        ]

    pairs = [operands(dot, i) for i, dot in enumerate(todo)]
    held = [jnp.zeros(dot.out, dot.result) for dot in todo]

    def run() -> None:
        held[:] = jax.block_until_ready(products(pairs, held))

    return Task(name, run)


def copy_task(size: int = 2**28) -> Task:
    """Reading and writing memory, all cores at once; per byte read or written."""
    if jax.default_backend() != "cpu":
        flip = jax.jit(lambda x: ~x, donate_argnums=0)
        held = [jnp.zeros(size // 8, jnp.uint32)]

        def run_device() -> None:
            held[0] = jax.block_until_ready(flip(held[0]))

        return Task("memory", run_device, size)

    threads = os.cpu_count() or 1
    half = size // 2 // threads
    blocks = [(np.ones(half, np.uint8), np.zeros(half, np.uint8)) for _ in range(threads)]
    pool = ThreadPoolExecutor(threads)

    def run() -> None:
        list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), blocks))

    return Task("memory", run, 2 * half * threads)
