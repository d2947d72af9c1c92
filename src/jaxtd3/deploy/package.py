"""`jaxtd3 export --controller` writes a controller and what belongs to it; `--check` tests one.

controller.onnx         the controller, its metadata inside
controller.trace.npz    200 recorded steps: any runtime can test itself against them
deploy.yaml             the metadata again, to be read by people
robot.xml               with --with-model: the robot's physics for MuJoCo, without its meshes
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtd3 import __version__
from jaxtd3.durable import whole_files
from jaxtd3.errors import UserError

if TYPE_CHECKING:
    from jaxtd3.deploy.runtime import Controller
    from jaxtd3.run.load import Trained

SUFFIX, TRACE_SUFFIX = ".onnx", ".trace.npz"
YAML_FILE, MODEL_FILE, ROBUSTNESS_FILE = "deploy.yaml", "robot.xml", "robustness.json"
NUMBERS = 1e-6
"""Largest difference of a number in the metadata from the model's."""


def trace_path(path: Path) -> Path:
    """The trace that belongs to a controller: controller.trace.npz beside controller.onnx."""
    return path.with_name(path.stem + TRACE_SUFFIX)


# --- writing ------------------------------------------------------------------------------------


def controller_of(trained: Trained, more: Mapping[str, Any] | None = None) -> Controller:
    """The controller of a policy, in memory; `more` adds to its metadata."""
    import jax

    from jaxtd3.deploy.controller import describe_controller
    from jaxtd3.deploy.controller_onnx import build_controller
    from jaxtd3.deploy.robot import describe_robot, kind_of
    from jaxtd3.deploy.runtime import Controller
    from jaxtd3.run.policy import policy_sha256

    env, config = trained.env, trained.config
    kind_of(config.env.name)
    robot = describe_robot(config.env.name, playground_of(trained))
    bounds = getattr(env.env, "bounds", None)
    hidden, history = observed_by(config.env)
    about = describe_controller(robot, env.spec, bounds, hidden, history)
    about |= {"algo": config.algo, "source": trained.source, "note": trained.note}
    about["policy_sha256"] = policy_sha256(trained.state, config.env.name)
    about["jaxtd3_version"] = __version__
    about |= dict(more or {})
    state = jax.device_get(trained.state)
    content = build_controller(about, env.spec, state, config.agent, bounds)
    controller = Controller(content)
    controller.about = {name: controller.about[name] for name in about}  # in this order
    return controller


def playground_of(trained: Trained) -> Any:
    """Playground's own environment, which has the robot's MuJoCo model."""
    return trained.env.env.unwrapped  # type: ignore[attr-defined]


def observed_by(settings: Any) -> tuple[tuple[str, ...], int]:
    """What of the observation the policy does not see, and how many it sees at once."""
    hidden = getattr(settings, "actor_hides", ()) or ()
    hidden = hidden.split(",") if isinstance(hidden, str) else hidden
    return tuple(hidden), int(getattr(settings, "history", 1) or 1)


def policy_of(trained: Trained) -> Callable[[np.ndarray], np.ndarray]:
    """The policy in JAX: act(observations [B, D]) -> actions [B, U] in the environment's units."""
    import jax
    import jax.numpy as jnp

    from jaxtd3.agent.td3 import fast_td3
    from jaxtd3.envs.playground.bounds import stretch

    spec, bounds = trained.env.spec, getattr(trained.env.env, "bounds", None)
    agent = fast_td3(spec, dataclasses.replace(trained.config.agent, compute="f32"))

    @jax.jit
    def act(obs: Any) -> Any:
        privileged = jnp.zeros((obs.shape[0], spec.width - spec.obs_size))  # the critic's alone
        action = agent.act(trained.state, jnp.concatenate([obs, privileged], axis=1))
        return action if bounds is None else stretch(bounds, action)

    def call(obs: np.ndarray) -> np.ndarray:
        with jax.default_matmul_precision("highest"):
            return np.asarray(act(obs))

    return call


