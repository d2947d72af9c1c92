"""`scripts/bench`: the figures of docs/speed.md, each by the command that anybody can run.

Every part is a process of its own; what it found goes into OUT/latest.json beside what earlier
calls with other parts found, and OUT/latest.md is the same as tables.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.table import markdown
from jaxtd3.cli.flags import parse
from jaxtd3.cli.main import complain
from jaxtd3.durable import write_whole
from jaxtd3.errors import UserError, nearest
from jaxtd3.runtime import BF16_UNITS, cpu_flags, cpu_has_bf16, prepare


@dataclass(frozen=True)
class Settings:
    """What to measure, and where to put it."""

    only: str = ""
    """Some parts, by comma: sizes bf16 return ring population replay warm peers roofline scaling
    devices processes."""
    out: Path = Path("bench")
    """Folder of latest.json and latest.md."""
    rounds: int = 5
    """Rounds of every comparison."""
    seeds: int = 3
    """Seeds of every race to a return."""
    races: str = "CartpoleBalance:950:240,CheetahRun:600:900,CartpoleSwingup:700:600"
    """ENV:RETURN:SECONDS of the races, the seconds being the most that each contender trains."""
    contenders: str = "ours,sketch,brax_sac,brax_ppo"
    """Who races."""


CHEETAH = "--env CheetahRun --num-envs 128 --critic-updates 2 --policy-updates 1"
CHEETAH += " --num-atoms 101 --n-step 1 --cdq"  # FastTD3's own settings; one step, as the sketch
SIZES = {
    "cheetah_small": f"{CHEETAH} --batch-size 2048 --critic-hidden 256 --actor-hidden 128",
    "cheetah_large": f"{CHEETAH} --batch-size 4096 --critic-hidden 1024 --actor-hidden 512",
    "g1": "--env G1JoystickFlatTerrain --num-envs 64 --no-sketch",
}
BF16 = {f"{name}_bf16": f"{SIZES[name]} --compute bf16" for name in list(SIZES)[:2]}
RING = SIZES["cheetah_small"]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def bench(flags: str) -> dict[str, Any]:
    """`jaxtd3 bench FLAGS --json`, its result with the command that gave it."""
    command = [sys.executable, "-m", "jaxtd3", "bench", *shlex.split(flags), "--json"]
    say(f"jaxtd3 bench {flags}")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    told = {"command": f"jaxtd3 bench {flags}"}
    if done.returncode:
        return told | {"error": f"exit code {done.returncode}"}
    return told | json.loads(done.stdout.splitlines()[-1])


# --- parts --------------------------------------------------------------------------------------


def measured(sizes: dict[str, str], cfg: Settings) -> dict[str, Any]:
    """`jaxtd3 bench` at some sizes; eager PyTorch beside it where there is a sketch."""
    torch = " --torch" if importlib.util.find_spec("torch") else ""
    return {
        name: bench(f"{flags} --rounds {cfg.rounds}{torch if 'Cheetah' in flags else ''}")
        for name, flags in sizes.items()
    }


def sizes(cfg: Settings) -> dict[str, Any]:
    """Shares of the limits, and the sketch beside."""
    return measured(SIZES, cfg)


def bf16(cfg: Settings) -> dict[str, Any]:
    """The same with bf16 products, against the sketch in f32."""
    return measured(BF16, cfg)


def returns(cfg: Settings) -> dict[str, Any]:
    """Wall time to a return, contenders taking turns."""
    from benchmarks.races import race

    races, names = entries(cfg)
    found = {}
    for env, goal, limit in races:
        raced = race(env, goal, limit, range(cfg.seeds), names, say)
        found[env] = {"when": now(), **raced}
    return found


def entries(cfg: Settings) -> tuple[list[tuple[str, float, float]], list[str]]:
    """The races, each (env, return, seconds), and who runs in them."""
    from benchmarks.races import CONTENDERS
    from jaxtd3.envs.registry import check_env

    names = [name for name in cfg.contenders.split(",") if name]
    for name in names:
        if name not in CONTENDERS:
            raise UserError(nearest("contender", name, CONTENDERS))
    races = []
    for text in cfg.races.split(","):
        try:
            env, goal, limit = text.split(":")
            races.append((env, float(goal), float(limit)))
        except ValueError as error:
            raise UserError(f"race {text!r} is not ENV:RETURN:SECONDS") from error
        check_env(env)
    return races, names


def ring(cfg: Settings) -> dict[str, Any]:
    """Flat in fill and in length."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{RING} --scaling --axes length,fill --rounds {cfg.rounds}"
        found = bench(f"{flags} --plot {folder}/ring.png")
        return found | {"command": f"jaxtd3 bench {flags}"}


