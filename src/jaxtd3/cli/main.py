"""The command `jaxtd3`: each subcommand's flags, and one line for every mistake.

Nothing heavy is imported before the arguments are known to be right.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from jaxtd3.cli import flags
from jaxtd3.errors import UserError, nearest
from jaxtd3.runtime import prepare


def shown(metavar: str | None = None) -> Any:
    """How a flag looks in --help: the text says what happens without it."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Name = Annotated[str | None, shown("NAME")]
Folder = Annotated[Path | None, shown("PATH")]
Count = Annotated[int | None, shown("INT")]
Switch = Annotated[bool, shown()]


@dataclass(frozen=True)
class Start:
    """Where settings come from."""

    env: Name = None
    """Environment: as `jaxtd3 envs` lists them, file.py:Class, or package.module:Class."""
    algo: Name = None
    """Algorithm: fasttd3, fasttd3-simbav2, fasttd3-simnorm, pql, pql-d, apex, gorila (fasttd3)."""
    profile: Name = None
    """Hardware to choose sizes for: auto, cpu or gpu (auto)."""
    config: Folder = None
    """Saved config.json to start from."""


@dataclass(frozen=True)
class Train(Start):
    """Train a policy.

    Settings come from the preset of the environment, the algorithm and the hardware; a --config
    file changes them, flags change them last. With --env, --help shows the values of its preset.
    """

    run_dir: Folder = None
    """Folder of the run (runs/ENV-ALGO-SEED-TIME)."""
    resume: Switch = False
    """Go on from the newest good checkpoint in --run-dir."""
    resume_from: Folder = None
    """Go on from this checkpoint, in a new run."""
    init_from: Folder = None
    """Take the weights of this run's policy and critics, and nothing else."""
    recipe: Name = None
    """Several stages in one run: deploy (flat ground; then randomised, pushed and delayed)."""
    checkpoint_replay: Switch = True
    """Keep the replay in checkpoints (on; off: smaller; a resume then collects anew)."""
    reward: Annotated[
        tuple[tuple[str, ...], ...],
        tyro.conf.UseAppendAction,
        shown("TERM=VALUE ..."),
    ] = ()
    """Weights of reward terms, as `jaxtd3 envs --env NAME` lists them."""
    reward_first: Annotated[
        tuple[tuple[str, ...], ...],
        tyro.conf.UseAppendAction,
        shown("TERM=VALUE ..."),
    ] = ()
    """Weights for the first half of --curriculum iterations; they move to --reward's then."""
    reward_preset: Name = None
    """Reward weights to start from: default or tuned."""
    per_device: Switch = False
    """Read --num-envs and --batch-size as sizes of one device, as FastTD3 does."""
    coordinator: Name = None
    """HOST:PORT where several processes meet (SLURM and MPI are recognised without it)."""
    num_processes: Count = None
    """Processes in all, with --coordinator."""
    process_id: Count = None
    """Number of this process, from 0, with --coordinator."""
    video: Switch = True
    """Film the policy at the end."""
    video_every: Annotated[int, shown("INT")] = 0
    """Also film it every so many iterations (0: only at the end)."""
    wandb: Switch = False
    """Log to Weights & Biases, offline where no key is set."""
    tensorboard: Switch = False
    """Write TensorBoard files into the run's folder."""
    quiet: Switch = False
    """Print the last line only."""
    json: Switch = False
    """Print the summary as one JSON object, and nothing else."""


