"""A trained policy in one line: `jaxtd3.load("runs/mine").act(obs)`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtd3.agent.td3 import fast_td3
from jaxtd3.config.config import Config, load_config
from jaxtd3.core.types import Agent, Array, BatchEnv
from jaxtd3.envs import make_env
from jaxtd3.envs.batch import undisturbed
from jaxtd3.envs.registry import sha256_of
from jaxtd3.envs.source import located
from jaxtd3.errors import UserError
from jaxtd3.output.rundir import CONFIG_FILE, require_run
from jaxtd3.run.checkpoint import locate, read_meta, restore_agent, verify
from jaxtd3.run.policy import fill_agent, find_policy, read_policy


class Trained(NamedTuple):
    """A policy, ready to act."""

    config: Config
    env: BatchEnv
    agent: Agent
    state: Any  # AgentState
    source: str  # what it was read from
    note: str = ""  # what a policy file says of itself
    robustness: Any = None  # how it fared in other worlds, if its file or checkpoint says so

    def act(self, obs: Array) -> Array:
        """The action for an observation of the environment: [D] -> [U], or [B, D] -> [B, U]."""
        obs = jnp.asarray(obs)
        return self.agent.act(self.state, obs) if obs.ndim > 1 else self.act(obs[None])[0]


def load(run: str | Path, best: bool = False, **changes: Any) -> Trained:
    """The policy of a file, of a shipped name, of a run's last good checkpoint or its best one.

    `changes` are settings of the environment that it shall act in.
    """
    run = Path(run)
    file = find_policy(run)
    if file is not None:
        if best:
            raise UserError("--best chooses a run's checkpoint: leave it away for a policy file")
        policy = read_policy(file)
        config = policy.config
    else:
        run = require_run(run).absolute()
        config = load_config(run / CONFIG_FILE)
        checkpoint = best_checkpoint(run) if best else locate(run)[0]
    config = config.override({"impl": "auto", "physics_threads": 0})  # another machine's choice
    config = config.override({"name": located(config.env.name, file or run)})
    try:
        quiet = undisturbed(config.env)  # as the run's own evaluations
        env = make_env(dataclasses.replace(quiet, **changes))
        agent = fast_td3(env.spec, config.agent)
    except ValueError as error:
        raise UserError(str(error)) from error
    template = jax.eval_shape(agent.init, jax.random.key(0))
    if file is not None:
        state = fill_agent(policy, template, file.name)
        note, fared = str(policy.about.get("note", "")), policy.about.get("robustness")
        return Trained(config, env, agent, state, file.name, note, fared)
    state = restore_agent(checkpoint, template)
    fared = read_meta(checkpoint).get("robustness")
    return Trained(config, env, agent, state, f"checkpoint {checkpoint.name}", "", fared)


def best_checkpoint(run: Path) -> Path:
    """The good checkpoint that was saved with the highest score (`--best`: return, or robust)."""
    scores = {}
    for path in (run / "checkpoints").glob("[0-9]*"):
        if not verify(path):
            score = read_meta(path).get("best")
            scores[path] = score if isinstance(score, int | float) else None
    known = {path: score for path, score in scores.items() if score is not None}
    if not known:
        raise UserError(f"{run} has no checkpoint that was evaluated")
    return max(known, key=lambda path: known[path])


def trained_env(run: Path) -> str:
    """The environment that a policy was trained in."""
    file = find_policy(run)
    if file is not None:
        return located(read_policy(file).config.env.name, file)
    return located(load_config(require_run(run) / CONFIG_FILE).env.name, run)


def as_now(config: Config) -> Config:
    """Settings with the digest that the environment's code has now."""
    return config.override({"source_sha256": sha256_of(config.env.name)})
