"""Environments by name: Playground's, and those a user registers.

Playground and MJX take seconds to import: only a name that is not registered asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtd3.config.config import Config
from jaxtd3.config.presets import preset_of
from jaxtd3.config.sections import EnvConfig
from jaxtd3.core.processes import processes_here
from jaxtd3.core.types import BatchEnv, Env
from jaxtd3.envs.batch import batch_env, choose_impl
from jaxtd3.envs.cruise import Cruise
from jaxtd3.envs.pendulum import Pendulum
from jaxtd3.errors import UserError, nearest

_OWN: dict[str, Callable[[], Env]] = {"Pendulum": Pendulum, "Cruise": Cruise}

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
UNTOLD = ("Aloha*", "BarkourJoystick", "Op3Joystick", "Panda*")


def register_env(name: str, make: Callable[[], Env]) -> None:
    """Make `--env name` mean `make()`."""
    _OWN[name] = make


def is_own(name: str) -> bool:
    """True for a registered environment, which comes before Playground's of the same name."""
    return name in _OWN


def env_names() -> tuple[str, ...]:
    """Every environment that can be asked for."""
    from jaxtd3.envs.playground.adapter import playground_names

    return (*_OWN, *playground_names())


def check_env(name: str) -> None:
    """Refuse an unknown name with the nearest known one."""
    if not is_own(name) and name not in env_names():
        raise UserError(nearest("env", name, env_names()))


def suite_of(name: str) -> str:
    """locomotion, manipulation, dm_control or own: what presets are chosen by."""
    if is_own(name):
        return "own"
    from mujoco_playground import dm_control_suite, locomotion, manipulation

    suites = {
        "locomotion": locomotion,
        "manipulation": manipulation,
        "dm_control": dm_control_suite,
    }
    return next((suite for suite, known in suites.items() if name in known.ALL_ENVS), "own")


def preset(env: str, algo: str = "fasttd3", profile: str = "auto", **changes: Any) -> Config:
    """The settings for an environment, with `changes` by field name (`num_envs=64`)."""
    check_env(env)
    if profile == "auto":
        profile = "cpu" if jax.default_backend() == "cpu" else "gpu"
    return preset_of(env, suite_of(env), algo, profile, **changes)


def reward_kind(name: str) -> str:
    """Whether an environment's reward is a weighted sum, told without loading it."""
    if is_own(name):
        return "weighted sum" if _OWN[name]().spec.reward_terms else "fixed"
    if any(fnmatchcase(name, pattern) for pattern in UNTOLD):
        return "told when loaded"
    return "weighted sum" if any(fnmatchcase(name, p) for p in WEIGHTED) else "fixed"


def physics_of(name: str, impl: str = "auto") -> str:
    """The physics back end that an environment gets here; `own`: its own arithmetic, none."""
    return "own" if is_own(name) else choose_impl(impl)


def with_physics(cfg: EnvConfig) -> EnvConfig:
    """`cfg` with the back end named, so that a run goes on with what it was started with."""
    return cfg if is_own(cfg.name) else replace(cfg, impl=choose_impl(cfg.impl))


def make_env(cfg: EnvConfig, mesh: Mesh | None = None) -> BatchEnv:
    """The training environment that `cfg` describes, spread over the devices of a mesh."""
    if is_own(cfg.name):
        if cfg.sim_dt is not None:
            raise UserError(f"{cfg.name} has no physics step to set: leave sim_dt away")
        return batch_env(_OWN[cfg.name](), cfg, mesh)
    check_env(cfg.name)
    from jaxtd3.envs.playground.adapter import load_playground

    devices = 1 if mesh is None else len(mesh.local_devices)
    return batch_env(load_playground(cfg, devices * processes_here()), cfg, mesh)
