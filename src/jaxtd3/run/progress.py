"""What a person sees while it trains: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class Status:
    """Where a run stands."""

    title: str = ""
    stage: str = "loading"
    since: float = field(default_factory=time.perf_counter)
    iteration: int = 0
    iterations: int = 0
    env_steps: int = 0
    rate: float = 0.0
    """Environment steps per second, of the last chunk."""
    left: float | None = None
    """Seconds of training left."""
    returned: float | None = None
    """Mean return of the last evaluation."""
    length: float | None = None


class Progress(Protocol):
    """Takes what happens and shows it."""

    status: Status

    def stage(self, name: str) -> None:
        """A new stage begins."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def update(self, **changes: Any) -> None:
        """The status changed."""

    def close(self, line: str | None) -> None:
        """The end, and the last line if all went well."""


def duration(seconds: float) -> str:
    """1h02m, 3m20s or 12.5s."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
    if seconds >= 60:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    return f"{seconds:.1f}s"


def numbers(status: Status) -> list[tuple[str, str]]:
    """The status as labelled texts."""
    done = f"{status.iteration:,} of {status.iterations:,}"
    shown = [
        ("iteration", done),
        ("env steps", f"{status.env_steps:,}"),
    ]
    if status.rate:
        shown.append(("env steps/s", f"{status.rate:,.0f}"))
    if status.returned is not None:
        shown.append(("return", f"{status.returned:.2f}"))
    if status.length is not None:
        shown.append(("episode length", f"{status.length:.0f}"))
    if status.left is not None:
        shown.append(("time left", duration(status.left)))
    return shown


class Quiet:
    """Shows the last line, or nothing at all."""

    def __init__(self, last_line: bool = True):
        self.status, self._last = Status(), last_line

    def stage(self, name: str) -> None:
        self.status.stage, self.status.since = name, time.perf_counter()

    def note(self, text: str) -> None:
        pass

    def update(self, **changes: Any) -> None:
        if changes.get("stage", self.status.stage) != self.status.stage:
            self.status.since = time.perf_counter()
        for name, value in changes.items():
            setattr(self.status, name, value)

    def close(self, line: str | None) -> None:
        if self._last and line:
            print(line, flush=True)


class Plain(Quiet):
    """One line now and then: for log files."""

    interval = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._shown = 0.0

    def stage(self, name: str) -> None:
        super().stage(name)
        self.note(f"{name} ...")

    def note(self, text: str) -> None:
        try:
            print(text, flush=True)
        except BrokenPipeError:
            raise
        except OSError:  # the log's disk is full: no reason to stop training
            pass

    def update(self, **changes: Any) -> None:
        evaluated = "returned" in changes
        super().update(**changes)
        now = time.perf_counter()
        if "iteration" in changes and (evaluated or now - self._shown >= self.interval):
            self._shown = now
            self.note("  ".join(f"{label} {text}" for label, text in numbers(self.status)))


class Live(Quiet):
    """A panel that follows the run, redrawn by a thread of its own even while it compiles."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live as RichLive

        self._console = Console()
        self._live = RichLive(self, console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def __rich__(self) -> Any:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        status = self.status
        elapsed = duration(time.perf_counter() - status.since)
        table = Table.grid(padding=(0, 2))
        table.add_row("[bold]stage", f"{status.stage}  [dim]{elapsed}")
        if status.iteration:
            for label, text in numbers(status):
                table.add_row(f"[bold]{label}", text)
            table.add_row("", ProgressBar(status.iterations, status.iteration, width=40))
        return Panel(table, title=status.title, expand=False)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self, line: str | None) -> None:
        self._live.stop()
        super().close(line)


def make_progress(quiet: bool, json: bool, silent: bool = False) -> Progress:
    """The view that fits where stdout goes; `silent`: of a process that is not the first."""
    if quiet or json or silent:
        return Quiet(last_line=not (json or silent))
    return Live() if sys.stdout.isatty() else Plain()
