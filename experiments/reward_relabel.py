"""New weights in the middle of a run, with all past data relabelled, against starting afresh.

    python experiments/reward_relabel.py [--old 0] [--new -1] [--seeds 5] [--before 250]

On Cruise the price of energy (`--old`) changes to `--new` after `--before` iterations. Printed:
environment steps until the return under the new weights comes within 2 % of the best seen, for runs
that change their weights and for new ones; medians over seeds, which are the members of one
population. Both use one compiled program. Weights that change moderately, as in tuning, are where
relabelling pays; after `--old -4 --new 0` a fresh start is faster, for the actor has gone flat.
"""

from __future__ import annotations

# ruff: noqa: E402
from jaxtd3.runtime import prepare

prepare()

import argparse
import statistics
from typing import Any

import jax
import numpy as np

import jaxtd3
from jaxtd3.envs.metrics import metrics_of
from jaxtd3.loop.population import with_members

CHUNK = 5


def first_reach(curve: np.ndarray, goal: float) -> list[int]:
    """Iterations until each member's return [chunks, P] reaches the goal; all of them if never."""
    reached = np.maximum.accumulate(curve, axis=0) >= goal
    chunks = np.where(reached.any(axis=0), reached.argmax(axis=0) + 1, len(curve))
    return [int(n) * CHUNK for n in chunks]


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--old", type=float, default=0.0, help="weight of energy at first")
    parser.add_argument("--new", type=float, default=-1.0, help="weight of energy then")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--before", type=int, default=250, help="iterations under the old weight")
    parser.add_argument("--after", type=int, default=300, help="iterations under the new one")
    args = parser.parse_args(argv)

    cfg = jaxtd3.preset("Cruise", profile="cpu", store_terms=True, log_every=CHUNK)
    old, new = (
        [cfg.override({"seed": s, "weights": {"energy": w}}) for s in range(args.seeds)]
        for w in (args.old, args.new)
    )
    before = jaxtd3.build_population(old)
    after = before._replace(configs=new)
    env, _, agent, _ = before.parts
    measure = jaxtd3.make_measure(env, agent, metrics_of(env.env), 64)
    measure = jax.jit(jax.vmap(measure, in_axes=(0, 0, None)))

    def returns(state: Any) -> np.ndarray:
        """Return under the new weights after every chunk: [chunks, P]."""
        rows = []
        for _ in range(args.after // CHUNK):
            state, _ = after.advance(state)
            found = measure(state.agent, state.weights, jax.random.key(99))
            rows.append(np.asarray(found["own_reward"]))
        return np.array(rows)

    state = before.start()
    for _ in range(args.before // CHUNK):
        state, _ = before.advance(state)
    changed, fresh = returns(with_members(state, env, new)), returns(after.start())
    best = max(changed.max(), fresh.max())
    goal = best - 0.02 * abs(best)
    steps = env.num_envs * cfg.loop.collect_steps
    needed = {}
    for name, curve in (("relabelled", changed), ("afresh", fresh)):
        each = [n * steps for n in first_reach(curve, goal)]
        needed[name] = statistics.median(each)
        print(f"{name:11s}{needed[name]:8,.0f} env steps to a return of {goal:.1f}   {each}")
    ratio = needed["relabelled"] / needed["afresh"]
    print(f"ratio {ratio:.2f}")
    return ratio


if __name__ == "__main__":
    main()
