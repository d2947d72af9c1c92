"""`jaxtd3 sweep`: many reward weightings and settings as one compiled program, ranked fairly."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtd3.cli.main import Sweep, Train
from jaxtd3.errors import UserError

if TYPE_CHECKING:
    from jaxtd3.config.config import Config
    from jaxtd3.run.progress import Progress
    from jaxtd3.sweep.plan import Plan, Space
    from jaxtd3.sweep.waves import SweepProgram, Waves

PLAN_FILE = "sweep.json"
FREE = {  # flags that a resumed sweep may be given anew: none of them changes what is trained
    *("run_dir", "resume", "metric", "pareto", "video", "wandb", "quiet", "json"),
}


def sweep_command(args: Sweep, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 sweep`."""
    from jaxtd3.output.rundir import check_run_dir, default_run_dir
    from jaxtd3.run.progress import make_progress
    from jaxtd3.sweep.results import clean, without_curves

    check_arguments(args, given)
    saved = read_plan(args.run_dir) if args.resume and args.run_dir is not None else None
    config, space, notes = decide(args, given, saved)
    run_dir = args.run_dir or default_run_dir(config.env.name, "sweep", config.run.seed)
    check_run_dir(run_dir, args.resume)
    ui = make_progress(args.quiet, args.json)
    line = None
    try:
        results = run(config, space, notes, run_dir, args, saved, ui)
        line = last_line(results, run_dir)
    finally:
        ui.close(line)
    if args.json:
        import json

        print(json.dumps(clean(without_curves(results)), allow_nan=False))
    return 0


def check_arguments(args: Sweep, given: Mapping[str, Any]) -> None:
    """What can be said of the flags alone, before anything is loaded."""
    from jaxtd3.cli.train import check_arguments as check_train
    from jaxtd3.output.logs import require_loggers
    from jaxtd3.sweep.source import require_optuna

    check_train(as_train(args), given)
    if args.resume and args.run_dir is None:
        raise UserError("--resume needs --run-dir")
    if args.members_at_once is not None and args.members_at_once < 1:
        raise UserError(f"--members-at-once {args.members_at_once} is below 1")
    if args.pareto and len(args.pareto) != 2:
        raise UserError("--pareto takes two metrics")
    if args.optuna:
        require_optuna()
    require_loggers(args.wandb, False)


def as_train(args: Sweep) -> Train:
    """The flags that a sweep shares with a single run."""
    names = ("env", "algo", "profile", "config", "reward", "reward_preset")
    return Train(**{name: getattr(args, name) for name in names})


def read_plan(run_dir: Path) -> Plan | None:
    """The plan that a sweep's directory holds, if any."""
    from jaxtd3 import durable
    from jaxtd3.config.config import config_from_dict
    from jaxtd3.sweep.plan import Plan, Range, Space

    path = run_dir / PLAN_FILE
    if not path.exists():
        return None
    try:
        data = durable.read_json(path)
        space = dict(data["space"])
        space["random"] = {name: Range(**r) for name, r in space["random"].items()}
        space["points"] = tuple(space["points"])
        space["grid"] = {name: tuple(values) for name, values in space["grid"].items()}
        return Plan(
            config_from_dict(data["config"], str(path)), Space(**space), int(data["at_once"])
        )
    except durable.UNREADABLE as error:
        raise UserError(f"{path}: {durable.explain(error)}") from error


def decide(
    args: Sweep, given: Mapping[str, Any], saved: Plan | None
) -> tuple[Config, Space, list[str]]:
    """Settings and space: of the flags, or of the sweep to go on with."""
    from dataclasses import replace

    from jaxtd3.cli.train import compare_saved, settings
    from jaxtd3.run.load import as_now
    from jaxtd3.sweep.plan import read_space

    asked = sorted(set(given) - FREE)
    changed: list[str] = []
    if saved is not None:  # what has changed since can be the code alone
        now = as_now(saved.config)
        changed, saved = compare_saved(saved.config, now), replace(saved, config=now)
    if saved is not None and not asked:
        return saved.config, saved.space, changed
    train = as_train(args)
    if saved is not None and train.env is None:
        train = replace(train, env=saved.config.env.name)
    space = read_space(args.grid, args.random, args.seeds, args.optuna, args.points)
    config, notes = settings(train, given)
    first = {k: v for k, v in config.loop.curriculum_weights.items() if k not in space.names}
    config = config.override({"curriculum_weights": first})  # what is compared counts throughout
    if config.run.best != "return":
        raise UserError("a sweep ranks its members by --metric: give --best return")
    if "eval_every" not in given and args.config is None:
        config = with_curves(config)
    if saved is not None and (
        (config, space) != (saved.config, saved.space)
        or args.members_at_once not in (None, saved.at_once)
    ):
        flags = ", ".join("--" + name.replace("_", "-") for name in asked)
        raise UserError(f"a resumed sweep keeps its settings: leave {flags} out")
    return config, space, notes + changed


