"""The command `report`: what was measured, on a terminal, as text or as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.console import say, tables_console
from nsa_tune._cli.files import write_file
from nsa_tune._cli.options import AsJson, Database, Format, Gpu, Heads, KvDtypeOption, Model
from nsa_tune._errors import ExtraMissing, UsageError
from nsa_tune.backend.layouts import layout_of
from nsa_tune.backend.profiles import family_of
from nsa_tune.reports import Report, build
from nsa_tune.reports.document import as_csv, as_json, as_markdown
from nsa_tune.reports.html import as_html, charts_javascript
from nsa_tune.reports.select import Wish, select
from nsa_tune.reports.terminal import as_terminal_text, print_report

__all__ = ["report"]


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
        Path | None, typer.Option("--out", "-o", help="File to write instead of stdout.")
    ] = None,
    table: Annotated[
        str,
        typer.Option("--table", help="For csv: crossovers, cells, costs or failures."),
    ] = "crossovers",
    json: AsJson = False,
) -> None:
    """Show the crossovers, what the engine's default costs, and which arms failed.

    Takes every table that the options match, from the first place that has one.
    """
    layout = None if kv_dtype is None else str(layout_of(kv_dtype, family_of(model)))
    found = build(select(database, Wish(gpu, model, heads, layout)))
    form = Format.JSON if json else form
    if form is Format.TERMINAL and out is None:
        print_report(found, tables_console())
        return
    text = _written(found, form, table)
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
        case Format.HTML:
            try:
                return as_html(found, charts_javascript())
            except ExtraMissing as missing:
                say(str(missing))
                return as_html(found)
        case Format.TERMINAL:
            return as_terminal_text(found)
