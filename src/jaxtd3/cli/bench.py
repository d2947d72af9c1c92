"""`jaxtd3 bench`: how near to the machine's limits, beside a plain sketch and beside peers.

jaxtd3 bench --env NAME                    times, limits, facts of the compiled program
jaxtd3 bench --env NAME --peers            brax SAC, brax PPO, sbx TD3, EnvPool, same environment
jaxtd3 bench --roofline a100               predicted from counts for a GPU that is not here
jaxtd3 bench --env NAME --scaling          growth with envs, batch, ring, updates, fill
jaxtd3 bench --env NAME --breakdown        the pieces of an iteration, each alone
jaxtd3 bench --env NAME --operations       what the compiled updates spend their time on
jaxtd3 bench --env NAME --over-devices 1,2 growth with devices
jaxtd3 bench --env NAME --population 8     a member's cost beside a single run's
jaxtd3 bench --env NAME --replay-cost      prioritised replay beside uniform
jaxtd3 bench --env NAME --impl native,jax  physics back ends beside C MuJoCo alone, and EnvPool
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxtd3.cli import flags
from jaxtd3.cli.main import Bench, Train
from jaxtd3.errors import UserError, nearest

if TYPE_CHECKING:
    from jaxtd3.config.config import Config

Report = tuple[dict[str, Any], list[str]]
"""What is printed with --json, and without"""

GPU_NAMES = ("a100", "h100", "4090")  # those of roofline.GPUS
BACK_ENDS = ("native", "jax", "warp")


def bench_command(args: Bench, given: Mapping[str, Any]) -> int:
    """Run `jaxtd3 bench`."""
    mode = chosen_mode(args)
    check_arguments(args)
    if args.over_devices:
        from jaxtd3.runtime import split_cpu

        split_cpu(max(device_list(args.over_devices)))
    if args.operations:
        os.environ.setdefault("PJRT_NPROC", "1")  # threads; read when JAX starts
    result, lines = MODES[mode](args, settings(args, given, mode))
    if args.json:
        print(json.dumps(result))
    else:
        print("\n".join(lines))
    return 0


def chosen_mode(args: Bench) -> str:
    """What is asked for; one thing at a time."""
    asked = [name for name in MODES if getattr(args, name, False)]
    named = ["--" + name.replace("_", "-") for name in asked]
    if args.envpool or "," in impl_flag(args):
        asked.append("physics")
        named.append("--envpool" if args.envpool else "--impl with a list")
    if len(asked) > 1:
        raise UserError(f"{' and '.join(named)}: one at a time")
    return asked[0] if asked else "measure"


def impl_flag(args: Bench) -> str:
    """--impl as it was written: a back end, or a list of them."""
    return flags.values_of(args).get("impl", "auto")


def back_ends(text: str) -> list[str]:
    """['native', 'jax'] of 'native,jax', each once; native where none is named."""
    found = ["native"] if text == "auto" else text.split(",")
    for name in found:
        if name not in BACK_ENDS:
            raise UserError(nearest("back end", name, BACK_ENDS))
    return list(dict.fromkeys(found))


def check_arguments(args: Bench) -> None:
    """What can be said of the flags alone."""
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds} is below 1")
    if not 0 < args.seconds < 3600:
        raise UserError(f"--seconds {args.seconds:g} is not between 0 and 3600")
    if args.population is not None and args.population < 2:
        raise UserError(f"--population {args.population} is below 2")
    if args.seeds < 1:
        raise UserError(f"--seeds {args.seeds} is below 1")
    if args.over_devices:
        device_list(args.over_devices)
    if args.roofline is not None and args.roofline not in GPU_NAMES:
        raise UserError(nearest("GPU", args.roofline, GPU_NAMES))
    if args.torch and importlib.util.find_spec("torch") is None:
        raise UserError("--torch: PyTorch is not installed (pip install torch)")
    if args.chunk < 2:
        raise UserError(f"--chunk {args.chunk} is below 2")


def device_list(text: str) -> list[int]:
    """[1, 2, 4] of '1,2,4'."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"--over-devices {text}: write a list such as 1,2,4")
    return found


def settings(args: Bench, given: Mapping[str, Any], mode: str) -> Config:
    """As `jaxtd3 train` would choose them; a roofline is of G1 on a GPU unless told otherwise."""
    from jaxtd3.cli import train

    env, profile = args.env, args.profile
    if mode == "roofline":
        env, profile = env or "G1JoystickFlatTerrain", profile or "gpu"
        given = {"impl": "jax", **given}
    if mode == "physics":  # with the environment's own physics step, unless told otherwise
        given = {"sim_dt": None, **given, "impl": back_ends(impl_flag(args))[0]}
    base = Train(env=env, algo=args.algo, profile=profile, config=args.config)
    config, _ = train.settings(base, given)
    return config


def tell(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


# --- modes --------------------------------------------------------------------------------------


def physics(args: Bench, config: Config) -> Report:
    from jaxtd3.bench import physics

    impls = back_ends(impl_flag(args))
    result = physics.compare(config, impls, args.rounds, args.seconds, args.envpool, tell)
    return result, physics.lines(result)


def from_checkout(module: str, function: str = "command") -> Callable[[Bench, Config], Report]:
    """A mode that is in `benchmarks/`, beside the package: what the documents' figures need."""

    def mode(args: Bench, config: Config) -> Report:
        from jaxtd3.bench.checkout import load_benchmark

        return getattr(load_benchmark(module), function)(args, config, tell)

    return mode


MODES: dict[str, Callable[[Bench, Config], Report]] = {
    "physics": physics,
    "measure": from_checkout("measure"),
    "peers": from_checkout("peers"),
    "roofline": from_checkout("roofline"),
    "scaling": from_checkout("scaling"),
    "breakdown": from_checkout("breakdown"),
    "operations": from_checkout("operations"),
    "over_devices": from_checkout("scaling", "devices_command"),
    "population": from_checkout("population"),
    "replay_cost": from_checkout("replay"),
}
