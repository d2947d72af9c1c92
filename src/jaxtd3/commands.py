"""`jaxtd3 evaluate | render | export | envs`: what to do with a run, and what there is to train."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtd3.errors import UserError, nearest

if TYPE_CHECKING:
    from jaxtd3.cli import Envs, Evaluate, Export, Render
    from jaxtd3.config import Config
    from jaxtd3.types import Agent, BatchEnv


class Trained(NamedTuple):
    """A run's policy, ready to act."""

    config: Config
    env: BatchEnv
    agent: Agent
    state: Any  # AgentState
    checkpoint: Path


def load_trained(run: Path, best: bool) -> Trained:
    """The policy of a run's last good checkpoint, or of the one that evaluated best."""

    import jax

    from jaxtd3.checkpoint import locate, restore_agent
    from jaxtd3.config import load_config
    from jaxtd3.envs import make_env
    from jaxtd3.envs.base import undisturbed
    from jaxtd3.rundir import CONFIG_FILE, require_run
    from jaxtd3.td3 import fast_td3

    run = require_run(run).absolute()
    config = load_config(run / CONFIG_FILE)
    checkpoint = best_checkpoint(run) if best else locate(run)[0]
    try:
        env = make_env(undisturbed(config.env))  # as the run's own evaluations
        agent = fast_td3(env.spec, config.agent)
    except ValueError as error:
        raise UserError(str(error)) from error
    template = jax.eval_shape(agent.init, jax.random.key(0))
    return Trained(config, env, agent, restore_agent(checkpoint, template), checkpoint)


def best_checkpoint(run: Path) -> Path:
    """The good checkpoint that was saved with the highest return."""
    from jaxtd3.checkpoint import read_meta, verify

    scores = {}
    for path in (run / "checkpoints").glob("[0-9]*"):
        if not verify(path):
            score = read_meta(path).get("best")
            scores[path] = score if isinstance(score, int | float) else None
    known = {path: score for path, score in scores.items() if score is not None}
    if not known:
        raise UserError(f"{run} has no checkpoint that was evaluated")
    return max(known, key=lambda path: known[path])


def evaluate_command(args: Evaluate, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 evaluate`."""
    import jax

    from jaxtd3.envs.base import reward_weights
    from jaxtd3.evaluate import make_evaluate
    from jaxtd3.parts import run_keys

    if args.episodes is not None and args.episodes < 1:
        raise UserError(f"--episodes {args.episodes} is below 1")
    check_seed(args.seed)
    config, env, agent, state, checkpoint = load_trained(args.run, args.best)
    seed = config.run.seed if args.seed is None else args.seed
    episodes = args.episodes or config.run.eval_episodes
    weights = reward_weights(env.spec, config.env.weights)
    evaluate = make_evaluate(env, agent, episodes)
    found = jax.device_get(evaluate(state, weights, run_keys(seed).evaluate))
    metrics = {name: float(value) for name, value in found.items()}
    if args.json:
        head = {"env": config.env.name, "checkpoint": checkpoint.name, "seed": seed}
        print(json.dumps(head | {"episodes": episodes} | metrics))
        return 0
    print(f"{config.env.name}, checkpoint {checkpoint.name}, {episodes} episodes, seed {seed}")
    for name, value in metrics.items():
        print(f"  {name:<28}{value:12.4f}")
    return 0


def check_seed(seed: int | None) -> None:
    if seed is not None and seed < 0:
        raise UserError(f"--seed {seed} is negative")


def render_command(args: Render, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 render`."""
    from jaxtd3.parts import run_keys
    from jaxtd3.render import check_path, render_video

    check_path(args.out)
    check_seed(args.seed)
    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps} is below 1")
    config, env, agent, state, _ = load_trained(args.run, args.best)
    key = run_keys(config.run.seed if args.seed is None else args.seed).render
    command = list(args.command) or None
    out = render_video(
        env, agent, state, key, args.out, steps=args.steps, command=command, camera=args.camera
    )
    print(out)
    return 0


def export_command(args: Export, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 export`."""
    from jaxtd3.export import export_onnx

    if not args.out.parent.is_dir():
        raise UserError(f"{args.out.parent} is not a folder")
    config, env, _, state, checkpoint = load_trained(args.run, args.best)
    about = {"algo": config.algo, "checkpoint": checkpoint.name}
    error = export_onnx(env, state, config.agent, args.out, about)
    print(f"{args.out}: differs from JAX by {error:.1e} at most")
    return 0


# --- envs ---------------------------------------------------------------------------------------


def envs_command(args: Envs, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 envs`."""
    from jaxtd3.envs import env_names

    names = env_names()
    if args.env is not None and args.env not in names:
        raise UserError(nearest("env", args.env, names))
    chosen = [args.env] if args.env else list(names)
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
    from jaxtd3.envs.registry import reward_kind
    from jaxtd3.presets import preset

    config = preset(name, profile=profile)
    row: dict[str, Any] = {"env": name}
    if not detailed:
        row["reward"] = reward_kind(name)
    else:
        try:
            spec = make_env(config.env).spec
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
    return row | {
        "profile": config.profile,
        "iterations": config.run.iterations,
        "num_envs": config.env.num_envs,
        "batch": config.replay.batch_size,
        "gamma": config.agent.gamma,
    }


def describe_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v:g}" for k, v in value.items()) or "not a weighted sum"
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
