"""Physics back ends on one environment, in one run: beside C MuJoCo alone, and beside EnvPool.

jaxtd3 bench --env NAME --impl native,jax [--envpool]

Every sample takes the same number of steps from the same first states with random actions, because
the cost of physics depends on what touches what. A back end is timed as training uses it: the whole
environment step, in a compiled scan. C alone is a loop over `mujoco.batch` on the same model, with
controls around the first pose: no observation, no reward, no seam. EnvPool draws first states of
its own and resets what ended in place of a step, where the others go on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtd3.bench.timing import Range, Task, attempt, compile_cold, interleave, spread
from jaxtd3.config.config import Config
from jaxtd3.config.sections import EnvConfig
from jaxtd3.core.tracing import flat_vmap
from jaxtd3.core.types import Array
from jaxtd3.envs.registry import check_env, has_physics, make_env
from jaxtd3.errors import UserError
from jaxtd3.thirdparty import attribute

FEWEST, MOST = 10, 200  # steps of one sample: robots that act at random do not stand for long
CALLS = 200  # of the seam, in one sample
ALONE, ENVPOOL = "c_alone", "envpool"
LABELS = {ALONE: "C alone", ENVPOOL: "EnvPool"}


class BackEnd:
    """An environment in one back end: its first states, and later its steps in a scan."""

    def __init__(self, cfg: EnvConfig, impl: Any, keys: Array):
        if impl == "warp" and jax.default_backend() == "cpu":
            raise UserError("warp needs an NVIDIA GPU: leave it away")
        begun = time.perf_counter()
        plain = replace(cfg, impl=impl, actor_hides="", history=1, weights={})
        self.impl = impl
        self.env: Any = make_env(plain).env
        if not hasattr(self.env, "physics"):
            raise UserError(f"{cfg.name} has no physics back ends to compare")
        self.load_seconds = time.perf_counter() - begun
        reset, (self.compile_seconds,) = compile_cold(
            lambda: jax.jit(flat_vmap(self.env.reset)), keys, most=1
        )
        self.states, _ = jax.block_until_ready(reset(keys))
        self.last: Any = None  # what the last scan returned

    def task(self, actions: Array) -> Task:
        """All `actions [T, E, A]`, one after the other, from the first states."""
        step = flat_vmap(self.env.step)

        def scan(states: Any, actions: Array) -> Any:
            def body(states: Any, action: Array) -> tuple[Any, Any]:
                out = step(states, action)
                return out.state, out[1:]

            return jax.lax.scan(body, states, actions)

        program, (seconds,) = compile_cold(lambda: jax.jit(scan), self.states, actions, most=1)
        self.compile_seconds += seconds

        def run() -> None:
            self.last = jax.block_until_ready(program(self.states, actions))

        return Task(self.impl, run, len(actions) * actions.shape[1])

    def ended(self) -> float:
        """Of the environment steps of a scan, the share at whose end the episode was over."""
        return float(np.mean(self.last[1][-1]))


class Alone:
    """`mujoco.batch` and nothing else, from the first states of an environment."""

    def __init__(self, back_end: BackEnd, num: int):
        import mujoco
        from mujoco.batch import Batch

        from jaxtd3.envs.physics.native import STATE, share_of_cores

        env, physics = back_end.env, back_end.env.physics
        self.model: Any = getattr(physics, "model", env.mj_model)
        self.threads = getattr(physics, "threads", share_of_cores())
        self.substeps, self.repeat = steps_of(env)
        self.scale = scale_of(env)
        self.batch, self.failed = Batch(self.model, num, self.threads), mujoco.batch.SimulationError
        for name in STATE:
            view, value = self.batch.bind(name), getattr(back_end.states.state.data, name, None)
            if view.size and value is not None:
                view[...] = np.asarray(value).reshape(view.shape)
        self.ctrl, self.start = self.batch.bind("ctrl"), self.batch.state.copy()
        self.pose = self.first_pose()

    def first_pose(self) -> np.ndarray:
        """Controls [E, nu] that hold the first pose, of the actuators that are servos; or zero."""
        length = self.batch.bind("actuator_length")
        self.batch.forward()
        return np.where(self.model.actuator_biasprm[:, 1] != 0, length, 0.0)

    def rewind(self) -> None:
        """Back to the first states."""
        self.batch.state[...] = self.start

    def run(self, actions: np.ndarray) -> None:
        """As many control steps as there are `actions [T, E, nu]`."""
        for action in actions:
            self.ctrl[...] = action
            for _ in range(self.repeat):
                with contextlib.suppress(self.failed):
                    self.batch.step(nstep=self.substeps)

    def task(self, steps: int) -> Task:
        shape = (steps, *self.pose.shape)
        actions = self.pose + self.scale * np.random.default_rng(0).uniform(-1, 1, shape)
        return Task(ALONE, lambda: self.run(actions), steps * len(self.pose), self.rewind)

    def steps_within(self, seconds: float) -> int:
        """How many steps to take, so that a sample is about as long as asked for."""
        (taken,) = interleave([self.task(FEWEST)], 1, 0.0)[ALONE]
        return int(np.clip(seconds / (taken * len(self.pose)), FEWEST, MOST))


def steps_of(env: Any) -> tuple[int, int]:
    """Physics steps of a control step, and control steps of a step of the environment."""
    if not hasattr(env, "unwrapped"):  # a `MujocoTask`
        return int(env.substeps), 1
    robot = env.unwrapped
    return int(robot.n_substeps), int(attribute(robot, "_config").get("action_repeat", 1))


def scale_of(env: Any) -> Any:
    """How far the controls of an action of 1 are from the pose: a number, or one for each."""
    if env.action_scale is not None:
        return np.asarray(env.action_scale, float)
    reach = getattr(env, "reach", None)
    return 1.0 if reach is None else (reach.down + reach.up) / 2


# --- the seam -----------------------------------------------------------------------------------


def seam_tasks(physics: Any, num: int) -> list[Task]:
    """A call of the native engine without the engine: the call itself, and the copies."""
    return [seam_task(physics, num), rows_task(physics, num)]


def seam_task(physics: Any, num: int) -> Task:
    """Calls with the buffers of a physics step, of a function that does nothing."""
    from jaxtd3.envs.physics.hostcall import host_call

    call = host_call("jaxtd3_bench_nothing", lambda ins, outs: None)
    reads = [physics.types[name] for name in physics.reads]
    ins = {name: physics.types[name] for name in physics.inputs}

    def once(ins: dict[str, Array], _: None) -> tuple[dict[str, Array], None]:
        found = dict(zip(physics.reads, jax.vmap(step)(ins), strict=True))
        return {name: found.get(name, x) for name, x in ins.items()}, None  # none can be left out

    def step(ins: dict[str, Array]) -> Any:
        return call(reads, *(ins[name] for name in physics.inputs))

    scan = jax.jit(lambda ins: jax.lax.scan(once, ins, length=CALLS)[0])
    first = {name: jnp.zeros((num, *x.shape), x.dtype) for name, x in ins.items()}
    return Task("seam", lambda: jax.block_until_ready(scan(first)), CALLS)


def rows_task(physics: Any, num: int) -> Task:
    """The state written and the fields read, with no step between."""
    from mujoco.batch import Batch

    batch = Batch(physics.model, num, physics.threads)

    def pairs(names: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        views = [batch.bind(name) for name in names]
        types = [physics.types[name].dtype for name in names]
        return [(view, view.astype(dtype)) for view, dtype in zip(views, types, strict=True)]

    written, read = pairs(physics.inputs), pairs(physics.reads)

    def run() -> None:
        for _ in range(CALLS):
            for view, x in written:
                view[...] = x
            for view, x in read:
                x[...] = view

    return Task("rows", run, CALLS)


# --- EnvPool ------------------------------------------------------------------------------------


def envpool_name(name: str, known: Sequence[str]) -> str:
    """EnvPool's task of an environment: Playground's own, or dm_control's."""
    folded = {task.casefold(): task for task in known}
    for task in (f"MuJoCoPlayground/{name}-v1", f"{name}-v1"):
        if task.casefold() in folded:
            return folded[task.casefold()]
    raise UserError(f"it has no {name}")