def population(cfg: Settings) -> dict[str, Any]:
    return bench(f"--env CartpoleBalance --population 8 --rounds {cfg.rounds}")


def replay(cfg: Settings) -> dict[str, Any]:
    return bench(f"--env CheetahRun --replay-cost --rounds {cfg.rounds}")


def peers(cfg: Settings) -> dict[str, Any]:
    flags = f"--peers --rounds {cfg.rounds}"
    return {env: bench(f"--env {env} {flags}") for env in ("CartpoleBalance", "CheetahRun")}


def roofline(cfg: Settings) -> dict[str, Any]:
    from jaxtd3.cli.bench import GPU_NAMES

    return {gpu: bench(f"--roofline {gpu}") for gpu in GPU_NAMES}


def scaling(cfg: Settings) -> dict[str, Any]:
    flags = f"--scaling --axes envs,batch,updates --rounds {cfg.rounds}"
    return bench(f"--env CartpoleBalance {flags} --plot {cfg.out / 'scaling.png'}")


def devices(cfg: Settings) -> dict[str, Any]:
    return bench(f"--env CartpoleBalance --over-devices 1,2,4 --rounds {cfg.rounds}")


def processes(cfg: Settings) -> dict[str, Any]:
    """Two cores as one process, as two devices, as two processes; the global sizes stay."""
    from benchmarks.processes import compare

    rounds = max(cfg.rounds // 2, 1)  # each is a whole run
    flags = {"CartpoleBalance": "--iterations 500", "CheetahRun": "--iterations 300"}
    return {env: compare(f"--env {env} {more}", rounds, say) for env, more in flags.items()}


def warm(cfg: Settings) -> dict[str, Any]:
    """Seconds from the start to the first update on G1: compile cache empty, then filled."""
    # ten iterations of warm-up, then one that learns
    flags = "--env G1JoystickFlatTerrain --iterations 11 --log-every 11 --eval-every 0"
    flags += " --checkpoint-every 0 --eval-episodes 1 --no-video --quiet"
    seconds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
        for name in ("cold", "warm"):
            say(f"G1, {name} start")
            run = Path(folder) / name
            command = [sys.executable, "-m", "jaxtd3", "train", *shlex.split(flags)]
            subprocess.run([*command, "--run-dir", str(run)], env=environment, check=True)
            summary = json.loads((run / "summary.json").read_text())
            first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
            seconds[name] = summary["start_seconds"] + first["seconds"]
    return {
        "command": f"jaxtd3 train {flags}",
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "warm_over_cold": seconds["warm"] / seconds["cold"],
    }


PARTS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "sizes": sizes,
    "bf16": bf16,
    "return": returns,
    "ring": ring,
    "population": population,
    "replay": replay,
    "warm": warm,
    "peers": peers,
    "roofline": roofline,
    "scaling": scaling,
    "devices": devices,
    "processes": processes,
}


def chosen(only: str) -> list[str]:
    """The parts to run, in the table's order."""
    asked = [name.strip() for name in only.split(",") if name.strip()]
    for name in asked:
        if name not in PARTS:
            raise UserError(nearest("part", name, PARTS))
    if asked:
        return [name for name in PARTS if name in asked]
    # what a machine with bf16 units measured is not overwritten by one without, unless asked for
    return [name for name in PARTS if name != "bf16" or cpu_has_bf16()]


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    import importlib.metadata as metadata

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = [s for s in cpuinfo.read_text().splitlines() if s.startswith("model name")]
        model = named[0].split(":", 1)[1].strip() if named else model
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "brax", "mujoco-mjx")}
    known = [name for name in ("avx2", "avx512f", *BF16_UNITS) if name in cpu_flags()]
    return {"cpu": " ".join([model, *known[-1:]]), "cores": os.cpu_count(), **versions}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write(out: Path, found: dict[str, Any]) -> None:
    """Both files, whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {"latest.json": json.dumps(found, indent=1) + "\n", "latest.md": markdown(found)}
    for name, text in texts.items():
        write_whole(out / name, text)


def main(argv: list[str]) -> int:
    """Run the parts asked for, and keep what each finds as soon as it is known."""
    prepare()
    try:
        cfg, _ = parse(Settings, argv, prog="scripts/bench")
        names = chosen(cfg.only)
        if "return" in names:
            entries(cfg)  # a mistake is told before anything runs
        latest = cfg.out / "latest.json"
        found = json.loads(latest.read_text()) if latest.exists() else {}
        for name in names:
            say(f"--- {name}")
            result = PARTS[name](cfg)
            if name == "return":  # races run today stand beside those of other days
                result = found.get(name, {}).get("found", {}) | result
            found[name] = {"when": now(), "machine": machine(), "found": result}
            write(cfg.out, found)
        print(markdown(found))
        return 0
    except UserError as error:
        complain(error)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
