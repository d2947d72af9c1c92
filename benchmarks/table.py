"""bench/latest.json as the tables of docs/speed.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Found = Mapping[str, Any]


def number(value: Any, form: str = ".3g") -> str:
    """A figure, with its range where it has one."""
    if isinstance(value, Mapping):
        middle, low, high = (format(value[k], form) for k in ("median", "low", "high"))
        return middle if low == high else f"{middle} ({low} to {high})"
    return format(value, form)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sizes(found: Found) -> str:
    names = {
        "eta": "of the limit (eta)",
        "eta_env": "collecting (eta_env)",
        "eta_learn": "learning (eta_learn)",
        "iterations_per_second": "iterations/s",
        "temp_over_buffer": "scratch / ring",
        "bytes_per_transition": "bytes a transition",
        "compile_seconds": "compile s",
    }
    rows = []
    for entry in found.values():
        command = f"`{entry['command']}`"
        if "error" in entry:
            rows.append([command, entry["error"], *[""] * (len(names) + 1)])
            continue
        told = [number(entry[name]) for name in names]
        over = [entry["details"].get(f"over_{name}") for name in ("sketch", "torch")]
        rows.append([command, *told, *(number(x) if x else "-" for x in over)])
    return table(["command", *names.values(), "times the sketch", "times PyTorch"], rows)


def returns(found: Found) -> str:
    rows = []
    for env, race in found.items():
        for name, entry in race["summary"].items():
            over = entry.get("over_ours_train_seconds")
            included = entry.get("over_ours_with_compile")
            rows.append(
                [
                    f"{env} to {race['goal']:g}",
                    name.replace("_", " "),
                    f"{entry['reached']} of {entry['seeds']}",
                    number(entry["train_seconds"]),
                    number(entry["with_compile"]),
                    "-" if over is None else number(over),
                    "-" if included is None else number(included),
                ]
            )
        failed = {r["contender"]: r["error"] for r in race["rows"] if "error" in r}
        for name, error in failed.items():
            rows.append([f"{env} to {race['goal']:g}", name, error, "", "", "", ""])
    head = ["race", "contender", "reached", "training s", "with compile s"]
    return table([*head, "times ours", "times ours, with compile"], rows)


def axes(found: Found) -> str:
    if "error" in found:
        return f"`{found['command']}`: {found['error']}"
    rows = []
    for name, axis in found["axes"].items():
        times = ", ".join(
            f"{x:,.0f}: {number(ms['median'])}"
            for x, ms in zip(axis["x"], axis["milliseconds"], strict=True)
        )
        memory = axis.get("memory_exponent")
        rows.append(
            [name, times, number(axis["time_exponent"]), "-" if memory is None else number(memory)]
        )
    told = table(["axis", "ms per iteration", "time exponent", "memory exponent"], rows)
    fill = found["axes"].get("fill", {}).get("full_over_empty")
    more = "" if fill is None else f"\n\nA collecting step, ring full / nearly empty: {fill:.2f}."
    return f"{told}{more}\n\n`{found['command']}`"


def peers(found: Found) -> str:
    rows = []
    for env, entry in found.items():
        if "error" in entry:
            rows.append([env, entry["error"], "", ""])
            continue
        for name, row in entry["rates"].items():
            if "error" in row:
                rows.append([env, name, f"cannot run: {row['error']}", ""])
                continue
            steps, updates = row["env_steps_per_second"], row["updates_per_second"]
            rows.append([env, name, number(steps, ",.0f"), number(updates, ",.0f")])
    return table(["env", "who", "env steps/s", "updates/s"], rows)


def roofline(found: Found) -> str:
    rows = []
    for entry in found.values():
        if "error" in entry:
            rows.append([entry["command"], entry["error"], "", "", "", ""])
            continue
        told, counts = entry["predicted"], entry["counts"]
        rows.append(
            [
                f"`{entry['command']}`",
                number(told["iteration_ms"]),
                number(told["learner_ms"]),
                number(counts["flops"] / 1e9, ".1f"),
                number(counts["replay_bytes"] / 1e6),
                number(counts["allreduce_bytes"] / 1e6),
            ]
        )
    head = ["predicted, not measured", "iteration ms", "learner ms", "GFLOP", "replay MB"]
    return table([*head, "all-reduce MB"], rows)


def flat(found: Found) -> str:
    """Anything else: its figures in one row."""
    if "error" in found:
        return f"`{found['command']}`: {found['error']}"
    names = [k for k, v in found.items() if isinstance(v, int | float) or is_range(v)]
    return table(
        ["command", *names], [[f"`{found['command']}`", *(number(found[n]) for n in names)]]
    )


def flats(found: Found) -> str:
    return "\n\n".join(flat(entry) for entry in found.values())


def is_range(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"median", "low", "high"}


def devices(found: Found) -> str:
    if "error" in found:
        return f"`{found['command']}`: {found['error']}"
    rows = [
        [name, *(number(row[str(n)]) for n in found["devices"])]
        for name, row in found["milliseconds"].items()
    ]
    head = ["ms per iteration", *(f"{n} devices" for n in found["devices"])]
    return f"{table(head, rows)}\n\n`{found['command']}`"


SECTIONS: dict[str, tuple[str, Callable[[Found], str]]] = {
    "sizes": ("Against the machine's limits", sizes),
    "bf16": ("The same with bf16 products", sizes),
    "return": ("Wall time to a return", returns),
    "ring": ("The ring", axes),
    "population": ("Eight seeds as one program", flat),
    "replay": ("Prioritised replay beside uniform, microseconds a call", flat),
    "warm": ("Warm start", flat),
    "peers": ("Rates beside peers", peers),
    "roofline": ("GPUs, predicted", roofline),
    "scaling": ("Growth", axes),
    "devices": ("Devices", devices),
    "processes": ("Two cores, divided", flats),
}


def markdown(found: Found) -> str:
    """All parts that were measured, each under its heading."""
    parts = []
    for name, (title, render) in SECTIONS.items():
        if name in found:
            entry = found[name]
            where = f"{entry['machine']['cores']} cores of {entry['machine']['cpu']}"
            parts.append(f"### {title}\n\n{render(entry['found'])}\n\n{where}, {entry['when']}\n")
    return "\n".join(parts)
