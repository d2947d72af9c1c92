"""Private names of other libraries that are used here, and functions of theirs that are replaced.

All of them, each with the version that it was seen with: when one is gone, `private` says which, a
test fails, and `jaxtd3 doctor` has a line for it. Replacements last for as long as a `with` does.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

from jaxtd3.errors import UserError


class Private(NamedTuple):
    """One name of another library."""

    path: str  # "module" or "module:name"
    package: str  # as it is installed
    seen: str  # the version that it was seen with
    why: str


PRIVATE = {
    "xla_bridge": Private(
        "jax._src.xla_bridge:backends_are_initialized",
        "jax",
        "0.10.2",
        "whether a compiler flag is set in time",
    ),
    "dce_jaxpr": Private(
        "jax.interpreters.partial_eval:dce_jaxpr",
        "jax",
        "0.10.2",
        "which fields an environment uses, whether its reward is a weighted sum",
    ),
    "mjx_forward": Private(
        "mujoco.mjx._src.forward:forward",
        "mujoco-mjx",
        "3.17.0",
        "replaced while MJX steps: traced once instead of eight times",
    ),
    "mjx_public_forward": Private(
        "mujoco.mjx:forward", "mujoco-mjx", "3.17.0", "replaced by the chosen physics"
    ),
    "mjx_impl": Private(
        "mujoco.mjx._src.types:Impl", "mujoco-mjx", "3.17.0", "which back end a model is for"
    ),
    "mjx_device": Private(
        "mujoco.mjx._src.io:_resolve_device",
        "mujoco-mjx",
        "3.17.0",
        "replaced: a process can use its own devices alone",
    ),
    "clip": Private(
        "jax.numpy:clip", "jax", "0.10.2", "replaced: LeapCubeReorient names bounds so"
    ),
    "env_step": Private(
        "mujoco_playground._src.mjx_env:step",
        "playground",
        "0.2.0",
        "replaced by the chosen physics",
    ),
    "menagerie_path": Private(
        "mujoco_playground._src.mjx_env:MENAGERIE_PATH",
        "playground",
        "0.2.0",
        "replaced by where meshes are",
    ),
    "playground_root": Private(
        "mujoco_playground._src.mjx_env:ROOT_PATH", "playground", "0.2.0", "where its models are"
    ),
    "locomotion": Private(
        "mujoco_playground._src.locomotion:_envs",
        "playground",
        "0.2.0",
        "which class an environment's name stands for, and so which robot",
    ),
    "manipulation": Private(
        "mujoco_playground._src.manipulation:_envs", "playground", "0.2.0", "the same"
    ),
    "dm_control": Private(
        "mujoco_playground._src.dm_control_suite:_envs", "playground", "0.2.0", "the same"
    ),
    "brax_envs": Private("brax.envs:_envs", "brax", "0.14.2", "which environments brax has"),
    "state_fields": Private(
        "mujoco.batch:_STATE_FIELDS", "mujoco", "4.0.0", "what a simulation's state consists of"
    ),
}

ATTRIBUTES = {  # of Playground's environments, seen with 0.2.0
    "_config": "what an environment was made with",
    "_default_pose": "what actions are measured from",
    "_feet_site_id": "where the feet are",
    "_get_reward": "replaced while a step is traced: the terms of the reward",
    "_init_q": "how a robot stands",
    "_mjx_model": "replaced while a step is traced: a model with randomised leaves",
}
_NEEDED = object()


def private(name: str) -> Any:
    """What stands under a name of `PRIVATE`; one line where it is gone."""
    known = PRIVATE[name]
    module, _, attribute = known.path.partition(":")
    try:
        found = import_module(module)
        return getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError) as error:
        version = importlib.metadata.version(known.package)
        raise UserError(
            f"{known.path} is not in {known.package} {version}, only in {known.seen}: {known.why}"
        ) from error


def missing() -> list[str]:
    """What is gone, a line each."""
    lines = []
    for name in PRIVATE:
        try:
            private(name)
        except UserError as error:
            lines.append(str(error))
    return lines


def attribute(env: Any, name: str, default: Any = _NEEDED) -> Any:
    """One of `ATTRIBUTES` of an environment of Playground's; one line where it is gone."""
    why = ATTRIBUTES[name]
    found = getattr(env, name, default)
    if found is _NEEDED:
        version = importlib.metadata.version("playground")
        raise UserError(f"{type(env).__name__} of playground {version} has no {name}: {why}")
    return found


def playground_envs() -> dict[str, Any]:
    """What is registered with Playground at this moment: name -> what makes it."""
    tables = map(private, ("dm_control", "locomotion", "manipulation"))
    return {name: make for table in tables for name, make in table.items()}


def replaced(name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    """`value` stands under a name of `PRIVATE` for as long as this lasts."""
    private(name)
    module, _, attribute = PRIVATE[name].path.partition(":")
    return swapped(import_module(module), attribute, value)


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for as long as this lasts; it must be there."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
