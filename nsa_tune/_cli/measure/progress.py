"""Progress of a run for people, on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from nsa_tune.autotune.runner.progress import Incident, Progress, Stored
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.counted import counted
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.records import Key, Status
from nsa_tune.reports.formats.plain import plain

if TYPE_CHECKING:
    from rich.console import Console

_LINE_EVERY_S = 10.0
_PACE_S = 10.0
"""The latest seconds, whose batches tell the pace of the rest: a kernel that compiles says nothing
of it."""
_FEWEST = 8
"""Batches up to which a pace means nothing."""
_LONGEST_NAME = 40
"""Of a batch, in characters."""


class RunProgress(Progress):
    """Counts batches and failures, and prints what is unusual."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.measured = 0
        self.failed = 0
        self.quarantined = 0
        self.batches = 0

    def start(self, setting: Setting, key: Key, batches: int, skipped: int) -> None:
        """Print what is going to be measured."""
        self.batches += batches
        known = f"; {counted(skipped, 'measurement')} stored before" if skipped else ""
        self._say(
            f"{key.model}, {setting.heads} local heads, {key.kv_layout} on {key.gpu}: "
            f"about {counted(batches, 'batch', 'batches')} to measure{known}"
        )

    def batch(self, stored: Stored) -> None:
        """Count a batch, and print failures."""
        self.measured += 1
        for row in stored.rows:
            if row.status is not Status.OK:
                self.failed += 1
                self._say(f"{row.arm} {row.status} on {_short(stored.batch)}: {row.reason}")

    def incident(self, incident: Incident) -> None:
        self.quarantined += incident.kind == "quarantined"
        self._say(incident.text)

    def pace(self, seconds: float) -> str:
        """Batches measured per second, and how many arms failed or are quarantined."""
        pace = f"{self.measured / seconds:.1f} batches/s" if seconds > 0 else "starting"
        return f"{pace}{self.failures()}"

    def failures(self) -> str:
        """How many arms failed or are quarantined, to be added to a line; "" where none."""
        failed = f", {counted(self.failed, 'arm')} failed" if self.failed else ""
        return failed + (f", {self.quarantined} quarantined" if self.quarantined else "")

    def _say(self, text: str) -> None:
        self.console.print(Text(plain(text)), soft_wrap=True)


class LineProgress(RunProgress):
    """Prints a line every ten seconds."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._next_line_at = _LINE_EVERY_S
        self._seconds = 0.0
        self._pace = RichProgress(
            disable=True, speed_estimate_period=_PACE_S, get_time=lambda: self._seconds
        )
        # Without a total: when that changes, rich forgets the pace.
        self._task = self._pace.add_task("", total=None)

    def batch(self, stored: Stored) -> None:
        """Also prints a line, every ten seconds and at the end."""
        super().batch(stored)
        done, total, seconds = stored.done, stored.total, stored.seconds
        self._seconds = seconds
        self._pace.update(self._task, completed=done)
        if seconds >= self._next_line_at or done == total:
            self._next_line_at = seconds + _LINE_EVERY_S
            speed = self._pace.tasks[0].speed if _FEWEST < done < total else None
            left = f", about {(total - done) / speed:.0f} s more" if speed else ""
            self._say(
                f"{_count(done, total)}, {seconds:.0f} s{left}{self.failures()}"
                f"; {stored.point.name}"
            )


class BarProgress(RunProgress):
    """A bar with the time left and the latest batch."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        # A narrow terminal cuts off these words, never the numbers before them.
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self.bar = RichProgress(
            BarColumn(bar_width=16),
            TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True, min_width=24)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=8)),
            TextColumn("{task.fields[pace]}  {task.fields[batch]}", markup=False,
                       table_column=rest),
            console=console,
            transient=True,
            expand=True,
        )  # fmt: skip
        self._task = self.bar.add_task("", total=None, count="", pace="starting", batch="")

    def start(self, setting: Setting, key: Key, batches: int, skipped: int) -> None:
        """Also sets the length of the bar."""
        super().start(setting, key, batches, skipped)
        self.bar.update(self._task, total=self.batches, count=_count(0, self.batches))

    def batch(self, stored: Stored) -> None:
        """Also moves the bar."""
        super().batch(stored)
        self.bar.update(
            self._task, completed=stored.done, total=stored.total,
            count=_count(stored.done, stored.total),
            pace=self.pace(stored.seconds), batch=_short(stored.batch),
        )  # fmt: skip


def _count(done: int, total: int) -> str:
    """Batches measured and left; how many are left, a search can only guess."""
    left = f", about {total - done} left" if total > done else ""
    return f"{counted(done, 'batch', 'batches')} measured{left}"


def _short(batch: Batch) -> str:
    """The name of a batch, which may have thousands of sequences, in 40 characters at most."""
    name = str(batch)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def progress_for(
    console: Console, *, quiet: bool
) -> tuple[RunProgress, AbstractContextManager[object]]:
    """The progress for `console`, and the context manager that displays it."""
    if quiet:
        console.quiet = True
        return RunProgress(console), nullcontext()
    if console.is_terminal:
        bar = BarProgress(console)
        return bar, bar.bar
    return LineProgress(console), nullcontext()
