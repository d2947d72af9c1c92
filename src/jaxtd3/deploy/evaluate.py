"""`jaxtd3 train --best robust`: every evaluation tries the policy in all worlds as well.

    evaluate = make_robust_evaluate(program)
    evaluate(agent_state)  ->  the summary of `robustness.json`, with fewer episodes

It is the very controller that would be exported, in C MuJoCo and onnxruntime, whatever physics the
run trains on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtd3.deploy.package import controller_of, playground_of
from jaxtd3.deploy.robot import kind_of
from jaxtd3.deploy.worlds import WORLDS
from jaxtd3.errors import UserError
from jaxtd3.run.load import Trained
from jaxtd3.run.program import Program

if TYPE_CHECKING:
    from jaxtd3.deploy.runtime import Controller

EPISODES, SECONDS = 4, 10.0
"""In every world: 64 episodes take about as long as an evaluation."""


def make_robust_evaluate(program: Program) -> Callable[[Any], dict[str, Any]]:
    """evaluate(agent_state) -> summary, for a run's evaluations.

    A robot or a network that no controller can be written for is the user's error, told at once.
    """
    config = program.config

    def controller(agent_state: Any) -> tuple[Controller, Any]:
        trained = Trained(config, program.eval_env, program.agent, agent_state, "training")
        return controller_of(trained), playground_of(trained).mj_model

    try:
        kind_of(config.env.name)
        controller(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), program.shapes.agent))
    except UserError as error:
        raise UserError(f"--best robust: {error}") from error
    from jaxtd3.deploy.robustness import evaluate_worlds, summarize

    def evaluate(agent_state: Any) -> dict[str, Any]:
        found = evaluate_worlds(
            *controller(agent_state), WORLDS, EPISODES, SECONDS, config.run.seed
        )
        return summarize(found, EPISODES, SECONDS)

    return evaluate
