"""The command line. Each command parses, calls one public function and prints what it returns.

Data goes to stdout, talk and progress to stderr.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

import nsa_tune
from nsa_tune._cli import answers
from nsa_tune._cli.files import only_table, write_file
from nsa_tune._cli.options import (
    AsJson,
    BatchWord,
    Captured,
    Database,
    Extend,
    Format,
    Gpu,
    Heads,
    KvDtype,
    KvDtypeOption,
    Model,
    Prefix,
    Strict,
    batch_of,
    heads_of,
    model_of,
)
from nsa_tune._errors import ExtraMissing, MachineUnfit, NsaTuneError, UsageError
from nsa_tune.backend import detect, tables
from nsa_tune.backend.dispatcher import Dispatcher
from nsa_tune.backend.layouts import layout_of
from nsa_tune.reports import Report, build
from nsa_tune.reports.document import as_csv, as_json, as_markdown, document
from nsa_tune.reports.html import as_html, charts_javascript
from nsa_tune.reports.plain import plain
from nsa_tune.reports.select import Wish, select
from nsa_tune.reports.terminal import as_terminal_text, print_crossovers, print_report

if TYPE_CHECKING:
    from nsa_tune.autotune.run import RunResult

__all__ = ["app", "db", "main"]

app = typer.Typer(
    help="Measure which attention implementation of a DeepSeek sparse attention model is fastest "
    "for which batch on this GPU, and answer from the measurements.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
db = typer.Typer(help="Look into databases, and move tables between them.", no_args_is_help=True)
app.add_typer(db, name="db")

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    logging.basicConfig(format="nsa-tune: %(message)s", stream=sys.stderr)
    try:
        app(arguments, prog_name="nsa-tune")
    except NsaTuneError as error:
        _say(f"nsa-tune: {error}")
        sys.exit(error.exit_code)


def _stdout() -> Console:
    # Into a file or a pipe a table keeps its lines whole.
    return Console() if sys.stdout.isatty() else Console(width=200)


def _say(text: str) -> None:
    Console(stderr=True, highlight=False).print(Text(plain(text)), soft_wrap=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(nsa_tune.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    del version  # its callback has printed it


@app.command()
def run(
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda or cuda:N; auto takes the best one.")
    ] = "auto",
    model: Model = None,
    heads: Heads = None,
    kv_dtype: Annotated[KvDtype, typer.Option("--kv-dtype", help="Format of the KV pool.")] = (
        KvDtype.FP8
    ),
    points: Annotated[
        str, typer.Option("--points", help="Decision points, comma-separated, or all.")
    ] = "all",
    budget: Annotated[
        float | None,
        typer.Option("--budget", min=0, help="Seconds after which to stop; what is done is kept."),
    ] = None,
    database: Database = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh/--resume", help="Measure again, or only what is missing."),
    ] = False,
    json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Measure every arm over the decision points' batches, and store each as soon as it is done.

    Without --model a GPU measures deepseek-v3.2 and a CPU the tiny profile; without --heads all of
    the model's heads. Ends with the crossover table.
    """
    from nsa_tune._cli.progress import progress_for

    try:
        from nsa_tune.autotune.run import RunRequest
        from nsa_tune.autotune.run import run as tune
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        raise ExtraMissing.of("measuring", "tune") from None
    request = RunRequest(
        database=database or tables.default_database(),
        device=device,
        model=model,
        heads=heads,
        kv_dtype=str(kv_dtype),
        points=() if points == "all" else tuple(points.split(",")),
        budget_s=budget,
        fresh=fresh,
    )
    progress, shown = progress_for(Console(stderr=True), quiet=quiet)
    with shown:
        result = tune(request, progress)
    _print_run(result, request.database, as_document=json, quiet=quiet)
    if result.outcome == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _print_run(result: RunResult, path: Path, *, as_document: bool, quiet: bool) -> None:
    found = build([result.table])
    if as_document:
        section = document(found)["sections"][0]
        print(answers.as_text(answers.measured(result, str(path), section)))
    else:
        print_crossovers(found, _stdout())
    if not quiet:
        _say(
            f"{result.outcome}: {result.measured} measurements in {result.seconds:.0f} s, "
            f"{result.failed} failed, {result.skipped} were there already; in {path}"
        )


@app.command()
def lookup(
    batch: BatchWord = None,
    prefix: Prefix = None,
    extend: Extend = None,
    captured: Captured = False,
    gpu: Gpu = None,
    model: Model = None,
    heads: Heads = None,
    kv_dtype: KvDtypeOption = None,
    database: Database = None,
    strict: Strict = False,
    json: AsJson = False,
) -> None:
    """Print the plan for one batch: every decision that an engine would read.

    Without a table for the key the engine's own rule answers, and stderr says so.
    """
    asked = batch_of(batch, prefix, extend, captured)
    dispatcher = _dispatcher(gpu, model, heads, kv_dtype, database, strict)
    plan = dispatcher.plan(asked)
    if json:
        print(answers.as_text(answers.looked_up(dispatcher, plan)))
        return
    for name, value in answers.decisions(plan).items():
        if value is not None:
            print(f"{name} = {value}")


