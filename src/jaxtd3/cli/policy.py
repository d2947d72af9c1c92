"""`jaxtd3 evaluate | render | export | envs`: what to do with a run, and what there is to train."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtd3.errors import UserError, nearest

if TYPE_CHECKING:
    from jaxtd3.cli.main import Envs, Evaluate, Export, Render
    from jaxtd3.config.config import Config


def evaluate_command(args: Evaluate, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 evaluate`."""
    if args.episodes is not None and args.episodes < 1:
        raise UserError(f"--episodes {args.episodes} is below 1")
    check_seed(args.seed)
    results = [evaluate_on(args, impl) for impl in impl_list(args.impl)]
    if args.json:
        print(json.dumps(results[0] if len(results) == 1 else results))
        return 0
    head = results[0]
    print(f"{head['env']}, {head['policy']}, {head['episodes']} episodes, seed {head['seed']}")
    if head["note"]:
        print(f"  {head['note']}")
    if len(results) > 1:
        print(f"  {'':<28}" + "".join(f"{result['impl']:>12}" for result in results))
    for name in (n for n, value in head.items() if isinstance(value, float) and n != "lost"):
        print(f"  {name:<28}" + "".join(f"{result[name]:12.4f}" for result in results))
    if head["walks"] is not None:
        words = ["yes" if result["walks"] else "no" for result in results]
        print(f"  {'walks':<28}" + "".join(f"{word:>12}" for word in words))
    for result in results:
        if result["lost"]:
            from jaxtd3.run.nonfinite import episodes_lost

            lost, count = result["lost"], result["episodes"]
            print(f"  {result['impl']}: {episodes_lost(lost, count, result['trouble'])}")
    return 0


def impl_list(text: str) -> list[str]:
    """["native", "jax"] of "native,jax", each once; native alone puts JAX on the CPU."""
    import jax

    from jaxtd3.envs.batch import choose_impl

    known = ("auto", "native", "jax", "warp")
    found = text.split(",")
    for name in found:
        if name not in known:
            raise UserError(nearest("impl", name, known))
    if set(found) == {"native"}:
        jax.config.update("jax_platforms", "cpu")  # C MuJoCo runs there
    elif "native" in found and jax.default_backend() != "cpu":
        raise UserError(f"--impl {text}: native runs on a CPU alone, so set JAX_PLATFORMS=cpu")
    return list(dict.fromkeys(map(choose_impl, found)))


def tell_changes(config: Config) -> None:
    """Say on stderr what `train --resume` would say of code that has changed since."""
    from jaxtd3.cli.train import compare_saved
    from jaxtd3.run.load import as_now

    for line in compare_saved(config, as_now(config)):
        print(line, file=sys.stderr)


def evaluate_on(args: Evaluate, impl: str) -> dict[str, Any]:
    """What a policy does on one physics back end."""
    import jax

    from jaxtd3.envs.batch import reward_weights
    from jaxtd3.envs.metrics import walks
    from jaxtd3.envs.registry import physics_of
    from jaxtd3.run.load import load
    from jaxtd3.run.nonfinite import trouble_of
    from jaxtd3.run.program import run_keys
    from jaxtd3.run.rollout import make_evaluate

    changes = {"impl": impl, "sim_dt": args.sim_dt}
    config, env, agent, state, source, note, _ = load(args.run, args.best, **changes)
    if impl == impl_list(args.impl)[0]:
        tell_changes(config)
    seed = config.run.seed if args.seed is None else args.seed
    episodes = args.episodes or config.run.eval_episodes
    weights = reward_weights(env.spec, config.env.weights)
    found = make_evaluate(env, agent, episodes)(state, weights, run_keys(seed).evaluate)
    metrics = {name: float(value) for name, value in jax.device_get(found).items()}
    return {
        "env": config.env.name,
        "policy": source,
        "note": note,
        "impl": physics_of(config.env.name, impl),
        "seed": seed,
        "episodes": episodes,
        "walks": walks(metrics),
        "trouble": trouble_of(env),
        **metrics,
    }


def check_seed(seed: int | None) -> None:
    if seed is not None and seed < 0:
        raise UserError(f"--seed {seed} is negative")


