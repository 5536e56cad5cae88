"""The command `probe`: find limits of kernels by experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_tune._cli.measure.device import INTERRUPTED, check_packages
from nsa_tune._cli.shared.console import print_document, say
from nsa_tune._cli.shared.option_groups import ModelOptions, grouped
from nsa_tune._cli.shared.options import AsJson, DatabaseToWrite, Quiet, names_of
from nsa_tune.db import places
from nsa_tune.reports.formats.plain import plain

if TYPE_CHECKING:
    from nsa_tune.autotune.probe.run import Probed
    from nsa_tune.autotune.probe.tries import Try


def _say_tried(name: str, one: Try) -> None:
    say(plain(f"{name} {one.size}: {one.outcome}{', ' + one.words if one.words else ''}"))


@grouped
def probe(
    *,
    limits: Annotated[
        str, typer.Option("--limits", help="Names of limits, comma-separated, or all.")
    ] = "all",
    device: Annotated[
        str, typer.Option("--device", help="auto, cuda or cuda:N; auto takes the first GPU.")
    ] = "auto",
    model: ModelOptions,
    blind: Annotated[
        bool, typer.Option("--blind", help="Search without using the formulas.")
    ] = False,
    deadline: Annotated[
        float, typer.Option("--deadline", min=1, help="Seconds after which a try counts as hung.")
    ] = 120.0,
    database: DatabaseToWrite = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Find limits of this machine's kernels by experiment, and store them for the guards.

    Sizes are doubled, then bisected, and each is tried in a process of its own. A size is over the
    limit when its process exits, is killed, hangs or returns wrong numbers.
    """
    check_packages("probing")
    from nsa_tune.autotune.probe.run import ProbeRequest
    from nsa_tune.autotune.probe.run import probe as find_limits

    request = ProbeRequest(
        database=database or places.database_to_write(),
        device=device,
        model=model.model or "deepseek-v3.2",
        heads=model.heads,
        kv_dtype=str(model.kv_dtype),
        limits=names_of("--limits", limits),
        blind=blind,
        deadline_s=deadline,
    )
    try:
        found = find_limits(request, None if quiet else _say_tried)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if json:
        print_document(_document(found, str(request.database)))
        return
    for one in found:
        typer.echo(plain(_line(one)))
    if not quiet:
        say(f"stored in {request.database}")


def _line(one: Probed) -> str:
    past, formula = one.found.past, one.formula
    expected = "no formula" if formula is None else f"formula {formula}"
    if one.untried:
        return f"{one.name:<24} could not be tried, nothing is stored: {one.untried}"
    text = f"{one.name:<24} {one.found.limit:>8}  {expected}"
    if past is None:
        return f"{text}; every size that was tried succeeded"
    text += f"; {past.size}: {past.outcome}, {past.words}"
    if one.ns_per_row is not None:
        text += f"; beyond the limit a row takes {one.ns_per_row} ns more"
    return text


def _document(found: list[Probed], database: str) -> dict[str, Any]:
    return {
        "schema": "nsa-tune/probe/1",
        "database": database,
        "limits": [
            {
                "name": one.name,
                "limit": None if one.untried else one.found.limit,
                "formula": one.formula,
                "past": None if one.found.past is None else _tried(one.found.past),
                "ns_per_row": one.ns_per_row,
                "untried": one.untried,
                "tries": [_tried(each) for each in one.found.tries],
            }
            for one in found
        ],
    }


def _tried(one: Try) -> dict[str, Any]:
    return {"size": one.size, "outcome": str(one.outcome), "words": one.words}