def write_controller(run: Path, out: Path, best: bool, note: str | None, with_model: bool) -> int:
    """The controller of a run or a policy, and what belongs to it; `with_model`: its robot too."""
    from jaxtd3.deploy.trace import TOLERANCE, largest_jump, record_trace, replay_error, save_trace
    from jaxtd3.run.load import load as load_trained

    check_out(out)
    known_robot(run)
    more: dict[str, Any] = {} if note is None else {"note": note}
    trained = load_trained(run, best, impl="native", num_envs=1)
    fared = find_robustness(run, trained)
    if fared is not None:
        more["robustness"] = fared
    controller = controller_of(trained, more)
    model = playground_of(trained).mj_model
    trace = record_trace(controller.about, model, policy_of(trained))
    more["target_jump"] = largest_jump(controller.about, trace)
    controller = controller_of(trained, more)
    error = replay_error(controller, trace)
    if not error <= TOLERANCE:
        raise UserError(f"the controller differs from JAX by {error:.1e}: nothing written")
    robot = playground_of(trained) if with_model else None
    with whole_files(out.parent) as folder:
        (folder / out.name).write_bytes(controller.content)
        save_trace(folder / trace_path(out).name, trace)
        (folder / YAML_FILE).write_text(yaml_text(controller.about))
        if robot is not None:
            from jaxtd3.deploy.model_file import write_model

            write_model(robot, folder, MODEL_FILE, controller.about["robot_licence"])
        names = sorted(path.name for path in folder.iterdir())
    print(f"{out}: {controller.about['robot']}, differs from JAX by {error:.1e} at most")
    print(f"beside it: {', '.join(name for name in names if name != out.name)}")
    print(describe_robustness(fared))
    return 0


def check_out(out: Path, what: str = "a controller", suffixes: Sequence[str] = (SUFFIX,)) -> None:
    """Refuse a place that cannot be written to before anything is loaded."""
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is not a folder")
    if out.suffix not in suffixes:
        raise UserError(f"{what} is an {' or '.join(suffixes)} file: {out} is not")
    if out.is_dir():
        raise UserError(f"{out} is a folder")


def known_robot(run: Path) -> None:
    """Refuse a policy of a robot that no controller can be written for, before it is loaded."""
    from jaxtd3.deploy.robot import kind_of
    from jaxtd3.run.load import trained_env

    kind_of(trained_env(run))


