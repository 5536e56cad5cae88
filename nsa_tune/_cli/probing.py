"""The command that finds limits by experiment: `probe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nsa_tune._cli import answers
from nsa_tune._cli.console import say
from nsa_tune._cli.options import AsJson, Database, Heads, KvDtype, Model
from nsa_tune._errors import ExtraMissing
from nsa_tune.db import reader as tables
from nsa_tune.reports.output.plain import plain

if TYPE_CHECKING:
    from nsa_tune.autotune.probe.run import Probed
    from nsa_tune.autotune.probe.search import Try

__all__ = ["probe"]

_INTERRUPTED = 130


class _Loud:
    """Says on stderr what each try came to."""

    def tried(self, name: str, one: Try) -> None:
        """One line a try."""
        say(plain(f"{name} {one.size}: {one.outcome}{', ' + one.words if one.words else ''}"))


def probe(
    limits: Annotated[
        str, typer.Option("--limits", help="Names of limits, comma-separated, or all.")
    ] = "all",
    device: Annotated[
        str, typer.Option("--device", help="auto, cuda or cuda:N; auto takes the first GPU.")
    ] = "auto",
    model: Model = None,
    heads: Heads = None,
    kv_dtype: Annotated[
        KvDtype, typer.Option("--kv-dtype", help="Format of the KV pool, a part of the key.")
    ] = KvDtype.FP8,
    blind: Annotated[
        bool, typer.Option("--blind", help="Do not begin with what the formulas say.")
    ] = False,
    deadline: Annotated[
        float, typer.Option("--deadline", min=1, help="Seconds after which a try counts as hung.")
    ] = 120.0,
    database: Database = None,
    json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No tries on stderr.")] = False,
) -> None:
    """Find the limits of this machine's kernels by experiment, and store them for the guards.

    Sizes are doubled and bisected, each tried in a process of its own: one that exits, is killed,
    hangs, or gives a wrong answer or no number, is over the limit.
    """
    try:
        from nsa_tune.autotune.probe.run import ProbeRequest
        from nsa_tune.autotune.probe.run import probe as search
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        raise ExtraMissing.of("probing", "tune") from None
    request = ProbeRequest(
        database=database or tables.default_database(),
        device=device,
        model=model or "deepseek-v3.2",
        heads=heads,
        kv_dtype=str(kv_dtype),
        limits=() if limits == "all" else tuple(limits.split(",")),
        blind=blind,
        deadline_s=deadline,
    )
    try:
        found = search(request, None if quiet else _Loud())
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    if json:
        typer.echo(answers.as_text(answers.probed(found, str(request.database))))
        return
    for one in found:
        typer.echo(plain(_line(one)))
    if not quiet:
        say(f"stored in {request.database}")


def _line(one: Probed) -> str:
    past, formula = one.found.past, one.formula
    says = "no formula" if formula is None else f"formula {formula}"
    text = f"{one.name:<24} {one.found.limit:>8}  {says}"
    if past is None:
        return f"{text}; nothing went wrong up to there"
    text += f"; {past.size}: {past.outcome}, {past.words}"
    if one.ns_per_row is not None:
        text += f"; behind it {one.ns_per_row} ns more a row"
    return text
