"""Fair metrics: what a policy does, measured without its reward weights.

A metric is one function of one step of one environment, `metric(env, step) -> value`; what is
reported is the mean over all steps of all episodes. A function that returns `(value, per)` is
reported as sum(value) / sum(per): energy per metre, falls per minute. Units are SI.

    def wobble(env, step):                       # your own: one function ...
        return jnp.abs(step.after.state.data.qvel[3])

    jaxtd3.register_metric("wobble", wobble)     # ... and `--metric wobble` ranks by it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtd3.core.types import Array, Env
from jaxtd3.errors import UserError, nearest
from jaxtd3.thirdparty import attribute

TINY = 1e-9


class MetricStep(NamedTuple):
    """One step of one environment, as a metric sees it."""

    before: Any  # environment state that the action was chosen in
    action: Array  # [U]
    previous: Array  # [U] the action before; the same one at the first step
    after: Any  # environment state that it led to
    reward: Array  # [] the environment's own reward
    terminated: Array  # [] bool
    first: Array  # [] bool: the episode begins with this step
    remaining: Array  # [] steps left in the episode after this one


MetricFn = Callable[[Any, MetricStep], Any]


@dataclass(frozen=True)
class Metric:
    """A metric and how to read it."""

    function: MetricFn
    high: bool = False
    """True where more is better."""
    unit: str = ""


# --- for every environment ----------------------------------------------------------------------


def default_reward(env: Env, step: MetricStep) -> tuple[Array, Array]:
    """Return of an episode under the environment's own weights."""
    return step.reward, step.first


def survival(env: Env, step: MetricStep) -> tuple[Array, Array]:
    """Share of the episode until a fall."""
    return jnp.ones(()), jnp.where(step.first, env.spec.episode_length, 0)


def falls_per_minute(env: Env, step: MetricStep) -> tuple[Array, Array]:
    return step.terminated, jnp.float32(env.spec.dt / 60)


def action_rate(env: Env, step: MetricStep) -> Array:
    """Change of the action per second, mean over actuators: jitter."""
    return jnp.mean(jnp.abs(step.action - step.previous)) / env.spec.dt


COMMON = {
    "default_reward": Metric(default_reward, high=True),
    "survival": Metric(survival, high=True),
    "falls_per_minute": Metric(falls_per_minute, unit="1/min"),
    "action_rate": Metric(action_rate, unit="1/s"),
}


# --- for robots that follow a joystick ----------------------------------------------------------


def body_velocity(data: Any) -> Array:
    """The base's linear velocity in its own frame: [3]."""
    w, u, v = data.qpos[3], -data.qpos[4:7], data.qvel[:3]
    return v + 2 * jnp.cross(u, jnp.cross(u, v) + w * v)


def until_the_end(step: MetricStep, error: Array, standing: Array) -> tuple[Array, Array]:
    """A robot that fell lies still until the episode would have ended: falling does not pay."""
    rest = jnp.where(step.terminated, step.remaining, 0)
    return error + rest * standing, 1 + rest


def tracking_error_lin(env: Env, step: MetricStep) -> tuple[Array, Array]:
    """Distance between commanded and real velocity over ground."""
    command = step.before.state.info["command"][:2]
    real = body_velocity(step.after.state.data)[:2]
    return until_the_end(step, jnp.linalg.norm(command - real), jnp.linalg.norm(command))


def tracking_error_ang(env: Env, step: MetricStep) -> tuple[Array, Array]:
    """Difference of commanded and real turning rate."""
    command = step.before.state.info["command"][2]
    return until_the_end(step, jnp.abs(command - step.after.state.data.qvel[5]), jnp.abs(command))


def tracking_error(env: Env, step: MetricStep) -> tuple[Array, Array]:
    """Linear and angular error, added."""
    linear, count = tracking_error_lin(env, step)
    return linear + tracking_error_ang(env, step)[0], count


def energy_per_metre(env: Env, step: MetricStep) -> tuple[Array, Array]:
    """Mechanical work of the actuators, over the way travelled."""
    data = step.after.state.data
    power = jnp.sum(jnp.abs(data.qvel[6:] * data.actuator_force))
    return power * env.spec.dt, jnp.linalg.norm(data.qpos[:2] - step.before.state.data.qpos[:2])


def foot_slip(env: Any, step: MetricStep) -> tuple[Array, Array]:
    """Speed over ground of feet that stand on it."""
    feet = attribute(env.unwrapped, "_feet_site_id")
    old, new = step.before.state, step.after.state
    moved = (new.data.site_xpos[feet] - old.data.site_xpos[feet])[:, :2]
    standing = old.info["last_contact"] & new.info["last_contact"]
    speed = jnp.linalg.norm(moved, axis=1) / env.spec.dt
    return jnp.sum(jnp.where(standing, speed, 0.0)), jnp.sum(standing)


def single_support(env: Any, step: MetricStep) -> Array:
    """Share of the time on one foot: 0 standing, near 1 walking."""
    left, right = step.after.state.info["last_contact"]
    return left ^ right