def with_curves(config: Config) -> Config:
    """Five evaluations at least: a shortened run shall have curves too."""
    run = config.run
    fifth = max(run.iterations // 5 // run.log_every, 1) * run.log_every
    return config.override({"eval_every": fifth}) if run.eval_every > fifth else config


# --- running ------------------------------------------------------------------------------------


def run(
    config: Config,
    space: Space,
    notes: list[str],
    run_dir: Path,
    args: Sweep,
    saved: Plan | None,
    ui: Progress,
) -> dict[str, Any]:
    """Load, tell, check, train, rank, report."""
    from jaxtd3.cli.train import describe
    from jaxtd3.envs.metrics import choose_metric, load_metric
    from jaxtd3.sweep.plan import check_names
    from jaxtd3.sweep.waves import load_sweep

    ui.update(title=f"{config.env.name} · sweep")
    ui.stage("loading")
    asked = [name for name in (args.metric, *args.pareto) if name and ":" in name]
    extra = dict(load_metric(name) for name in asked)
    program = load_sweep(config, extra)
    check_names(space, program.parts.env.spec, config)
    own = lambda name: name.partition(":")[2] if name and ":" in name else name  # noqa: E731
    metric = choose_metric(own(args.metric), program.metrics)
    pair = [choose_metric(own(name), program.metrics) for name in args.pareto]
    pair = pair or [metric, next(n for n in other_metrics(metric) if n in program.metrics)]
    for line in [*notes, *describe(config)]:
        ui.note(line)
    plan = saved or make_plan(config, space, program, args.members_at_once)
    return Session(plan, program, metric, (pair[0], pair[1]), run_dir, args, ui).run()


def other_metrics(metric: str) -> list[str]:
    """What the Pareto plot sets against the metric, where nothing is asked for."""
    usual = ["energy_per_metre", "action_rate", "default_reward", "survival"]
    return [name for name in usual if name != metric]


def make_plan(config: Config, space: Space, program: SweepProgram, at_once: int | None) -> Plan:
    """How many members are trained at once: as asked, or as memory allows."""
    import jax

    from jaxtd3.sweep.plan import Plan, combinations, wave_size
    from jaxtd3.sweep.waves import most_members

    groups = space.trials or len(combinations(space, config.run.seed))
    most = most_members(program) if at_once is None else at_once
    most = min(most, groups * space.seeds)
    if space.trials:  # Optuna learns between waves: a few of them, whole groups each
        if at_once is None:
            most = min(most, max(4, math.ceil(space.trials / 4)) * space.seeds)
        return Plan(config, space, max(most // space.seeds, 1) * space.seeds)
    devices = config.run.devices or jax.device_count()
    return Plan(config, space, wave_size(groups * space.seeds, most, devices))


class Session:
    """One sweep on the host."""

    def __init__(
        self, plan: Plan, program: SweepProgram, metric: str, pair, run_dir: Path, args, ui
    ):
        self.plan, self.program, self.metric, self.pair = plan, program, metric, pair
        self.run_dir, self.args, self.ui = run_dir.absolute(), args, ui
        self.started = time.perf_counter()

    def run(self) -> dict[str, Any]:
        """Train every wave that is not there yet, and tell what was found."""
        from jaxtd3.output.rundir import create_run_dir
        from jaxtd3.run.checkpoint import RunLock
        from jaxtd3.run.signals import StopSignals
        from jaxtd3.sweep.results import write_json
        from jaxtd3.sweep.waves import Waves

        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(StopSignals(self.ui.note))
            create_run_dir(self.run_dir)
            stack.enter_context(RunLock(self.run_dir))
            if not (self.run_dir / PLAN_FILE).exists():
                write_json(self.run_dir / PLAN_FILE, self.plan.to_dict())
            waves = Waves(self.program, self.plan.at_once, self.run_dir, self.ui, self.mesh())
            members, status = self.loop(waves, stop)
            return self.finish(waves, members, status)

    def mesh(self) -> Any:
        """Devices to spread members over, where there are several."""
        import jax

        from jaxtd3.core.sharding import make_mesh

        devices = self.plan.config.run.devices or jax.device_count()
        if devices == 1 or self.plan.at_once % devices:
            return None
        return make_mesh(devices)

    def loop(self, waves: Waves, stop: Any) -> tuple[list[dict], str]:
        """Every wave, in order: (members found, status)."""
        from jaxtd3.sweep.source import make_source

        high = self.program.metrics[self.metric].high
        source = make_source(self.plan, self.run_dir, self.metric, high)
        iterations = self.plan.config.run.iterations
        waves_text = f"{source.waves} wave" + ("s" if source.waves > 1 else "")
        self.ui.note(f"{source.total} members, {self.plan.at_once} at once, {waves_text}")
        found: list[dict] = []
        for number in range(source.waves):
            members = source.wave(number)
            there = waves.read(number, members)
            if there is None:
                waves.total = max(waves.total, (source.waves - number) * iterations)
                there = waves.train(number, members, stop)
                if there is None:
                    return found, "interrupted"
                self.log_wave(there)
            else:
                self.ui.note(f"wave {number + 1} of {source.waves} is there already")
            source.tell(there)
            found += there
            self.tell_wave(number, source.waves, there)
        return found, "completed"

    def tell_wave(self, number: int, count: int, found: list[dict]) -> None:
        from jaxtd3.sweep.results import sort_key

        high = self.program.metrics[self.metric].high
        best = min(found, key=lambda m: sort_key(m["metrics"][self.metric], high))
        value = best["metrics"][self.metric]
        shown = "not finite" if value is None else f"{value:.4g}"
        self.ui.note(f"wave {number + 1} of {count}: best {self.metric} {shown} ({best['label']})")

    def log_wave(self, found: list[dict]) -> None:
        """One run of Weights & Biases per member, grouped by the sweep."""
        if not self.args.wandb:
            return
        from jaxtd3.output.logs import WandbLog, read_rows
        from jaxtd3.output.rundir import METRICS_FILE

        for member in found:
            folder = self.run_dir / member["path"]
            try:
                name, group = f"{member['index']:03d}", self.run_dir.name
                log = WandbLog(self.run_dir, member["config"], name, group)
                for row in read_rows(folder / METRICS_FILE):
                    log.write(row)
                log.close({**member["values"], **member["metrics"]}, None)
            except Exception as error:  # a logger never fails the sweep
                self.ui.note(f"wandb: {error}")
                return

    def finish(self, waves: Waves, members: list[dict], status: str) -> dict[str, Any]:
        """Results and report of what is there."""
        from jaxtd3.sweep.report import write_sweep_report
        from jaxtd3.sweep.results import summarize, write_results

        members = sorted(members, key=lambda m: m["index"])
        plan = self.plan.to_dict()
        results = summarize(plan, members, self.program.metrics, self.metric, self.pair)
        results |= {
            "status": status,
            "traces": waves.traces,
            "at_once": self.plan.at_once,
            "seconds": time.perf_counter() - self.started,
            "times": dict(waves.clock.seconds),
        }
        if not members:
            return results
        write_results(self.run_dir, results)
        videos: list[Path] = []
        if self.args.video and status == "completed":
            videos = self.film(results)
        self.ui.update(stage="report")
        try:
            write_sweep_report(self.run_dir, results, videos)
        except Exception as error:  # what was trained is not lost for a picture
            self.ui.note(f"no report: {' '.join(str(error).split())}")
        return results

    def film(self, results: Mapping[str, Any]) -> list[Path]:
        """The best three; told in one line where there is nothing to draw with."""
        from jaxtd3.sweep.report import film_best

        self.ui.update(stage="video")
        try:
            return film_best(self.program, self.run_dir, results)
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            self.ui.note(said if said.startswith("no ") else f"no video: {said}")
            return []


def last_line(results: Mapping[str, Any], run_dir: Path) -> str:
    """How it went, and the flags of the best."""
    if not results["members"]:
        return f"{results['status']}: no wave was finished; --resume starts over: {run_dir}"
    best, metric = results["best"], results["metric"]
    value = best["metrics"][metric]
    shown = "not finite" if value is None else f"{value:.4g}"
    return (
        f"{results['status']}: {len(results['members'])} members in {results['seconds']:.0f} s, "
        f"best {metric} {shown}: {run_dir}\njaxtd3 train --env {results['env']} {best['flags']}"
    )
