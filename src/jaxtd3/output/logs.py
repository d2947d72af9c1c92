"""Where metrics go: metrics.jsonl always, TensorBoard and Weights & Biases where asked for."""

from __future__ import annotations

import json
import math
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxtd3.durable import write_whole
from jaxtd3.errors import UserError

Row = Mapping[str, Any]


class Log(Protocol):
    """Takes one row of metrics per chunk."""

    def write(self, row: Row) -> None: ...

    def close(self, summary: Row, video: Path | None) -> None: ...


def finite(value: Any) -> Any:
    """None for what JSON has no number for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dumps(row: Row) -> str:
    return json.dumps({k: finite(v) for k, v in row.items()}, allow_nan=False)


class JsonlLog:
    """Appends lines; what a full disk refuses is kept and tried again with the next line."""

    def __init__(self, path: Path):
        self.path = path
        self.error: str | None = None
        self._waiting: list[str] = []

    def write(self, row: Row) -> None:
        self._waiting.append(dumps(row) + "\n")
        self.flush()

    def flush(self) -> None:
        data = "".join(self._waiting).encode()
        try:
            with open(self.path, "ab", buffering=0) as file:
                size = file.tell()
                if file.write(data) != len(data):
                    file.truncate(size)  # never leave half a line
                    raise OSError("disk full")
        except OSError as error:
            self.error = str(error)
            return
        self.error = None
        self._waiting.clear()

    def close(self, summary: Row, video: Path | None) -> None:
        self.flush()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file that are whole."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("iteration"), int):
            rows.append(row)
    return rows


def truncate_rows(path: Path, iteration: int) -> list[dict[str, Any]]:
    """Drop lines beyond `iteration`, which a resumed run will write again; those that stay."""
    rows = [row for row in read_rows(path) if row["iteration"] <= iteration]
    write_whole(path, "".join(dumps(row) + "\n" for row in rows))
    return rows


class TensorboardLog:
    """Event files in `<run dir>/tensorboard`."""

    def __init__(self, run_dir: Path):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "iteration":
                self._writer.add_scalar(name, value, row["iteration"])

    def close(self, summary: Row, video: Path | None) -> None:
        self._writer.close()


class WandbLog:
    """A run of Weights & Biases; offline where no key is configured, so that nothing asks."""

    def __init__(
        self, run_dir: Path, config: Mapping[str, Any], name: str, group: str | None = None
    ):
        import wandb

        self.mode = wandb_mode()
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxtd3"),
            name=name,
            group=os.environ.get("WANDB_RUN_GROUP", group),
            dir=str(run_dir),
            config=dict(config),
            mode=self.mode,  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, row: Row) -> None:
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
        self._run.log(numbers, step=row["iteration"])

    def close(self, summary: Row, video: Path | None) -> None:
        if video is not None:
            kind = video.suffix.removeprefix(".")
            self._run.log({"video": self._wandb.Video(str(video), format=kind)})  # type: ignore
        self._run.summary.update({k: v for k, v in summary.items() if k != "versions"})
        self._run.finish()


def wandb_mode() -> str:
    """What the user set, else online with a key and offline without."""
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    return "online" if has_wandb_key() else "offline"


def has_wandb_key() -> bool:
    """True if a key stands in the environment or in a netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        return netrc.netrc(path).authenticators(host.split(":")[0]) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def require_loggers(wandb: bool, tensorboard: bool) -> None:
    """Raise where a package that was asked for is missing."""
    from importlib.util import find_spec

    for asked, module, extra in (
        (wandb, "wandb", "wandb"),
        (tensorboard, "tensorboardX", "tensorboard"),
    ):
        if asked and find_spec(module) is None:
            raise UserError(f'--{extra} needs {module}: pip install "jaxtd3[{extra}]"')
