"""What an environment asks of its physics: one small contract, one module for each back end.

    native     MuJoCo's C engine, called once per control step (`native.py`)
    jax        MJX, traced into the program (`mjx.py`)
    warp       MJX on an NVIDIA GPU, by Warp kernels (`mjx.py`)

A back end is given the state of ONE simulation as an `mjx.Data` and returns one with what the
environment reads filled in; the caller vmaps. It must be pure: the same arguments give the same
bits, in any process, at any batch size or number of threads of its own. A simulation that blows up
returns numbers that are not finite, and harms no other.
"""

from __future__ import annotations

from typing import Any, Protocol

from jaxtd3.core.types import Array


class Physics(Protocol):
    """A physics back end of one model."""

    @property
    def name(self) -> str: ...

    def step(self, model: Any, data: Any, ctrl: Array, substeps: int = 1) -> Any:
        """`data` after `substeps` physics steps under `ctrl`; derived fields lag one behind."""
        ...

    def forward(self, model: Any, data: Any) -> Any:
        """`data` with the derived fields of its own state."""
        ...

    def carry(self, data: Any) -> Any:
        """What of `data` the next step needs."""
        ...
