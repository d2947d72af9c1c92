"""Where the members of a wave come from: a fixed list, or Optuna, which is asked and told in waves.

Optuna's study lives in `DIR/optuna.log` and survives the process; a wave that was asked for and not
finished is trained with the same values when the sweep is resumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from jaxtd3.errors import UserError
from jaxtd3.sweep.plan import SCALES, Member, Plan, combinations, members_of

STUDY_FILE = "optuna.log"


class Source(Protocol):
    """Says what each wave trains."""

    total: int
    """Members in all."""
    waves: int

    def wave(self, number: int) -> list[Member]:
        """Members of a wave; asked for in order."""

    def tell(self, found: Sequence[dict]) -> None:
        """A wave is finished."""


class Fixed:
    """All members are known from the start."""

    def __init__(self, plan: Plan):
        space, seed = plan.space, plan.config.run.seed
        self.members = members_of(combinations(space, seed), space.seeds, seed)
        self.size, self.total = plan.at_once, len(self.members)
        self.waves = math.ceil(self.total / self.size)

    def wave(self, number: int) -> list[Member]:
        return self.members[number * self.size : (number + 1) * self.size]

    def tell(self, found: Sequence[dict]) -> None:
        pass


def require_optuna() -> None:
    if find_spec("optuna") is None:
        raise UserError('--optuna needs optuna: pip install "jaxtd3[sweep]"')


class Searched:
    """Optuna chooses the combinations of a wave, knowing how the ones before did."""

    def __init__(self, plan: Plan, run_dir: Path, metric: str, high: bool):
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space, self.seed, self.metric = plan.space, plan.config.run.seed, metric
        self.groups = plan.at_once // plan.space.seeds
        self.total = plan.space.trials * plan.space.seeds
        self.waves = math.ceil(plan.space.trials / self.groups)
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(run_dir / STUDY_FILE))),
            study_name="sweep",
            direction="maximize" if high else "minimize",
            load_if_exists=True,
        )
        self.optuna = optuna
        asked = self.study.user_attrs.get("metric", metric)
        if asked != metric:
            raise UserError(f"this search is for {asked}: it cannot go on for {metric}")
        self.study.set_user_attr("metric", metric)

    def wave(self, number: int) -> list[Member]:
        """The trials of a wave, from the study where they were asked for already."""
        first = number * self.groups
        count = min(self.groups, self.space.trials - first)
        # A sampler per wave: its suggestions depend on study and wave, not on the process.
        self.study.sampler = self.optuna.samplers.TPESampler(
            seed=self.seed + number, constant_liar=True
        )
        while len(self.study.trials) < first + count:
            self.study.ask(self.distributions())
        trials = self.study.trials[first : first + count]
        groups = [self.values(trial.params) for trial in trials]
        return members_of(groups, self.space.seeds, self.seed, first)

    def distributions(self) -> dict[str, Any]:
        """What Optuna searches: on a log scale, the size of the value."""
        of = self.optuna.distributions
        found = {n: of.CategoricalDistribution(list(v)) for n, v in self.space.grid.items()}
        for name, r in self.space.random.items():
            log = SCALES[r.scale].log
            low, high = sorted((abs(r.low), abs(r.high)) if log else (r.low, r.high))
            found[name] = of.FloatDistribution(low, high, log=log)
        return found

    def values(self, params: dict[str, Any]) -> dict[str, float]:
        """A trial's values; one that a kill left without some takes the middle of the range."""
        values = {n: params.get(n, v[0]) for n, v in self.space.grid.items()}
        for name, r in self.space.random.items():
            value = params.get(name, r.sample(0.5))
            value = math.copysign(value, r.low) if SCALES[r.scale].log else value
            values[name] = float(f"{value:.6g}")
        return values

    def tell(self, found: Sequence[dict]) -> None:
        """The mean over seeds of each trial that still runs, as the study knows it."""
        running = self.optuna.trial.TrialState.RUNNING
        for group in dict.fromkeys(m["group"] for m in found):
            if self.study.trials[group].state != running:
                continue
            values = [m["metrics"][self.metric] for m in found if m["group"] == group]
            if any(value is None for value in values):
                self.study.tell(group, state=self.optuna.trial.TrialState.FAIL)
            else:
                self.study.tell(group, sum(values) / len(values))


def make_source(plan: Plan, run_dir: Path, metric: str, high: bool) -> Source:
    """Optuna where trials are asked for, else the list."""
    return Searched(plan, run_dir, metric, high) if plan.space.trials else Fixed(plan)
