"""Parts of the bench that stand in `benchmarks/`, beside the package: only a checkout has them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxtd3.errors import UserError

ROOT = Path(__file__).parents[3]


def load_benchmark(name: str) -> Any:
    """`benchmarks.name`; an installed package without the checkout says so in one line."""
    if not (ROOT / "benchmarks" / f"{name}.py").is_file():
        raise UserError(
            f"benchmarks/{name}.py is not installed: run this from a checkout; an installed "
            "package compares physics alone (--impl native,jax)"
        )
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return import_module(f"benchmarks.{name}")
