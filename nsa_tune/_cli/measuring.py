"""Commands that look at this machine: `run` measures on it, `doctor` examines it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from nsa_tune._cli import answers
from nsa_tune._cli.console import say, tables_console
from nsa_tune._cli.options import AsJson, Database, Engine, Heads, KvDtype, Model
from nsa_tune._errors import ExtraMissing, MachineUnfit
from nsa_tune.backend import tables
from nsa_tune.reports import build
from nsa_tune.reports.document import document
from nsa_tune.reports.plain import plain
from nsa_tune.reports.terminal import print_crossovers

if TYPE_CHECKING:
    from nsa_tune.autotune.run import RunResult

__all__ = ["doctor", "run"]

_INTERRUPTED = 130


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
        raise typer.Exit(_INTERRUPTED)


def _print_run(result: RunResult, path: Path, *, as_document: bool, quiet: bool) -> None:
    found = build([result.table])
    if as_document:
        section = document(found)["sections"][0]
        typer.echo(answers.as_text(answers.measured(result, str(path), section)))
    else:
        print_crossovers(found, tables_console())
    if not quiet:
        say(
            f"{result.outcome}: {result.measured} measurements in {result.seconds:.0f} s, "
            f"{result.failed} failed, {result.skipped} were there already; in {path}"
        )


def doctor(
    database: Database = None,
    engine: Annotated[
        Engine | None,
        typer.Option("--engine", help="Look instead whether the plug-in steers this engine."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Examine this machine: GPU, driver, libraries, clocks, other processes and the database.

    Exits with 5 when it cannot measure, or, with --engine, when the plug-in does not steer it.
    """
    from nsa_tune.autotune.doctor import examine, examine_engine

    diagnosis = examine(database=database) if engine is None else examine_engine(database)
    if json:
        typer.echo(answers.as_text(answers.diagnosed(diagnosis)))
    else:
        for finding in diagnosis.findings:
            typer.echo(plain(f"{finding.state:<5} {finding.subject:<16} {finding.text}"))
        typer.echo(plain(diagnosis.conclusion))
    if not diagnosis.fit:
        raise typer.Exit(MachineUnfit.exit_code)
