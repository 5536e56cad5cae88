"""The command `run`: measure on this machine, and store the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from nsa_tune._cli.measure.device import INTERRUPTED, check_packages, interruptible
from nsa_tune._cli.measure.events import events_into
from nsa_tune._cli.measure.executors import ExecutorKind, ExecutorOptions, launcher_for
from nsa_tune._cli.measure.progress import progress_for
from nsa_tune._cli.shared.console import print_document, say, tables_console
from nsa_tune._cli.shared.option_groups import ModelOptions, grouped
from nsa_tune._cli.shared.options import (
    AllowLossy,
    AsJson,
    DatabaseToWrite,
    Quiet,
    listed,
    names_of,
)
from nsa_tune._errors import MachineUnfit
from nsa_tune.autotune.runner.progress import Together
from nsa_tune.autotune.worker.isolated import Deadlines
from nsa_tune.backend.hardware.detect import cpu_name, device_name
from nsa_tune.backend.types.counted import counted
from nsa_tune.db import places
from nsa_tune.reports.analysis.report import build
from nsa_tune.reports.formats.json_document import report_document
from nsa_tune.reports.formats.terminal import print_crossovers

if TYPE_CHECKING:
    from nsa_tune.autotune.runner.run import RunRequest, RunResult


@grouped
def run(
    *,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="cuda, cuda:N, all GPUs of this host, cpu, or auto: a GPU, else the CPU. Default: "
            "a GPU.",
        ),
    ] = None,
    model: ModelOptions,
    executors: ExecutorOptions,
    points: Annotated[
        str, typer.Option("--points", help="Decision points, comma-separated, or all.")
    ] = "all",
    budget: Annotated[
        float | None,
        typer.Option("--budget", min=0, help="Start no new batch after so many seconds."),
    ] = None,
    target_regret: Annotated[
        float,
        typer.Option(
            "--target-regret",
            min=0,
            max=1,
            help="Stop when the regret expected on the worst tenth of batches is at most this; "
            "0 measures the whole grid.",
        ),
    ] = 0.01,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="File with requests, or an engine's decision log, whose batches are measured too.",
        ),
    ] = None,
    allow_lossy: AllowLossy = "",
    overlap: Annotated[
        float | None,
        typer.Option(
            "--overlap",
            min=0,
            max=1,
            help="Share of its selected keys that a query of prefill has in common with the one "
            "before it. The table's protocol names it. Default: selections drawn one by one.",
        ),
    ] = None,
    database: DatabaseToWrite = None,
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
            "--arm-timeout",
            min=1,
            help="Seconds after which an arm's first call, which may compile, counts as hung.",
        ),
    ] = Deadlines().first,
    events: Annotated[
        str | None,
        typer.Option("--events", help="Append events as JSON lines to this file; - is stderr."),
    ] = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure the arms of the decision points, and store each batch as soon as it is measured.

    Without --model a GPU measures deepseek-v3.2, a CPU the tiny profile; without --heads all of
    the model's heads. Each device has a worker process, which is replaced when an arm crashes or
    hangs. At the end the crossovers are printed: the batches at which another arm becomes faster.
    """
    from nsa_tune.autotune.runner.run import RunRequest
    from nsa_tune.autotune.runner.run import run as tune

    local = executors.executor is ExecutorKind.LOCAL
    on_cpu = local and device_name(device or "auto") == cpu_name()
    if on_cpu and device is None:
        raise MachineUnfit(
            "this host has no GPU to measure: run this where the engine runs, and nsa-tune doctor "
            "there says what is missing; --device cpu shows how a run works, and its times hold "
            "for no GPU"
        )
    if local:
        check_packages("measuring")
    request = RunRequest(
        database=database or places.database_to_write(),
        device=device or "auto",
        model=model.model,
        heads=model.heads,
        kv_dtype=str(model.kv_dtype),
        points=names_of("--points", points),
        budget_s=budget,
        fresh=fresh,
        target_regret=target_regret,
        trace=trace,
        lossy=listed(allow_lossy),
        overlap=overlap,
        executor=executors.executor.value,
        sample=executors.sample,
        isolate=isolate,
        deadlines=Deadlines(first=arm_timeout),
    )
    if on_cpu and not quiet:
        say("no GPU is measured: this demonstrates a run on a CPU, and its times hold for no GPU")
    launcher = launcher_for(executors, request)
    progress, shown = progress_for(Console(stderr=True), quiet=quiet or events == "-")
    with interruptible("interrupted; what was measured is stored"), events_into(events) as written:
        told = progress if written is None else Together(progress, written)
        with shown:
            result = tune(request, told, launcher=launcher)
        if written is not None:
            written.end(result.outcome, **_counts(result))
    _print_result(result, request, as_document=json)
    if not quiet:
        _print_summary(result, request)
    if result.outcome == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _print_result(result: RunResult, request: RunRequest, *, as_document: bool) -> None:
    found = build(list(result.tables))
    if not as_document:
        print_crossovers(found, tables_console())
        return
    sections = report_document(found)["sections"]
    print_document(_document(result, str(request.database), sections))


def _print_summary(result: RunResult, request: RunRequest) -> None:
    batches = counted(sum(unit.batches for unit in result.units), "batch", "batches")
    rows = counted(result.measured, "measurement")
    for arm in result.quarantined:
        say(f"quarantined: {arm.arm} of {arm.point}, not tried again without --fresh: {arm.reason}")
    say(
        f"{result.outcome}: {batches} in {result.seconds:.0f} s: {rows}, {result.failed} of them "
        f"failed, {result.skipped} stored before; in {request.database}"
    )
    for spread in result.spreads:
        shared = counted(spread.batches, "shared batch", "shared batches")
        driver = f", driver {spread.driver}" if spread.driver else ""
        say(
            f"{spread.units} devices of {spread.device}{driver} are {spread.median:.1%} apart "
            f"(median over {shared}; at most {spread.most:.1%})"
        )
    if result.left_out:
        losses = ", ".join(f"{name} {loss}" for name, loss in result.left_out.items())
        most = max(loss.most for loss in result.left_out.values())
        missed = result.outcome == "done" and most > request.target_regret > 0
        more = "; --target-regret 0 measures the whole grid" if missed else ""
        say(
            "on batches that were not measured, a choice takes on average so much longer than the "
            f"fastest one: {losses}{more}"
        )


def _document(
    result: RunResult, database: str, sections: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The document of `run`; `sections` are those of its report document.

    A run on GPUs of several models makes a table for each; the fields of the first one are also on
    top.
    """
    tables = [_tuned(section) for section in sections]
    return {
        "schema": "nsa-tune/run/3",
        "outcome": result.outcome,
        **_counts(result),
        "database": database,
        **tables[0],
        "tables": tables,
    }


def _counts(result: RunResult) -> dict[str, Any]:
    return {
        "measured": result.measured,
        "skipped": result.skipped,
        "failed": result.failed,
        "quarantined": [asdict(arm) for arm in result.quarantined],
        "workers_replaced": result.replaced,
        "devices_lost": result.lost,
        "seconds": round(result.seconds, 1),
        "left_out": {name: asdict(one) for name, one in result.left_out.items()},
        "units": [{**asdict(unit), "out_of_line": unit.out_of_line} for unit in result.units],
        "spreads": [asdict(one) for one in result.spreads],
    }


def _tuned(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "key": section["key"],
        "crossovers": [
            {"question": question["question"], **line}
            for point in section["points"]
            for question in point["questions"]
            for line in question["lines"]
        ],
        "failures": section["failures"],
    }
