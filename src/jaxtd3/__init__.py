"""FastTD3 for humanoids, JAX-native: physics, replay and learner in one compiled program.

Importing does nothing: each name below is fetched from its module at first use, so that
`jaxtd3 --help` and a misspelt flag answer without waiting for JAX and MuJoCo.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtd3.config import Config, RunConfig, load_config
    from jaxtd3.envs import EnvConfig, Pendulum, batch_env, env_names, make_env, register_env
    from jaxtd3.envs.task import MujocoTask
    from jaxtd3.errors import UserError
    from jaxtd3.evaluate import make_evaluate
    from jaxtd3.exploration import Ladder, NoiseHyper, constant_noise, make_noise, mixed_noise
    from jaxtd3.metrics import Metric, MetricStep, make_measure, register_metric
    from jaxtd3.population import make_population, take_member
    from jaxtd3.presets import preset
    from jaxtd3.replay import ReplayConfig, make_replay
    from jaxtd3.td3 import AgentConfig, AgentState, fast_td3
    from jaxtd3.train_step import LoopConfig, make_chunk, make_train_step
    from jaxtd3.types import (
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
    "Replay",
    "ReplayConfig",
    "RunConfig",
    "TrainState",
    "Transition",
    "UserError",
    "batch_env",
    "constant_noise",
    "env_names",
    "fast_td3",
    "load_config",
    "make_chunk",
    "make_env",
    "make_evaluate",
    "make_measure",
    "make_noise",
    "make_population",
    "make_replay",
    "make_train_step",
    "mixed_noise",
    "preset",
    "register_env",
    "register_metric",
    "take_member",
]

# module -> the names that are fetched from it
_HOMES = {
    "config": "Config RunConfig load_config",
    "envs": "EnvConfig Pendulum batch_env env_names make_env register_env",
    "envs.task": "MujocoTask",
    "errors": "UserError",
    "evaluate": "make_evaluate",
    "exploration": "Ladder NoiseHyper constant_noise make_noise mixed_noise",
    "metrics": "Metric MetricStep make_measure register_metric",
    "population": "make_population take_member",
    "presets": "preset",
    "replay": "ReplayConfig make_replay",
    "td3": "AgentConfig AgentState fast_td3",
    "train_step": "LoopConfig make_chunk make_train_step",
    "types": "Agent Batch BatchEnv Env EnvSpec EnvState EnvStep Noise Replay TrainState Transition",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jaxtd3' has no attribute {name!r}")
    value = getattr(import_module(f"jaxtd3.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
