"""The papers' ablations at any size: one command; a picture, a table, two sentences per axis.

    python experiments/ablations.py                               # every axis, minutes on two cores
    python experiments/ablations.py --axes cdq batch --env CheetahRun --size preset --seeds 5
    python experiments/ablations.py --axes envs --set iterations=5000 --out runs/ablations

Seeds are a vmapped population: one compiled program trains them all. An axis is a row of `AXES`.
"""

# ruff: noqa: E402
from jaxtd3.runtime import prepare

prepare()

import argparse
import ast
import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import jaxtd3
from jaxtd3.config.presets import ALGORITHMS

Variants = dict[str, dict[str, Any]]  # label -> changes of the settings
POINTS = 10  # evaluations per run

# Over the preset of the hardware profile; `tiny` trains an own/Pendulum in seconds.
SIZES: dict[str, dict[str, Any]] = {
    "preset": {},
    "tiny": {
        "num_envs": 32,
        "length": 512,
        "batch_size": 256,
        "critic_hidden": 64,
        "actor_hidden": 64,
        "critic_updates": 2,
        "policy_updates": 1,
        "actor_lr": 1e-3,
        "actor_lr_end": 1e-3,
        "critic_lr": 1e-3,
        "critic_lr_end": 1e-3,
        "sigma_min": 0.05,
        "sigma_max": 0.8,
        "iterations": 600,
        "eval_episodes": 32,
    },
}


class Axis(NamedTuple):
    """One figure of a paper."""

    title: str
    variants: Callable[[jaxtd3.Config], Variants]
    paper: str  # what the paper found, as half a sentence
    best: tuple[str, ...]  # labels that the paper found best, the best one first
    algo: str = "fasttd3"


def scaled(name: str, *factors: float) -> Callable[[jaxtd3.Config], Variants]:
    """One setting at multiples of the base's."""

    def variants(cfg: jaxtd3.Config) -> Variants:
        section = next(s for s in (cfg.env, cfg.agent, cfg.replay, cfg.loop) if hasattr(s, name))
        values = {f: max(int(getattr(section, name) * f), 1) for f in factors}
        return {f"x{f:g}": {name: value} for f, value in values.items()}

    return variants


def fixed(**variants: dict[str, Any]) -> Callable[[jaxtd3.Config], Variants]:
    """Variants that do not depend on the base."""
    return lambda cfg: {name.replace("_", " "): changes for name, changes in variants.items()}


def model_sizes(cfg: jaxtd3.Config) -> Variants:
    sizes = cfg.agent.critic_hidden, cfg.agent.actor_hidden
    return {
        f"x{f:g}": {"critic_hidden": int(sizes[0] * f), "actor_hidden": int(sizes[1] * f)}
        for f in (0.25, 1, 2)
    }


