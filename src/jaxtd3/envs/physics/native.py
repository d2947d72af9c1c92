"""Native physics: MuJoCo's own C engine, one call per control step inside the compiled program.

`mujoco.batch` steps many simulations on a thread pool; a simulation is nothing but its state row.
Every call writes the rows, runs, and returns the fields that the environment reads, so a call is a
pure function of its arguments: any engine serves any simulation, at any number of threads, with
the same bits, and a run resumes as with any other physics.

An engine belongs to one environment, because training and evaluation may step differently. It
keeps one set of simulations per call that runs at the same time (one per device, as a rule).

What goes wrong stays in the simulation it went wrong in. C MuJoCo by itself puts a simulation whose
numbers blow up back to its start; here that is switched off, and whatever the engine warned about
(contacts that it had no room for, too) returns as NaN, which the batch of environments quarantines
and counts. The engine keeps the last reason (`NativePhysics.trouble`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import mujoco
import numpy as np
from mujoco import batch as mujoco_batch

from jaxtd3.core.types import Array
from jaxtd3.envs.physics.hostcall import host_call
from jaxtd3.errors import UserError
from jaxtd3.thirdparty import private

STATE = tuple(private("state_fields"))
GIVEN = ("ctrl", "qfrc_applied", "xfrc_applied", "eq_active", "mocap_pos", "mocap_quat", "userdata")
"""Parts of the state that a step reads and never writes."""
UNSURE = ("cacc", "cfrc_ext", "cfrc_int", "qfrc_inverse", "subtree_angmom", "subtree_linvel")
"""Fields that MuJoCo computes only where a sensor asks for them."""
BOUNDED = ("time", "qpos", "qvel", "act", "qacc_warmstart", *GIVEN, *UNSURE)
"""Fields whose numbers are known to be finite in 32 bits where nothing went wrong, or not known."""
FULL = ("CONTACTFULL", "CNSTRFULL")  # contacts or constraints were left out: finite, and wrong
INERTIAL = ("body_mass", "body_inertia", "body_ipos", "body_iquat", "dof_armature")
"""Fields of a model from which its compiler found the mass matrix of bodies that move alone."""
PLACING = ("body_ipos", "body_iquat", "geom_pos", "geom_quat", "site_pos", "site_quat")
"""Fields of a model from which its compiler found frames that coincide."""
MOVING = [mujoco.mjtState.mjSTATE_TIME, mujoco.mjtState.mjSTATE_QPOS]
MOVING += [mujoco.mjtState.mjSTATE_QVEL, mujoco.mjtState.mjSTATE_ACT]
"""Parts of the state that a step computes; they stand first in its rows."""
WARNINGS = [
    int(getattr(mujoco.mjtWarning, f"mjWARN_{name}"))
    for name in ("INERTIA", *FULL, "BADQPOS", "BADQVEL", "BADQACC", "BADCTRL")
]


def share_of_cores(devices: int = 1) -> int:
    """Threads for each of `devices` that step at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, math.ceil(min(cores or 1, cpu_quota())) // devices)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores' worth of time that a container is given (cgroup v2 or v1); infinite: no limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((root / name).read_text() for name in names).split()
            if int(quota) > 0:
                return int(quota) / int(period)
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return math.inf


class Used(NamedTuple):
    """Which fields of `mjx.Data` an environment uses (`fields.find_used`)."""

    reads: tuple[str, ...]
    """Read after physics or by the next step: returned by it, and carried in the state."""
    constant: tuple[str, ...]
    """Parts of the physics' input that never change: not passed."""


