"""A function of NumPy arrays as an operation of a compiled program, on a CPU.

    call = host_call("double", lambda ins, outs: np.multiply(ins[0], 2, out=outs[0]))
    (y,) = call([jax.ShapeDtypeStruct((), jnp.float32)], x)    # inside jit, scan, vmap, shard_map

XLA calls it through its own C interface (`xla/ffi/api/c_api.h`), which is read here by `ctypes`:
the arrays are the program's own buffers, so nothing is copied on the way, and no compiler is
needed. A call costs 5 us where `jax.pure_callback` takes 57, and a program that contains one is
kept in JAX's compile cache, because it holds a name and no address.

A `vmap` adds leading axes to all arguments and results. The function must not call JAX. What it
raises ends the program with its message. Programs that still run when Python ends are ended too, as
a call would crash then. Where XLA speaks another version of the interface, `jax.pure_callback` does
the same work.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

HostFunction = Callable[[list[np.ndarray], list[np.ndarray]], None]
"""function(inputs, outputs): reads the ones, writes the others in place."""

API_VERSION = (0, 3)  # of c_api.h, as jaxlib 0.10 has it
METADATA, EXECUTE, INTERNAL = 1, 3, 13  # extension type, execution stage, error code


def _structure(name: str, **fields: Any) -> type[ctypes.Structure]:
    """A C struct; those of the interface begin with their size and a list of extensions."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_head: dict[str, Any] = {"struct_size": ctypes.c_size_t, "extension": ctypes.c_void_p}
_Pointers = ctypes.POINTER(ctypes.c_void_p)
_list: dict[str, Any] = {"size": ctypes.c_int64, "types": ctypes.c_void_p, "items": _Pointers}
_Version: Any = _structure("Version", **_head, major=ctypes.c_int, minor=ctypes.c_int)
_Metadata: Any = _structure(
    "Metadata",
    struct_size=ctypes.c_size_t,
    version=_Version,
    traits=ctypes.c_uint32,
    state_type=ctypes.c_int64,
)
_Extension: Any = _structure(
    "Extension",
    struct_size=ctypes.c_size_t,
    type=ctypes.c_int,
    next=ctypes.c_void_p,
    metadata=ctypes.POINTER(_Metadata),
)
_ErrorArgs: Any = _structure("ErrorArgs", **_head, message=ctypes.c_char_p, code=ctypes.c_int)
_CreateError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArgs))
_Api: Any = _structure(
    "Api", **_head, version=_Version, internal=ctypes.c_void_p, create_error=_CreateError
)
_Buffer: Any = _structure(
    "Buffer",
    **_head,
    dtype=ctypes.c_int,
    data=ctypes.c_void_p,
    rank=ctypes.c_int64,
    dims=ctypes.POINTER(ctypes.c_int64),
)
_Arrays: Any = _structure("Arrays", **_head, **_list)
_Frame: Any = _structure(
    "Frame",
    **_head,
    api=ctypes.POINTER(_Api),
    context=ctypes.c_void_p,
    stage=ctypes.c_int,
    inputs=_Arrays,
    outputs=_Arrays,
)
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))

DTYPES = {  # XLA_FFI_DataType
    1: np.dtype(bool),
    2: np.dtype(np.int8),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.uint8),
    8: np.dtype(np.uint32),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
}

_functions: dict[str, HostFunction] = {}
_handlers: dict[str, Any] = {}  # they must outlive every program that names them
QUIET = 0.2
"""Seconds without a call after which a program is taken to make no more. One that computes for
longer between two calls, and returns nothing that is held, may crash when Python ends."""


class _Calls:
    """When the last call ended, and whether more are answered."""

    last, running, ended = -QUIET, 0, False
    lock = threading.Lock()  # several devices call at once


@atexit.register
def _end() -> None:
    """Refuse all calls, and wait until nobody makes any: Python is there no more afterwards.

    Programs whose results are held are waited for; of others it is guessed from `QUIET`.
    """
    _Calls.ended = True
    for array in jax.live_arrays():  # what programs on their way will return
        with contextlib.suppress(Exception):
            array.block_until_ready()
    while _Calls.running or time.monotonic() - _Calls.last < QUIET:
        time.sleep(0.01)


def host_call(name: str, function: HostFunction) -> Callable[..., Any]:
    """call(list of result types of one example, *arguments) -> list of results, by `function`.

    `name` must tell one function from another in every process that shares a compile cache. Of
    functions with the same name the newest is called, also by programs that are older.
    """
    if _speaks_version():
        register(name, function)
        return lambda types, *args: jax.ffi.ffi_call(name, types, vmap_method="broadcast_all")(
            *args
        )

    def call(types: Any, *args: Any) -> Any:
        rank = np.ndim(args[0])

        def callback(*args: Any) -> Any:
            leading = np.shape(args[0])[: np.ndim(args[0]) - rank]
            outs = [np.empty((*leading, *t.shape), t.dtype) for t in types]
            function([np.asarray(x) for x in args], outs)
            return outs

        return jax.pure_callback(callback, types, *args, vmap_method="broadcast_all")

    return call


@functools.cache
def _speaks_version() -> bool:
    """True where XLA takes a handler of this module's version of the interface."""
    try:
        register("jaxtd3_probe", lambda ins, outs: None)
    except Exception:  # whatever another version answers
        return False
    return True


def register(name: str, function: HostFunction) -> None:
    """Make a custom call of this name, on the CPU, mean `function`."""
    _functions[name] = function
    if name in _handlers:
        return

    @_Handler
    def handler(pointer: Any) -> int | None:
        frame = pointer.contents
        if frame.extension:
            extension = ctypes.cast(frame.extension, ctypes.POINTER(_Extension)).contents
            if extension.type == METADATA:
                extension.metadata.contents.version.major = API_VERSION[0]
                extension.metadata.contents.version.minor = API_VERSION[1]
                return None
        if frame.stage != EXECUTE:
            return None
        with _Calls.lock:
            _Calls.running += 1
        try:
            if _Calls.ended:
                raise InterruptedError("Python ends")
            _functions[name](_arrays(frame.inputs), _arrays(frame.outputs))
        except BaseException as error:  # nothing may pass through C
            text = f"{type(error).__name__}: {error}".encode()
            args = _ErrorArgs(ctypes.sizeof(_ErrorArgs), None, text, INTERNAL)
            return frame.api.contents.create_error(ctypes.byref(args))
        finally:
            with _Calls.lock:
                _Calls.running, _Calls.last = _Calls.running - 1, time.monotonic()
        return None

    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    _handlers[name] = handler


def _arrays(found: Any) -> list[np.ndarray]:
    """The buffers of a call, as they lie in memory."""
    return [_array(found.items[i]) for i in range(found.size)]


def _array(address: int) -> np.ndarray:
    buffer = _Buffer.from_address(address)
    dtype = DTYPES[buffer.dtype]
    shape = tuple(buffer.dims[: buffer.rank])
    size = dtype.itemsize
    for n in shape:
        size *= n
    if not size:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * size).from_address(buffer.data)
    return np.ndarray(shape, dtype, memory)
