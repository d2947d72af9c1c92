# ruff: noqa: RUF012
"""Stand and Walk on the tests' four-legged robot, small enough for tests."""

from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtd3.envs.task import MujocoTask, near, sq

TINY = {
    "num_envs": 8,
    "length": 32,
    "batch_size": 32,
    "critic_updates": 1,
    "policy_updates": 1,
    "critic_hidden": 16,
    "actor_hidden": 16,
    "iterations": 20,
    "log_every": 10,
    "eval_every": 20,
    "eval_episodes": 4,
    "checkpoint_every": 10,
    "warmup": 8,
}


class Stand(MujocoTask):
    """Keep upright."""

    mjcf = Path(__file__).with_name("quadruped.xml")
    episode_length = 40
    observations = {
        "gyro": lambda s: s.sensor("gyro"),
        "up": lambda s: s.up,
        "joints": lambda s: s.pose_error,
        "joint_velocities": lambda s: s.joint_velocities,
        "last_action": lambda s: s.action,
    }
    privileged = {"velocity": lambda s: s.velocity, "height": lambda s: s.height}
    rewards = {
        "upright": (1.0, lambda s: near(s.up[:2], 0.4)),
        "effort": (-1e-4, lambda s: sq(s.torques)),
        "action_rate": (-0.1, lambda s: sq(s.action - s.previous)),
    }
    terminations = {"tilted": lambda s: s.up[2] < 0.6}
    randomization = {
        "geom_friction": lambda x, key: x * jax.random.uniform(key, minval=0.3, maxval=1.5),
    }
    push_speed = 0.5
    push_every = 0.1
    preset = {"gamma": 0.9, "cpu": TINY}


class Walk(Stand):
    """Follow a commanded velocity."""

    command = {"forward": (-0.5, 1.0), "left": (-0.2, 0.2), "turn": (-1.0, 1.0)}
    command_every = 0.1
    observations = {**Stand.observations, "command": lambda s: s.command}
    rewards = {
        **Stand.rewards,
        "speed": (1.0, lambda s: near(s.command[:2] - s.velocity[:2], 0.3)),
        "foot": (0.1, lambda s: jnp.clip(s.site("front_left_foot")[2], 0.0, 0.1)),
    }
