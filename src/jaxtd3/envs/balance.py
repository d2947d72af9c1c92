"""A pole balanced on a cart: the example of a `MujocoTask`, on native physics or MJX."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtd3.envs.task import MujocoTask, near, sq


class Balance(MujocoTask):
    """Hold the pole up and the cart in the middle, with little effort."""

    mjcf = Path(__file__).parent / "models" / "balance.xml"
    control_dt = 0.02
    episode_length = 500
    action_scale = None  # a motor: actions of -1 and 1 are the ends of its range
    observations: ClassVar = {
        "place": lambda s: s.joints[0],
        "angle": lambda s: jnp.stack([jnp.cos(s.joints[1]), jnp.sin(s.joints[1])]),
        "velocities": lambda s: s.joint_velocities,
    }
    rewards: ClassVar = {
        "upright": (1.0, lambda s: jnp.cos(s.joints[1])),
        "middle": (0.5, lambda s: near(s.joints[0], 0.5)),
        "effort": (-0.1, lambda s: sq(s.action)),
    }
    terminations: ClassVar = {
        "fallen": lambda s: s.site("tip")[2] < 0.4,
        "off": lambda s: jnp.abs(s.joints[0]) > 1.7,
    }
    randomization: ClassVar = {
        "dof_damping": lambda x, key: x * jax.random.uniform(key, minval=0.5, maxval=2.0),
    }
    preset: ClassVar = {
        "gamma": 0.98,
        "v_min": -1.0,
        "v_max": 2.0,
        "cpu": {
            "num_envs": 32,
            "length": 1024,
            "batch_size": 256,
            "critic_hidden": 64,
            "actor_hidden": 32,
            "actor_lr": 1e-3,
            "actor_lr_end": 1e-3,
            "critic_lr": 2e-3,
            "critic_lr_end": 2e-3,
            "n_step": 3,
            "sigma_max": 0.5,
            "iterations": 1_500,
            "eval_every": 500,
            "eval_episodes": 32,
        },
    }
