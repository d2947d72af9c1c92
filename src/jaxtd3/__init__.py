"""FastTD3 for humanoids, JAX-native: physics, replay and learner in one compiled program.

Importing does nothing: each name below is fetched from its module at first use, so that
`jaxtd3 --help` and a misspelt flag answer without waiting for JAX and MuJoCo.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxtd3 import runtime

if TYPE_CHECKING:
    from jaxtd3.agent.exploration import Ladder, NoiseHyper, make_noise
    from jaxtd3.agent.td3 import AgentState, fast_td3
    from jaxtd3.config.config import Config, load_config
    from jaxtd3.config.sections import AgentConfig, EnvConfig, LoopConfig, ReplayConfig, RunConfig
    from jaxtd3.core.types import (
        Agent,
        Batch,
        BatchEnv,
        Env,
        EnvSpec,
        EnvState,
        EnvStep,
        Noise,
        Replay,
        TrainState,
        Transition,
    )
    from jaxtd3.envs import Pendulum, batch_env, env_names, make_env, preset, register_env
    from jaxtd3.envs.metrics import Metric, MetricStep, register_metric
    from jaxtd3.envs.task import MujocoTask
    from jaxtd3.errors import UserError
    from jaxtd3.loop.chunk import make_chunk
    from jaxtd3.loop.population import make_population, take_member
    from jaxtd3.loop.step import make_train_step
    from jaxtd3.replay.ring import make_replay
    from jaxtd3.run.load import load
    from jaxtd3.run.program import Population, Program, build, build_population
    from jaxtd3.run.rollout import make_evaluate, make_measure

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "AgentConfig",
    "AgentState",
    "Batch",
    "BatchEnv",
    "Config",
    "Env",
    "EnvConfig",
    "EnvSpec",
    "EnvState",
    "EnvStep",
    "Ladder",
    "LoopConfig",
    "Metric",
    "MetricStep",
    "MujocoTask",
    "Noise",
    "NoiseHyper",
    "Pendulum",
    "Population",
    "Program",
    "Replay",
    "ReplayConfig",
    "RunConfig",
    "TrainState",
    "Transition",
    "UserError",
    "batch_env",
    "build",
    "build_population",
    "env_names",
    "fast_td3",
    "load",
    "load_config",
    "make_chunk",
    "make_env",
    "make_evaluate",
    "make_measure",
    "make_noise",
    "make_population",
    "make_replay",
    "make_train_step",
    "preset",
    "register_env",
    "register_metric",
    "take_member",
]

# module -> the names that are fetched from it
_HOMES = {
    "agent.exploration": "Ladder NoiseHyper make_noise",
    "agent.td3": "AgentState fast_td3",
    "config.config": "Config load_config",
    "config.sections": "AgentConfig EnvConfig LoopConfig ReplayConfig RunConfig",
    "core.types": (
        "Agent Batch BatchEnv Env EnvSpec EnvState EnvStep Noise Replay TrainState Transition"
    ),
    "envs": "Pendulum batch_env env_names make_env preset register_env",
    "envs.task": "MujocoTask",
    "envs.metrics": "Metric MetricStep register_metric",
    "errors": "UserError",
    "loop.population": "make_population take_member",
    "loop.chunk": "make_chunk",
    "loop.step": "make_train_step",
    "replay.ring": "make_replay",
    "run.load": "load",
    "run.program": "Population Program build build_population",
    "run.rollout": "make_evaluate make_measure",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jaxtd3' has no attribute {name!r}")
    runtime.fix_compiler()  # `core` would, but a setting fetched first may be all before JAX starts
    value = getattr(import_module(f"jaxtd3.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
