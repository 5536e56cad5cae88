"""The command `report`: what was measured, as text, as an HTML page or as charts."""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.shared.console import say, tables_console
from nsa_tune._cli.shared.option_groups import TableOptions, grouped
from nsa_tune._cli.shared.options import AsJson, Database, Format
from nsa_tune._cli.shared.tables import ask_for_choice
from nsa_tune._errors import ExtraMissing, NsaTuneError, UnknownName, UsageError
from nsa_tune.backend.types.counted import counted
from nsa_tune.reports.analysis.report import Report, build
from nsa_tune.reports.analysis.selection import select_tables
from nsa_tune.reports.charts.figures import figures_of
from nsa_tune.reports.charts.pictures import as_svg
from nsa_tune.reports.formats.flat_table import as_csv
from nsa_tune.reports.formats.json_document import as_json
from nsa_tune.reports.formats.markdown import as_markdown
from nsa_tune.reports.formats.terminal import as_terminal_text, print_report
from nsa_tune.reports.html.page import as_html
from nsa_tune.reports.html.vega_bundle import charts_javascript


@grouped
def report(
    tables: TableOptions,
    database: Database = None,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="What to write. Default: by --out's ending, or terminal.",
                     case_sensitive=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write instead of stdout. For svg: a "
                     "directory, or a file for one chart."),
    ] = None,
    chart: Annotated[
        str, typer.Option("--chart", help="For svg: name of charts; * matches anything.")
    ] = "*",
    json: AsJson = False,
) -> None:  # fmt: skip
    """Show the crossovers, what the engine's default costs, and which arms failed.

    Includes every matching table of the first place that has one: the database, then the user's
    and the site's, then the tables that ship. Where only these are there, it asks for a choice.
    """
    if database is None:
        ask_for_choice(tables)
    shown = build(select_tables(database, tables.filter(database)))
    _report(shown, Format.JSON if json else form or _named(out), out, chart)


def _named(out: Path | None) -> Format:
    """The format that the ending of `out` names."""
    ending = out.suffix.lower().removeprefix(".") if out else ""
    return Format(ending) if ending in set(Format) else Format.TERMINAL


def _report(shown: Report, form: Format, out: Path | None, chart: str) -> None:
    if form is Format.TERMINAL and out is None:
        print_report(shown, tables_console())
    elif form is Format.SVG:
        _draw(shown, out, chart)
    elif form is Format.HTML and out is None and sys.stdout.isatty():
        raise UsageError("an HTML page is not for a terminal; give a file with --out report.html")
    elif out is None:
        typer.echo(_written(shown, form), nl=False)
    else:
        _write_file(out, _written(shown, form))
        say(f"wrote {out}")


def _written(shown: Report, form: Format) -> str:
    match form:
        case Format.MD:
            return as_markdown(shown)
        case Format.CSV:
            return as_csv(shown)
        case Format.JSON:
            return as_json(shown)
        case Format.HTML:
            return _page(shown)
        case _:
            return as_terminal_text(shown)


def _page(shown: Report) -> str:
    try:
        return as_html(shown, charts_javascript())
    except ExtraMissing as missing:
        say(str(missing))
        return as_html(shown)


def _draw(shown: Report, out: Path | None, chart: str) -> None:
    if out is None:
        raise UsageError("give a directory for the svg files with --out")
    figures = figures_of(shown)
    chosen = fnmatch.filter(figures, chart)
    if not chosen:
        raise UnknownName.of("chart", chart, list(figures))
    if out.suffix != ".svg":
        for name in chosen:
            _write_file(out / f"{name}.svg", as_svg(figures[name]))
        say(f"wrote {counted(len(chosen), 'picture')} to {out}")
        return
    if len(chosen) > 1:
        raise UsageError(
            f"{len(chosen)} charts cannot go into the one file {out}: choose one with --chart, or "
            "give a directory"
        )
    _write_file(out, as_svg(figures[chosen[0]]))
    say(f"wrote {out}")


def _write_file(path: Path, text: str) -> None:
    """Write `text` to `path`.

    Raises:
        NsaTuneError: when it cannot be written.
    """
    try:
        if path.suffix == ".svg":
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    except OSError as error:
        raise NsaTuneError(
            f"{path} cannot be written ({error.strerror}); give another file with --out"
        ) from error