Tokens = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True)
class Sweep(Start):
    """Train many reward weightings and settings as one program, and rank them.

    Members are ranked by a metric that does not depend on their weights; report.html, results.json
    and results.csv in the run's folder tell the rest. Settings come as in `jaxtd3 train`.
    """

    grid: Annotated[Tokens, shown("NAME=V,V ...")] = ()
    """Values to combine, of reward terms (energy=0,-5e-5) and settings (agent.gamma=0.97,0.99)."""
    random: Annotated[Tokens, shown("N NAME=log:A:B ...")] = ()
    """N draws between bounds, on a log or linear scale; no N with --optuna."""
    points: Folder = None
    """JSON file with a list of combinations instead: [{"name": "soft", "energy": -1e-4}, ...]."""
    optuna: Annotated[int, shown("TRIALS")] = 0
    """Let Optuna choose so many combinations out of --grid and --random, wave by wave."""
    seeds: Annotated[int, shown("N")] = 1
    """Seeds per combination, from --seed on (1)."""
    metric: Name = None
    """Metric to rank by, or module:function of your own (tracking_error, or default_reward)."""
    pareto: Annotated[tuple[str, ...], shown("METRIC METRIC")] = ()
    """Two metrics whose Pareto front is drawn."""
    members_at_once: Count = None
    """Members trained together (as many as memory allows)."""
    run_dir: Folder = None
    """Folder of the sweep (runs/ENV-sweep-SEED-TIME)."""
    resume: Switch = False
    """Go on with the sweep in --run-dir: finished waves are not trained again."""
    reward: Annotated[Tokens, shown("TERM=VALUE ...")] = ()
    """Weights of reward terms that all members share."""
    reward_preset: Name = None
    """Reward weights to start from: default or tuned."""
    video: Switch = True
    """Film the best three at the end."""
    wandb: Switch = False
    """Log every member to Weights & Biases, as one group."""
    quiet: Switch = False
    """Print the last lines only."""
    json: Switch = False
    """Print the results as one JSON object, and nothing else."""


@dataclass(frozen=True)
class Trained:
    """A policy."""

    run: Run
    """Folder of a run, a policy file, or the name of a shipped policy."""
    best: Switch = False
    """The checkpoint that evaluated best instead of the last one."""


@dataclass(frozen=True)
class Evaluate(Trained):
    """Run a trained policy without noise, one episode per environment."""

    episodes: Count = None
    """Episodes (as in the run)."""
    seed: Count = None
    """Seed of the episodes (the run's)."""
    impl: Annotated[str, shown("NAMES")] = "auto"
    """Physics back end: auto, native, jax or warp; several, as native,jax, are compared (auto)."""
    sim_dt: Annotated[float | None, shown("FLOAT")] = None
    """Seconds of one physics step (the environment's own)."""
    json: Switch = False
    """Print one JSON object; for several back ends, a list."""


@dataclass(frozen=True)
class Render(Trained):
    """Film a trained policy."""

    out: Annotated[Path, shown()] = Path("video.mp4")
    """File to write, .mp4 or .gif (video.mp4)."""
    steps: Count = None
    """Steps to film (ten seconds' worth)."""
    command: Annotated[tuple[float, ...], shown("X ...")] = ()
    """Command to follow, such as 1 0 0 for walking ahead."""
    camera: Name = None
    """Camera of the model to film with."""
    seed: Count = None
    """Seed of the episode (the run's)."""


@dataclass(frozen=True)
class Play:
    """Drive a policy live, in real time, in a browser.

    Without a policy, --env NAME plays the untrained robot. Sliders and keys give the command; the
    page tells the reward's terms and what the policy observes.
    """

    run: Annotated[Path | None, tyro.conf.Positional, shown("RUN")] = None
    """Folder of a run, a policy file, or the name of a shipped policy."""
    env: Name = None
    """Environment (the policy's own; another ground for the same robot may be named)."""
    agent: Name = None
    """What acts where there is no policy: zero or random (zero)."""
    port: Count = None
    """Port to listen on; 0 takes a free one (8230)."""
    host: Annotated[str | None, shown("ADDRESS")] = None
    """Address to listen on (this machine alone); any other is guarded by a token."""
    window: Switch = False
    """Open a window instead, where there is a display."""
    seconds: Annotated[float | None, shown("S")] = None
    """End after so long (when interrupted)."""
    seed: Annotated[int, shown("INT")] = 0
    """Seed of the first states (0)."""
    best: Switch = False
    """The checkpoint that evaluated best instead of the last one."""


