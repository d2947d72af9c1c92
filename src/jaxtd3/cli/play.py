"""`jaxtd3 play`: which robot, which policy, and where it is shown."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtd3.errors import UserError, nearest

if TYPE_CHECKING:
    from jaxtd3.cli.main import Play
    from jaxtd3.core.types import BatchEnv
    from jaxtd3.play.session import Act, Session

AGENTS = ("zero", "random")


def play_command(args: Play, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 play`."""
    import jax

    check(args)
    jax.config.update("jax_platforms", "cpu")  # C MuJoCo runs there
    from jaxtd3.play.server import PORT, Server
    from jaxtd3.play.window import describe_keys, require_display, run_window

    if args.window:
        require_display()
        session = make_session(args)
        print(describe_keys(), flush=True)
        run_window(session, seconds(args))
        print(session.pace.describe())
        return 0
    server = Server(args.host or "127.0.0.1", PORT if args.port is None else args.port)
    try:
        session = make_session(args)
        server.start(session)
        print(f"{session.spec.name}, {session.about['agent']}: {server.url}", flush=True)
        try:
            session.run(seconds(args))
        except KeyboardInterrupt:
            print()
        finally:
            session.ended = True
            server.shutdown()
        print(f"{session.pace.describe()}; {server.frames_sent} frames sent")
    finally:
        server.server_close()
    return 0


def seconds(args: Play) -> float:
    return math.inf if args.seconds is None else args.seconds


def check(args: Play) -> None:
    """Refuse what can be seen to be wrong before anything is loaded."""
    if args.agent is not None and args.agent not in AGENTS:
        raise UserError(nearest("agent", args.agent, AGENTS))
    if args.run is None and args.env is None:
        raise UserError("nothing to play: name a run or a policy, or an environment with --env")
    if args.run is not None and args.agent is not None:
        raise UserError(f"--agent {args.agent} plays without a policy: leave {args.run} away")
    if args.seconds is not None and not args.seconds > 0:
        raise UserError(f"--seconds {args.seconds:g} is not above 0")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed} is negative")
    if args.host == "":
        raise UserError("--host is empty: name an address, or leave it away for this machine alone")
    if args.window and (args.host is not None or args.port is not None):
        raise UserError("--window opens no port: leave --host and --port away")


def make_session(args: Play) -> Session:
    """The live environment."""
    from jaxtd3.play.session import Session

    env, act, weights, agent = load(args)
    return Session(env, act, args.seed, weights, {"agent": agent})


def load(args: Play) -> tuple[Any, Act, Mapping[str, float], str]:
    """The environment, how to act in it, its reward weights, and a name for what acts."""
    from jaxtd3.cli.policy import tell_changes
    from jaxtd3.run.load import load as load_trained

    if args.run is None:
        return load_untrained(args.env or "", args.agent or "zero")
    changes: dict[str, Any] = {"impl": "native", "physics_threads": 1, "num_envs": 1}
    if args.env is not None:
        check_robot(args.run, args.env)
        changes["name"] = args.env
    config, env, agent, state, source, *_ = load_trained(args.run, args.best, **changes)
    if args.env is None:
        tell_changes(config)
    act = lambda obs, key: agent.act(state, obs[None])[0]  # noqa: E731
    return env, act, config.env.weights, f"{args.run.name} ({source})"


def load_untrained(name: str, agent: str) -> tuple[Any, Act, Mapping[str, float], str]:
    """An environment without a policy: actions of zero, or drawn evenly."""
    import jax
    import jax.numpy as jnp

    env = made(name)
    size = env.spec.action_size
    if agent == "zero":
        return env, lambda obs, key: jnp.zeros(size), {}, "zero actions"
    drawn = lambda obs, key: jax.random.uniform(key, (size,), minval=-1.0)  # noqa: E731
    return env, drawn, {}, "random actions"


def made(name: str) -> BatchEnv:
    """An environment by its name alone, one of it."""
    from jaxtd3.config.sections import EnvConfig
    from jaxtd3.envs import make_env

    try:
        return make_env(EnvConfig(name, num_envs=1, impl="native", physics_threads=1))
    except ValueError as error:
        raise UserError(str(error)) from error


def check_robot(run: Path, env: str) -> None:
    """Refuse to play a policy in an environment of another robot."""
    from jaxtd3.envs.registry import check_env
    from jaxtd3.run.load import trained_env

    check_env(env)
    trained = trained_env(run)
    if robot(trained) != robot(env) or not same_joints(trained, env):
        raise UserError(f"{run} was trained in {trained}: it cannot drive {env}")


def same_joints(trained: str, env: str) -> bool:
    """Whether classes of one name in different files drive the same joints; so does one alone."""
    from jaxtd3.envs.source import find, is_reference

    if trained == env or not (is_reference(trained) and is_reference(env)):
        return True
    try:
        if find(trained).file == find(env).file:
            return True
        was = joints(trained)
    except UserError:  # its file is not there any more: it moved
        return True
    return was == joints(env)


def joints(name: str) -> tuple[int, list[str]]:
    """How many actions an environment takes, and the names of its model's joints."""
    from jaxtd3.output.video import model_of

    env = made(name)
    model = model_of(env)
    names = [] if model is None else [model.joint(i).name for i in range(model.njnt)]
    return env.spec.action_size, names


def robot(env: str) -> str:
    """The same for environments that differ in their ground alone, and for a class that moved."""
    env = env.rpartition(":")[2]
    return re.sub(r"(Flat|Rough)Terrain", "", env)
