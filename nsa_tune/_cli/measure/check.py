"""The command `check`: does a table still hold on this machine?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from nsa_tune._cli.measure.device import check_packages, interruptible
from nsa_tune._cli.measure.progress import progress_for
from nsa_tune._cli.shared.console import print_document, say
from nsa_tune._cli.shared.option_groups import ModelOptions, grouped
from nsa_tune._cli.shared.options import AsJson, DatabaseToWrite, Quiet, heads_of, model_of
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.types.counted import counted
from nsa_tune.reports.formats.plain import plain

if TYPE_CHECKING:
    from nsa_tune.autotune.health.table_check import CheckResult

_DOES_NOT_HOLD = 4


@grouped
def check(
    *,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda or cuda:N; auto takes the first GPU.")
    ] = "auto",
    model: ModelOptions,
    anchors: Annotated[
        int, typer.Option("--anchors", min=1, help="Batches of every decision point to time again.")
    ] = 4,
    database: DatabaseToWrite = None,
    keep: Annotated[
        bool,
        typer.Option("--keep/--no-keep", help="Store the outcome in the database, or do not."),
    ] = True,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time a few batches of a table again, and tell whether it still holds on this machine.

    Exits with 4 when it does not: a choice of the table loses more than 3 % on a batch where it was
    clearly faster before, an arm fails, or the median time has changed by more than 10 %.
    """
    check_packages("measuring")
    from nsa_tune.autotune.health.table_check import CheckRequest
    from nsa_tune.autotune.health.table_check import check as check_table

    gpu = detect.device_name(device)
    name = model_of(model.model, gpu)
    request = CheckRequest(
        gpu, name, heads_of(model.heads, name), str(model.kv_dtype), database, device, anchors, keep
    )
    progress, shown = progress_for(Console(stderr=True), quiet=quiet)
    with (
        interruptible("interrupted: a part of the batches proves nothing, so no outcome is stored"),
        shown,
    ):
        result = check_table(request, progress)
    if result.not_kept:
        say(f"the outcome is not stored: {result.not_kept}")
    if json:
        print_document(_document(result))
    else:
        _print(result)
    if not result.check.holds:
        raise typer.Exit(_DOES_NOT_HOLD)


def _print(result: CheckResult) -> None:
    for difference in result.differences:
        typer.echo(plain(f"differs  {difference}"))
    for problem in result.problems:
        typer.echo(plain(f"problem  {problem}"))
    batches = counted(len(result.check.anchors), "batch", "batches")
    word = "holds" if result.check.holds else "does not hold"
    typer.echo(
        plain(
            f"{result.table.source} {word} here: {batches} timed again "
            f"in {result.seconds:.0f} s, times {result.check.drift:+.1%}"
        )
    )


def _document(result: CheckResult) -> dict[str, Any]:
    found = result.check
    return {
        "schema": "nsa-tune/check/1",
        "holds": found.holds,
        "table": result.table.source,
        "digest": found.digest,
        "checked_at": found.checked_at,
        "drift": found.drift,
        "differences": list(result.differences),
        "problems": list(result.problems),
        "seconds": round(result.seconds, 1),
        "anchors": [asdict(anchor) for anchor in found.anchors],
    }
