"""A whole run as one frozen value: sections, flat overrides, JSON both ways.

Each section stands beside the code that reads it; here they are put together. A field's docstring
is its `--help`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtd3.durable import read_json
from jaxtd3.envs.base import EnvConfig
from jaxtd3.errors import UserError, nearest
from jaxtd3.replay import ReplayConfig
from jaxtd3.td3 import AgentConfig
from jaxtd3.train_step import LoopConfig


@dataclass(frozen=True)
class RunConfig:
    """How long, and what is kept."""

    seed: int = 0
    """Seed of every random number of the run."""
    iterations: int = 100_000
    """Iterations to train: collect_steps of every environment and the updates that follow."""
    max_time: float | None = None
    """Stop after so many seconds of training (compile time not counted)."""
    log_every: int = 100
    """Iterations per compiled chunk, and per line of metrics."""
    eval_every: int = 5000
    """Iterations between evaluations (0: only at the end)."""
    eval_episodes: int = 128
    """Episodes per evaluation."""
    checkpoint_every: int = 10_000
    """Iterations between checkpoints (0: only at the end)."""
    keep: int = 2
    """Checkpoints kept beside the best one."""
    devices: int = 0
    """Devices to use (0: all)."""

    def __post_init__(self):
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} is negative")
        for name, least in (
            ("iterations", 1),
            ("log_every", 1),
            ("eval_every", 0),
            ("eval_episodes", 1),
            ("checkpoint_every", 0),
            ("keep", 2),
            ("devices", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is below {least}")
        if self.max_time is not None and not 0 < self.max_time < math.inf:
            raise ValueError(f"max_time={self.max_time} is not a positive number of seconds")


@dataclass(frozen=True)
class Config:
    """Everything that decides a run."""

    algo: str = "fasttd3"
    """Algorithm."""
    profile: str = "gpu"
    """Hardware the sizes were chosen for."""
    run: RunConfig = field(default_factory=RunConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def override(self, changes: Mapping[str, Any]) -> Config:
        """A copy with fields changed, named as `gamma` or `agent.gamma`."""
        grouped: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            section, leaf = find_field(name)
            grouped.setdefault(section, {})[leaf] = value
        for section, values in grouped.items():
            check_bounds(section, values)
        try:
            new = {s: dataclasses.replace(getattr(self, s), **v) for s, v in grouped.items()}
        except ValueError as error:
            raise UserError(str(error)) from error
        return dataclasses.replace(self, **new)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")


INT32, INT64, FLOAT32 = 2**31 - 1, 2**63 - 1, 3.4e38
LONG = ("seed", "schedule_updates", "noise_steps")  # never an int32 in the program

SECTIONS: dict[str, type] = {
    "run": RunConfig,
    "env": EnvConfig,
    "agent": AgentConfig,
    "replay": ReplayConfig,
    "loop": LoopConfig,
}


def field_names() -> dict[str, str]:
    """Every field as `section.field`, by its short name too (short names are unique)."""
    names = {}
    for section, cls in SECTIONS.items():
        for f in dataclasses.fields(cls):
            names[f"{section}.{f.name}"] = f"{section}.{f.name}"
            names[f.name] = f"{section}.{f.name}"
    return names


def find_field(name: str) -> tuple[str, str]:
    """('agent', 'gamma') for 'gamma' or 'agent.gamma'."""
    known = field_names()
    if name not in known:
        raise UserError(nearest("setting", name, known))
    section, leaf = known[name].split(".")
    return section, leaf


def config_from_dict(data: Any, where: str = "config") -> Config:
    """Read what `to_dict` wrote; anything else is refused with one line."""
    if not isinstance(data, dict):
        raise UserError(f"{where} is not a JSON object")
    top = {"algo", "profile", *SECTIONS}
    for name in data:
        if name not in top:
            raise UserError(f"{where}: " + nearest("section", name, top))
    sections: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        given = data.get(section, {})
        if not isinstance(given, dict):
            raise UserError(f"{where}: {section} is not a JSON object")
        kinds = {f.name: f for f in dataclasses.fields(cls)}
        for name, value in given.items():
            if name not in kinds:
                raise UserError(f"{where}: " + nearest(f"{section} setting", name, kinds))
            _check_kind(f"{where}: {section}.{name}", value, kinds[name])
        check_bounds(f"{where}: {section}", given)
        try:
            sections[section] = cls(**given)
        except (ValueError, TypeError) as error:
            raise UserError(f"{where}: {error}") from error
    labels = {k: data[k] for k in ("algo", "profile") if k in data}
    for name, value in labels.items():
        if not isinstance(value, str):
            raise UserError(f"{where}: {name} is not a string")
    return Config(**labels, **sections)


def check_bounds(where: str, values: Mapping[str, Any]) -> None:
    """Refuse numbers that the program's int32 and float32 cannot hold, before they reach it."""
    for name, value in values.items():
        most = INT64 if name in LONG else INT32
        if isinstance(value, int) and abs(value) > most:
            raise UserError(f"{where} {name}={shorten(value)} is beyond {most}")
        if isinstance(value, float) and math.isfinite(value) and abs(value) > FLOAT32:
            raise UserError(f"{where} {name}={value} is beyond {FLOAT32}")
        if isinstance(value, Mapping):
            check_bounds(f"{where} {name}", value)


def shorten(value: Any) -> str:
    """A value that may be anybody's, on one line and not long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def _check_kind(where: str, value: Any, f: dataclasses.Field) -> None:
    """Refuse a value of another kind than the field's."""
    kind = str(f.type)
    if value is None and "None" in kind:
        return
    if kind.startswith("bool"):
        ok = isinstance(value, bool)
    elif kind.startswith("int"):
        ok = isinstance(value, int) and not isinstance(value, bool)
    elif kind.startswith("float"):
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        ok = ok and math.isfinite(value)
    elif kind.startswith("Mapping"):
        ok = isinstance(value, dict) and all(
            isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
            for v in value.values()
        )
    else:
        ok = isinstance(value, str)
    if not ok:
        raise UserError(
            f"{where}={shorten(value)} is not a {kind.split(' ')[0].split('[')[0].lower()}"
        )


def load_config(path: Path) -> Config:
    """Read a saved config.json."""
    try:
        data = read_json(path, follow=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    return config_from_dict(data, str(path))
