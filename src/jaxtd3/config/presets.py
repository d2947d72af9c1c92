"""Settings as data: one table of changes per environment, per algorithm, per hardware.

`preset_of` applies, in this order: the environments' rows whose pattern matches, the hardware
profile's rows whose pattern matches, what the environment suggests, the algorithm's row and sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from jaxtd3.config.config import Config, check_kinds
from jaxtd3.errors import UserError, nearest

Changes = Mapping[str, Any]

# FastTD3's forebears and variants: what makes each of them itself, over any environment and size.
PQL: Changes = {
    "critic": "scalar",
    "activation": "elu",
    "noise": "linear",
    "sigma_min": 0.05,
    "sigma_max": 0.8,
    "warmup": 32,
    "warmup_random": True,
    "critic_updates": 8,
    "policy_updates": 4,
    "n_step": 3,
    "gamma": 0.99,
    "tau": 0.05,
    "policy_noise": 0.8,
    "noise_clip": 0.2,
    "max_grad_norm": 0.5,
    "weight_decay": 0.0,
}
ALGORITHMS: dict[str, Changes] = {
    "fasttd3": {},  # the defaults of the config sections are FastTD3's
    "fasttd3-simbav2": {"network": "simbav2", "weight_decay": 0.0},
    "fasttd3-simnorm": {"network": "simnorm"},
    "pql": PQL,
    "pql-d": {**PQL, "critic": "c51", "cdq_target": "elementwise-min", "num_atoms": 51},
    "apex": {  # Ape-X DPG: one critic, lagging copies of both networks, a learner that prioritises
        "critic": "scalar",
        "num_critics": 1,
        "cdq": False,
        "target_actor": True,
        "noise": "geometric",
        "sigma_max": 0.4,
        "noise_alpha": 7.0,
        "prioritized": True,
        "priority_alpha": 0.6,
        "priority_beta": 0.4,
        "priority_beta_end": 0.4,
        "critic_updates": 4,
        "policy_updates": 4,
        "n_step": 5,
        "gamma": 0.99,
        "tau": 0.05,
        "policy_noise": 0.0,
        "weight_decay": 0.0,
    },
    # Bundles of actor, learner and replay, one per device, that average every 8 updates.
    "gorila": {"sync_every": 8, "noise": "constant", "sigma_max": 0.4},
}

# Sizes that an algorithm was published with, and those for two cores, by (algorithm, profile).
ALGORITHM_SIZES: dict[tuple[str, str], Changes] = {
    ("fasttd3-simbav2", "gpu"): {
        "batch_size": 8192,
        "critic_hidden": 512,
        "actor_hidden": 256,
        "critic_lr_end": 3e-5,
        "actor_lr_end": 3e-5,
    },
    ("fasttd3-simbav2", "cpu"): {"critic_hidden": 64, "actor_hidden": 32},
    ("fasttd3-simnorm", "cpu"): {"simnorm_groups": 8, "simnorm_dim": 8},
    **{
        (algo, "gpu"): {
            "num_envs": 4096,
            "length": 1024,
            "batch_size": 8192,
            "critic_hidden": 512,
            "actor_hidden": 512,
            "actor_lr": 5e-4,
            "actor_lr_end": 5e-4,
            "critic_lr": 5e-4,
            "critic_lr_end": 5e-4,
        }
        for algo in ("pql", "pql-d")
    },
}

# FastTD3's reward for the G1 and T1 joystick tasks; Playground's own weights were tuned for PPO.
TUNED_REWARDS: dict[str, Mapping[str, float]] = {
    "[GT]1Joystick*": {
        "energy": -5e-5,
        "action_rate": -0.1,
        "torques": -1e-3,
        "pose": -1.0,
        "tracking_ang_vel": 1.25,
        "tracking_lin_vel": 1.25,
        "feet_phase": 1.0,
        "ang_vel_xy": -0.3,
        "orientation": -5.0,
    },
}

# For few samples: what the robots' own rewards ask for, but standing comes before walking.
HUMANOID_REWARDS: Mapping[str, float] = {
    "alive": 15.0,
    "tracking_lin_vel": 14.0,
    "tracking_ang_vel": 12.0,
    "feet_phase": 12.0,
    "feet_air_time": 10.0,
    "feet_slip": -2.5,
    "pose": -12.0,
    "joint_deviation_hip": -1.0,
    "joint_deviation_knee": -1.0,
    "stand_still": -1.0,
    "orientation": -10.0,
    "ang_vel_xy": -0.8,
    "dof_pos_limits": -5.0,
    "collision": -2.0,
    "action_rate": -0.3,
    "energy": -1e-4,
    "torques": -1e-3,
}

# In the beginning the feet's phase counts more and the pose less: a robot that learned to stand in
# the right pose does not step any more.
STEPS_FIRST: Mapping[str, float] = {
    "tracking_lin_vel": 5.0,
    "tracking_ang_vel": 5.0,
    "feet_phase": 15.0,
    "pose": -5.0,
    "joint_deviation_hip": -0.5,
    "joint_deviation_knee": -0.5,
}

# Patterns are matched against `suite/env`, the suites being locomotion, manipulation, dm_control
# and own. All rows that match apply, in order.

# FastTD3's settings per environment (published sizes, for a GPU).
ENVIRONMENTS: list[tuple[str, Changes]] = [
    ("*", {"num_envs": 1024, "length": 10240, "gamma": 0.97, "v_min": -10.0, "v_max": 10.0}),
    (
        "*/Go1*",
        {
            "iterations": 50_000,
            "sigma_min": 0.2,
            "sigma_max": 0.8,
            "policy_noise": 0.2,
            "critic_updates": 8,
            "policy_updates": 4,
        },
    ),
    (
        "*/LeapCubeReorient",
        {
            "n_step": 3,
            "gamma": 0.99,
            "policy_noise": 0.2,
            "v_min": -50.0,
            "v_max": 50.0,
            "cdq": False,
        },
    ),
    ("*/LeapCubeRotateZAxis", {"gamma": 0.99, "policy_noise": 0.2, "cdq": False}),
    (
        "dm_control/*",  # rewards are in [0, 1] a step: with gamma 0.99 values are in [0, 100]
        {
            "iterations": 20_000,
            "n_step": 3,
            "gamma": 0.99,
            "v_min": 0.0,
            "v_max": 100.0,
            "sigma_min": 0.1,
            "policy_noise": 0.1,
            "stagger": True,
        },
    ),
    ("own/Pendulum", {"iterations": 2_000, "gamma": 0.99, "v_min": -500.0, "v_max": 0.0}),
    ("own/Cruise", {"iterations": 1_000, "gamma": 0.95, "v_min": -20.0, "v_max": 100.0}),
]

# For two cores: small networks and batches, high learning rates, more updates per step.
PROFILES: dict[str, list[tuple[str, Changes]]] = {
    "gpu": [("*", {"compute": "bf16"})],
    "cpu": [
        (
            "*",
            {
                "num_envs": 64,
                "length": 2048,
                "batch_size": 512,
                "critic_updates": 4,
                "policy_updates": 2,
                "critic_hidden": 256,
                "actor_hidden": 128,
                "num_atoms": 51,
                "actor_lr": 5e-4,
                "actor_lr_end": 5e-4,
                "critic_lr": 5e-4,
                "critic_lr_end": 5e-4,
                "weight_decay": 0.01,
                "iterations": 2_000,
                "log_every": 50,
                "eval_every": 250,
                "eval_episodes": 64,
                "checkpoint_every": 1_000,
            },
        ),
        (
            "dm_control/*",
            {
                "num_envs": 256,
                "length": 512,
                "policy_updates": 4,
                "critic_hidden": 128,
                "actor_hidden": 64,
                "actor_lr": 1e-3,
                "actor_lr_end": 1e-3,
                "critic_lr": 1e-3,
                "critic_lr_end": 1e-3,
                "weight_decay": 0.001,
                "n_step": 5,
                "sigma_max": 1.0,
                "eval_episodes": 32,
            },
        ),
        (
            "locomotion/*",
            {
                "critic_updates": 8,
                "policy_updates": 4,
                "n_step": 3,
                "actor_lr": 3e-4,
                "actor_lr_end": 3e-4,
                "critic_lr": 1e-3,
                "critic_lr_end": 1e-3,
                "policy_noise": 0.1,
                "sigma_min": 0.0,
                "sigma_max": 0.2,
                "iterations": 1_200,
                "eval_every": 200,
                "checkpoint_every": 400,
            },
        ),
        (
            # A humanoid learns to stay up within 300,000 steps, then to follow, then to lift its
            # feet. What that needs (docs/walking.md): a large bonus for every step on its feet
            # that shrinks as episodes last, so that standing does not stay the best it can do; the
            # environment's own terms at some ten times their weight, the feet's phase among them,
            # without which it shuffles, and the pose, without which it steps with bent arms; noise
            # held for some steps, as white noise averages out over a fall; many small updates per
            # step. The ring keeps the reward terms, so that all past data count under the weights
            # of now.
            "locomotion/[GT]1Joystick*",
            {
                "weights": HUMANOID_REWARDS,
                "curriculum": 9_000,
                "curriculum_weights": STEPS_FIRST,
                "curriculum_length": True,
                "curriculum_alive": 0.2,
                "store_terms": True,
                "num_envs": 128,
                "length": 8192,
                "sim_dt": 0.004,
                "symmetry": "augment",
                "batch_size": 512,
                "layer_norm": True,
                "actor_hidden": 256,
                "compute": "auto",
                "critic_updates": 16,
                "policy_updates": 8,
                "actor_lr_end": 1e-4,
                "critic_lr_end": 3e-4,
                "n_step": 5,
                "gamma": 0.98,
                "v_min": -10.0,
                "v_max": 40.0,
                "sigma_max": 0.4,
                "noise_hold": 16,
                "iterations": 16_000,
                "eval_every": 500,
                "eval_episodes": 16,
                "checkpoint_every": 1_000,
            },
        ),
        (
            # The two robots' own rewards price the pose and the hips differently. G1 turns to and
            # fro with every step unless turning counts for more; where standing still is dear
            # before it can stand, it ends the episode as soon as it is told to; and it walks with
            # raised arms, which standing pays for, unless the pose is dear in the end.
            "locomotion/G1Joystick*",
            {
                "weights": {
                    **HUMANOID_REWARDS,
                    "tracking_ang_vel": 15.0,
                    "pose": -10.0,
                    "joint_deviation_hip": -2.5,
                    "stand_still": -3.0,
                    "termination": -500.0,
                },
                "curriculum_weights": {
                    **STEPS_FIRST,
                    "tracking_ang_vel": 8.0,
                    "pose": -2.0,
                    "stand_still": -0.5,
                },
                "curriculum": 12_000,
                "iterations": 24_000,
            },
        ),
        ("dm_control/Cheetah*", {"iterations": 6_000, "cdq": False}),
        ("dm_control/CartpoleSwingup*", {"iterations": 4_000}),  # three seeds swung up by 3,000
        (  # a fast actor saturates here before the critic knows anything: one seed in eight
            "dm_control/CartpoleBalance*",
            {
                "policy_updates": 2,
                "actor_lr": 3e-4,
                "actor_lr_end": 3e-4,
                "eval_every": 500,  # twenty seconds in all: an evaluation and its save take 0.2 s
            },
        ),
        (
            "own/Cruise",
            {
                "num_envs": 32,
                "length": 512,
                "batch_size": 256,
                "critic_updates": 2,
                "n_step": 3,
                "sigma_max": 1.0,
                "critic_hidden": 64,
                "actor_hidden": 32,
                "critic_lr": 3e-3,
                "critic_lr_end": 3e-3,
                "actor_lr": 3e-3,
                "actor_lr_end": 3e-3,
                "iterations": 500,
                "eval_every": 100,
            },
        ),
    ],
}


class Stage(NamedTuple):
    """One stage of a recipe: a run that begins with the weights of the stage before."""

    name: str
    about: str
    share: float  # of the iterations and of the time
    changes: Changes  # beside the preset


# `--recipe`: what is trained one after the other, as one run.
RECIPES: Mapping[str, tuple[Stage, ...]] = {
    "deploy": (
        Stage("flat", "flat ground, nothing disturbed but what it observes", 0.6, {}),
        Stage(
            "all",
            "the robot randomised and pushed, its actions delayed by up to 40 ms",
            0.4,
            {
                "randomize": True,
                "push": True,
                "action_delay": 0.04,
                # The first updates must not undo what was learned: begin with data to learn from,
                # at the rates that the first stage ends with.
                "warmup": 100,
                "actor_lr": 1e-4,
                "actor_lr_end": 1e-4,
                "critic_lr": 3e-4,
                "critic_lr_end": 3e-4,
            },
        ),
    ),
}


def tuned_reward(env: str) -> Mapping[str, float]:
    """The tuned weights of an environment."""
    for pattern, weights in TUNED_REWARDS.items():
        if fnmatchcase(env, pattern):
            return weights
    raise UserError(f"{env} has no tuned reward: only {', '.join(TUNED_REWARDS)} have")


def preset_of(
    env: str, label: str, algo: str, profile: str, suggested: Changes, randomize: bool = False
) -> Config:
    """The settings for an environment whose rows match `label`, such as `locomotion/Go1Getup`.

    `suggested` by the environment's own class: settings, under `cpu` and `gpu` those for either.
    """
    if algo not in ALGORITHMS:
        raise UserError(nearest("algo", algo, ALGORITHMS))
    if profile not in PROFILES:
        raise UserError(nearest("profile", profile, PROFILES))
    flat: dict[str, Any] = {"env.name": env}
    for pattern, row in ENVIRONMENTS + PROFILES[profile]:
        if pattern == "*" or fnmatchcase(label, pattern):
            flat |= row
    if randomize:
        # A longer physics step is stable for the robot as it is: T1's ankles, damped up to twice
        # as much, are not at 4 ms.
        flat.pop("sim_dt", None)
    flat |= suggestions(suggested, profile)
    flat |= ALGORITHMS[algo]
    flat |= ALGORITHM_SIZES.get((algo, profile), {})
    return Config(algo=algo, profile=profile).override(flat)


def suggestions(preset: Any, profile: str) -> Changes:
    """What a class suggests for a profile; it may be anybody's, so its kinds are looked at."""
    rows = [preset, preset.get(profile, {})] if isinstance(preset, Mapping) else [preset]
    if not all(isinstance(row, Mapping) for row in rows):
        raise UserError("preset is not a dict of settings")
    flat = {name: value for row in rows for name, value in row.items() if name not in PROFILES}
    check_kinds("preset", flat)
    return flat
