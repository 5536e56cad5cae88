"""Commands that look at this machine: `run` measures on it, `doctor` examines it."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from nsa_tune._cli import answers
from nsa_tune._cli.console import say, tables_console
from nsa_tune._cli.events import Together, events_into
from nsa_tune._cli.options import AsJson, Database, Engine, Heads, KvDtype, Model
from nsa_tune._errors import ExtraMissing, MachineUnfit, UsageError
from nsa_tune.autotune.worker.isolation import Deadlines
from nsa_tune.db import reader as tables
from nsa_tune.reports import build
from nsa_tune.reports.output.document import document
from nsa_tune.reports.output.plain import plain
from nsa_tune.reports.output.terminal import print_crossovers

if TYPE_CHECKING:
    from nsa_tune.autotune.runner.run import RunRequest, RunResult

__all__ = ["doctor", "interruptible", "run"]

_INTERRUPTED = 130


def run(
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda, cuda:N, or all GPUs of this host.")
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
    target_regret: Annotated[
        float,
        typer.Option(
            "--target-regret",
            min=0,
            max=1,
            help="Regret to expect on the worst tenth of batches; 0 measures the whole grid.",
        ),
    ] = 0.01,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Requests, or an engine's decision log, to take batches of."),
    ] = None,
    database: Database = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh/--resume", help="Measure again, or only what is missing."),
    ] = False,
    isolate: Annotated[
        bool,
        typer.Option(
            "--isolate/--no-isolate",
            help="Measure in worker processes, or in this one (for debuggers and profilers).",
        ),
    ] = True,
    arm_timeout: Annotated[
        float,
        typer.Option(
            "--arm-timeout", min=1, help="Seconds after which an arm's first touch counts as hung."
        ),
    ] = Deadlines().first,
    events: Annotated[
        str | None,
        typer.Option("--events", help="File to append events to as JSON lines, or - for stderr."),
    ] = None,
    json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Measure the decision points' arms where it matters, and store each batch when it is done.

    Without --model a GPU measures deepseek-v3.2 and a CPU the tiny profile; without --heads all of
    the model's heads. Arms run in a worker process for each GPU, so one that crashes or hangs ends
    its worker and not the run. Ends with the crossover table.
    """
    from nsa_tune._cli.progress import progress_for
    from nsa_tune.autotune.runner.run import RunRequest
    from nsa_tune.autotune.runner.run import run as tune

    for library in ("torch", "triton"):
        if importlib.util.find_spec(library) is None:
            raise ExtraMissing.of("measuring", "tune")
    request = RunRequest(
        database=database or tables.default_database(),
        device=device,
        model=model,
        heads=heads,
        kv_dtype=str(kv_dtype),
        points=() if points == "all" else _names(points),
        budget_s=budget,
        fresh=fresh,
        target_regret=target_regret,
        trace=trace,
        isolate=isolate,
        deadlines=Deadlines(first=arm_timeout),
    )
    progress, shown = progress_for(Console(stderr=True), quiet=quiet or events == "-")
    with interruptible("interrupted; what was measured is kept"), events_into(events) as written:
        told = progress if written is None else Together(progress, written)
        with shown:
            result = tune(request, told)
        if written is not None:
            written.end(result.outcome, **answers.counted(result))
    _print_run(result, request, as_document=json, quiet=quiet)
    if result.outcome == "interrupted":
        raise typer.Exit(_INTERRUPTED)


def _names(points: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in points.split(","))
    if not all(names):
        raise UsageError(f"--points {points!r} lacks a name; write it like prefill,decode")
    return names


@contextmanager
def interruptible(sentence: str) -> Iterator[None]:
    """Within it SIGTERM, which a batch system sends first, is as Ctrl-C: exit code 130, and
    `sentence` where the command has nothing else to say."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        say(f"nsa-tune: {sentence}")
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_run(result: RunResult, request: RunRequest, *, as_document: bool, quiet: bool) -> None:
    found, path = build(list(result.tables)), str(request.database)
    if as_document:
        sections = document(found)["sections"]
        typer.echo(answers.as_text(answers.measured(result, path, sections)))
    else:
        print_crossovers(found, tables_console())
    if quiet:
        return
    target = request.target_regret
    for arm in result.quarantined:
        say(f"quarantined: {arm.arm} of {arm.point}, not tried again without --fresh: {arm.reason}")
    say(
        f"{result.outcome}: {result.measured} measurements in {result.seconds:.0f} s, "
        f"{result.failed} failed, {result.skipped} were there already; in {path}"
    )
    if result.expected_regret:
        left = ", ".join(f"{name} {r:.1%}" for name, r in result.expected_regret.items())
        say(f"regret to expect on the worst tenth of batches: {left}")
        if result.outcome == "done" and max(result.expected_regret.values()) > target:
            say(
                f"that is over the target of {target:.1%}, and more batches did not lower it, or a "
                "fifth of the grid was reached; --target-regret 0 measures the whole grid"
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
    from nsa_tune.autotune.health.doctor import examine, examine_engine

    diagnosis = examine(database=database) if engine is None else examine_engine(database)
    if json:
        typer.echo(answers.as_text(answers.diagnosed(diagnosis)))
    else:
        for finding in diagnosis.findings:
            typer.echo(plain(f"{finding.state:<5} {finding.subject:<16} {finding.text}"))
        typer.echo(plain(diagnosis.conclusion))
    if not diagnosis.fit:
        raise typer.Exit(MachineUnfit.exit_code)
