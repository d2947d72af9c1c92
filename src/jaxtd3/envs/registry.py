"""Environments by name: Playground's, and those a user registers."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from jax.sharding import Mesh

from jaxtd3.envs.base import EnvConfig, batch_env
from jaxtd3.envs.cruise import Cruise
from jaxtd3.envs.pendulum import Pendulum
from jaxtd3.envs.playground import load_playground, playground_names
from jaxtd3.errors import UserError, nearest
from jaxtd3.types import BatchEnv, Env

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
# Not seen loaded yet: files of the robot are missing, or it does not run with this JAX.
UNTOLD = ("Aloha*", "BarkourJoystick", "LeapCubeReorient", "Op3Joystick", "Panda*")


def register_env(name: str, make: Callable[[], Env]) -> None:
    """Make `--env name` mean `make()`."""
    _OWN[name] = make


def env_names() -> tuple[str, ...]:
    """Every environment that can be asked for."""
    return (*_OWN, *playground_names())


def reward_kind(name: str) -> str:
    """Whether an environment's reward is a weighted sum, told without loading it."""
    if name in _OWN:
        return "weighted sum" if _OWN[name]().spec.reward_terms else "fixed"
    if any(fnmatchcase(name, pattern) for pattern in UNTOLD):
        return "told when loaded"
    return "weighted sum" if any(fnmatchcase(name, p) for p in WEIGHTED) else "fixed"


def make_env(cfg: EnvConfig, mesh: Mesh | None = None) -> BatchEnv:
    """The training environment that `cfg` describes, spread over the devices of a mesh."""
    if cfg.name in _OWN:
        if cfg.sim_dt is not None:
            raise UserError(f"{cfg.name} has no physics step to set: leave sim_dt away")
        return batch_env(_OWN[cfg.name](), cfg, mesh)
    if cfg.name not in playground_names():
        raise UserError(nearest("env", cfg.name, env_names()))
    return batch_env(load_playground(cfg), cfg, mesh)