def read_robustness(folder: Path) -> dict[str, Any] | None:
    """The summary of robustness.json in a folder, if it stands there."""
    path = folder / ROBUSTNESS_FILE
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text())["summary"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: write it anew or remove it") from error


def find_robustness(run: Path, trained: Trained) -> dict[str, Any] | None:
    """How a policy fared: as a robustness.json of it says, else its checkpoint or its own file.

    The file stands in a run's folder; for a policy file beside that or in the working folder.
    """
    from jaxtd3.run.policy import find_policy, policy_sha256

    file, digest = find_policy(run), policy_sha256(trained.state, trained.config.env.name)
    folders = [run] if file is None else [file.parent, Path()]
    for folder in {folder.resolve(): folder for folder in folders}.values():  # each once
        tested = read_robustness(folder)
        if tested is not None and tested.get("policy_sha256") == digest:
            return tested
        if tested is not None:
            reason = f"is of {tested.get('policy')}, not of this {trained.source}: left out"
            print(f"{folder / ROBUSTNESS_FILE} {reason}")
    return dict(trained.robustness) if isinstance(trained.robustness, Mapping) else None


def describe_robustness(fared: Mapping[str, Any] | None) -> str:
    """One line on how a policy fared."""
    if fared is None:
        return "robustness: not known; jaxtd3 robustness tries the policy in other worlds"
    try:
        count = len(fared["by_world"])
        return (
            f"robustness: survives {fared['survival']:.0%} of {count * fared['episodes']} episodes "
            f"in {count} worlds; worst: {fared['worst_world']} ({fared['worst_survival']:.0%})"
        )
    except (KeyError, TypeError, ValueError):  # of another hand
        return "robustness: told in a form that cannot be read"


def yaml_text(about: Mapping[str, Any]) -> str:
    """The metadata as YAML; lists of plain values on one line each."""

    def scalar(value: Any) -> str:
        return json.dumps(value)  # JSON's values are YAML's

    def lines(value: Any, indent: str) -> list[str]:
        found = []
        for name, x in value.items():
            name = name if name.isidentifier() else scalar(name)
            if isinstance(x, Mapping) and x:
                found += [f"{indent}{name}:", *lines(x, indent + "  ")]
            elif isinstance(x, list) and x and isinstance(x[0], Mapping):
                found.append(f"{indent}{name}:")
                found += [f"{indent}  - {scalar(item)}" for item in x]
            else:
                found.append(f"{indent}{name}: {scalar(x)}")
        return found

    head = "# What the controller beside this file holds in its metadata; see docs/deploy.md."
    return "\n".join([head, *lines(about, "")]) + "\n"


# --- checking -----------------------------------------------------------------------------------


def check_controller(path: Path) -> int:
    """Run `jaxtd3 export --check FILE`: 0 if it answers as recorded and tells the truth, else 1."""
    from jaxtd3.deploy.runtime import load_controller
    from jaxtd3.deploy.trace import TOLERANCE, load_trace, replay_error

    controller = load_controller(path)
    wrong = shapes(controller)
    if not wrong:  # else it cannot be run
        trace = load_trace(trace_path(path), controller)
        error, steps = replay_error(controller, trace), len(trace["in.command"])
        if not error <= TOLERANCE:
            wrong.append(f"differs from its trace by {error:.1e}")
        wrong += differences(controller.about, trace)[:3]
    if wrong:
        print(f"{path}: wrong: {'; '.join(wrong)}")
        return 1
    robot = controller.about["robot"]
    print(f"{path}: good: {robot}, {steps} recorded steps to {error:.1e}, metadata as the model")
    return 0


def differences(about: Mapping[str, Any], trace: Mapping[str, np.ndarray]) -> list[str]:
    """What the metadata says otherwise than the robot's model, the layout or the trace."""
    from jaxtd3.core.types import EnvSpec
    from jaxtd3.deploy.controller import describe_controller
    from jaxtd3.deploy.controller_onnx import ACTION, TARGETS
    from jaxtd3.deploy.robot import describe_robot, load_robot
    from jaxtd3.deploy.trace import largest_jump

    robot = describe_robot(about["env"], load_robot(about["env"]))
    size = int(about["observation"][-1]["stop"]) * int(about["history"])
    spec = EnvSpec(about["env"], size, len(robot["joint_names"]), 1)
    expected = describe_controller(robot, spec, None, about["hidden"], about["history"])
    for name in ("action_low", "action_high"):  # the policy's own: tested below
        del expected[name]
    found = [text for name, x in expected.items() for text in unlike(name, about.get(name), x)]
    found += unlike("joint_names of the trace", trace["joint_names"].tolist(), about["joint_names"])
    action, targets = trace[f"out.{ACTION}"], trace[f"out.{TARGETS}"]
    pose, scale = (np.asarray(about[k]) for k in ("default_pose", "action_scale"))
    if not np.allclose(targets, pose + scale * action, atol=1e-5):
        found.append("joint_targets are not default_pose + action_scale * action")
    reach = scale * action
    low, high = (np.asarray(about[k]) for k in ("action_low", "action_high"))
    if np.any(reach < low - 1e-5) or np.any(reach > high + 1e-5):
        found.append("actions lie beyond action_low and action_high")
    if "target_jump" in about:  # files of earlier versions lack it
        found += unlike("target_jump", about["target_jump"], largest_jump(about, trace))
    return found


def unlike(name: str, given: Any, right: Any) -> list[str]:
    """One line for the first place in which two JSON values differ."""
    if isinstance(right, Mapping) and isinstance(given, Mapping):
        keys = [*right, *(k for k in given if k not in right)]
        return [t for k in keys for t in unlike(f"{name}.{k}", given.get(k), right.get(k))][:1]
    if isinstance(right, list) and isinstance(given, list):
        if len(given) != len(right):
            return [f"{name} has {len(given)} entries, not {len(right)}"]
        pairs = enumerate(zip(given, right, strict=True))
        return [t for i, (a, b) in pairs for t in unlike(f"{name}[{i}]", a, b)][:1]
    number = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (given, right))
    same = abs(given - right) <= NUMBERS if number else given == right
    return [] if same else [f"{name} is {given}, not {right}"]


def shapes(controller: Controller) -> list[str]:
    """Inputs of the graph that are not as the metadata says."""
    about = controller.about
    described = {name: [size] for name, size in about["inputs"].items()} | about["state"]
    real = {node.name: list(node.shape[1:]) for node in controller.session.get_inputs()}
    return unlike("inputs", real, {name: list(shape) for name, shape in described.items()})