@dataclass(frozen=True)
class Export:
    """Write a trained policy: as ONNX, compared with JAX, or as a small file of its weights.

    With --controller the file takes the robot's sensors and returns joint targets; a trace and
    deploy.yaml are written beside it. --check tests such a file.
    """

    run: Annotated[Path | None, tyro.conf.Positional, shown("RUN")] = None
    """Folder of a run, a policy file, or the name of a shipped policy."""
    out: Annotated[Path | None, shown("PATH")] = None
    """File to write, .onnx or .npz (policy.onnx, or controller.onnx)."""
    note: Annotated[str | None, shown("TEXT")] = None
    """What an .npz or a controller says of itself: how it was made."""
    best: Switch = False
    """The checkpoint that evaluated best instead of the last one."""
    controller: Switch = False
    """Write the whole controller: raw sensors in, joint targets out."""
    with_model: Switch = False
    """With --controller: write robot.xml too, for MuJoCo without Playground."""
    check: Folder = None
    """Test a controller against its trace and the robot's model; exit code 1 if it fails."""


@dataclass(frozen=True)
class Robustness:
    """Try a policy in worlds it was not trained in, in C MuJoCo, through its controller.

    Delay, friction, mass, motor gains, noise, pushes, a slope: who survives, and how well the
    command is followed. Writes robustness.json and robustness.png.
    """

    run: Run
    """Folder of a run, a policy file, the name of a shipped policy, or a controller.onnx."""
    episodes: Count = None
    """Episodes in every world (16: 256 at once over 16 worlds)."""
    seconds: Annotated[float, shown("S")] = 10.0
    """Seconds of an episode (10)."""
    worlds: Annotated[str | None, shown("NAME,NAME")] = None
    """Only these worlds (all)."""
    seed: Annotated[int, shown("INT")] = 0
    """Seed of starts, commands, noise and pushes (0)."""
    out: Folder = None
    """Folder to write into (the run's, or the current one)."""
    best: Switch = False
    """The checkpoint that evaluated best instead of the last one."""
    json: Switch = False
    """Print the results as one JSON object, and nothing else."""


@dataclass(frozen=True)
class New:
    """Write a small package that trains a robot of yours, from its MJCF.

    The MJCF is checked first: what a task needs and does not find is told with the lines to add.
    """

    dir: Annotated[Path, tyro.conf.Positional, shown("DIR")]
    """Folder to make."""
    mjcf: Folder = None
    """The robot's MJCF; files that it names must lie in its folder."""
    task: Annotated[str, shown("NAME")] = "stand"
    """What it shall learn: stand, velocity or reach (stand)."""


@dataclass(frozen=True)
class Envs:
    """List the environments, or tell all about one."""

    env: Name = None
    """Environment to load and describe."""
    details: Switch = False
    """Load and describe every environment (takes minutes)."""
    profile: Annotated[str, shown("NAME")] = "auto"
    """Hardware whose presets are shown: auto, cpu or gpu (auto)."""
    json: Switch = False
    """Print JSON."""


@dataclass(frozen=True)
class Bench(Start):
    """Measure speed against the machine's limits, a plain sketch, and peers.

    All that is compared runs in turns within one process, round after round, and is told as median
    and range. Settings come as in `jaxtd3 train`. With a list of physics back ends, such as
    --impl native,jax, their environment steps are compared with each other and with C MuJoCo alone:
    that an installed package does too, all else needs a checkout.
    """

    rounds: Annotated[int, shown("N")] = 5
    """Rounds, in each of which everything runs once (5)."""
    seconds: Annotated[float, shown("S")] = 0.5
    """Least seconds of every sample (0.5)."""
    chunk: Annotated[int, shown("N")] = 10
    """Iterations per timed call (10)."""
    sketch: Switch = True
    """Time the plain sketch beside it (on)."""
    torch: Switch = False
    """Time the same work in eager PyTorch beside it; needs PyTorch installed."""
    peers: Switch = False
    """Compare with brax SAC, brax PPO, sbx TD3 and EnvPool instead."""
    goal: Annotated[float | None, shown("RETURN")] = None
    """With --peers: time to this return too."""
    limit: Annotated[float, shown("S")] = 600.0
    """With --goal: seconds of training that each is given (600)."""
    seeds: Annotated[int, shown("N")] = 3
    """With --goal: seeds of each (3)."""
    roofline: Annotated[str | None, shown("GPU")] = None
    """Predict an iteration on a GPU from counts, running nothing: a100, h100 or 4090."""
    scaling: Switch = False
    """How time and memory grow instead; draws --plot."""
    axes: Annotated[str | None, shown("NAME,NAME")] = None
    """With --scaling: some of envs, batch, length, updates, fill (all)."""
    plot: Annotated[Path, shown()] = Path("scaling.png")
    """With --scaling: picture to write (scaling.png)."""
    breakdown: Switch = False
    """The pieces of an iteration, each timed alone, instead."""
    operations: Switch = False
    """What the compiled updates spend their time on, on one thread, instead."""
    over_devices: Annotated[str | None, shown("N,N")] = None
    """How time divides over numbers of devices, such as 1,2,4; a CPU is split into as many."""
    population: Count = None
    """What a member of a population of so many seeds costs, beside a single run."""
    replay_cost: Switch = False
    """What prioritised replay costs beside uniform, instead."""
    envpool: Switch = False
    """With a list of back ends as --impl (or native alone): step EnvPool beside them."""
    json: Switch = False
    """Print one JSON object, and nothing else."""


