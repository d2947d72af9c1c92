"""What a program does, counted: matrix products, bytes, and what the compiler made of it.

FLOPs come from the traced program (every `dot_general`, times the length of the scans around it),
never from the compiler's estimate, which counts a loop's body once. `mlp_flops` is the same number
by hand, for FastTD3's networks; a test compares the two.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jaxtd3.config.config import Config
from jaxtd3.config.sections import LoopConfig
from jaxtd3.core.types import EnvSpec, TrainState
from jaxtd3.loop.step import make_learn, update_plan
from jaxtd3.replay import ring as replay
from jaxtd3.run.memory import tree_bytes
from jaxtd3.run.program import Program


class Dot(NamedTuple):
    """One `dot_general`: all that is needed to run it again."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    dims: Any  # dimension_numbers
    dtypes: tuple[str, str]
    result: str
    precision: str

    @property
    def is_gemm(self) -> bool:
        """A product of two matrices, not a batch of them nor of vectors."""
        return len(self.lhs) == len(self.rhs) == 2 and len(self.dims[0][0]) == 1

    @property
    def flops(self) -> int:
        """2 M N K, times the batch."""
        (_, contracted), (_, batch) = self.dims
        used = {*contracted, *batch}
        free = math.prod(n for i, n in enumerate(self.rhs) if i not in used)
        return 2 * math.prod(self.lhs) * free

    @property
    def out(self) -> tuple[int, ...]:
        """Shape of a GEMM's result."""
        (left, right), _ = self.dims
        return self.lhs[1 - left[0]], self.rhs[1 - right[0]]


def subprograms(value: Any) -> Iterator[Any]:
    """The jaxprs within a parameter of an equation."""
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif isinstance(value, list | tuple):
        for item in value:
            yield from subprograms(item)


def count_dots(jaxpr: Any, times: int = 1) -> Counter[Dot]:
    """Every dot of a program and how often it runs; loops of unknown length count once."""
    found: Counter[Dot] = Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            a, b = (v.aval for v in eqn.invars)
            (out,) = (v.aval for v in eqn.outvars)
            dot = Dot(
                a.shape,
                b.shape,
                eqn.params["dimension_numbers"],
                (str(a.dtype), str(b.dtype)),
                str(out.dtype),
                str(eqn.params["precision"]),
            )
            found[dot] += times
        if eqn.primitive.name == "cond":  # one branch runs
            each = [count_dots(branch.jaxpr, times) for branch in eqn.params["branches"]]
            found.update(each[max(range(len(each)), key=lambda i: flops(each[i]))])
            continue
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for sub in subprograms(value):
                found.update(count_dots(sub, inner))
    return found


def gemms(dots: Counter[Dot]) -> Counter[Dot]:
    return Counter({dot: n for dot, n in dots.items() if dot.is_gemm})


def flops(dots: Counter[Dot]) -> int:
    return sum(dot.flops * n for dot, n in dots.items())


# --- of this project's programs -----------------------------------------------------------------


def update_step(program: Program) -> Callable[[TrainState], tuple[TrainState, Any]]:
    """One iteration's updates without its environment steps."""
    learn = make_learn(program.agent, program.replay, program.config.loop)
    plan = update_plan(program.config.loop)

    def step(state: TrainState) -> tuple[TrainState, Any]:
        key, key_learn = jax.random.split(state.key)
        agent, ring, metrics = learn(state, key_learn, plan, state.weights)
        return state.replace(key=key, agent=agent, replay=ring), metrics

    return step


def trace(program: Program, step: Callable) -> Any:
    """The jaxpr of a step of one device of the mesh, nothing run."""
    specs = jax.tree.map(lambda sharding: sharding.spec, program.layout)
    mapped = jax.shard_map(
        step,
        mesh=program.mesh,
        in_specs=(specs,),
        out_specs=jax.P(),
        check_vma=False,
    )
    return jax.make_jaxpr(mapped)(program.shapes).jaxpr


def learner_dots(program: Program) -> Counter[Dot]:
    """The matrix products of one iteration's updates, on one device."""
    return gemms(count_dots(trace(program, update_step(program))))


def mlp_flops(spec: EnvSpec, config: Config) -> int:
    """The learner's FLOPs per iteration by hand, for `network=mlp`.

    Targets: a forward pass of actor and critics. Critics: forward, and backward twice that but for
    the gradient of the inputs. Policy: forward through both, back to the critics' inputs, and the
    actor's own backward pass.
    """
    agent, loop = config.agent, config.loop
    outputs = 1 if agent.critic == "scalar" else agent.num_atoms
    actor = layer_sizes(spec.obs_size, agent.actor_hidden, spec.action_size)
    critic = layer_sizes(spec.critic_size + spec.action_size, agent.critic_hidden, outputs)
    a, c = sum(actor), sum(critic)
    target = a + agent.num_critics * c
    learn = agent.num_critics * (3 * c - critic[0])
    policy = (3 * a - actor[0]) + agent.num_critics * 2 * c
    per_sample = loop.critic_updates * (target + learn) + loop.policy_updates * policy
    return 2 * config.replay.batch_size * per_sample


