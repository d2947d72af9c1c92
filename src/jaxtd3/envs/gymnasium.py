"""Any environment of ours as gymnasium's: for those who bring their own learner.

    GymnasiumEnv("Balance")                              one, `gymnasium.Env`
    GymnasiumVectorEnv("G1JoystickFlatTerrain", 64)      many at once, `gymnasium.vector.VectorEnv`

Observations are the actor's; `info` has the privileged part and the reward terms by name. Names are
those of `--env`; an `EnvConfig` says more (physics, reward weights, randomisation).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from jaxtd3.config.sections import EnvConfig
from jaxtd3.core.types import Array, EnvSpec, EnvState
from jaxtd3.envs.batch import reward_weights
from jaxtd3.envs.registry import make_env

REFRESH = 200  # steps between fresh pools of first states


def spaces(spec: EnvSpec) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Box]:
    """Of one environment's observations and actions."""
    return (
        gymnasium.spaces.Box(-np.inf, np.inf, (spec.obs_size,), np.float32),
        gymnasium.spaces.Box(-1.0, 1.0, (spec.action_size,), np.float32),
    )


def as_config(env: str | EnvConfig, num_envs: int) -> EnvConfig:
    return replace(env if isinstance(env, EnvConfig) else EnvConfig(env), num_envs=num_envs)


def info_of(spec: EnvSpec, obs: np.ndarray, terms: np.ndarray | None) -> dict[str, Any]:
    """What `info` holds."""
    info: dict[str, Any] = {}
    if spec.extra_size:
        info["privileged"] = obs[..., spec.obs_size :]
    if terms is not None:
        info |= {f"reward/{name}": terms[..., i] for i, name in enumerate(spec.reward_terms)}
    return info


class GymnasiumEnv(gymnasium.Env):
    """One environment; `truncated` at its time limit."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, env: str | EnvConfig):
        cfg = as_config(env, 1)
        batch = make_env(cfg)
        self.spec_ours, single = batch.spec, batch.env
        self.observation_space, self.action_space = spaces(batch.spec)
        weights = reward_weights(batch.spec, cfg.weights)

        def step(state: Any, action: Array) -> Any:
            out = single.step(state, jnp.clip(action, -1.0, 1.0))
            weighted = batch.spec.reward_terms
            reward = batch.spec.combine(out.terms, weights) if weighted else out.reward
            return out.state, (out.obs, reward, out.terms, out.terminated)

        self._reset, self._step = jax.jit(single.reset), jax.jit(step)
        self._state: Any = None
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        super().reset(seed=seed)
        key = jax.random.key(int(self.np_random.integers(2**31)))
        self._state, obs = self._reset(key)
        self._steps = 0
        return self._seen(obs), info_of(self.spec_ours, np.asarray(obs), None)

    def step(self, action: Any) -> Any:
        given = jnp.asarray(action, jnp.float32)
        self._state, found = self._step(self._state, given)
        obs, reward, terms, over = jax.device_get(found)
        self._steps += 1
        late = self._steps >= self.spec_ours.episode_length and not over
        info = info_of(self.spec_ours, obs, terms)
        return self._seen(obs), float(reward), bool(over), bool(late), info

    def _seen(self, obs: Any) -> np.ndarray:
        return np.array(self.spec_ours.actor_obs(obs), np.float32)


class GymnasiumVectorEnv(VectorEnv):
    """Many environments in one compiled step; those that end start anew in the same step.

    `info["final_obs"]` holds what they observed last, where `info["_final_obs"]` is true.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, env: str | EnvConfig, num_envs: int):
        self._env = make_env(as_config(env, num_envs))
        self.num_envs, self.spec_ours = num_envs, self._env.spec
        self.single_observation_space, self.single_action_space = spaces(self._env.spec)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._step = jax.jit(self._env.step)
        self._state: EnvState | None = None
        self._key = jax.random.key(0)
        self._count = 0

    def reset(self, *, seed: Any = None, options: dict | None = None) -> Any:
        super().reset(seed=seed)
        self._key = jax.random.key(int(self.np_random.integers(2**31)))
        self._state = self._env.init(self._next())
        obs = np.asarray(self._state.obs)
        return obs[:, : self.spec_ours.obs_size], info_of(self.spec_ours, obs, None)

    def _next(self) -> Array:
        self._key, key = jax.random.split(self._key)
        return key

    def step(self, actions: Any) -> Any:
        if self._state is None:
            raise RuntimeError("call reset first")
        self._count += 1
        if self._count % REFRESH == 0:
            self._state = self._env.refresh(self._state, self._next())
        given = jnp.asarray(actions, jnp.float32)
        self._state, seen, _ = self._step(self._state, given, self._next())
        obs, seen = jax.device_get((self._state.obs, seen))
        info = info_of(self.spec_ours, obs, seen.terms)
        done = seen.done
        if done.any():
            info |= {"final_obs": seen.final_obs[:, : self.spec_ours.obs_size], "_final_obs": done}
        shown = obs[:, : self.spec_ours.obs_size]
        return shown, seen.reward, seen.terminated, seen.truncated | ~seen.valid, info
