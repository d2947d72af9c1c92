"""sbx TD3 as a peer: its learner is JAX, its loop, replay and environments are on the host."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from jaxtd3.config.sections import EnvConfig
from jaxtd3.core.types import BatchEnv
from jaxtd3.envs import make_env

# As many environments, updates and samples as Playground gives brax SAC.
SETTINGS: dict[str, Any] = {
    "num_envs": 128,
    "batch_size": 512,
    "gradient_steps": 8,
    "buffer_size": 2**18,
}
STEPS = 20  # of all environments, per timed epoch


def host_envs(env: BatchEnv) -> Any:
    """The batch of environments as Stable-Baselines3 knows them: numpy in, numpy out."""
    from gymnasium import spaces
    from stable_baselines3.common.vec_env import VecEnv

    spec, num = env.spec, env.num_envs
    step = jax.jit(env.step)

    class HostEnvs(VecEnv):
        def __init__(self) -> None:
            high = np.full(spec.width, np.inf, np.float32)
            one = np.ones(spec.action_size, np.float32)
            super().__init__(num, spaces.Box(-high, high), spaces.Box(-one, one))
            self.key = jax.random.key(0)

        def reset(self) -> Any:
            self.state = env.init(self.key)
            return np.asarray(self.state.obs)

        def step_async(self, actions: Any) -> None:
            self.actions = actions

        def step_wait(self) -> Any:
            self.key, key = jax.random.split(self.key)
            self.state, tr, _ = step(self.state, np.asarray(self.actions, np.float32), key)
            tr = jax.device_get(tr)
            infos: list[dict[str, Any]] = [{} for _ in range(num)]
            for i in np.flatnonzero(tr.done):
                infos[i] = {
                    "terminal_observation": tr.final_obs[i],
                    "TimeLimit.truncated": bool(tr.truncated[i]),
                }
            return np.asarray(self.state.obs), tr.reward, tr.done, infos

        def close(self) -> None: ...

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [None] * num

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

        def env_method(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list:
            return [None] * num

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * num

    return HostEnvs()


def epoch_rates(name: str, rounds: int) -> list[float]:
    """Environment steps per second, epoch by epoch, after one that compiles."""
    from sbx import TD3

    num = SETTINGS["num_envs"]
    vec = host_envs(make_env(EnvConfig(name=name, num_envs=num)))
    given = {k: v for k, v in SETTINGS.items() if k != "num_envs"}
    model = TD3("MlpPolicy", vec, train_freq=1, learning_starts=num * STEPS // 2, **given)
    rates = []
    with jax.numpy_rank_promotion("allow"):
        for epoch in range(rounds + 1):
            begun = time.perf_counter()
            model.learn(num * STEPS, reset_num_timesteps=epoch == 0)
            rates.append(num * STEPS / (time.perf_counter() - begun))
    return rates[1:]