def layer_sizes(inputs: int, hidden: int, outputs: int) -> list[int]:
    """Multiplications per example and layer of `inputs -> h -> h/2 -> h/4 -> outputs`."""
    widths = [inputs, hidden, hidden // 2, hidden // 4, outputs]
    return [a * b for a, b in itertools.pairwise(widths)]


def replay_bytes(spec: EnvSpec, config: Config) -> int:
    """Bytes one iteration must move between ring and learner: slabs written, batches read.

    A sampled window reads its observation, action and next observation, and for each of its steps
    reward and end mark; the batch that is made of it is written once.
    """
    cfg, loop = config.replay, config.loop
    wide = 2 if cfg.bf16 else 4
    label = 4 * len(spec.reward_terms) if cfg.store_terms else 4
    stored = wide * (spec.width + spec.action_size) + label + 1 + 2
    window = wide * (2 * spec.width + spec.action_size) + cfg.n_step * (label + 1) + 2
    batch = 4 * (2 * spec.width + spec.action_size + 3)
    written = loop.collect_steps * config.env.num_envs * stored
    return written + loop.critic_updates * cfg.batch_size * (window + batch)


def param_bytes(agent: Any, loop: LoopConfig) -> int:
    """Bytes of parameters and optimiser that one iteration must move.

    A step reads and writes parameters and both moments, and writes and reads the gradient; the
    critics' target is read and written besides.
    """
    critic, actor = tree_bytes(agent.critic), tree_bytes(agent.actor)
    return loop.critic_updates * 10 * critic + loop.policy_updates * 8 * actor


def gradient_bytes(agent: Any, loop: LoopConfig) -> int:
    """Bytes one device sends into all-reduces in an iteration: gradients, once per update."""
    rounds = 1 / loop.sync_every
    sent = tree_bytes(agent.critic) * loop.critic_updates
    return int(rounds * (sent + tree_bytes(agent.actor) * loop.policy_updates))


# --- of a compiled program ----------------------------------------------------------------------

HOST = re.compile(
    r"\b(infeed|outfeed|send|recv|host-transfer)\(|custom_call_target=\"[^\"]*callback"
)
COPY = re.compile(r"= (\w+\[[\d,]*\])\S* copy(?:-start)?\(")
HLO_TYPES = {"float32": "f32", "bfloat16": "bf16", "uint8": "u8", "uint16": "u16", "int32": "s32"}


def hlo_shape(x: Any) -> str:
    """An array's type as HLO writes it, such as f32[8,4]."""
    return f"{HLO_TYPES.get(str(x.dtype), str(x.dtype))}[{','.join(map(str, x.shape))}]"


def ring_copies(text: str, ring: Any) -> int:
    """Copies of the ring's large arrays in a compiled program's text."""
    total = tree_bytes(ring)
    large = {hlo_shape(x) for x in jax.tree.leaves(ring) if tree_bytes(x) > 0.02 * total}
    return sum(shape in large for shape in COPY.findall(text))


def program_facts(compiled: Any, ring: Any) -> dict[str, float]:
    """What the compiler says of a chunk: memory, copies of the ring, transfers.

    Its own count of FLOPs and bytes takes the body of a loop once, so it is of one iteration.
    """
    usage, text = compiled.memory_analysis(), compiled.as_text()
    size = tree_bytes(ring)
    cost = compiled.cost_analysis() or {}
    return {
        "hlo_flops": cost.get("flops", 0.0),
        "hlo_bytes": cost.get("bytes accessed", 0.0),
        "ring_bytes": size,
        "temp_bytes": usage.temp_size_in_bytes,
        "temp_over_buffer": usage.temp_size_in_bytes / size,
        "aliased_bytes": usage.alias_size_in_bytes,
        "ring_copies": ring_copies(text, ring),
        "host_transfers": len(HOST.findall(text)),
    }


def bytes_per_transition(program: Program) -> float:
    cfg = program.config
    return replay.bytes_per_transition(program.env.spec, cfg.replay, cfg.env.num_envs)


def setup(config: Config) -> str:
    """What is measured, in one line."""
    env, replay, loop, agent = config.env, config.replay, config.loop, config.agent
    return (
        f"{env.name}: {env.num_envs:,} envs, batch {replay.batch_size:,}, "
        f"{loop.critic_updates} critic and {loop.policy_updates} policy updates, "
        f"critics {agent.critic_hidden}, actor {agent.actor_hidden}, {agent.compute}, "
        f"ring of {env.num_envs * replay.length:,}, {replay.n_step}-step"
    )
