"""What a sweep trains: from `--grid`, `--random` and `--seeds` to members.

    --grid energy=0,-5e-5 agent.gamma=0.97,0.99      every combination
    --random 8 energy=log:-1e-3:-1e-6                drawn; combined with every point of the grid
    --points FILE                                    a JSON list of combinations, each an object
    --seeds 3                                        each of them with three seeds

A name is a reward term or a setting in which members may differ (`population.TRACED`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtd3.config.config import SECTIONS, Config, field_names, find_field
from jaxtd3.core.types import EnvSpec
from jaxtd3.errors import UserError, nearest
from jaxtd3.loop.population import TRACED, require_traced

Values = Mapping[str, float]
NAME = "name"


class Scale(NamedTuple):
    """A way to sample between two bounds."""

    sample: Callable[[float, float, float], float]
    """sample(low, high, u in [0, 1])"""
    allowed: Callable[[float, float], bool]
    log: bool


def _sample_log(low: float, high: float, u: float) -> float:
    """Both bounds of one sign."""
    return math.copysign(abs(low) ** (1 - u) * abs(high) ** u, low)


SCALES: dict[str, Scale] = {
    "log": Scale(_sample_log, lambda low, high: low * high > 0, True),
    "linear": Scale(lambda low, high, u: low + (high - low) * u, lambda low, high: True, False),
}


@dataclass(frozen=True)
class Range:
    """Where a random value comes from."""

    scale: str
    low: float
    high: float

    def sample(self, u: float) -> float:
        return float(f"{SCALES[self.scale].sample(self.low, self.high, u):.6g}")


@dataclass(frozen=True)
class Space:
    """All that a sweep tries."""

    grid: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    random: Mapping[str, Range] = field(default_factory=dict)
    draws: int = 0
    points: tuple[Mapping[str, Any], ...] = ()
    """Combinations by themselves: values by name, and a `name` to call them by."""
    seeds: int = 1
    trials: int = 0
    """Combinations that Optuna chooses; 0: the grid and the draws."""

    @property
    def names(self) -> tuple[str, ...]:
        of_points = (name for point in self.points for name in point if name != NAME)
        return tuple(dict.fromkeys((*self.grid, *self.random, *of_points)))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    index: int
    group: int
    """Members of one combination, which differ in their seeds alone, are a group."""
    seed: int
    values: Values
    """What it differs in, by name as given."""
    name: str = ""
    """What its combination was called."""


# --- reading ------------------------------------------------------------------------------------


def read_number(flag: str, text: str, token: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{flag} {token}: {text!r} is not a number") from None
    if not math.isfinite(value):
        raise UserError(f"{flag} {token}: {text} is not finite")
    return value


def read_pairs(flag: str, groups: Iterable[Sequence[str]], form: str) -> dict[str, str]:
    """{'energy': '0,-5e-5'} of 'energy=0,-5e-5'; each name once."""
    pairs: dict[str, str] = {}
    for group in groups:
        if not group:
            raise UserError(f"{flag} is empty: write {form}")
        for token in group:
            name, equals, text = token.partition("=")
            if not name or not equals or not text:
                raise UserError(f"{flag} {token}: write {form}")
            if name in pairs:
                raise UserError(f"{flag} names {name} twice")
            pairs[name] = text
    return pairs


def read_grid(groups: Iterable[Sequence[str]]) -> dict[str, tuple[float, ...]]:
    """Values by name."""
    grid = {}
    for name, text in read_pairs("--grid", groups, "NAME=VALUE,VALUE,...").items():
        token = f"{name}={text}"
        values = [read_number("--grid", part, token) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise UserError(f"--grid {token}: the same value twice")
        grid[name] = tuple(values)
    return grid


def read_random(groups: Sequence[Sequence[str]], trials: int) -> tuple[int, dict[str, Range]]:
    """How many draws, and the ranges by name; with Optuna there is no number."""
    form = "N NAME=log:LOW:HIGH or NAME=linear:LOW:HIGH"
    tokens = [token for group in groups for token in group]
    counts = [token for token in tokens if "=" not in token]
    if not groups:
        return 0, {}
    if len(tokens) == len(counts):
        raise UserError(f"--random has no range: write {form}")
    pairs = read_pairs("--random", [[token for token in tokens if "=" in token]], form)
    ranges = {name: read_range(f"{name}={text}", text) for name, text in pairs.items()}
    if trials and counts:
        raise UserError(f"--optuna {trials} draws by itself: leave {counts[0]} of --random out")
    if trials:
        return 0, ranges
    if len(counts) != 1 or not counts[0].isdigit() or int(counts[0]) < 1:
        raise UserError(f"--random {' '.join(tokens)}: write {form}")
    return int(counts[0]), ranges


def read_range(token: str, text: str) -> Range:
    parts = text.split(":")
    if len(parts) != 3:
        raise UserError(f"--random {token}: write NAME=log:LOW:HIGH or NAME=linear:LOW:HIGH")
    if parts[0] not in SCALES:
        raise UserError(f"--random {token}: " + nearest("scale", parts[0], SCALES))
    low, high = sorted(read_number("--random", part, token) for part in parts[1:])
    if low == high or not SCALES[parts[0]].allowed(low, high):
        what = "equal" if low == high else "not of one sign"
        raise UserError(f"--random {token}: the bounds are {what}")
    return Range(parts[0], low, high)


def read_points(path: Path | None) -> tuple[dict[str, Any], ...]:
    """The combinations that a file lists."""
    if path is None:
        return ()
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, list) or not data or not all(isinstance(p, dict) for p in data):
        raise UserError(f'{path} is not a list of objects, as [{{"energy": -1e-4}}, ...]')
    for point in data:
        for name, value in point.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (isinstance(value, str) if name == NAME else number and math.isfinite(value)):
                raise UserError(f"{path}: {name}={value!r} is not a number")
    return tuple(data)


def read_space(
    grid: Sequence[Sequence[str]],
    random: Sequence[Sequence[str]],
    seeds: int,
    trials: int,
    points: Path | None = None,
) -> Space:
    """The flags as a space; names are checked by `check_names`, when the environment is known."""
    if seeds < 1:
        raise UserError(f"--seeds {seeds} is below 1")
    if trials < 0:
        raise UserError(f"--optuna {trials} is negative")
    draws, ranges = read_random(random, trials)
    space = Space(read_grid(grid), ranges, draws, read_points(points), seeds, trials)
    both = set(space.grid) & set(space.random)
    if both:
        raise UserError(f"{both.pop()} stands in --grid and in --random")
    if space.points and (space.grid or space.random):
        raise UserError("--points stands alone: neither --grid nor --random goes with it")
    if not space.names and not space.points:
        raise UserError("nothing to sweep: give --grid NAME=VALUE,... or --random N NAME=log:A:B")
    return space


# --- names and members --------------------------------------------------------------------------


def check_names(space: Space, spec: EnvSpec, base: Config) -> None:
    """Refuse names that are neither a reward term nor a traced setting, and values out of range."""
    for name in space.names:
        if name in spec.reward_terms:
            continue
        if name not in field_names():
            if not spec.reward_terms:
                raise UserError(
                    f"{spec.name}'s reward is not a weighted sum: it cannot be re-weighted, "
                    f"and {name!r} is no setting"
                )
            free = [*spec.reward_terms, *sorted(TRACED - {"env.weights", "run.seed"})]
            raise UserError(nearest("reward term or setting", name, free))
        if require_traced(name) == "run.seed":
            raise UserError("sweep over seeds with --seeds N")
    ends = {name: (r.low, r.high) for name, r in space.random.items()}
    for point in space.points:
        member_config(base, spec, without_name(point), base.run.seed)
    for name, values in {**space.grid, **ends}.items():
        for value in values:
            member_config(base, spec, {name: value}, base.run.seed)


def member_config(base: Config, spec: EnvSpec, values: Values, seed: int) -> Config:
    """The settings of a member."""
    weights = {name: value for name, value in values.items() if name in spec.reward_terms}
    changes: dict[str, Any] = {"run.seed": seed}
    for name, value in values.items():
        if name not in weights:
            section, leaf = find_field(name)
            kind = {f.name: str(f.type) for f in dataclasses.fields(SECTIONS[section])}[leaf]
            changes[f"{section}.{leaf}"] = int(value) if kind.startswith("int") else value
    if weights:
        changes["env.weights"] = {**base.env.weights, **weights}
    return base.override(changes)


def without_name(point: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in point.items() if name != NAME}


def combinations(space: Space, seed: int) -> list[dict[str, Any]]:
    """The points, or every point of the grid with every draw."""
    if space.points:
        return [dict(point) for point in space.points]
    rng = np.random.default_rng(seed)
    draws = [
        {name: r.sample(float(rng.random())) for name, r in space.random.items()}
        for _ in range(space.draws)
    ]
    points = [
        dict(zip(space.grid, values, strict=True))
        for values in itertools.product(*space.grid.values())
    ]
    return [{**point, **draw} for point in points for draw in draws or [{}]]


def members_of(
    groups: Sequence[Mapping[str, Any]], seeds: int, seed: int, first: int = 0
) -> list[Member]:
    """Each combination with each seed; groups and members are counted from group `first` on."""
    return [
        Member((first + g) * seeds + s, first + g, seed + s, without_name(values), name)
        for g, values in enumerate(groups)
        for name in [values.get(NAME, "")]
        for s in range(seeds)
    ]


def wave_size(total: int, most: int, multiple: int = 1) -> int:
    """Members per wave: as few waves as `most` allows, all of one size, with little to spare."""
    waves = math.ceil(total / max(most, 1))
    size = math.ceil(total / waves)
    return math.ceil(size / multiple) * multiple


def label(values: Values) -> str:
    """A combination in words."""
    return " ".join(f"{name}={value:g}" for name, value in values.items())


@dataclass(frozen=True)
class Plan:
    """What a sweep trains, as sweep.json keeps it."""

    config: Config
    space: Space
    at_once: int

    def to_dict(self) -> dict[str, Any]:
        space = self.space.to_dict()
        return {"config": self.config.to_dict(), "space": space, "at_once": self.at_once}
