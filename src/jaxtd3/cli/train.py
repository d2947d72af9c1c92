"""`python -m jaxtd3.train`: from flags to settings, from settings to a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtd3.cli.main import Train, complain
from jaxtd3.errors import UserError, nearest

if TYPE_CHECKING:
    from jaxtd3.config.config import Config
    from jaxtd3.run.program import Program
    from jaxtd3.run.progress import Progress


def train_command(args: Train, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 train`."""
    from jaxtd3.cli.recipe import recipe_command, recipe_in
    from jaxtd3.output.rundir import check_run_dir, default_run_dir

    check_arguments(args, given)
    if args.run_dir is not None:
        check_run_dir(args.run_dir, args.resume)
    gather_devices(args, given)
    recipe = args.recipe or (recipe_in(args.run_dir) if args.resume else None)
    if recipe is not None:
        run_dir = args.run_dir
        if run_dir is None:
            config, _ = settings(args, given)
            run_dir = default_run_dir(config.env.name, config.algo, config.run.seed)
        return recipe_command(args, given, recipe, agreed(run_dir, args.resume))
    config, notes = settings(args, given)
    run_dir = args.run_dir or default_run_dir(config.env.name, config.algo, config.run.seed)
    return ending(train_one(config, notes, agreed(run_dir, args.resume), args), args)


def agreed(run_dir: Path, resume: bool) -> Path:
    """The first process's run directory, for all."""
    from jaxtd3.core import processes
    from jaxtd3.output.rundir import check_run_dir

    run_dir = Path(processes.from_first(str(run_dir)))
    if processes.is_first():
        check_run_dir(run_dir, resume)
    return run_dir


def train_one(
    config: Config, notes: list[str], run_dir: Path, args: Train, program: Program | None = None
) -> dict[str, Any]:
    """One run, with its progress on the terminal: its summary."""
    from jaxtd3.core import processes
    from jaxtd3.run.progress import make_progress

    ui = make_progress(args.quiet, args.json, silent=not processes.is_first())
    line = None
    try:
        summary = run(config, notes, run_dir, args, ui, program)
        line = last_line(summary, run_dir)
    finally:
        ui.close(line)
    return summary


def ending(summary: Mapping[str, Any], args: Train) -> int:
    """What the command says at the end, and its exit code."""
    from jaxtd3.core import processes
    from jaxtd3.output.logs import dumps

    if args.json and processes.is_first():
        print(dumps(summary))
    if summary["error"]:
        complain(summary["error"])
    code = 1 if summary["status"] == "failed" else 0
    if code and processes.several():
        processes.leave(code)  # the others may be gone: wait for none of them
    return code


def gather_devices(args: Train, given: Mapping[str, Any]) -> None:
    """Before JAX starts: meet other processes, or split the CPU into as many devices as asked."""
    from jaxtd3.core import processes
    from jaxtd3.runtime import split_cpu

    where = args.coordinator, args.num_processes, args.process_id
    if processes.asked(*where):
        processes.join(*where)
    else:
        base = base_config(args)[0]
        split_cpu(given.get("devices", base.run.devices if base is not None else 0))


def check_arguments(args: Train, given: Mapping[str, Any]) -> None:
    """What can be said of the flags alone, before anything is loaded."""
    from jaxtd3.cli.recipe import check_recipe
    from jaxtd3.output.logs import require_loggers

    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name.replace('_', '-')} {value} is not finite")
    if args.resume and args.run_dir is None:
        raise UserError("--resume needs --run-dir")
    sources = [args.resume, args.resume_from is not None, args.init_from is not None]
    if sum(sources) > 1:
        raise UserError("--resume, --resume-from and --init-from exclude each other")
    if args.video_every < 0:
        raise UserError(f"--video-every {args.video_every} is negative")
    check_recipe(args)
    parse_rewards(args.reward)
    parse_rewards(args.reward_first, "--reward-first")
    if args.reward_preset not in (None, "default", "tuned"):
        raise UserError(nearest("reward preset", args.reward_preset, ("default", "tuned")))
    require_loggers(args.wandb, args.tensorboard)