@app.command()
def explain(
    batch: BatchWord = None,
    prefix: Prefix = None,
    extend: Extend = None,
    captured: Captured = False,
    gpu: Gpu = None,
    model: Model = None,
    heads: Heads = None,
    kv_dtype: KvDtypeOption = None,
    database: Database = None,
    strict: Strict = False,
    json: AsJson = False,
) -> None:
    """Say why the plan for one batch is what it is: estimates, intervals, limits and sources."""
    asked = batch_of(batch, prefix, extend, captured)
    dispatcher = _dispatcher(gpu, model, heads, kv_dtype, database, strict)
    if json:
        print(answers.as_text(answers.explained(dispatcher, dispatcher.plan(asked))))
    else:
        for line in dispatcher.explain(asked).splitlines():
            print(plain(line))


def _dispatcher(
    gpu: str | None,
    model: str | None,
    heads: int | None,
    kv_dtype: KvDtype | None,
    database: Path | None,
    strict: bool,
) -> Dispatcher:
    gpu = gpu or detect.local_device_name()
    model = model_of(model, gpu)
    return Dispatcher.open(
        database,
        gpu,
        model=model,
        heads=heads_of(heads, model),
        kv_dtype=str(kv_dtype or KvDtype.FP8),
        strict=strict,
    )


@app.command()
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
    layout = None if kv_dtype is None else str(layout_of(kv_dtype))
    found = build(select(database, Wish(gpu, model, heads, layout)))
    form = Format.JSON if json else form
    if form is Format.TERMINAL and out is None:
        print_report(found, _stdout())
        return
    text = _written(found, form, table)
    if out is not None:
        write_file(out, text)
        _say(f"wrote {out}")
    elif form is Format.HTML and sys.stdout.isatty():
        raise UsageError("an HTML page is not for a terminal; give a file with --out report.html")
    else:
        print(text, end="")


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
                _say(str(missing))
                return as_html(found)
        case Format.TERMINAL:
            return as_terminal_text(found)


@app.command()
def doctor(database: Database = None, json: AsJson = False) -> None:
    """Examine this machine: GPU, driver, libraries, clocks, other processes and the database.

    Exits with 5 when it cannot measure.
    """
    from nsa_tune.autotune.doctor import examine

    diagnosis = examine(database=database)
    if json:
        print(answers.as_text(answers.diagnosed(diagnosis)))
    else:
        for finding in diagnosis.findings:
            print(plain(f"{finding.state:<5} {finding.subject:<16} {finding.text}"))
        print(plain(diagnosis.conclusion))
    if not diagnosis.fit:
        raise typer.Exit(MachineUnfit.exit_code)


@db.command("list")
def db_list(database: Database = None, json: AsJson = False) -> None:
    """List the tables of a database."""
    path = database or tables.default_database()
    known = tables.read_database(path)
    if json:
        print(answers.as_text(answers.listed(str(path), known)))
        return
    for one in known:
        key = one.key
        print(
            plain(
                f"{key.digest}  {key.gpu}, {key.model}, {key.heads} local heads, {key.kv_layout}, "
                f"{key.protocol}: {len(one.measurements)} measurements, {one.measured_at}"
            )
        )
    if not known:
        _say(f"{path} has no tables; measure with `nsa-tune run`")


@db.command("export")
def db_export(
    out: Annotated[Path, typer.Option("--out", "-o", help="Text table to write.")],
    key: Annotated[
        str | None, typer.Option("--key", help="Digest of the table's key, as `db list` shows it.")
    ] = None,
    gpu: Gpu = None,
    model: Model = None,
    heads: Heads = None,
    kv_dtype: KvDtypeOption = None,
    database: Database = None,
) -> None:
    """Write one table of a database as text that can be compared, committed and imported."""
    from nsa_tune.db.exchange import write_text

    layout = None if kv_dtype is None else str(layout_of(kv_dtype))
    wish = Wish(gpu, model, heads, layout)
    path = database or tables.default_database()
    known = [one for one in tables.read_database(path) if wish.matches(one.key)]
    if key is not None:
        known = [one for one in known if one.key.digest.startswith(key)]
    write_text(only_table(known, path), out)
    _say(f"wrote {out}")


@db.command("import")
def db_import(
    file: Annotated[Path, typer.Argument(help="Text table that `db export` wrote.")],
    database: Database = None,
) -> None:
    """Add a text table to a database; measurements that are there already stay as they are."""
    from nsa_tune.db.exchange import import_text
    from nsa_tune.db.store import Store

    with Store.open(database or tables.default_database()) as store:
        added = import_text(store, file)
        _say(f"{added} measurements added to {store.path}")


if __name__ == "__main__":
    main()
