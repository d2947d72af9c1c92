"""FastTD3's tuned reward, Playground's default, and ours: one population, ranked by fair metrics.

    python experiments/reward_g1_t1.py                              # G1, this machine's profile
    python experiments/reward_g1_t1.py --env T1JoystickFlatTerrain --seeds 3
    python experiments/reward_g1_t1.py --num-envs 16 --iterations 100 --no-video   # any size
    python experiments/reward_g1_t1.py --ours runs/SWEEP/best.json       # what your own sweep found

Every other flag is one of `jaxtd3 sweep`. `--ours` takes the reward weights of a config file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from jaxtd3.cli.main import main

# A bonus for every step on its feet lets a robot fall later within a short run; see presets.py.
OURS = {"alive": 10.0}


def take(argv: list[str], flag: str, default: str | None) -> str | None:
    """The value of a flag, taken out of the arguments."""
    if flag not in argv:
        return default
    at = argv.index(flag)
    _, value = argv.pop(at), argv.pop(at)
    return value


def points(env: str, ours: str | None) -> list[dict]:
    """The weightings to compare; terms that one does not name keep the environment's own weight."""
    from jaxtd3.config.presets import tuned_reward

    tuned = dict(tuned_reward(env))
    mine = tuned | OURS
    if ours is not None:
        mine = json.loads(Path(ours).read_text())["env"]["weights"]
    return [{"name": "Playground"}, {"name": "FastTD3", **tuned}, {"name": "ours", **mine}]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    name = take(arguments, "--env", "G1JoystickFlatTerrain") or ""
    chosen = points(name, take(arguments, "--ours", None))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "points.json"
        path.write_text(json.dumps(chosen))
        given = ["--env", name, "--points", str(path), "--reward-preset", "default"]
        sys.exit(main(["sweep", *given, *arguments]))