def envpool_task(cfg: EnvConfig, threads: int, steps: int) -> Task:
    """EnvPool through its gymnasium interface, reset before every sample."""
    if importlib.util.find_spec("envpool") is None:
        raise UserError("not installed (pip install 'jaxtd3[envpool]')")
    import envpool

    name = envpool_name(cfg.name, envpool.list_all_envs())
    known = envpool.make_spec(name).config._asdict()
    options: dict[str, Any] = {"push_enable": cfg.push} if "push_enable" in known else {}
    if cfg.sim_dt is not None:
        if "sim_dt" not in known:
            raise UserError(f"its {name} has no physics step to set")
        options["sim_dt"] = cfg.sim_dt
    sizes = {"num_envs": cfg.num_envs, "num_threads": threads, "seed": 0}
    env = envpool.make(name, env_type="gymnasium", **sizes, **options)
    space = env.action_space
    shape = (steps, cfg.num_envs, *space.shape)
    actions = np.random.default_rng(0).uniform(-1, 1, shape).astype(space.dtype)

    def run() -> None:
        for action in actions:
            env.step(action)

    return Task(ENVPOOL, run, steps * cfg.num_envs, env.reset)


# --- the comparison -----------------------------------------------------------------------------


def compare(
    config: Config,
    impls: Sequence[str],
    rounds: int,
    seconds: float,
    with_envpool: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Environment steps per second of every back end, of C alone and of EnvPool, in turns."""
    cfg, num = config.env, config.env.num_envs
    check_env(cfg.name)
    if not has_physics(cfg.name):
        raise UserError(f"{cfg.name} has no physics back ends to compare")
    if cfg.randomize:
        raise UserError("--randomize: C MuJoCo alone, beside which it is measured, has one model")
    keys = jax.random.split(jax.random.key(0), num)
    back_ends = []
    for impl in impls:
        tell(f"{impl}: loading, and compiling the reset")
        back_ends.append(BackEnd(cfg, impl, keys))
    lead = next((b for b in back_ends if b.impl == "native"), back_ends[0])
    alone = Alone(lead, num)
    steps = alone.steps_within(seconds)
    shape = (steps, num, lead.env.spec.action_size)
    actions = jax.random.uniform(jax.random.key(1), shape, jnp.float32, -1.0, 1.0)
    tasks = []
    for back_end in back_ends:
        tell(f"{back_end.impl}: compiling the step")
        tasks.append(back_end.task(actions))
    tasks.append(alone.task(steps))
    errors: dict[str, str] = {}
    if with_envpool:
        made = attempt(lambda: {"task": envpool_task(cfg, alone.threads, steps)})
        tasks += [made["task"]] if "task" in made else []
        errors |= {ENVPOOL: made["error"]} if "error" in made else {}
    tasks += seam_tasks(lead.env.physics, num) if lead.impl == "native" else []
    tell(f"timing {', '.join(task.name for task in tasks)}: {rounds} rounds in turns")
    times = interleave(tasks, rounds, 0.0)  # one run each: `prepare` goes before every run
    return {
        "env": cfg.name,
        "num_envs": num,
        "threads": alone.threads,
        "steps": steps,
        "physics_steps": alone.substeps * alone.repeat,
        "ended": lead.ended(),
        **figures(times, lead.impl),
        "compile_seconds": {b.impl: b.compile_seconds for b in back_ends},
        "load_seconds": {b.impl: b.load_seconds for b in back_ends},
        "errors": errors,
    }


def figures(times: Mapping[str, Sequence[float]], lead: str) -> dict[str, Any]:
    """Rates, and ratios round by round, from the seconds of every task."""
    seam = {f"{name}_us": spread([1e6 * t for t in times[name]]) for name in SEAM if name in times}
    rates = {name: taken for name, taken in times.items() if name not in SEAM}
    ratios = {
        f"{lead}_over_{name}": spread([b / a for a, b in zip(times[lead], taken, strict=True)])
        for name, taken in rates.items()
        if name != lead
    }
    found: dict[str, Any] = {
        "env_steps_per_second": {k: spread([1 / t for t in taken]) for k, taken in rates.items()},
        "ratios": ratios,
    }
    if lead == "native":
        found["eta_env"] = ratios[f"{lead}_over_{ALONE}"]
    return {**found, "callback": seam}


SEAM = ("seam", "rows")


def lines(result: Mapping[str, Any]) -> list[str]:
    """The comparison as a table for people."""

    def ranged(value: Range, form: str) -> str:
        low, high = format(value["low"], form), format(value["high"], form)
        return f"{format(value['median'], form):>12}  ({low} .. {high})"

    head = f"{result['env']}: {result['num_envs']:,} envs, {result['threads']} threads"
    body = [
        f"{head}; {result['steps']} steps from the same first states, each of "
        f"{result['physics_steps']} physics steps; {100 * result['ended']:.0f} % after an end",
        f"{'':<20}{'env steps/s':>12}{'':<28}compile s",
    ]
    for name, value in result["env_steps_per_second"].items():
        seconds = result["compile_seconds"].get(name)
        compiled = "" if seconds is None else f"{seconds:9.1f}"
        body.append(f"{LABELS.get(name, name):<20}{ranged(value, ',.0f'):<40}{compiled}".rstrip())
    for name, error in result["errors"].items():
        body.append(f"{LABELS[name]:<20}cannot run: {error}")
    for name, value in result["ratios"].items():
        first, other = name.split("_over_")
        body.append(f"{f'{first} / {LABELS.get(other, other)}':<20}{ranged(value, '.2f')}")
    if result["callback"]:
        seam, copies = (result["callback"][f"{name}_us"] for name in SEAM)
        body.append(f"{'the call alone, us':<20}{ranged(seam, '.1f')}")
        body.append(f"{'its copies, us':<20}{ranged(copies, '.1f')}")
    return body
