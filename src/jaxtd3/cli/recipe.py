"""`jaxtd3 train --recipe deploy`: a run in stages, each from the weights of the one before.

    RUN/                  the last stage: a run as any other, so every command takes RUN
    RUN/flat/             the stage before it: a run as well
    RUN/stage-flat.json   what each stage begins with; `--resume` needs no other flag
    RUN/stage-all.json

The stages and what they change are in `config/presets.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtd3.cli.main import Train
from jaxtd3.cli.train import ending, settings, train_one
from jaxtd3.config.presets import RECIPES, Stage
from jaxtd3.errors import UserError, nearest

if TYPE_CHECKING:
    from jaxtd3.config.config import Config

SHARED = ("iterations", "max_time")
"""Settings of which each stage gets its share."""
ENDED = ("completed", "time_limit")


class Planned(NamedTuple):
    """One stage of this run."""

    args: Train  # as if it had been asked for by itself
    config: Config
    notes: list[str]
    file: Path  # its settings at the start

    @property
    def folder(self) -> Path:
        assert self.args.run_dir is not None
        return self.args.run_dir


def check_recipe(args: Train) -> None:
    """What can be said of the flags alone."""
    if args.recipe is None:
        return
    if args.recipe not in RECIPES:
        raise UserError(nearest("recipe", args.recipe, RECIPES))
    if args.init_from is not None or args.resume_from is not None:
        flag = "--init-from" if args.init_from is not None else "--resume-from"
        raise UserError(f"--recipe begins from nothing: leave {flag} away")


def recipe_in(run_dir: Path | None) -> str | None:
    """The recipe that a folder was begun with, if any."""
    if run_dir is None:
        return None
    return next((name for name, s in RECIPES.items() if stage_file(run_dir, s[0]).exists()), None)


def stage_file(run_dir: Path, stage: Stage) -> Path:
    return run_dir / f"stage-{stage.name}.json"


def recipe_command(args: Train, given: Mapping[str, Any], recipe: str, run_dir: Path) -> int:
    """Train what is left of the stages; an interrupted one ends the command."""
    from jaxtd3.core import processes
    from jaxtd3.output.rundir import create_run_dir
    from jaxtd3.run.program import build

    begun = recipe_in(run_dir)
    if args.resume and begun is None:
        raise UserError(f"{run_dir} was not begun with --recipe: leave it away")
    plan = [plan_stage(args, given, recipe, i, run_dir) for i in range(len(RECIPES[recipe]))]
    left = [s for s in plan if s is plan[-1] or not has_ended(s.folder)]
    programs = [build(s.config) for s in left]  # what a later stage cannot have is told now
    if begun is None and processes.is_first():
        create_run_dir(run_dir)
        for stage in reversed(plan):  # the first one's says that all are there
            stage.config.save(stage.file)
    summary: dict[str, Any] = {}
    for stage, built in zip(left, programs, strict=True):
        before = plan.index(stage) - 1
        if before >= 0:
            stage = stage._replace(args=with_weights(stage.args, plan[before].folder))
        summary = train_one(stage.config, stage.notes, stage.folder, stage.args, built)
        if summary["status"] not in ENDED:
            break
    return ending(summary, args)


def plan_stage(
    args: Train, given: Mapping[str, Any], recipe: str, index: int, run_dir: Path
) -> Planned:
    """A stage as a run of its own: settings from its saved ones, or from the recipe's."""
    from jaxtd3.output.rundir import CONFIG_FILE
    from jaxtd3.run.program import whole_chunks

    stages = RECIPES[recipe]
    stage, last = stages[index], index == len(stages) - 1
    folder, file = run_dir if last else run_dir / stage.name, stage_file(run_dir, stage)
    resume = args.resume and (folder / CONFIG_FILE).exists()
    known = args.resume and file.exists()
    env = args.env if last or args.env is None else level_ground(args.env)
    config_file = args.config if resume or not known else file
    own = dataclasses.replace(
        args, run_dir=folder, recipe=None, resume=resume, env=env, config=config_file
    )
    asked = {n: share_of(n, x, stage.share) if n in SHARED else x for n, x in given.items()}
    config, notes = settings(own, asked if known else {**stage.changes, **asked})
    if not known:
        values = {name: config.value(name) for name in SHARED if name not in given}
        shares = {n: share_of(n, x, stage.share) for n, x in values.items() if x is not None}
        config, more = whole_chunks(config.override(shares))
        notes += more
    note = f"stage {index + 1} of {len(stages)} of --recipe {recipe}: {stage.about}"
    return Planned(own, config, [note, *notes], file)


def share_of(name: str, total: Any, share: float) -> Any:
    """A stage's part of the iterations, or of the time."""
    return max(1, round(total * share)) if name == "iterations" else total * share


def level_ground(env: str) -> str:
    """The same robot's environment on flat ground, if it has one."""
    from jaxtd3.envs import env_names

    flat = env.replace("RoughTerrain", "FlatTerrain")
    return flat if flat in env_names() else env


def has_ended(folder: Path) -> bool:
    """Whether a run was trained to its end."""
    from jaxtd3 import durable
    from jaxtd3.output.rundir import SUMMARY_FILE

    try:
        return durable.read_json(folder / SUMMARY_FILE)["status"] in ENDED
    except durable.UNREADABLE:
        return False


def with_weights(args: Train, before: Path) -> Train:
    """A stage that begins with the best weights of the one before it."""
    from jaxtd3.run.load import best_checkpoint

    try:
        source = best_checkpoint(before)
    except UserError:  # never evaluated: the last there is
        source = before
    return dataclasses.replace(args, init_from=source)
