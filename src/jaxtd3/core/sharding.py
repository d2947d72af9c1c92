"""Many devices: one mesh axis, along which environments and all that belongs to them are split.

    split over devices    env state, reset pool, ring, noise, running returns     (their axis E)
    on every device       agent, counters, the key, reward weights

Sizes in configs are global; this is the only module that divides them. A device draws its own
random numbers from the shared key and its place on the axis, gradients are averaged once per
update, statistics and metrics are reduced, and the ring never moves. One device is a mesh of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxtd3.core.tracing import flat_vmap
from jaxtd3.core.types import (
    Agent,
    Array,
    Batch,
    BatchEnv,
    Metrics,
    Noise,
    Replay,
    TrainState,
)
from jaxtd3.errors import UserError

if TYPE_CHECKING:
    from jaxtd3.config.sections import ReplayConfig

AXIS = "data"
SPLIT, WHOLE = PartitionSpec(AXIS), PartitionSpec()


def make_mesh(devices: int = 0) -> Mesh:
    """A mesh of the first `devices` devices (0: all, of every process)."""
    available = jax.devices()
    if devices > len(available):
        raise UserError(f"devices={devices}, but there are {len(available)}: lower --devices")
    if devices and devices < len(available) and jax.process_count() > 1:
        raise UserError(f"devices={devices}: several processes use all {len(available)} devices")
    chosen = np.array(available[: devices or None])
    return Mesh(chosen, (AXIS,), axis_types=(AxisType.Auto,))  # MJX knows no explicit axes


def share(total: int, mesh: Mesh, name: str) -> int:
    """What one device gets of `total`; both numbers are named where it does not divide."""
    if total % mesh.size:
        below = total - total % mesh.size
        fits = " or ".join(str(n) for n in (below, below + mesh.size) if n)
        raise UserError(f"{name}={total} is not divisible by {mesh.size} devices: {fits} would be")
    return total // mesh.size


def local_replay(cfg: ReplayConfig, mesh: Mesh) -> ReplayConfig:
    """The replay of one device: it draws its share of the batch."""
    return replace(cfg, batch_size=share(cfg.batch_size, mesh, "batch_size"))


# --- inside the program -------------------------------------------------------------------------


def local_key(key: Array, axis_name: str | None) -> Array:
    """This device's own random numbers of a key that all devices hold."""
    return jax.random.fold_in(key, 0 if axis_name is None else jax.lax.axis_index(axis_name))


def mean_over(tree: Any, axis_name: str) -> Any:
    """The mean over devices of all (floating) leaves, by one all-reduce."""
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, axis_name))


def average(tree: Any, axis_name: str) -> Any:
    """The mean over devices; of counters, which are integers, the largest."""
    leaves, structure = jax.tree.flatten(tree)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    means = mean_over([leaves[i] for i in floats], axis_name)
    new = [jax.lax.pmax(x, axis_name) if i not in floats else x for i, x in enumerate(leaves)]
    for i, mean in zip(floats, means, strict=True):
        new[i] = mean
    return jax.tree.unflatten(structure, new)


def bundles(agent: Agent, every: int, axis_name: str) -> Agent:
    """Devices that learn alone and take the mean of all after every `every` updates.

    Networks, targets and the optimiser's moments are averaged alike: moments of another device's
    parameters would point elsewhere.
    """

    def update(
        state: Any, batch: Batch, key: Array, *, policy: bool
    ) -> tuple[Any, Metrics, Array | None]:
        state, metrics, td_error = agent.update(state, batch, key, policy=policy)
        # A device that refused an update counts otherwise: all must agree, or some wait for ever.
        mine = state.updates % every == 0
        due = jax.lax.pmax(mine.astype(jnp.int32), axis_name) > 0
        state = jax.lax.cond(due, lambda s: average(s, axis_name), lambda s: s, state)
        return state, metrics, td_error

    return agent._replace(update=update)


