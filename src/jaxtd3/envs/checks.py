"""Is it an `Env`? Asked of environments that come by reference, before anything is written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtd3.core.types import EnvSpec, EnvStep
from jaxtd3.envs.source import Found, blaming
from jaxtd3.errors import UserError


def check_made(env: Any, found: Found) -> None:
    """Refuse what is not an environment: in one line, with the place of the method at fault."""
    with blaming(found.file, found.make):
        spec = getattr(env, "spec", None)
        if not isinstance(spec, EnvSpec):
            raise UserError(f"{type(env).__name__}.spec is no jaxtd3.EnvSpec")
        for name in ("obs_size", "action_size", "episode_length"):
            size = getattr(spec, name)
            if not isinstance(size, int | np.integer) or size < 1:
                raise UserError(f"spec: {name}={size!r} is not a whole number above 0")
        if len(spec.reward_terms) != len(spec.default_weights):
            terms, weights = len(spec.reward_terms), len(spec.default_weights)
            raise UserError(f"spec: {terms} reward_terms, but {weights} default_weights")
        for name in ("reset", "step"):
            if not callable(getattr(env, name, None)):
                raise UserError(f"{type(env).__name__} has no method {name}")
    with blaming(found.file, getattr(type(env), "reset", None)):
        state = check_reset(env, spec)
    with blaming(found.file, getattr(type(env), "step", None)):
        check_step(env, spec, state)
    with blaming(found.file, getattr(type(env), "reset", None)):
        check_finite(env)


def check_reset(env: Any, spec: EnvSpec) -> Any:
    """The type of a state."""
    out = jax.eval_shape(env.reset, jax.random.key(0))
    if not isinstance(out, tuple) or len(out) != 2:
        raise UserError("reset(key) does not return (state, obs)")
    state, obs = out
    check_array("reset: the observation", obs, (spec.width,), jnp.float32)
    return state


def check_step(env: Any, spec: EnvSpec, state: Any) -> None:
    """Shapes of all that a step returns."""
    action = jax.ShapeDtypeStruct((spec.action_size,), jnp.float32)
    out = jax.eval_shape(env.step, state, action)
    if not isinstance(out, EnvStep):
        raise UserError("step(state, action) does not return a jaxtd3.EnvStep")
    check_array("step: the observation", out.obs, (spec.width,), jnp.float32)
    check_array("step: the reward", out.reward, ())
    check_array("step: the reward terms", out.terms, (len(spec.reward_terms),))
    check_array("step: terminated", out.terminated, (), jnp.bool_)
    check_same(state, out.state)


def check_same(state: Any, then: Any) -> None:
    """A step must return a state of the type that it was given."""
    old, new = (jax.tree_util.tree_leaves_with_path(x) for x in (state, then))
    if [path for path, _ in old] != [path for path, _ in new]:
        raise UserError("reset and step return states of different structure")
    for (path, a), (_, b) in zip(old, new, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            where = jax.tree_util.keystr(path)
            raise UserError(
                f"state{where} is {a.dtype}{list(a.shape)} after reset, "
                f"{b.dtype}{list(b.shape)} after step"
            )


def check_array(what: str, x: Any, shape: tuple[int, ...], dtype: Any = None) -> None:
    """Refuse another shape, and another type where one is asked for."""
    if getattr(x, "shape", None) != shape:
        raise UserError(f"{what} has shape {getattr(x, 'shape', None)}, not {shape}")
    if dtype is not None and x.dtype != dtype:
        raise UserError(f"{what} is of {x.dtype}, not {jnp.dtype(dtype)}")


def check_finite(env: Any) -> None:
    """Run one reset: its numbers must be finite."""
    _, obs = jax.jit(env.reset)(jax.random.key(0))
    bad = np.flatnonzero(~np.isfinite(np.asarray(obs)))
    if bad.size:
        parts = getattr(env, "layout", None) or ()
        names = [p.name for p in parts if np.any((bad >= p.start) & (bad < p.stop))]
        what = f"observation {', '.join(names)}" if names else f"obs[{bad[0]}]"
        raise UserError(f"reset: {what} is not finite ({np.asarray(obs)[bad[0]]})")
