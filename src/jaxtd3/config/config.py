"""A whole run as one frozen value: sections, flat overrides, JSON both ways.

The sections are in `sections.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtd3.config.sections import (
    DERIVED,
    SECTIONS,
    AgentConfig,
    EnvConfig,
    LoopConfig,
    ReplayConfig,
    RunConfig,
)
from jaxtd3.durable import read_json, write_whole
from jaxtd3.errors import UserError, nearest


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

    def resolved(self) -> Config:
        """A copy whose schedules have lengths: those that are None last for the whole run."""
        each = {name: self.value(counted) for name, counted in DERIVED.items()}
        lengths = {name: self.run.iterations * n for name, n in each.items()}
        return self.override({k: v for k, v in lengths.items() if self.value(k) is None})

    def value(self, name: str) -> Any:
        """The value of a field, named as `gamma` or `agent.gamma`."""
        section, leaf = find_field(name)
        return getattr(getattr(self, section), leaf)

    def by_name(self) -> dict[str, Any]:
        """Every field of every section by its short name."""
        sections = (getattr(self, section) for section in SECTIONS)
        return {f.name: getattr(s, f.name) for s in sections for f in dataclasses.fields(s)}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")


INT32, INT64, FLOAT32 = 2**31 - 1, 2**63 - 1, 3.4e38
LONG = ("seed", *(name.split(".")[1] for name in DERIVED))
"""Never an int32 in the program."""


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


def check_kinds(where: str, values: Mapping[str, Any]) -> None:
    """Refuse values that are of another kind than the fields they are for."""
    for name, value in values.items():
        section, leaf = find_field(name)
        kinds = {f.name: f for f in dataclasses.fields(SECTIONS[section])}
        _check_kind(f"{where}: {name}", value, kinds[leaf])


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
