"""The command that watches over tables: `check` times a few cells again."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from nsa_tune._cli import answers
from nsa_tune._cli.console import say
from nsa_tune._cli.measuring import interruptible
from nsa_tune._cli.options import AsJson, Database, Heads, KvDtype, Model, heads_of, model_of
from nsa_tune._errors import ExtraMissing
from nsa_tune.backend.hardware import detect
from nsa_tune.reports.output.plain import plain

if TYPE_CHECKING:
    from nsa_tune.autotune.health.sentinel import CheckResult

__all__ = ["check"]

_DOES_NOT_HOLD = 4


def check(
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda or cuda:N; auto takes the best one.")
    ] = "auto",
    model: Model = None,
    heads: Heads = None,
    kv_dtype: Annotated[KvDtype, typer.Option("--kv-dtype", help="Format of the KV pool.")] = (
        KvDtype.FP8
    ),
    anchors: Annotated[
        int, typer.Option("--anchors", min=1, help="Batches of every decision point to time again.")
    ] = 4,
    database: Database = None,
    keep: Annotated[
        bool,
        typer.Option("--keep/--no-keep", help="Store the outcome in the database, or only say it."),
    ] = True,
    json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Time a few cells of a table again, and say whether it still holds on this machine.

    Exits with 4 when it does not: a choice that the table takes loses more than 3 % on a cell
    that was clear before, an arm fails, or all times have moved by more than 10 %.
    """
    from nsa_tune._cli.progress import progress_for

    for library in ("torch", "triton"):
        if importlib.util.find_spec(library) is None:
            raise ExtraMissing.of("measuring", "tune")
    from nsa_tune.autotune.health.sentinel import CheckRequest
    from nsa_tune.autotune.health.sentinel import check as examine

    gpu = detect.cpu_name() if device == "cpu" else detect.local_device_name()
    name = model_of(model, gpu)
    request = CheckRequest(
        gpu, name, heads_of(heads, name), str(kv_dtype), database, device, anchors, keep
    )
    progress, shown = progress_for(Console(stderr=True), quiet=quiet)
    with interruptible("interrupted: a part of the cells says nothing of the table"), shown:
        result = examine(request, progress)
    if result.not_kept:
        say(f"the outcome is not stored: {result.not_kept}")
    if json:
        typer.echo(answers.as_text(_document(result)))
    else:
        _print(result)
    if not result.check.holds:
        raise typer.Exit(_DOES_NOT_HOLD)


def _print(result: CheckResult) -> None:
    for difference in result.differences:
        typer.echo(plain(f"differs  {difference}"))
    for problem in result.problems:
        typer.echo(plain(f"problem  {problem}"))
    word = "holds" if result.check.holds else "does not hold"
    typer.echo(
        plain(
            f"{result.table.source} {word} here: {len(result.check.anchors)} batches timed again "
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
        "anchors": [
            {
                "point": anchor.point,
                "batch": anchor.batch,
                "there_us": anchor.there_us,
                "here_us": anchor.here_us,
                "problem": anchor.problem,
            }
            for anchor in found.anchors
        ],
    }
