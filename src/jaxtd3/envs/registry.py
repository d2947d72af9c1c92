"""Environments by name: Playground's, those a user registers, and those a reference names.

Playground and MJX take seconds to import: only a name that is not registered asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtd3.config.config import Config
from jaxtd3.config.presets import preset_of
from jaxtd3.config.sections import EnvConfig
from jaxtd3.core.processes import processes_here
from jaxtd3.core.types import BatchEnv, Env
from jaxtd3.envs import source
from jaxtd3.envs.batch import batch_env, choose_impl
from jaxtd3.envs.cruise import Cruise
from jaxtd3.envs.pendulum import Pendulum
from jaxtd3.errors import UserError, nearest

_OWN: dict[str, Callable[[], Env]] = {"Pendulum": Pendulum, "Cruise": Cruise}
_LAZY = {"Balance": "jaxtd3.envs.balance:Balance"}  # what imports MuJoCo, imported when asked for

# What loading finds out, kept here so that a list need not load sixty environments; a slow test
# loads each and compares. Playground's other rewards are no weighted sums.
WEIGHTED = (
    "AeroCube*",
    "ApolloJoystick*",
    "BerkeleyHumanoid*",
    "G1Joystick*",
    "Go1*",
    "LeapCubeRotateZAxis",
    "SpotFlatTerrainJoystick",
    "SpotGetup",
    "T1Joystick*",
)
# Not seen loaded yet: meshes of the robot collide or carry mass, and were not at hand.
REWARD_NOT_KNOWN = ("Aloha*", "BarkourJoystick", "Op3Joystick", "Panda*")


def register_env(name: str, make: Callable[[], Env]) -> None:
    """Let `name` mean `make()`, in this process: another needs `--env file.py:Class`."""
    _OWN[name] = make


def reference_of(name: str) -> str | None:
    """`file.py:Class` or `package.module:Class` that a name stands for, if it does."""
    if name in _OWN:
        return None
    if source.is_reference(name):
        return name
    return _LAZY.get(name) or source.entry_points().get(name)


def maker(name: str) -> Any:
    """What makes an environment: a class or function, or (a string) Playground's name for it."""
    if name in _OWN:
        return _OWN[name]
    reference = reference_of(name)
    if reference is None:
        return name
    found = source.find(reference)
    if found.make is not None and not is_playground_class(found.make):
        if not callable(found.make):
            raise UserError(f"{reference} is not a class or a function that makes an environment")
        return found.make
    from jaxtd3.envs.playground.adapter import registered_as

    # not an environment of ours: one that the module registered with Playground
    inside = registered_as(source.short_name(reference), found.make, found.module)
    if inside.name is None:
        raise source.unknown(reference, found, inside.known)
    return inside.name


def is_playground_class(make: Any) -> bool:
    """True for a class of Playground's kind, told without importing Playground."""
    bases = getattr(make, "__mro__", ())
    return any(base.__module__.startswith("mujoco_playground.") for base in bases)


def is_own(name: str) -> bool:
    """True for an environment that is not Playground's; those come first."""
    return not isinstance(maker(name), str)


def has_physics(name: str) -> bool:
    """True where a physics back end can be chosen: Playground's environments, and tasks."""
    make = maker(name)
    return isinstance(make, str) or hasattr(make, "from_config")


def file_of(name: str) -> Path | None:
    """The file that a reference names."""
    reference = reference_of(name)
    return source.find(reference).file if reference else None


def sha256_of(name: str) -> str:
    """A digest of the file that a reference names; empty for all others."""
    reference = reference_of(name)
    if reference is None or name in _LAZY:
        return ""
    return source.source_sha256(source.find(reference))


def env_names() -> tuple[str, ...]:
    """Every environment that can be asked for by a plain name."""
    from jaxtd3.envs.playground.adapter import playground_names

    return (*_OWN, *_LAZY, *source.entry_points(), *playground_names())


def check_env(name: str) -> None:
    """Refuse an unknown name with the nearest known one."""
    if not is_own(name) and reference_of(name) is None and name not in env_names():
        if source.names_file(name):
            raise UserError(f"--env {name}: write file.py:Class")
        raise UserError(nearest("env", name, env_names()))


