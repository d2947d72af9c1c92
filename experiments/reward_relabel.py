"""New weights in the middle of a run, with all past data relabelled, against starting afresh.

    python experiments/reward_relabel.py [--seeds 5] [--before 300] [--reach 0.06]

On Cruise a high price on energy makes the point lag behind its command. When the price falls to
nothing, the new optimum has no lag. Printed: environment steps until the tracking error is below
`--reach` for a run that changes its weights, and for a new one; medians over seeds, which are the
members of one population. Both use one compiled program.
"""

from __future__ import annotations

# ruff: noqa: E402
from jaxtd3.startup import prepare

prepare()

import argparse
import statistics

import jax

import jaxtd3
from jaxtd3.metrics import metrics_of
from jaxtd3.population import with_members

OLD, NEW = {"energy": -4.0}, {"energy": 0.0}
CHUNK = 5


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--before", type=int, default=300, help="iterations under the old weights")
    parser.add_argument("--most", type=int, default=400, help="iterations under the new ones")
    parser.add_argument("--reach", type=float, default=0.06, help="tracking error to reach")
    args = parser.parse_args(argv)

    cfg = jaxtd3.preset("Cruise", profile="cpu", store_terms=True)
    old, new = (
        [cfg.override({"seed": s, "weights": w}) for s in range(args.seeds)] for w in (OLD, NEW)
    )
    env = jaxtd3.make_env(cfg.env)
    agent = jaxtd3.fast_td3(env.spec, cfg.agent)
    replay = jaxtd3.make_replay(env.spec, cfg.replay)
    init, train_step = jaxtd3.make_population(env, agent, replay, old)
    chunk = jaxtd3.make_chunk(train_step, CHUNK)
    measure = jaxtd3.make_measure(env, agent, metrics_of(env.env), 64)
    measure = jax.jit(jax.vmap(measure, in_axes=(0, 0, None)))

    def error(state) -> list[float]:
        found = measure(state.agent, state.env.weights, jax.random.key(99))
        return found["tracking_error"].tolist()

    def steps_to_reach(state) -> list[int]:
        """Environment steps that each member needs."""
        needed = [args.most] * args.seeds
        for done in range(CHUNK, args.most + 1, CHUNK):
            state, _ = chunk(state)
            now = error(state)
            reached = [min(n, done) if e < args.reach else n for n, e in zip(needed, now)]  # noqa: B905
            needed = reached
            if max(needed) < args.most:
                break
        return [n * env.num_envs * cfg.loop.collect_steps for n in needed]

    state = init(old)
    for _ in range(args.before // CHUNK):
        state, _ = chunk(state)
    print(f"tracking error under the old weights: {statistics.median(error(state)):.3f}")
    changed = steps_to_reach(with_members(state, env, new))
    fresh = steps_to_reach(init(new))
    a, b = statistics.median(changed), statistics.median(fresh)
    print(f"relabelled: {a:,.0f} env steps {changed}")
    print(f"afresh:     {b:,.0f} env steps {fresh}")
    print(f"ratio {a / b:.2f}")
    return a / b


if __name__ == "__main__":
    main()