class Simulations:
    """`num` simulations of one model, with the fields of one kind of call bound."""

    def __init__(self, engine: NativePhysics, num: int, reads: Sequence[str]):
        self.batch = mujoco_batch.Batch(engine.model, num, min(engine.threads, num))
        self.inputs = [self.batch.bind(name) for name in engine.inputs]
        self.inputs += [self.batch.expand(name) for name in engine.varied]
        self.masses: tuple[np.ndarray, np.ndarray] | None = None
        if "body_mass" in engine.varied and "body_subtreemass" not in engine.varied:
            # MuJoCo divides by these sums to find centres of mass, MJX adds up the masses anew in
            # every step. Other constants, invweights among them, stay the model's in both.
            mass, whole = map(self.batch.expand, ("body_mass", "body_subtreemass"))
            self.masses = mass, whole
            self.parents = engine.model.body_parentid.tolist()
        self.outputs = {name: self.batch.bind(name) for name in reads}
        self.start = self.batch.state[0].copy()
        width = mujoco.mj_stateSize(engine.model, sum(map(int, MOVING)))
        self.moving = self.batch.state[:, :width]

    def run(self, substeps: int, ins: list[np.ndarray], outs: list[np.ndarray]) -> tuple[int, str]:
        """`substeps` physics steps, or (0) the derived fields of the state as it is.

        Returns how many simulations went wrong, and why the last that is known of did. One that
        comes back with the NaN that it was returned with is not counted again.
        """
        batch, reason = self.batch, ""
        for view, x in zip(self.inputs, ins, strict=True):
            view[...] = x.reshape(view.shape)
        if self.masses is not None:
            add_up(*self.masses, self.parents)
        bad = ~np.isfinite(batch.state).all(axis=1)
        again = np.zeros_like(bad)
        if bad.any():
            again = ~np.isfinite(self.moving).all(axis=1)
            batch.state[bad], reason = self.start, "it was given a state that is not finite"
        batch.warning[:] = 0
        try:
            if substeps:
                batch.step(nstep=substeps)
            else:
                batch.forward()
        except mujoco_batch.SimulationError as error:
            bad[error.ids], reason = True, str(error)
        with np.errstate(over="ignore", invalid="ignore"):
            reason = self._mark_bad(bad) or reason
            reason = self._copy(outs, bad) or reason
        return int((bad & ~again).sum()), reason

    def _mark_bad(self, bad: np.ndarray) -> str:
        """Mark in `bad` what was warned about or grew too large; why the last did."""
        reason, batch = "", self.batch
        if not np.abs(self.moving).max() < mujoco.mjMAXVAL:  # C looks before a step, not after it
            grown = ~(np.abs(self.moving) < mujoco.mjMAXVAL).all(axis=1)
            if (grown & ~bad).any():
                reason = f"its state grew beyond {mujoco.mjMAXVAL:g}"
            bad |= grown
        if batch.warning.any():
            warned = batch.warning[:, WARNINGS].any(axis=2)  # [N, W]
            if warned.any():
                bad |= warned.any(axis=1)
                row, kind = np.argwhere(warned)[-1]
                reason = warning_text(WARNINGS[kind], batch.warning[row, WARNINGS[kind], 0])
        return reason

    def _copy(self, outs: list[np.ndarray], bad: np.ndarray) -> str:
        """The fields into the program's arrays, NaN where `bad`; what had no place there is bad."""
        reason, floats = "", []
        for x, (name, view) in zip(outs, self.outputs.items(), strict=True):
            x = x.reshape(view.shape)
            x[...] = view
            if x.dtype.kind != "f":
                continue
            floats.append(x)
            if name not in BOUNDED and not np.isfinite(x).all():
                over = ~np.isfinite(x).reshape(len(x), -1).all(axis=1)
                if (over & ~bad).any():
                    reason = f"{name} is not finite in {8 * x.dtype.itemsize} bits"
                bad |= over
        if bad.any():
            for x in floats:
                x[bad] = np.nan
        return reason


