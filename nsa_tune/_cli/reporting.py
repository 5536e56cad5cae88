"""The command `report`: what was measured, on a terminal, as text, as a page or as pictures."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.console import say, tables_console
from nsa_tune._cli.files import write_file
from nsa_tune._cli.options import (
    AsJson,
    Database,
    Format,
    Gpu,
    Heads,
    KvDtypeOption,
    Model,
    Theme,
)
from nsa_tune._errors import ExtraMissing, UnknownName, UsageError
from nsa_tune.backend.types.layouts import layout_of
from nsa_tune.backend.types.profiles import family_of
from nsa_tune.backend.types.records import Table
from nsa_tune.reports import Report, build
from nsa_tune.reports.content.select import Wish, select
from nsa_tune.reports.html import as_html, bundling
from nsa_tune.reports.output.document import as_csv, as_json, as_markdown
from nsa_tune.reports.output.figures import Figure, figures_of
from nsa_tune.reports.output.flat import FLAT
from nsa_tune.reports.output.pictures import drawn, write_pictures
from nsa_tune.reports.output.terminal import as_terminal_text, print_report

__all__ = ["report"]

_PICTURES = (Format.SVG, Format.PNG)


def report(
    gpu: Gpu = None,
    model: Model = None,
    heads: Heads = None,
    kv_dtype: KvDtypeOption = None,
    database: Database = None,
    form: Annotated[
        Format, typer.Option("--format", help="What to write.", case_sensitive=False)
    ] = Format.TERMINAL,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write instead of stdout; of pictures, the "
                     "directory, or the file of one."),
    ] = None,
    table: Annotated[
        str,
        typer.Option("--table", help=f"For csv: {', '.join(FLAT)}."),
    ] = "crossovers",
    chart: Annotated[
        str, typer.Option("--chart", help="For svg and png: the charts of this name; * fits any.")
    ] = "*",
    theme: Annotated[
        Theme, typer.Option("--theme", help="For svg and png: light or dark.")
    ] = Theme.LIGHT,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Show the crossovers, what the engine's default costs, and which arms failed.

    Takes every table that the options match, from the first place that has one.
    """
    layout = None if kv_dtype is None else str(layout_of(kv_dtype, family_of(model)))
    form = Format.JSON if json else form
    with _nothing_collected():
        found = select(database, Wish(gpu, model, heads, layout))
        _report(found, form, out, table, chart, str(theme))


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Without garbage collection: a report only grows, and looking through it takes a quarter of
    the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _report(
    found: Sequence[Table], form: Format, out: Path | None, table: str, chart: str, theme: str
) -> None:
    if form is Format.TERMINAL and out is None:
        print_report(build(found), tables_console())
        return
    if form in _PICTURES:
        _draw(build(found), form, out, chart, theme)
        return
    text = _page(found) if form is Format.HTML else _written(build(found), form, table)
    if out is not None:
        write_file(out, text)
        say(f"wrote {out}")
    elif form is Format.HTML and sys.stdout.isatty():
        raise UsageError("an HTML page is not for a terminal; give a file with --out report.html")
    else:
        typer.echo(text, nl=False)


def _written(found: Report, form: Format, table: str) -> str:
    match form:
        case Format.MD:
            return as_markdown(found)
        case Format.CSV:
            return as_csv(found, table)
        case Format.JSON:
            return as_json(found)
        case _:
            return as_terminal_text(found)


def _page(found: Sequence[Table]) -> str:
    # The script is made in a process of its own while this one follows the surfaces.
    with bundling() as javascript:
        report = build(found)
        try:
            return as_html(report, javascript())
        except ExtraMissing as missing:
            say(str(missing))
            return as_html(report)


def _draw(found: Report, form: Format, out: Path | None, chart: str, theme: str) -> None:
    if out is None:
        raise UsageError(f"give the directory to write the {form} files to with --out")
    figures = _chosen(list(figures_of(found)), chart)
    if out.suffix != f".{form}":
        count = sum(1 for _ in write_pictures(figures, out, form, theme))
        say(f"wrote {count} pictures to {out}")
        return
    if len(figures) > 1:
        raise UsageError(
            f"{len(figures)} charts do not fit into {out}: choose one with --chart, or give a "
            "directory"
        )
    write_file(out, drawn(figures[0].spec, form, theme))
    say(f"wrote {out}")


def _chosen(figures: list[Figure], pattern: str) -> list[Figure]:
    chosen = [figure for figure in figures if fnmatchcase(figure.name, pattern)]
    if not chosen:
        raise UnknownName.of("chart", pattern, [figure.name for figure in figures])
    return chosen