def suite_of(name: str) -> str:
    """locomotion, manipulation, dm_control or own: what presets are chosen by."""
    made = maker(name)
    if not isinstance(made, str):
        return "own"
    from jaxtd3.envs.playground.adapter import suites

    return next((suite for suite, known in suites().items() if made in known.ALL_ENVS), "own")


def preset(env: str, algo: str = "fasttd3", profile: str = "auto", **changes: Any) -> Config:
    """The settings for an environment, with `changes` by field name (`num_envs=64`)."""
    check_env(env)
    if profile == "auto":
        profile = "cpu" if jax.default_backend() == "cpu" else "gpu"
    made = maker(env)
    name = made if isinstance(made, str) else env
    label = "" if name == env and ":" in env else f"{suite_of(env)}/{name}"  # a class of one's own
    randomize = bool(changes.get("randomize") or changes.get("env.randomize"))
    with source.blaming(file_of(env), made):  # for what the class suggests
        config = preset_of(env, label, algo, profile, getattr(made, "preset", {}), randomize)
    return config.override({**changes, "source_sha256": sha256_of(env)})


def reward_kind(name: str) -> str:
    """Whether an environment's reward is a weighted sum, told without loading it."""
    if name in _OWN:
        return "weighted sum" if _OWN[name]().spec.reward_terms else "fixed"
    if reference_of(name) is not None:
        return "weighted sum" if name in _LAZY else "known when loaded"
    if any(fnmatchcase(name, pattern) for pattern in REWARD_NOT_KNOWN):
        return "known when loaded"
    return "weighted sum" if any(fnmatchcase(name, p) for p in WEIGHTED) else "fixed"


def physics_of(name: str, impl: str = "auto") -> str:
    """The physics back end that an environment gets here; `own`: its own arithmetic, none."""
    return choose_impl(impl) if has_physics(name) else "own"


def with_physics(cfg: EnvConfig) -> EnvConfig:
    """`cfg` with the back end named, so that a run goes on with what it was started with."""
    return replace(cfg, impl=choose_impl(cfg.impl)) if has_physics(cfg.name) else cfg


def make_env(cfg: EnvConfig, mesh: Mesh | None = None) -> BatchEnv:
    """The training environment that `cfg` describes, spread over the devices of a mesh."""
    check_env(cfg.name)
    make = maker(cfg.name)
    devices = (1 if mesh is None else len(mesh.local_devices)) * processes_here()
    if isinstance(make, str):
        from jaxtd3.envs.playground.adapter import load_playground

        robot = load_playground(replace(cfg, name=make), devices)
        return batch_env(observed(robot, cfg), cfg, mesh)
    if cfg.action_delay:
        raise UserError(f"{cfg.name} knows no delay of actions: Playground's environments do")
    if cfg.sim_dt is not None and not has_physics(cfg.name):
        raise UserError(f"{cfg.name} has no physics step to set: leave sim_dt away")
    reference = reference_of(cfg.name)
    if reference is None:
        return batch_env(observed(make_own(make, cfg, devices), cfg), cfg, mesh)
    found = source.find(reference)
    with source.blaming(found.file, make):
        env = make_own(make, cfg, devices)
    if cfg.name not in _LAZY:
        from jaxtd3.envs.checks import check_made

        check_made(env, found)
    return batch_env(observed(env, cfg), cfg, mesh)


def make_own(make: Any, cfg: EnvConfig, devices: int) -> Env:
    """An environment of a class or function, given the settings where it asks for them."""
    return make.from_config(cfg, devices) if hasattr(make, "from_config") else make()


def observed(env: Env, cfg: EnvConfig) -> Env:
    """The environment as the actor shall see it: without what is hidden, with what was before."""
    if cfg.actor_hides:
        from jaxtd3.envs.hidden import HiddenEnv, hidden_names

        env = HiddenEnv(env, hidden_names(cfg.actor_hides))
    if cfg.history > 1:
        from jaxtd3.envs.history import HistoryEnv

        env = HistoryEnv(env, cfg.history)
    return env
