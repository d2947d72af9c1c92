"""Environments: any pure-JAX `Env`, batched; Playground's whole registry; a pendulum as example."""

from jaxtd3.config.sections import EnvConfig
from jaxtd3.envs.batch import batch_env
from jaxtd3.envs.pendulum import Pendulum
from jaxtd3.envs.registry import env_names, make_env, preset, register_env

__all__ = [
    "EnvConfig",
    "Pendulum",
    "batch_env",
    "env_names",
    "make_env",
    "preset",
    "register_env",
]
