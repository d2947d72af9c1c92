"""Left and right: a humanoid's mirror image as permutations and signs, checked against physics.

    mirrored = sign * x[perm]      of an observation [D], an action [U], a pose or a velocity

A mirror across the plane y = 0 keeps x and z of positions, velocities and forces (polar vectors)
and turns y; of rotations (axial vectors) it keeps y and turns x and z. Joints change places by
their names; whether an angle changes its sign follows from the joints' axes in the model.

`find_mirror` trusts none of this: it lets MuJoCo step a state and its mirror image, and compares
what follows, observations and rewards included. A sign that is wrong anywhere is refused by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtd3.core.tracing import compile_soon
from jaxtd3.core.types import Array, EnvSpec, EnvStep
from jaxtd3.envs.playground.layout import OBSERVED, PRIVILEGED
from jaxtd3.errors import UserError
from jaxtd3.thirdparty import attribute

if TYPE_CHECKING:
    from jaxtd3.envs.playground.adapter import PlaygroundEnv, PlaygroundState


class Reflection(NamedTuple):
    """mirrored[i] = sign[i] * x[perm[i]]."""

    perm: np.ndarray  # [N] int
    sign: np.ndarray  # [N] +1 or -1


class Mirror(NamedTuple):
    """A robot's mirror image."""

    obs: Reflection  # [D], of the flat observation [actor part | privileged part]
    action: Reflection  # [U]
    qpos: Reflection
    qvel: Reflection
    info: Mapping[str, Reflection]  # what the environment carries beside the physics
    labels: tuple[str, ...]  # [D] the part that each number of the observation belongs to


