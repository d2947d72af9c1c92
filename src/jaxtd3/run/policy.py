"""A trained policy as one small file: the actor, its observation statistics, settings, scores.

    jaxtd3 export RUN --out walk.npz         write one
    jaxtd3 evaluate walk.npz                 a file, a run's folder, or the name of a shipped policy
    jaxtd3 render t1-flat

The file is NumPy's `.npz`: arrays named as in a checkpoint, and `about`, a text of JSON. Nothing in
it is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from jaxtd3.config.config import Config, config_from_dict
from jaxtd3.durable import whole_file
from jaxtd3.errors import UserError, nearest

SHIPPED = Path(__file__).parent / "policies"
SUFFIX, KIND = ".npz", "jaxtd3 policy"
PARTS = ("actor", "obs_stats")
"""What of an agent's state acting needs."""
MOST = 64 << 20  # bytes of a file that is taken for a policy


class PolicyFile(NamedTuple):
    config: Config
    arrays: dict[str, np.ndarray]  # by dotted name, as `actor.params.Dense_0.kernel`
    about: dict[str, Any]


def shipped_names() -> tuple[str, ...]:
    """The policies that come with the package."""
    return tuple(sorted(path.stem for path in SHIPPED.glob(f"*{SUFFIX}")))


def find_policy(run: Path) -> Path | None:
    """The policy file that is meant, if a file or a shipped policy is; None: a run's folder."""
    if run.suffix == SUFFIX and run.is_file():
        return run
    if run.is_dir() or len(run.parts) != 1:
        return None
    if str(run) in shipped_names():
        return SHIPPED / f"{run}{SUFFIX}"
    if not run.exists() and shipped_names():
        raise UserError(f"{run} is not a run; " + nearest("policy", str(run), shipped_names()))
    return None


def save_policy(path: Path, agent: Any, config: Config, about: Mapping[str, Any]) -> None:
    """Write an agent's actor and statistics; nothing is left behind where that fails."""
    from jaxtd3.run.arrays import named_leaves, to_host

    arrays = {}
    for part in PARTS:
        for name, leaf in named_leaves(getattr(agent, part)).items():
            arrays[f"{part}.{name}"] = to_host(leaf)
    text = json.dumps({"kind": KIND, "config": config.to_dict(), **about})
    try:
        with whole_file(path) as new, open(new, "wb") as file:
            np.savez_compressed(file, about=np.array(text), **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def read_policy(path: Path) -> PolicyFile:
    """Read what `save_policy` wrote; anything else is refused with one line."""
    try:
        if path.stat().st_size > MOST:
            raise UserError(f"{path} is too large for a policy")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop("about")))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise UserError(f"{path} is no policy of jaxtd3: {error}") from error
    if not isinstance(about, dict) or about.pop("kind", None) != KIND:
        raise UserError(f"{path} is no policy of jaxtd3")
    return PolicyFile(config_from_dict(about.pop("config", None), str(path)), arrays, about)


def policy_sha256(agent: Any, env: str) -> str:
    """A digest of what acts in an environment, the same in a checkpoint and in a policy file."""
    from jaxtd3.run.arrays import state_sha256

    return state_sha256({env: {part: getattr(agent, part) for part in PARTS}})


def fill_agent(policy: PolicyFile, template: Any, where: str) -> Any:
    """An agent's state that acts as the policy; what acting does not need is zero."""
    import jax
    import jax.numpy as jnp

    from jaxtd3.run.arrays import named_leaves

    filled = {}
    for part in PARTS:
        like = getattr(template, part)
        found = []
        for name, leaf in named_leaves(like).items():
            array = policy.arrays.get(f"{part}.{name}")
            if array is None or (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
                raise UserError(f"{where} does not fit its own settings: {part}.{name}")
            if not np.all(np.isfinite(array)):
                raise UserError(f"{where}: {part}.{name} is not finite")
            found.append(jnp.asarray(array))
        filled[part] = jax.tree.unflatten(jax.tree.structure(like), found)
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), template)
    return blank.replace(**filled)
