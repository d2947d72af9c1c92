"""`scripts/faults`: run the drill, print the table, write faults.json; 1 if a line fails."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.drill.base import Drill, Line, Settings

from jaxtd3.cli.flags import parse
from jaxtd3.cli.main import complain
from jaxtd3.errors import UserError, nearest
from jaxtd3.run.progress import duration
from jaxtd3.runtime import prepare

PARTS = {
    "kills": "tests.drill.saves:kills",
    "phases": "tests.drill.saves:phases",
    "bits": "tests.drill.files:bits",
    "disk": "tests.drill.disk:disk",
    "nan": "tests.drill.poison:nan",
    "fuzz": "tests.drill.fuzz:fuzz",
    "soak": "tests.drill.soak:soak",
}


def chosen(only: str) -> list[str]:
    """The parts to run, in the table's order."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in PARTS:
            raise UserError(nearest("part", name, PARTS))
    return [name for name in PARTS if not names or name in names]


def run_part(name: str, settings: Settings, work: Path) -> Iterator[dict[str, Any]]:
    """The part's lines with the seconds each took; a part that breaks is a line that failed."""
    folder = work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    drill = Drill(settings, folder, name, random.Random(f"{settings.seed}-{name}"))
    module, function = PARTS[name].split(":")
    begun = time.monotonic()
    lines = getattr(importlib.import_module(module), function)(drill)
    while True:
        try:
            line = next(lines)
        except StopIteration:
            return
        except Exception as error:
            traceback.print_exc()
            line = Line("the drill itself", False, f"{type(error).__name__}: {error}")
        now = time.monotonic()
        yield {"part": name, **line._asdict(), "seconds": round(now - begun, 1)}
        begun = now


def show(row: dict[str, Any]) -> str:
    mark = "✓" if row["ok"] else "✗"
    found = " ".join(row["found"].split())
    return f"{mark} {row['part']:<7}{row['what']:<42} {found}  ({duration(row['seconds'])})"


def main(argv: Sequence[str] | None = None) -> int:
    """The drill as a command."""
    prepare()
    try:
        settings, _ = parse(Settings, sys.argv[1:] if argv is None else argv, "scripts/faults")
        names = chosen(settings.only)
    except UserError as error:
        complain(error)
        return 2
    with contextlib.ExitStack() as stack:
        if settings.out is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        else:
            work = settings.out.absolute()
            work.mkdir(parents=True, exist_ok=True)
        rows = []
        for name in names:
            for row in run_part(name, settings, work):
                rows.append(row)
                print(show(row), flush=True)
                (work / "faults.json").write_text(json.dumps(rows, indent=2) + "\n")
    failed = sum(not row["ok"] for row in rows)
    spent = duration(sum(row["seconds"] for row in rows))
    print(f"{len(rows) - failed} of {len(rows)} lines hold, in {spent}")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
