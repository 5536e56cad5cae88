"""A report for the terminal. Words and numbers carry everything; colour only helps."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from nsa_tune.reports.output.grids import Grid, crossover_grids, fingerprint, grids_of, title_of
from nsa_tune.reports.output.plain import plain

if TYPE_CHECKING:
    from nsa_tune.reports.content.report import Report, Section

__all__ = ["as_terminal_text", "print_crossovers", "print_grids", "print_report"]


def as_terminal_text(report: Report) -> str:
    """What `print_report` shows, without colour, 200 columns wide."""
    console = Console(file=io.StringIO(), width=200, color_system=None)
    with console.capture() as captured:
        print_report(report, console)
    return captured.get()


def print_report(report: Report, console: Console) -> None:
    """All tables of `report`."""
    for section in report.sections:
        _print_heading(section, console)
        for name, value in fingerprint(section):
            console.print(Text(f"  {plain(name):<18}", style="dim"), Text(plain(value)), sep="")
        for grid in grids_of(section, report.rule):
            _print_grid(grid, console)


def print_crossovers(report: Report, console: Console) -> None:
    """The crossover tables only."""
    for section in report.sections:
        _print_heading(section, console)
        for grid in crossover_grids(section):
            _print_grid(grid, console)


def print_grids(title: str, grids: Iterable[Grid], console: Console) -> None:
    """Tables under one title."""
    console.print(Text(plain(title), style="bold"))
    for grid in grids:
        _print_grid(grid, console)


def _print_heading(section: Section, console: Console) -> None:
    console.print(Text(plain(title_of(section)), style="bold"))


def _print_grid(grid: Grid, console: Console) -> None:
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    for i, column in enumerate(grid.columns):
        table.add_column(
            Text(column), justify="right" if i in grid.numeric else "left", overflow="fold"
        )
    for row in grid.rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    console.print()
    console.print(Text(plain(grid.title), style="bold"))
    if grid.note:
        console.print(Text(plain(grid.note), style="dim"))
    console.print(table)