class NativePhysics:
    """One model in C MuJoCo, as operations of a compiled program (see `contract.Physics`)."""

    name = "native"

    def __init__(
        self,
        model: mujoco.MjModel,
        like: Any,
        varied: Sequence[str] = (),
        threads: int = 1,
        label: str = "",
        make_spec: Callable[[], mujoco.MjSpec] | None = None,
    ):
        """`like`: an `mjx.Data` of the model, whose shapes and types the results have; `varied`:
        names of model fields that every simulation has its own values of; `label`: tells engines
        apart that one process has of the same model (of engines that are the same in all of it,
        the newest serves and counts for all); `make_spec`: what the model was compiled from."""
        self.varied = tuple(varied)
        self.model = prepare_model(without_shortcuts(model, varied, make_spec))
        self.threads, self.label, self.dense = threads, label, needs_dense(model)
        blank = mujoco.MjData(model)
        if np.size(blank.plastic):
            raise UserError("native physics does not carry the state of plastic flexes")
        self.state = tuple(name for name in STATE if np.size(getattr(blank, name)))
        self.types = {
            name: jax.ShapeDtypeStruct(np.shape(x), x.dtype)
            for name in field_names(like)
            if name in mujoco_batch.DATA_FIELDS
            and np.size(x := getattr(like, name)) == np.size(getattr(blank, name))
        }
        self.inputs = self.state
        self.reads = tuple(self.types)
        self._bytes = model_bytes(self.model)
        if mujoco.get_mju_user_warning() is None:  # it would fill the console and a log file
            mujoco.set_mju_user_warning(lambda text: None)
        self._free: dict[Any, list[Simulations]] = {}
        self._lock = threading.Lock()
        self.lost, self.reason = 0, ""  # simulations that went wrong so far, and why the last did
        self._check(())

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        dense = ", dense Jacobian (MuJoCo 4.0.0 errs with a sparse one)" if self.dense else ""
        return f"native, MuJoCo {mujoco.__version__} in C, {threads} per device{dense}"

    @property
    def trouble(self) -> str:
        """What went wrong so far, in one line; empty where nothing did."""
        return (
            f"{self.lost:,} simulations lost, the last: {self.reason}" if self.lost else self.reason
        )

    def narrow(self, used: Used) -> None:
        """From now on take, return and carry only what the environment was found to use."""
        self.inputs = tuple(name for name in self.state if name not in used.constant)
        self.reads = used.reads
        self._check(self.reads)

    def _check(self, reads: Sequence[str]) -> None:
        """Refuse now what would end the first call."""
        try:
            Simulations(self, 1, reads)
        except ValueError as error:
            raise UserError(f"native physics: {error}; try --impl jax") from error

    # --- the contract ---------------------------------------------------------------------------

    def step(self, model: Any, data: Any, ctrl: Array, substeps: int = 1) -> Any:
        return self._call(model, data.replace(ctrl=ctrl), int(substeps))

    def forward(self, model: Any, data: Any) -> Any:
        return self._call(model, data, 0)

    def carry(self, data: Any) -> Any:
        """What was not asked for is gone, so that nobody reads an old value of it."""
        dead = {name: None for name in field_names(data) if name not in self.reads}
        return data.replace(_impl=None, **dead)

    # --- inside the program ---------------------------------------------------------------------

    def _call(self, model: Any, data: Any, substeps: int) -> Any:
        reads = self.reads
        args = [getattr(data, name) for name in self.inputs]
        args += [leaf_of(model, name) for name in self.varied]
        width = int(np.prod(np.shape(args[0])))

        def run(ins: list[np.ndarray], outs: list[np.ndarray]) -> None:
            with self._simulations(ins[0].size // width, reads) as simulations:
                lost, reason = simulations.run(substeps, ins, outs)
            with self._lock:
                self.lost += lost
                if lost or not self.reason:
                    self.reason = reason

        call = host_call(self._call_name(substeps, reads), run)
        found = call([self.types[name] for name in reads], *args)
        return data.replace(**dict(zip(reads, found, strict=True)))

    def _call_name(self, substeps: int, reads: Sequence[str]) -> str:
        """The same in every process for the same model, label, fields, steps and MuJoCo."""
        known = substeps, self.inputs, self.varied, tuple(reads), self.label, mujoco.__version__
        return (
            "jaxtd3_mujoco_" + hashlib.sha256(repr(known).encode() + self._bytes).hexdigest()[:24]
        )

    # --- on the host ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _simulations(self, num: int, reads: tuple[str, ...]) -> Iterator[Simulations]:
        """Simulations that nobody else uses meanwhile."""
        with self._lock:
            free = self._free.setdefault((num, reads), [])
            found = free.pop() if free else None
        found = found or Simulations(self, num, reads)
        yield found  # after an error they are not used again
        with self._lock:
            free.append(found)


def add_up(mass: np.ndarray, whole: np.ndarray, parents: Sequence[int]) -> None:
    """`whole` becomes the mass of every body and all that hang on it: [N, bodies]."""
    whole[...] = mass
    for body in range(len(parents) - 1, 0, -1):
        whole[:, parents[body]] += whole[:, body]


def prepare_model(model: mujoco.MjModel) -> mujoco.MjModel:
    """A copy that is never put back to its start unseen, and steers clear of a known defect."""
    model = copy.copy(model)
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
    if needs_dense(model):
        model.opt.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
    return model


def without_shortcuts(
    model: mujoco.MjModel, varied: Sequence[str], make_spec: Callable[[], mujoco.MjSpec] | None
) -> mujoco.MjModel:
    """A model on which the `varied` fields have all the effect that they stand for.

    MuJoCo's compiler notes which bodies have a diagonal mass matrix that never changes, and which
    frames coincide; the engine then reads the notes and not the fields.
    """
    if set(varied).intersection(INERTIAL) and model.dof_simplenum.any():
        model = recompile(model, make_spec)
    if set(varied).intersection(PLACING):
        model = copy.copy(model)
        for frames in (model.body_sameframe, model.geom_sameframe, model.site_sameframe):
            frames[:] = mujoco.mjtSameFrame.mjSAMEFRAME_NONE
    return model


def recompile(
    model: mujoco.MjModel, make_spec: Callable[[], mujoco.MjSpec] | None
) -> mujoco.MjModel:
    """The model with the mass matrix of every body found anew in every step."""
    alone = model.body(model.dof_bodyid[np.flatnonzero(model.dof_simplenum)[0]]).name or "a body"
    if make_spec is not None:
        with contextlib.suppress(ValueError, OSError):  # files that are gone or were changed
            spec = make_spec()
            plain = spec.compile()
            for body in spec.bodies:
                body.simple = False
            full = spec.compile()
            if carry_over(model, plain, full):
                return full
    raise UserError(
        f"randomised masses do not reach {alone}, which moves alone: "
        'write simple="false" at it in the MJCF'
    )


def carry_over(model: mujoco.MjModel, plain: mujoco.MjModel, full: mujoco.MjModel) -> bool:
    """Put into `full`, compiled otherwise than `plain`, what `model` has changed since; False where
    that is not known to be all."""
    for name in mujoco_batch.MODEL_FIELDS:
        if name.startswith("opt."):
            setattr(full.opt, name[4:], getattr(model.opt, name[4:]))
            continue
        own, old, new = (np.asarray(getattr(m, name, 0)) for m in (model, plain, full))
        if np.array_equal(own, old):
            continue
        if own.shape != new.shape or not np.array_equal(old, new):
            return False
        new[...] = own
    return True


def needs_dense(model: mujoco.MjModel) -> bool:
    """MuJoCo 4.0.0 factors wrongly with Newton's method and a sparse constraint Jacobian."""
    sparse = model.opt.jacobian == mujoco.mjtJacobian.mjJAC_SPARSE or (
        model.opt.jacobian == mujoco.mjtJacobian.mjJAC_AUTO and model.nv >= 60
    )
    newton = model.opt.solver == mujoco.mjtSolver.mjSOL_NEWTON
    return bool(sparse and newton and mujoco.__version__ == "4.0.0")


def warning_text(warning: int, info: int) -> str:
    """MuJoCo's words for a warning, on one line."""
    return " ".join(mujoco.mju_warningText(warning, int(info)).split())


def model_bytes(model: mujoco.MjModel) -> bytes:
    """A digest of all that a model is."""
    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return hashlib.sha256(buffer.data).digest()


def field_names(data: Any) -> tuple[str, ...]:
    """The public fields of an `mjx.Data`."""
    return tuple(f.name for f in dataclasses.fields(data) if f.name != "_impl")


def leaf_of(model: Any, name: str) -> Any:
    """`opt.gravity` or `body_mass` of a model."""
    return functools.reduce(getattr, name.split("."), model)
