"""A report on the terminal. Nothing is told by colour alone."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from nsa_tune.reports.analysis.report import Report, Section
from nsa_tune.reports.formats.display_tables import (
    DisplayTable,
    answer_texts,
    crossover_tables,
    display_tables,
    fingerprint,
)
from nsa_tune.reports.formats.plain import plain


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
        for text in answer_texts(section):
            console.print(Text(text))
        for table in display_tables(section, report.baseline):
            _print_table(table, console)
        console.print(Text("What the table is valid for", style="bold"))
        for name, value in fingerprint(section):
            console.print(Text(f"  {plain(name):<18}", style="dim"), Text(plain(value)), sep="")


def print_crossovers(report: Report, console: Console) -> None:
    """The crossover tables only."""
    for section in report.sections:
        _print_heading(section, console)
        for table in crossover_tables(section):
            _print_table(table, console)


def print_tables(title: str, tables: Iterable[DisplayTable], console: Console) -> None:
    """Tables under one title."""
    console.print(Text(plain(title), style="bold"))
    for table in tables:
        _print_table(table, console)


def _print_heading(section: Section, console: Console) -> None:
    console.print(Text(plain(section.title), style="bold"))


def _print_table(shown: DisplayTable, console: Console) -> None:
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    for i, column in enumerate(shown.columns):
        table.add_column(
            Text(column), justify="right" if i in shown.numeric else "left", overflow="fold"
        )
    for row in shown.rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    console.print()
    console.print(Text(plain(shown.title), style="bold"))
    if shown.note:
        console.print(Text(plain(shown.note), style="dim"))
    console.print(table)