@dataclass(frozen=True)
class Doctor:
    """Check what this machine offers, and say what to do about what is missing."""

    fault: Folder = None
    """Replay the dump of a run whose updates stopped being finite (RUN/fault)."""
    from_checkpoint: Switch = False
    """With --fault: start at the run's last good checkpoint, and find the very first bad update."""
    json: Switch = False
    """Print JSON."""


def preset_values(argv: Sequence[str]) -> dict[str, Any]:
    """What the preset of the environment in `argv` says, for --help; {} where none is named."""
    words = [part for word in argv for part in word.split("=", 1)]
    named = dict(itertools.pairwise(words))
    if "--env" not in named:
        return {}
    from jaxtd3.envs.registry import preset

    labels = {name: named.get(f"--{name}") for name in ("algo", "profile")}
    return preset(named["--env"], **{k: v for k, v in labels.items() if v}).by_name()


class Command(NamedTuple):
    args: type
    run: str  # "module:function", imported when called

    def __call__(self, name: str, argv: Sequence[str]) -> int:
        cls: type[Any] = self.args
        if cls in (Train, Sweep, Bench):  # every setting is a flag
            asks = "--help" in argv or "-h" in argv
            cls = flags.with_sections(cls, preset_values(argv) if asks else {})
        args, given = flags.parse(cls, argv, prog=f"jaxtd3 {name}")
        module, function = self.run.split(":")
        return getattr(importlib.import_module(module), function)(args, given)


COMMANDS = {
    "train": Command(Train, "jaxtd3.cli.train:train_command"),
    "sweep": Command(Sweep, "jaxtd3.cli.sweep:sweep_command"),
    "evaluate": Command(Evaluate, "jaxtd3.cli.policy:evaluate_command"),
    "render": Command(Render, "jaxtd3.cli.policy:render_command"),
    "play": Command(Play, "jaxtd3.cli.play:play_command"),
    "export": Command(Export, "jaxtd3.cli.policy:export_command"),
    "robustness": Command(Robustness, "jaxtd3.cli.robustness:robustness_command"),
    "bench": Command(Bench, "jaxtd3.cli.bench:bench_command"),
    "envs": Command(Envs, "jaxtd3.cli.policy:envs_command"),
    "new": Command(New, "jaxtd3.cli.new:new_command"),
    "doctor": Command(Doctor, "jaxtd3.cli.doctor:doctor_command"),
}


def usage() -> str:
    """What `jaxtd3 --help` prints."""
    lines = ["usage: jaxtd3 COMMAND [OPTIONS]", ""]
    for name, command in COMMANDS.items():
        lines.append(f"  {name:<12}{(command.args.__doc__ or '').splitlines()[0]}")
    return "\n".join([*lines, "", "jaxtd3 COMMAND --help tells the options of each."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 well, 1 failed, 2 asked wrongly."""
    words = list(sys.argv[1:] if argv is None else argv)
    prepare()
    try:
        if not words or words[0] in ("-h", "--help"):
            print(usage())
            return 0 if words else 2
        if words[0] not in COMMANDS:
            raise UserError(nearest("command", words[0], COMMANDS))
        return COMMANDS[words[0]](words[0], words[1:])
    except UserError as error:
        complain(error)
        return 2
    except BrokenPipeError:  # `jaxtd3 train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def complain(error: Any) -> None:
    """Say what is wrong, in one line."""
    print("jaxtd3: error:", " ".join(str(error).split()), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