def parse_rewards(groups: Iterable[Iterable[str]], flag: str = "--reward") -> dict[str, float]:
    """{'energy': -1e-4} of 'energy=-1e-4'."""
    weights = {}
    for text in (text for group in groups for text in group):
        term, equals, value = text.partition("=")
        try:
            weights[term] = float(value)
        except ValueError:
            raise UserError(f"{flag} {text}: write TERM=VALUE, as in energy=-0.001") from None
        if not term or not equals or not math.isfinite(weights[term]):
            raise UserError(f"{flag} {text}: the value of {term!r} is not finite")
    return weights


def settings(args: Train, given: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Preset, then file, then flags; and what is worth telling about it."""
    from jaxtd3.config.config import field_names
    from jaxtd3.config.presets import tuned_reward
    from jaxtd3.envs.registry import preset, with_physics
    from jaxtd3.run.program import whole_chunks

    base, saved = base_config(args)
    labels: dict[str, str | None] = {"env": args.env, "algo": args.algo, "profile": args.profile}
    if base is not None:
        own = {"env": base.env.name, "algo": base.algo, "profile": base.profile}
        for name, value in labels.items():
            if value not in (None, own[name]) and (name, value) != ("profile", "auto"):
                raise UserError(f"--{name} {value}: the settings to start from are of {own[name]}")
        labels |= own
    env, algo, profile = labels["env"], labels["algo"] or "fasttd3", labels["profile"] or "auto"
    if env is None:
        hint = "`jaxtd3 envs` lists the environments"
        if args.resume:
            hint = f"no run in {args.run_dir}"
        raise UserError(f"--env is missing: {hint}")
    changes = base.by_name() if base is not None else {}
    known = field_names()
    changes |= {k: v for k, v in given.items() if k in known}
    changes.pop("name", None)
    changes.pop("source_sha256", None)  # of the file as it is now
    config = preset(env, algo, profile, **changes)
    weights = config.env.weights
    if args.reward_preset is not None:
        weights = tuned_reward(env) if args.reward_preset == "tuned" else {}
    asked = parse_rewards(args.reward)
    first = {k: v for k, v in config.loop.curriculum_weights.items() if k not in asked}
    first |= parse_rewards(args.reward_first, "--reward-first")
    config = config.override({"weights": {**weights, **asked}, "curriculum_weights": first})
    config, notes = whole_chunks(dataclasses.replace(config, env=with_physics(config.env)))
    if args.per_device:
        config, more = scaled(config)
        notes += more
    if saved is not None:
        notes += compare_saved(saved, config)
    return config, notes


def scaled(config: Config) -> tuple[Config, list[str]]:
    """Sizes of one device times the devices, and what they are now."""
    from jaxtd3.core.sharding import make_mesh

    count = make_mesh(config.run.devices).size
    sizes = {"num_envs": config.env.num_envs, "batch_size": config.replay.batch_size}
    config = config.override({name: value * count for name, value in sizes.items()})
    ring = config.env.num_envs * config.replay.length
    text = f"per device on {count}: {config.env.num_envs} envs, batch {config.replay.batch_size}"
    return config, [f"{text}, ring of {ring:,} transitions in all"]


def base_config(args: Train) -> tuple[Config | None, Config | None]:
    """The settings to start from, if any; and those of the run to go on with, if any."""
    from jaxtd3.config.config import config_from_dict, load_config
    from jaxtd3.envs.batch import choose_impl
    from jaxtd3.envs.registry import is_own
    from jaxtd3.output.rundir import CONFIG_FILE
    from jaxtd3.run.checkpoint import read_meta

    saved = None
    if args.resume and args.run_dir is not None and (args.run_dir / CONFIG_FILE).exists():
        saved = load_config(args.run_dir / CONFIG_FILE)
    if args.resume_from is not None:
        meta = read_meta(args.resume_from)
        saved = config_from_dict(meta.get("config"), f"{args.resume_from}: config")
    auto = saved is not None and saved.env.impl == "auto" and ":" not in saved.env.name
    if saved is not None and auto and not is_own(saved.env.name):
        # of a time when it meant MJX everywhere
        saved = saved.override({"impl": "warp" if choose_impl("auto") == "warp" else "jax"})
    base = load_config(args.config) if args.config is not None else saved
    return base, saved


def compare_saved(saved: Config, config: Config) -> list[str]:
    """What changed since the run was started; refused where it cannot."""
    from jaxtd3.config.sections import KEPT

    old = {"algo": saved.algo, **saved.by_name()}
    new = {"algo": config.algo, **config.by_name()}
    changed = {k: f"{k}: {old[k]} -> {new[k]}" for k in new if old[k] != new[k]}
    fixed = {"algo", *(name.partition(".")[2] for name in KEPT)}
    refused = [text for name, text in changed.items() if name in fixed]
    if refused:
        raise UserError(f"a resumed run cannot change {'; '.join(refused)}")
    if "source_sha256" in changed:
        was, now = old["source_sha256"][:12] or "not known", new["source_sha256"][:12]
        changed["source_sha256"] = f"the code of {config.env.name}: sha256 {was} -> {now}"
    notes = [f"changed since: {text}" for text in changed.values()]
    if "weights" in changed and not config.replay.store_terms:
        notes.append("the ring keeps rewards under the old weights: --store-terms relabels them")
    return notes


def run(
    config: Config,
    notes: list[str],
    run_dir: Path,
    args: Train,
    ui: Progress,
    program: Program | None = None,
) -> dict[str, Any]:
    """Load, tell, check, train."""
    import jax

    from jaxtd3.run import memory
    from jaxtd3.run.program import build
    from jaxtd3.run.session import Options, Session

    ui.update(title=f"{config.env.name} · {config.algo} · seed {config.run.seed}")
    ui.stage("loading")
    program = program or build(config)
    needs = memory.describe(config, program.env.spec, program.shapes)
    for line in [*notes, *describe(config), *needs]:
        ui.note(line)
    meshes = getattr(program.env.env, "meshes", None)
    if meshes is not None and meshes.robots:
        ui.note(f"meshes: {meshes}")
    physics = getattr(program.env.env, "physics", None)
    if physics is not None:
        ui.note(f"physics: {physics}")
    memory.check(config, program.shapes)
    evaluate_robust = None
    if config.run.best == "robust":
        from jaxtd3.deploy.evaluate import make_robust_evaluate

        evaluate_robust = make_robust_evaluate(program)
    options = Options(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Options)})
    try:
        return Session(program, run_dir, options, ui, evaluate_robust).run()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError("out of memory: lower --num-envs, --length or --batch-size") from error


def describe(config: Config) -> list[str]:
    """The picked settings, in short."""
    from jaxtd3.nets.dense import precision

    run, env, agent, loop = config.run, config.env, config.agent, config.loop
    limit = f" or {run.max_time:g} s" if run.max_time else ""
    changed = ", ".join(f"{term} {weight:g}" for term, weight in env.weights.items())
    reward = [f"reward weights: {changed} (evaluations use the environment's own)"]
    if loop.curriculum_weights:
        first = ", ".join(f"{term} {weight:g}" for term, weight in loop.curriculum_weights.items())
        reward.append(f"until iteration {loop.curriculum // 2:,}: {first}; then slowly as above")
    return [
        f"{env.name}: {config.algo}, profile {config.profile}, seed {run.seed}, "
        f"{run.iterations:,} iterations{limit}",
        f"{env.num_envs} envs, batch {config.replay.batch_size}, {loop.critic_updates} critic and "
        f"{loop.policy_updates} policy updates, actor {agent.actor_hidden}, critics "
        f"{agent.num_critics} x {agent.critic_hidden}, gamma {agent.gamma:g}, "
        f"{config.replay.n_step}-step, {precision(agent.compute)}",
        *(reward if changed else []),
    ]


def last_line(summary: Mapping[str, Any], run_dir: Path) -> str:
    """How it went, in one line."""
    returned = summary["final_return"]
    shown = "no evaluation" if returned is None else f"return {returned:.2f}"
    if returned is not None and summary["best_return"] > returned:
        shown += f" (best {summary['best_return']:.2f})"
    return (
        f"{summary['status']}: {summary['iterations']:,} iterations, {shown}, "
        f"{summary['env_steps_per_second']:,.0f} env steps/s, trained "
        f"{summary['train_seconds']:.1f} s, compiled {summary['compile_seconds']:.1f} s: {run_dir}"
    )