def reduce_shards(metrics: Metrics, is_sum: Callable[[str], bool], axis_name: str) -> Metrics:
    """Metrics over all devices, by two collectives however many there are."""
    reduced: Metrics = {}
    for names, collective in (
        ([n for n in metrics if is_sum(n)], jax.lax.psum),
        ([n for n in metrics if not is_sum(n)], jax.lax.pmean),
    ):
        if names:
            values = collective(jnp.stack([metrics[n] for n in names]), axis_name)
            reduced |= dict(zip(names, values, strict=True))
    return {name: reduced[name] for name in metrics}


# --- around it ----------------------------------------------------------------------------------


def env_specs(batch: Any, single: Any) -> Any:
    """A batch of environments is split along E, which are its leaves' axes that `single`, one of
    them, does not have; leaves without (Warp shares some buffers) are on every device."""
    return jax.tree.map(lambda x, one: SPLIT if x.ndim > one.ndim else WHOLE, batch, single)


def size_specs(init: Callable[[int], Any]) -> Any:
    """What `init(num_envs)` makes is split along the axes whose length its argument is."""

    def spec(two: Any, three: Any) -> PartitionSpec:
        lengths = enumerate(zip(two.shape, three.shape, strict=True))
        axes = [i for i, (a, b) in lengths if a != b]
        return PartitionSpec(*[None] * axes[0], AXIS) if axes else WHOLE

    return jax.tree.map(spec, *(jax.eval_shape(lambda n=n: init(n)) for n in (2, 3)))


def state_specs(state: TrainState, env: BatchEnv, replay: Replay, noise: Noise) -> TrainState:
    """How every array of a run's state lies on the mesh."""
    key, inner = jax.random.key(0), env_specs(state.env.inner, env.single)
    split = jax.tree.map(lambda _: SPLIT, state.env)
    return jax.tree.map(lambda _: WHOLE, state).replace(
        replay=size_specs(replay.init),
        env=split.replace(inner=inner, pool=inner),
        noise=size_specs(lambda num: noise.init(key, num, env.spec.action_size)),
        discounted=SPLIT,
    )


def shardings(specs: Any, mesh: Mesh) -> Any:
    """PartitionSpecs as shardings of a mesh."""
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def make_layout(
    state: TrainState, env: BatchEnv, replay: Replay, noise: Noise, mesh: Mesh
) -> TrainState:
    """Where every array of a state (or of its shapes) lies: a tree of shardings."""
    return shardings(state_specs(state, env, replay, noise), mesh)


def over_envs(function: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """`function` of ONE environment over arrays `[E, ..]`, each device calling it with its own."""
    batched = flat_vmap(function)
    if mesh is None:
        return batched

    def sharded(*args: Any) -> Any:
        first = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], args))
        one = jax.eval_shape(function, *first)
        specs = env_specs(jax.eval_shape(batched, *args), one)
        mapped = jax.shard_map(batched, mesh=mesh, in_specs=SPLIT, out_specs=specs, check_vma=False)
        return mapped(*args)

    return sharded


def place(state: TrainState, layout: TrainState) -> TrainState:
    """A state, or its shapes, laid out on the mesh; what lies there already stays."""

    def one(x: Any, target: NamedSharding) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)
        return put(x, target)

    return jax.tree.map(one, state, layout)


def put(x: Any, target: Sharding) -> Array:
    """An array that every process holds, as one array over the devices of all."""
    if target.is_fully_addressable or getattr(x, "sharding", None) == target:
        return jax.device_put(x, target)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(x), target))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, target, lambda index: host[index])


def spread_inits(agent: Agent, replay: Replay, mesh: Mesh) -> tuple[Agent, Replay]:
    """The same parts, whose first states are made where they will lie (the ring fits no one)."""

    def init_replay(num_envs: int) -> Any:
        out = shardings(size_specs(replay.init), mesh)
        return jax.jit(lambda: replay.init(num_envs), out_shardings=out)()

    init_agent = jax.jit(agent.init, out_shardings=NamedSharding(mesh, WHOLE))
    return agent._replace(init=init_agent), replay._replace(init=init_replay)