def reflect(how: Reflection, x: Array) -> Array:
    """The mirror image of vectors: [.., N]."""
    x = x[..., how.perm]
    if np.all(how.sign == 1):
        return x
    return x * jnp.asarray(how.sign, x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


# --- found from the model -----------------------------------------------------------------------

ROBOTS = {
    "G1JoystickFlatTerrain": "G1JoystickFlatTerrain",
    "G1JoystickRoughTerrain": "G1JoystickFlatTerrain",
    "T1JoystickFlatTerrain": "T1JoystickFlatTerrain",
    "T1JoystickRoughTerrain": "T1JoystickFlatTerrain",
}
"""Environments with a mirror -> where it is checked (no rough ground is its own mirror image)."""

INFO = {
    "command": "command",
    "last_act": "actuators",
    "last_last_act": "actuators",
    "motor_targets": "actuators",
    "feet_air_time": "feet",
    "last_contact": "feet",
    "swing_peak": "feet",
    "phase": "feet",
    "push": "planar",
    "filtered_linvel": "polar",
    "filtered_angvel": "axial",
}
UNCHANGED = ("rng", "step", "phase_dt", "push_step", "push_interval_steps")
ONE_SIDED = {"G1JoystickFlatTerrain": ("joint_deviation_hip",)}
"""Reward terms that an environment itself computes for one side only: not compared. (G1 lets hips
roll while it walks to the left, not to the right.)"""


def signs(*sign: float) -> Reflection:
    """Numbers that stay where they are and change their signs."""
    return Reflection(np.arange(len(sign)), np.array(sign, np.float32))


def join(parts: Iterable[Reflection]) -> Reflection:
    """Reflections of vectors as one of their concatenation."""
    parts = list(parts)
    starts = np.cumsum([0, *(len(p.perm) for p in parts)])
    perm = [p.perm + start for p, start in zip(parts, starts, strict=False)]
    return Reflection(np.concatenate(perm), np.concatenate([p.sign for p in parts]))


def swap(pair: Reflection) -> Reflection:
    """Two vectors of one kind, left and right, each taking the other's mirror image."""
    both, half = join([pair, pair]), len(pair.perm)
    return Reflection(np.roll(both.perm, half), both.sign)


POLAR, AXIAL = signs(1, -1, 1), signs(-1, 1, -1)


def other_side(name: str) -> str:
    """The name with left for right, and right for left, at its beginning."""
    sides = {"left": "right", "Left": "Right", "right": "left", "Right": "Left"}
    return re.sub("^(left|right)", lambda m: sides[m[0]], name, flags=re.IGNORECASE)


def find_joints(model: Any) -> Reflection:
    """How the angles of all hinges are mirrored, by the joints' names, places and axes."""
    import mujoco

    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    hinge, free = mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_FREE
    if list(model.jnt_type) != [free, *[hinge] * (model.njnt - 1)]:
        raise UserError("no mirror: the robot is not one floating base with hinges")
    names = [model.joint(i).name for i in range(1, model.njnt)]
    absent = [name for name in names if other_side(name) not in names]
    if absent:
        raise UserError(f"no mirror: joint {absent[0]} has no {other_side(absent[0])}")
    perm = np.array([names.index(other_side(name)) for name in names])
    axes, places = data.xaxis[1:], data.xanchor[1:]
    along = np.sum(axes * (AXIAL.sign * axes)[perm], axis=1)
    apart = np.linalg.norm(places - (POLAR.sign * places)[perm], axis=1)
    for name, cosine, distance in zip(names, along, apart, strict=True):
        if abs(abs(cosine) - 1) > 1e-3 or distance > 1e-3:
            raise UserError(f"no mirror: {name} and {other_side(name)} are not placed alike")
    return Reflection(perm, np.sign(along).astype(np.float32))


def find_actuators(model: Any, joints: Reflection) -> Reflection:
    """How the actuators are mirrored that drive these joints."""
    driven = list(model.actuator_trnid[:, 0] - 1)
    perm = np.array([driven.index(joints.perm[joint]) for joint in driven])
    return Reflection(perm, joints.sign[driven])


def read_mirror(env: PlaygroundEnv) -> Mirror:
    """The mirror image by the model and the table of what is observed, not checked yet."""
    model = env.unwrapped.mj_model
    joints = find_joints(model)
    actuators, feet = find_actuators(model, joints), swap(signs(1))
    kinds = {
        "scalar": signs(1),
        "planar": signs(1, -1),
        "polar": POLAR,
        "axial": AXIAL,
        "command": signs(1, -1, -1),
        "joints": joints,
        "actuators": actuators,
        "feet": feet,
        "feet_polar": swap(POLAR),
    }
    table = (*OBSERVED, *PRIVILEGED)
    labels = tuple(name for name, kind in table for _ in kinds[kind].perm)
    for what, given, width in (
        ("actor", env.spec.obs_size, sum(len(kinds[kind].perm) for _, kind in OBSERVED)),
        ("whole", env.spec.width, len(labels)),
    ):
        if given != width:
            raise UserError(
                f"no mirror of {env.name}: its {what} observation has {given} numbers, not {width}"
            )
    return Mirror(
        obs=join(kinds[kind] for _, kind in table),
        action=actuators,
        qpos=join([POLAR, signs(1, -1, 1, -1), joints]),  # w x y z of a quaternion
        qvel=join([POLAR, AXIAL, joints]),
        info={name: kinds[kind] for name, kind in INFO.items()},
        labels=labels,
    )


def mirror_of(env: Any) -> Mirror | None:
    """The unchecked mirror image of an environment, to measure with; None where none is known."""
    if env.spec.name not in ROBOTS:
        return None
    return as_seen(read_mirror(getattr(env, "whole", env)), env.spec)


def as_seen(mirror: Mirror, spec: EnvSpec) -> Mirror:
    """The mirror image of an environment's own observation as that of the learner's: reordered
    (`EnvSpec.order`), each of a window for itself (`EnvSpec.history`)."""
    obs, labels = mirror.obs, mirror.labels
    if spec.order:
        places = np.asarray(spec.order)
        obs = Reflection(np.argsort(places)[obs.perm[places]], obs.sign[places])
        labels = tuple(labels[i] for i in places)
    if spec.history > 1:
        size, older = spec.frame_size, spec.history - 1
        frame = Reflection(obs.perm[:size], obs.sign[:size])
        obs, labels = join([*[frame] * older, obs]), (*labels[:size] * older, *labels)
    return mirror._replace(obs=obs, labels=labels)


# --- checked against physics --------------------------------------------------------------------


def quiet_env(name: str) -> PlaygroundEnv:
    """The environment with native physics and without noise on what it observes."""
    from mujoco_playground import registry

    from jaxtd3.envs.playground.adapter import PlaygroundEnv, on_own_device
    from jaxtd3.envs.playground.meshes import menagerie_for

    quiet = {"impl": "cpp", "push_config.enable": False, "noise_config.level": 0.0}
    with menagerie_for(name) as meshes, on_own_device():
        env = registry.load(name, config_overrides=quiet)
    return PlaygroundEnv(name, env, None, meshes, native_threads=1)


def mirror_state(mirror: Mirror, state: PlaygroundState) -> PlaygroundState:
    """The mirror image of an environment's state, as far as a step reads it."""
    data, info = state.state.data, dict(state.state.info)
    unknown = sorted(set(info) - set(mirror.info) - set(UNCHANGED))
    if unknown:
        raise UserError(f"no mirror: nothing is known about info {unknown[0]}")
    data = data.replace(
        qpos=reflect(mirror.qpos, data.qpos),
        qvel=reflect(mirror.qvel, data.qvel),
        qacc_warmstart=reflect(mirror.qvel, data.qacc_warmstart),
    )
    info |= {name: reflect(how, info[name]) for name, how in mirror.info.items() if name in info}
    return state._replace(state=state.state.replace(data=data, info=info))


def check_mirror(mirror: Mirror, env: PlaygroundEnv) -> None:
    """Refuse a mirror image that is none, by what is wrong with it."""
    check_twice(mirror, env.name)
    check_standing(mirror, env)
    check_step(mirror, env)


def check_twice(mirror: Mirror, name: str) -> None:
    """Twice mirrored is as before."""
    named = {"obs": mirror.obs, "action": mirror.action, "qpos": mirror.qpos, "qvel": mirror.qvel}
    for what, how in (named | dict(mirror.info)).items():
        size = np.arange(len(how.perm))
        back = np.array_equal(how.perm[how.perm], size)
        if not back or np.any(how.sign * how.sign[how.perm] != 1):
            raise UserError(f"no mirror of {name}: {what} mirrored twice is not itself")


def check_standing(mirror: Mirror, env: PlaygroundEnv) -> None:
    """The pose that the action zero holds is its own mirror image."""
    stand = np.asarray(attribute(env.unwrapped, "_init_q"))
    apart = np.abs(how_mirrored(mirror.qpos, stand) - stand)
    if apart.max() > 1e-6:
        raise UserError(
            f"no mirror of {env.name}: standing is not its own mirror image, by "
            f"{apart.max():.2g} at {qpos_names(env)[int(apart.argmax())]}"
        )


def how_mirrored(how: Reflection, x: np.ndarray) -> np.ndarray:
    """`reflect` of NumPy arrays: [.., N]."""
    return how.sign * x[..., how.perm]


def qpos_names(env: PlaygroundEnv) -> list[str]:
    model = env.unwrapped.mj_model
    return [f"base_{x}" for x in ("x", "y", "z", "qw", "qx", "qy", "qz")] + [
        model.joint(i).name for i in range(1, model.njnt)
    ]


def compare_steps(
    mirror: Mirror, env: PlaygroundEnv, envs: int = 16, steps: int = 12, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """What the mirrored state makes of the mirrored action, and the mirror image of the step:
    two arrays [envs * steps, qpos | qvel | obs | reward terms], equal but for rounding."""
    rng = np.random.default_rng(seed)
    keys = jax.random.split(jax.random.key(seed), envs)
    state, _ = compile_soon(jax.vmap(env.reset), keys)(keys)
    image = compile_soon(lambda s: mirror_state(mirror, s), state)
    step = compile_soon(jax.vmap(env.step), state, jnp.zeros((envs, env.spec.action_size)))

    def columns(out: EnvStep, mirrored: bool) -> np.ndarray:
        data = out.state.state.data
        pairs = ((mirror.qpos, data.qpos), (mirror.qvel, data.qvel), (mirror.obs, out.obs))
        parts = [how_mirrored(how, np.asarray(x)) if mirrored else x for how, x in pairs]
        return np.concatenate([*parts, out.terms], axis=1)

    found, expected = [], []
    for _ in range(steps):
        action = rng.uniform(-1, 1, (envs, env.spec.action_size)).astype(np.float32)
        out = step(state, action)
        twin = step(image(state), how_mirrored(mirror.action, action))
        expected.append(columns(out, True))
        found.append(columns(twin, False))
        state = out.state
    return np.concatenate(found), np.concatenate(expected)


def check_step(mirror: Mirror, env: PlaygroundEnv) -> None:
    """The mirrored state, stepped with the mirrored action, is the mirror image of the step.

    Contacts that begin a moment earlier on one side make single numbers differ; a wrong sign or a
    wrong place makes most of a column differ, by about its own spread.
    """
    found, expected = compare_steps(mirror, env)
    apart = np.median(np.abs(found - expected) / (expected.std(axis=0) + 1e-3), axis=0)
    speeds = [f"speed of {name}" for name in ("x", "y", "z", "roll", "pitch", "yaw")]
    joints = qpos_names(env)[7:]
    names = [*qpos_names(env), *speeds, *(f"speed of {name}" for name in joints)]
    names += [f"observed {label}" for label in mirror.labels]
    names += [f"reward {term}" for term in env.spec.reward_terms]
    one_sided = {f"reward {term}" for term in ONE_SIDED.get(env.name, ())}
    wrong = [i for i in np.argsort(-apart) if apart[i] > TOLERANCE and names[i] not in one_sided]
    if wrong:
        raise UserError(
            f"no mirror of {env.name}: a mirrored step differs in {names[wrong[0]]}, by "
            f"{apart[wrong[0]]:.2g} of its spread"
        )


TOLERANCE = 0.02
"""Largest median difference of a mirrored step, over a number's spread."""


@functools.cache
def find_mirror(name: str) -> Mirror:
    """The mirror image of a robot's environment, checked with C MuJoCo."""
    if name not in ROBOTS:
        raise UserError(f"no mirror of {name}: only of {', '.join(ROBOTS)}")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        env = quiet_env(ROBOTS[name])
        mirror = read_mirror(env)
        check_mirror(mirror, env)
    return mirror