def render_command(args: Render, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 render`."""
    from jaxtd3.output.video import check_path, render_video
    from jaxtd3.run.load import load
    from jaxtd3.run.program import run_keys

    check_path(args.out)
    check_seed(args.seed)
    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps} is below 1")
    config, env, agent, state, *_ = load(args.run, args.best)
    tell_changes(config)
    key = run_keys(config.run.seed if args.seed is None else args.seed).render
    command = list(args.command) or None
    out = render_video(
        env, agent, state, key, args.out, steps=args.steps, command=command, camera=args.camera
    )
    print(out)
    return 0


def export_command(args: Export, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 export`."""
    from jaxtd3.deploy.package import (
        check_controller,
        check_out,
        describe_robustness,
        find_robustness,
        write_controller,
    )
    from jaxtd3.deploy.robot import has_controller
    from jaxtd3.output.onnx import export_onnx
    from jaxtd3.run.load import load
    from jaxtd3.run.policy import SUFFIX, save_policy

    if args.check is not None:
        if args.run is not None or args.controller or args.with_model or args.out is not None:
            raise UserError("--check tests a controller and writes nothing: leave the rest away")
        return check_controller(args.check)
    if args.with_model and not args.controller:
        raise UserError("--with-model belongs to --controller")
    if args.run is None:
        raise UserError("nothing to export: name a run or a policy")
    if args.controller:
        out = args.out or Path("controller.onnx")
        return write_controller(args.run, out, args.best, args.note, args.with_model)
    out = args.out or Path("policy.onnx")
    check_out(out, "a policy", (".onnx", SUFFIX))
    trained = load(args.run, args.best)
    config, source = trained.config, trained.source
    tell_changes(config)
    about: dict[str, Any] = {"algo": config.algo, "source": source}
    fared = find_robustness(args.run, trained)
    if fared is not None:
        about["robustness"] = fared
    if out.suffix == SUFFIX:
        save_policy(out, trained.state, config, about | made_by(args.run, source, args.note))
        print(f"{out}: {out.stat().st_size / 1024:.0f} KiB")
    else:
        error = export_onnx(trained.env, trained.state, config.agent, out, about)
        print(f"{out}: differs from JAX by {error:.1e} at most")
    if fared is not None or has_controller(config.env.name):
        print(describe_robustness(fared))
    return 0


def made_by(run: Path, source: str, note: str | None) -> dict[str, Any]:
    """Where a policy comes from: steps, training time, what the run's evaluation said of it."""
    from jaxtd3.output.logs import read_rows
    from jaxtd3.output.rundir import METRICS_FILE
    from jaxtd3.run.artifacts import versions

    known: dict[str, Any] = {"versions": versions()}
    if note:
        known["note"] = note
    number = source.removeprefix("checkpoint ")
    if run.is_dir() and number.isdigit():
        rows = [r for r in read_rows(run / METRICS_FILE) if r["iteration"] <= int(number)]
        known |= {k: rows[-1][k] for k in ("iteration", "env_steps", "seconds") if rows}
        scores = [r for r in rows if r.get("eval/return") is not None]
        if scores:
            last = scores[-1]
            known["scores"] = {k: v for k, v in last.items() if k.startswith("eval/")}
    return known


# --- envs ---------------------------------------------------------------------------------------


def envs_command(args: Envs, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 envs`."""
    from jaxtd3.envs import env_names
    from jaxtd3.envs.registry import check_env

    if args.env is not None:
        check_env(args.env)
    chosen = [args.env] if args.env else list(env_names())
    detailed = args.details or args.env is not None
    rows = [env_row(name, args.profile, detailed) for name in chosen]
    if args.json:
        print(json.dumps(rows, indent=2))
    elif args.env:
        for name, value in rows[0].items():
            print(f"{name:<16}{describe_value(value)}")
    else:
        print_table(rows)
    return 0


def env_row(name: str, profile: str, detailed: bool) -> dict[str, Any]:
    """What is known of an environment: its preset, and with `detailed` what loading it tells."""
    from jaxtd3.envs import make_env
    from jaxtd3.envs.playground.layout import describe_layout
    from jaxtd3.envs.registry import physics_of, preset, reward_kind
    from jaxtd3.envs.source import entry_points

    try:
        config = preset(name, profile=profile)
        row: dict[str, Any] = {"env": name, "physics": physics_of(name, config.env.impl)}
    except UserError as error:
        if name not in entry_points():
            raise
        return {"env": name, "error": str(error)}  # an installed package that cannot be loaded
    if not detailed:
        row["reward"] = reward_kind(name)
    else:
        try:
            env = make_env(config.env)
            spec = env.spec
        except ValueError as error:
            row["error"] = str(error)
        else:
            row |= {
                "obs": spec.obs_size,
                "privileged": spec.extra_size,
                "actions": spec.action_size,
                "episode": spec.episode_length,
                "reward_terms": dict(zip(spec.reward_terms, spec.default_weights, strict=True)),
            }
            layout = describe_layout(env.env)
            if layout:
                row["layout"] = layout
    return row | {
        "profile": config.profile,
        "iterations": config.run.iterations,
        "num_envs": config.env.num_envs,
        "batch": config.replay.batch_size,
        "gamma": config.agent.gamma,
    }


def describe_value(value: Any) -> str:
    if isinstance(value, dict):
        shown = {k: v if isinstance(v, str) else f"{v:g}" for k, v in value.items()}
        return ", ".join(f"{k}={v}" for k, v in shown.items()) or "not a weighted sum"
    return str(value)


def print_table(rows: list[dict[str, Any]]) -> None:
    """A table on a terminal, tab-separated lines elsewhere."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[describe_value(row.get(name, "")) for name in columns] for row in rows]
    if not sys.stdout.isatty():
        for line in [columns, *cells]:
            print("\t".join(line))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None)
    for line in cells:
        table.add_row(*line)
    Console().print(table)