def rates(**pairs: tuple[int, int, int]) -> Callable[[jaxtd3.Config], Variants]:
    """(collect steps, critic updates, policy updates) by label; equal environment steps."""

    def variants(cfg: jaxtd3.Config) -> Variants:
        names = ("collect_steps", "critic_updates", "policy_updates")
        return {
            label.lstrip("_").replace("_", ":"): dict(zip(names, rate, strict=True))
            | {"iterations": max(cfg.run.iterations // rate[0], POINTS)}
            for label, rate in pairs.items()
        }

    return variants


def constant(sigma: float) -> dict[str, Any]:
    return {"noise": "constant", "sigma_min": 0.0, "sigma_max": sigma}


AXES: dict[str, Axis] = {
    "envs": Axis(
        "Parallel environments (FastTD3 Fig. 5)",
        scaled("num_envs", 0.25, 0.5, 1, 2),
        "more parallel environments learn faster",
        ("x2", "x1"),
    ),
    "batch": Axis(
        "Batch size (FastTD3 Fig. 5)",
        scaled("batch_size", 0.125, 0.5, 1, 4),
        "larger batches learn faster",
        ("x4", "x1"),
    ),
    "critic": Axis(
        "Distributional critics (FastTD3 Fig. 5)",
        fixed(c51={"critic": "c51"}, scalar={"critic": "scalar"}, quantile={"critic": "quantile"}),
        "C51 learns more than a scalar critic",
        ("c51",),
    ),
    "cdq": Axis(
        "Clipped double Q (FastTD3 Fig. 5)",
        fixed(minimum={"cdq": True}, own={"cdq": False}),
        "the minimum of two critics helps, beside distributional ones",
        ("minimum",),
    ),
    "model": Axis(
        "Model size (FastTD3 Fig. 6)",
        model_sizes,
        "larger networks learn more, up to a point",
        ("x2", "x1"),
    ),
    "noise": Axis(
        "Noise scale, mixed against constant (FastTD3 Fig. 6)",
        fixed(
            mixed_0_to_0d4={"noise": "mixed", "sigma_min": 0.001, "sigma_max": 0.4},
            mixed_0d05_to_0d8={"noise": "mixed", "sigma_min": 0.05, "sigma_max": 0.8},
            constant_0d1=constant(0.1),
            constant_0d4=constant(0.4),
            constant_0d8=constant(0.8),
        ),
        "mixed scales do as well as the best constant one, without a search for it",
        ("mixed 0d05 to 0d8", "mixed 0 to 0d4"),
    ),
    "updates": Axis(
        "Updates per step (FastTD3 Fig. 6)",
        rates(_1_1=(1, 1, 1), _1_2=(1, 2, 1), _1_4=(1, 4, 2), _1_8=(1, 8, 4)),
        "more updates per step learn faster in steps, and cost time",
        ("1:8", "1:4"),
    ),
    "buffer": Axis(
        "Buffer size (FastTD3 Fig. 6)",
        scaled("length", 0.0625, 0.25, 1),
        "larger buffers learn more",
        ("x1",),
    ),
    "beta_av": Axis(
        "Actor to value rate, PQL (PQL Fig. 6)",
        rates(_4_1=(4, 1, 1), _1_1=(1, 1, 1), _1_4=(1, 4, 2), _1_8=(1, 8, 4)),
        "1:8 is a good start, and too few value updates hurt",
        ("1:8", "1:4"),
        "pql",
    ),
    "beta_pv": Axis(
        "Policy to value rate, PQL (PQL Fig. 6)",
        rates(_8_8=(1, 8, 8), _4_8=(1, 8, 4), _2_8=(1, 8, 2), _1_8=(1, 8, 1)),
        "1:2 is a good start",
        ("4:8",),
        "pql",
    ),
    "pql_envs": Axis(
        "Parallel environments, PQL (PQL Fig. 7)",
        scaled("num_envs", 0.25, 1, 2),
        "more environments learn faster, up to a point",
        ("x2", "x1"),
        "pql",
    ),
    "exploration": Axis(
        "Mixed exploration, PQL (PQL Fig. 4)",
        fixed(
            ladder={},
            constant_0d2=constant(0.2),
            constant_0d4=constant(0.4),
            constant_0d8=constant(0.8),
        ),
        "the ladder of scales does as well as or better than any constant one",
        ("ladder",),
        "pql",
    ),
    "actors": Axis(
        "Number of actors, Ape-X (Ape-X Fig. 4)",
        scaled("num_envs", 0.125, 0.5, 2),
        "more actors learn more, with the learner's work the same",
        ("x2",),
        "apex",
    ),
}


# --- one variant --------------------------------------------------------------------------------


class Curves(NamedTuple):
    """What a population of seeds did."""

    iteration: np.ndarray  # [P]
    env_steps: np.ndarray  # [P]
    returns: np.ndarray  # [seeds, P]


def train(cfg: jaxtd3.Config, seeds: int) -> Curves:
    """Train all seeds at once, evaluating `POINTS` times."""
    length = max(cfg.run.iterations // POINTS, 1)
    cfg = cfg.resolved().override({"log_every": length})
    configs = [cfg.override({"seed": cfg.run.seed + k}) for k in range(seeds)]
    population = jaxtd3.build_population(configs)
    _, eval_env, agent, _ = population.parts
    evaluate = jaxtd3.make_evaluate(eval_env, agent, cfg.run.eval_episodes)
    state, returns = population.start(), []
    for i in range(POINTS):
        state, _ = population.advance(state, i * length)
        each = [jaxtd3.take_member((state.agent, state.weights), k) for k in range(seeds)]
        returns.append([float(evaluate(*one, jax.random.key(1))["return"]) for one in each])
    iteration = length * np.arange(1, POINTS + 1)
    steps = iteration * cfg.loop.collect_steps * cfg.env.num_envs
    return Curves(iteration, steps, np.array(returns).T)


def same_run(cfg: jaxtd3.Config) -> str:
    """Equal for configs that train alike: a variant that is the base is not trained again."""
    return json.dumps({k: v for k, v in cfg.to_dict().items() if k != "algo"}, sort_keys=True)


# --- one axis -----------------------------------------------------------------------------------


def show(label: str) -> str:
    return label.replace("0d", "0.")


def plot(axis: Axis, where: str, curves: Mapping[str, Curves], path: Path) -> None:
    """Mean over the seeds, and one standard deviation around it, over environment steps."""
    by_updates = axis.title.startswith(("Number of actors", "Parallel"))
    figure, ax = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for label, c in curves.items():
        mean, spread = c.returns.mean(0), c.returns.std(0)
        x = c.iteration if by_updates else c.env_steps
        (line,) = ax.plot(x, mean, marker="o", markersize=3, label=show(label))
        ax.fill_between(x, mean - spread, mean + spread, color=line.get_color(), alpha=0.15, lw=0)
    ax.set_title(f"{axis.title}\n{where}", fontsize=10)
    ax.set_xlabel(
        "iterations (the learner's work is the same)" if by_updates else "environment steps"
    )
    ax.set_ylabel("return of the policy without noise")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def score(c: Curves) -> np.ndarray:
    """Mean return over the whole run, per seed: how much and how fast."""
    return c.returns.mean(axis=1)


def sentences(axis: Axis, curves: Mapping[str, Curves]) -> str:
    """What the figure shows, and whether the paper said so."""
    scores = {label: score(c) for label, c in curves.items()}
    order = sorted(scores, key=lambda label: -scores[label].mean())
    first, last = order[0], order[-1]
    told = ", ".join(
        f"{show(label)} {scores[label].mean():.0f} ± {scores[label].std():.0f}" for label in order
    )

    def clearly_below(label: str) -> bool:
        """By more than two standard errors."""
        error = np.hypot(scores[first].std(), scores[label].std()) / len(scores[first]) ** 0.5
        return scores[first].mean() - scores[label].mean() > 2 * error

    favoured = axis.best[0]
    if not clearly_below(last):
        verdict = "at this size the difference is within the spread of the seeds"
    elif first == favoured:
        verdict = "it agrees"
    elif not clearly_below(favoured):
        ahead = f"{show(first)} comes first, {show(favoured)} within the spread of the seeds"
        verdict = f"it agrees, though {ahead}"
    elif first in axis.best:
        verdict = f"it agrees in part, {show(first)} being better here than {show(favoured)}"
    else:
        verdict = f"it does not agree here, where {show(first)} comes first"
    return (
        f"Mean return over the run: {told} ({len(scores[first])} seeds). "
        f"The paper found that {axis.paper}: {verdict}."
    )


def run_axis(name: str, options: argparse.Namespace, known: dict[str, Curves]) -> str:
    """Train every variant, leave NAME.png and NAME.csv; the two sentences."""
    axis = AXES[name]
    changes = SIZES[options.size] | options.set
    if axis.algo != "fasttd3":  # what makes the algorithm itself is not a question of size
        row = ALGORITHMS[axis.algo]
        changes = {k: v for k, v in changes.items() if k not in row or k in options.set}
    base = jaxtd3.preset(options.env, axis.algo, options.profile, **changes)
    curves: dict[str, Curves] = {}
    for label, variant in axis.variants(base).items():
        cfg = jaxtd3.preset(options.env, axis.algo, options.profile, **changes | variant)
        key = same_run(cfg)
        if key not in known:
            known[key] = train(cfg, options.seeds)
        curves[label] = known[key]
        print(
            f"{name}: {show(label)}: {known[key].returns[:, -1].mean():.1f} at the end", flush=True
        )
    options.out.mkdir(parents=True, exist_ok=True)
    where = f"{options.env}, {axis.algo}, {options.seeds} seeds: mean and standard deviation"
    plot(axis, where, curves, options.out / f"{name}.png")
    with (options.out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["axis", "variant", "seed", "iteration", "env_steps", "return"])
        for label, c in curves.items():
            for seed, row in enumerate(c.returns):
                points = zip(c.iteration, c.env_steps, row, strict=True)
                writer.writerows([name, show(label), seed, *point] for point in points)
    return sentences(axis, curves)


def write_index(out: Path, told: Mapping[str, str], env: str, size: str) -> None:
    """README.md of the folder: every figure with its sentences; axes of earlier runs stay."""
    index = out / "sentences.json"
    known = json.loads(index.read_text()) if index.exists() else {}
    known |= {name: f"{text} ({env}, {size})" for name, text in told.items()}
    index.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    tiny = ", ".join(f"{name} {value}" for name, value in SIZES["tiny"].items())
    lines = ["# Ablations", "", "Made by `python experiments/ablations.py`.", ""]
    lines += [f"The size `tiny`, where an algorithm's own row does not say otherwise: {tiny}.", ""]
    for name in AXES:
        if name in known:
            lines += [f"## {AXES[name].title}", "", known[name], "", f"![{name}]({name}.png)", ""]
    (out / "README.md").write_text("\n".join(lines))


def setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--axes", nargs="*", default=list(AXES), choices=list(AXES), metavar="AXIS")
    parser.add_argument("--env", default="Pendulum")
    parser.add_argument("--profile", default="auto")
    parser.add_argument("--size", default="tiny", choices=list(SIZES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", type=setting, default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, default=Path("docs/ablations"))
    options = parser.parse_args()
    options.set = dict(options.set)
    known: dict[str, Curves] = {}
    for name in options.axes:
        text = run_axis(name, options, known)
        write_index(options.out, {name: text}, options.env, options.size)
        print(f"{name}: {text}", flush=True)
    write_index(options.out, {}, options.env, options.size)


if __name__ == "__main__":
    main()
