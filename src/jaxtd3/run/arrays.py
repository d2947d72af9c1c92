"""Trees as tables of named arrays: described, digested, written and read by Orbax.

A name is the dotted path of a leaf (`agent.actor.params.Dense_0.kernel`). Typed keys are stored as
their words. What is read back is equal bit by bit, strongly typed, and on the template's devices.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import sys
import threading
import warnings
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtd3.core.sharding import put

CHUNK_BYTES = 16 << 20  # the chunks of a large array are compressed side by side

Spec = tuple[np.dtype, tuple[int, ...]]


def named_leaves(tree: Any) -> dict[str, Any]:
    """Every leaf by its dotted name."""
    flat: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in flat:
            raise ValueError(f"two leaves of the state are named {name!r}")
        flat[name] = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return flat


def describe(leaf: Any) -> list:
    """`[dtype, shape]` as JSON has it."""
    return [str(leaf.dtype), list(leaf.shape)]


def state_sha256(tree: Any) -> str:
    """One digest over names, dtypes, shapes and bytes of all leaves."""
    digest = sha256()
    for name, leaf in sorted(named_leaves(tree).items()):
        digest.update(json.dumps([name, *describe(leaf)]).encode() + b"\n")
        digest.update(np.ascontiguousarray(_data(leaf)).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def to_host(leaf: Any) -> np.ndarray:
    """A copy of its own: on CPU a view would hold the live buffer, which a donation then copies."""
    return np.array(_data(leaf), copy=True)


def raw(leaf: Any) -> Any:
    """An array as it is stored, still on its devices."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def stored_spec(leaf: Any) -> Spec:
    """Dtype and shape of what is stored for a leaf."""
    raw = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return np.dtype(raw.dtype), tuple(raw.shape)


def place(array: np.ndarray, leaf: Any) -> Any:
    """A stored array as the template's leaf is: its kind, its devices, committed or not."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return array
    sharding = leaf.sharding if getattr(leaf, "committed", True) else None
    if sharding is not None and not sharding.is_fully_addressable:
        return put(_as_key(array, leaf) if _is_key(leaf) else array, sharding)
    if not _is_key(leaf):
        # jnp.array copies; device_put may borrow numpy's memory, which no donation can reuse
        return jnp.array(array, device=sharding)
    keys = _as_key(array, leaf)
    return keys if sharding is None else jax.device_put(keys, sharding)


def _as_key(array: np.ndarray, leaf: Any) -> Any:
    """Stored words as keys of the template's kind."""
    impl: list[Any] = []
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(jnp.array(array), impl=impl[0])


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a table of arrays; empty ones have no bytes to write."""
    import orbax.checkpoint as ocp

    arrays = {name: x for name, x in arrays.items() if x.size}
    options = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in arrays}
    with _checkpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(arrays, save_args=options))


def read_arrays(path: Path, specs: dict[str, Spec]) -> dict[str, np.ndarray]:
    """Exactly the arrays of `specs`; others stay unread, and none of another size is allocated."""
    import orbax.checkpoint as ocp

    empty = {n: np.empty(shape, dtype) for n, (dtype, shape) in specs.items() if 0 in shape}
    wanted = {n: spec for n, spec in specs.items() if n not in empty}
    with _checkpointer() as checkpointer:
        stored = checkpointer.metadata(path).item_metadata.tree
        for name, spec in wanted.items():
            _check_header(name, stored[name], spec)
        arrays = checkpointer.restore(
            path,
            args=ocp.args.PyTreeRestore(
                item={n: jax.ShapeDtypeStruct(shape, d) for n, (d, shape) in wanted.items()},
                restore_args={n: ocp.RestoreArgs(restore_type=np.ndarray) for n in wanted},
                partial_restore=True,
            ),
        )
    for name, spec in wanted.items():
        if (arrays[name].dtype, arrays[name].shape) != spec:
            raise ValueError(f"{name} came back as {arrays[name].dtype}{arrays[name].shape}")
    return arrays | empty


def _check_header(name: str, stored: Any, spec: Spec) -> None:
    """Refuse an array whose own header tells of another size than was agreed."""
    chunk = stored.storage.chunk_shape
    same = (np.dtype(stored.dtype), tuple(stored.shape)) == spec
    if not same or math.prod(chunk) > math.prod(spec[1]):
        raise ValueError(f"{name} is stored as {stored.dtype}{stored.shape} in chunks of {chunk}")


@functools.cache
def hush_late_callbacks() -> None:
    """What fails half-way leaves work in flight; its end, told to a closed loop, is no news."""
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    earlier = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            earlier(unraisable)

    sys.unraisablehook = hook


def preload() -> None:
    """Import Orbax in the background, while something else is waited for."""
    threading.Thread(target=__import__, args=("orbax.checkpoint",), daemon=True).start()


@contextlib.contextmanager
def _checkpointer() -> Iterator[Any]:
    """Orbax for flat dicts of numpy arrays and nothing else."""
    import orbax.checkpoint as ocp  # half a second, and not every command needs it

    hush_late_callbacks()
    kinds = ocp.type_handlers
    registry = kinds.create_type_handler_registry(
        (np.ndarray, kinds.NumpyHandler(deepcopy_host_arrays=False)),  # they are copies already
        (jax.Array, kinds.ArrayHandler()),  # unused, but Orbax warns where it is missing
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        yield checkpointer


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> np.ndarray:
    """What is stored for a leaf, perhaps still in the live buffer; of keys, their words."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