def touchdowns(step: MetricStep) -> Array:
    """Feet that meet the ground in this step, left and right: [2]."""
    old, new = step.before.state.info["last_contact"], step.after.state.info["last_contact"]
    return (new & ~old).astype(jnp.float32).reshape(2)


def step_frequency(env: Any, step: MetricStep) -> tuple[Array, Array]:
    """Touchdowns of either foot per second."""
    return jnp.sum(touchdowns(step)), jnp.float32(env.spec.dt)


def left_steps(env: Any, step: MetricStep) -> tuple[Array, Array]:
    """Share of the touchdowns that are the left foot's: 0.5 where the feet alternate."""
    found = touchdowns(step)
    return found[0], jnp.sum(found)


JOYSTICK = {
    "tracking_error": Metric(tracking_error, unit="m/s + rad/s"),
    "tracking_error_lin": Metric(tracking_error_lin, unit="m/s"),
    "tracking_error_ang": Metric(tracking_error_ang, unit="rad/s"),
    "energy_per_metre": Metric(energy_per_metre, unit="J/m"),
    "foot_slip": Metric(foot_slip, unit="m/s"),
}
TWO_FEET = {
    "single_support": Metric(single_support, high=True, unit="of the time"),
    "step_frequency": Metric(step_frequency, high=True, unit="1/s"),
    "left_steps": Metric(left_steps, unit="of the steps"),
}

# Patterns of environment names; an environment of one's own may have an attribute `metrics`.
PRESETS: list[tuple[str, Mapping[str, Metric]]] = [
    ("*Joystick*", JOYSTICK),
    ("[GT]1Joystick*", TWO_FEET),
]
_OWN: dict[str, Metric] = {}


def register_metric(name: str, function: MetricFn, high: bool = False, unit: str = "") -> None:
    """Measure `function` in every sweep, and make `--metric name` rank by it."""
    _OWN[name] = Metric(function, high, unit)


def load_metric(text: str) -> tuple[str, Metric]:
    """A metric by `module:function`; a function that ends in `_high` is better when higher."""
    module, _, name = text.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"metric {text}: {error}") from error
    if not callable(function):
        raise UserError(f"metric {text} is not a function")
    return name, Metric(function, high=name.endswith("_high"))


def metrics_of(env: Env) -> dict[str, Metric]:
    """Every metric that an environment can give, the one to rank by first."""
    found: dict[str, Metric] = {**getattr(env, "metrics", {})}
    for pattern, preset in PRESETS:
        if fnmatchcase(env.spec.name, pattern):
            found |= preset
    found = found | COMMON | _OWN
    state, _ = jax.eval_shape(env.reset, jax.random.key(0))
    return {name: metric for name, metric in found.items() if fits(env, state, metric)}


def fits(env: Env, state: Any, metric: Metric) -> bool:
    """Whether the environment has what the metric reads."""
    number: Any = jax.ShapeDtypeStruct((), jnp.float32)
    flag: Any = jax.ShapeDtypeStruct((), bool)
    action: Any = jax.ShapeDtypeStruct((env.spec.action_size,), jnp.float32)
    step = MetricStep(state, action, action, state, number, flag, flag, number)
    try:
        jax.eval_shape(lambda step: ratio(metric, env, step), step)
    except (KeyError, AttributeError, TypeError, ValueError, IndexError):
        return False
    return True


def choose_metric(name: str | None, metrics: Mapping[str, Metric]) -> str:
    """The metric to rank by; the first one where none is named."""
    if name is not None and name not in metrics:
        raise UserError(nearest("metric", name, metrics))
    return name or next(iter(metrics))


WALKS = {"length": 950.0, "tracking_error_lin": 0.25, "tracking_error_ang": 0.3}
"""Least mean episode length of 1000 steps, and largest mean errors in m/s and rad/s."""


def walks(found: Mapping[str, float]) -> bool | None:
    """Whether a robot on two feet walks as commanded; None where that cannot be told.

    It stays up, follows the commands, and its feet alternate: it stands on one foot for a quarter
    of the time or more, and neither foot takes more than two thirds of the steps.
    """
    needed = (*WALKS, "single_support", "left_steps")
    if any(name not in found for name in needed):
        return None
    follows = all(found[name] <= WALKS[name] for name in WALKS if name != "length")
    alternates = found["single_support"] >= 0.25 and 1 / 3 <= found["left_steps"] <= 2 / 3
    return bool(found["length"] >= WALKS["length"] and follows and alternates)


# --- measuring ----------------------------------------------------------------------------------


def ratio(metric: Metric, env: Env, step: MetricStep) -> Array:
    """A metric's value and what it is divided by, for one step: [2]."""
    with jax.numpy_rank_promotion("allow"):
        out = metric.function(env, step)
    pair = out if isinstance(out, tuple) else (out, jnp.ones(()))
    return jnp.stack([jnp.asarray(x, jnp.float32).reshape(()) for x in pair])
