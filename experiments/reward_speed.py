"""How long a sweep of 8 takes against 8 single commands, one after another.

    python experiments/reward_speed.py [--env Cruise] [--iterations 300] [--members 8] [FLAGS ...]

Both begin with an empty compile cache of their own and train the same weightings equally long,
without videos. The single commands share their cache, as a user's do. Other flags go to both.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(arguments: list[str], cache: Path) -> float:
    """Seconds that a command takes."""
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    begin = time.perf_counter()
    command = [sys.executable, "-m", "jaxtd3", *arguments, "--no-video", "--quiet"]
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="Cruise")
    parser.add_argument("--term", default="energy", help="reward term to weight")
    parser.add_argument("--iterations", default="300")
    parser.add_argument("--members", type=int, default=8)
    args, more = parser.parse_known_args()
    weights = [-0.1 * i for i in range(args.members)]
    shared = ["--env", args.env, "--iterations", args.iterations, *more]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        grid = f"{args.term}=" + ",".join(f"{w:g}" for w in weights)
        together = run(
            ["sweep", *shared, "--grid", grid, "--run-dir", str(work / "sweep")], work / "cache-1"
        )
        print(f"sweep of {args.members}: {together:.1f} s", flush=True)
        alone = []
        for i, weight in enumerate(weights):
            flags = ["--reward", f"{args.term}={weight:g}", "--run-dir", str(work / f"run-{i}")]
            alone.append(run(["train", *shared, *flags], work / "cache-2"))
            print(f"single {i + 1}: {alone[-1]:.1f} s", flush=True)
    total = sum(alone)
    print(f"{args.members} single commands: {total:.1f} s; ratio {together / total:.2f}")


if __name__ == "__main__":
    main()
