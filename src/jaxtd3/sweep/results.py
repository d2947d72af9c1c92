"""What a sweep found: ranks by a fair metric, the Pareto front of two, and files that tell it.

DIR/results.json    all of it: `members` (weights, settings, metrics, rank), `weightings` (means
                    over seeds, rank), `best`, `pareto`
DIR/results.csv     one line per member
DIR/best.json       the best weighting as settings: `jaxtd3 train --config DIR/best.json`
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtd3.config.config import Config, config_from_dict
from jaxtd3.durable import write_whole
from jaxtd3.envs.metrics import Metric
from jaxtd3.output.logs import finite

RESULTS_FILE, TABLE_FILE, BEST_FILE = "results.json", "results.csv", "best.json"

Found = Mapping[str, Any]
"""A member as its wave stored it: index, group, seed, values, weights, metrics, curve, path."""


def sort_key(value: Any, high: bool) -> tuple[bool, float]:
    """Best first; what is not a number comes last."""
    good = isinstance(value, int | float) and math.isfinite(value)
    return not good, (-value if high else value) if good else 0.0


def ranks(values: Sequence[Any], high: bool) -> list[int]:
    """1 for the best; equals in the order given."""
    order = sorted(range(len(values)), key=lambda i: (*sort_key(values[i], high), i))
    places = [0] * len(values)
    for place, i in enumerate(order):
        places[i] = place + 1
    return places


def pareto_front(points: Sequence[tuple[Any, Any]], high: tuple[bool, bool]) -> list[int]:
    """Indices of points that no other point beats in both; by the first coordinate."""
    signed = []
    for i, point in enumerate(points):
        keys = [sort_key(value, h) for value, h in zip(point, high, strict=True)]
        if not any(bad for bad, _ in keys):
            signed.append((keys[0][1], keys[1][1], i))
    front, lowest = [], math.inf
    for _, second, i in sorted(signed):
        if second < lowest:
            front.append(i)
            lowest = second
    return front


def weightings(members: Sequence[Found], metric: str, high: bool) -> list[dict[str, Any]]:
    """One entry per combination, means over its seeds; best first."""
    groups: dict[int, list[Found]] = {}
    for member in members:
        groups.setdefault(member["group"], []).append(member)
    entries: list[dict[str, Any]] = []
    for group, own in groups.items():
        names = own[0]["metrics"]
        columns = {name: [m["metrics"][name] for m in own] for name in names}
        columns = {name: [v for v in c if v is not None] for name, c in columns.items()}
        entries.append(
            {
                "group": group,
                "label": own[0]["label"],
                "values": dict(own[0]["values"]),
                "weights": dict(own[0]["weights"]),
                "members": [m["index"] for m in own],
                "metrics": {n: statistics.fmean(c) if c else None for n, c in columns.items()},
                "spread": {n: statistics.pstdev(c) if c else None for n, c in columns.items()},
            }
        )
    places = ranks([entry["metrics"][metric] for entry in entries], high)
    for entry, place in zip(entries, places, strict=True):
        entry["rank"] = place
    return sorted(entries, key=lambda entry: entry["rank"])


def train_flags(config: Config, values: Mapping[str, float]) -> str:
    """The flags of `jaxtd3 train` that reproduce a combination."""
    weights = config.env.weights
    flags = [
        f"--{name.split('.')[-1].replace('_', '-')} {value!r}"
        for name, value in values.items()
        if name not in weights
    ]
    if weights:
        flags.append("--reward " + " ".join(f"{k}={v!r}" for k, v in weights.items()))
    return " ".join(flags)


def summarize(
    plan: Mapping[str, Any],
    members: Sequence[Found],
    metrics: Mapping[str, Metric],
    metric: str,
    pair: tuple[str, str],
) -> dict[str, Any]:
    """The content of results.json."""
    places = ranks([m["metrics"][metric] for m in members], metrics[metric].high)
    points = [(m["metrics"][pair[0]], m["metrics"][pair[1]]) for m in members]
    front = pareto_front(points, (metrics[pair[0]].high, metrics[pair[1]].high))
    ranked = [{**m, "rank": place} for m, place in zip(members, places, strict=True)]
    groups = weightings(members, metric, metrics[metric].high)
    config = config_from_dict(plan["config"])
    best = dict(groups[0]) if groups else {}
    if best:
        first = next(m for m in members if m["group"] == best["group"])
        best["flags"] = train_flags(config_from_dict(first["config"]), best["values"])
    return {
        "env": config.env.name,
        "algo": config.algo,
        "iterations": config.run.iterations,
        "metric": metric,
        "metrics": {
            n: {"better": "high" if m.high else "low", "unit": m.unit} for n, m in metrics.items()
        },
        "members": sorted(ranked, key=lambda m: m["rank"]),
        "weightings": groups,
        "best": best,
        "pareto": {"metrics": list(pair), "members": [members[i]["index"] for i in front]},
    }


def without_curves(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results for people: curves stand in each member's metrics.jsonl."""
    left_out = ("curve", "config")
    members = [{k: v for k, v in m.items() if k not in left_out} for m in results["members"]]
    return {**results, "members": members}


def table(results: Mapping[str, Any]) -> str:
    """results.csv."""
    rows = results["members"]
    values = list(dict.fromkeys(name for m in rows for name in m["values"]))
    names = [*results["metrics"], "own_reward", "length"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["rank", "member", "group", "seed", *values, *names])
    for m in rows:
        head = [m["rank"], m["index"], m["group"], m["seed"]]
        writer.writerow(
            head + [m["values"].get(n) for n in values] + [m["metrics"].get(n) for n in names]
        )
    return out.getvalue()


def clean(value: Any) -> Any:
    """The same without numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return finite(value)


def write_json(path: Path, data: Any) -> None:
    write_whole(path, json.dumps(clean(data), indent=1, allow_nan=False) + "\n")


def write_results(directory: Path, results: Mapping[str, Any]) -> None:
    """results.json, results.csv and best.json."""
    write_json(directory / RESULTS_FILE, without_curves(results))
    write_whole(directory / TABLE_FILE, table(results))
    if results["best"]:
        first = next(m for m in results["members"] if m["group"] == results["best"]["group"])
        write_json(directory / BEST_FILE, first["config"])
