"""The command `compare`: two measurements of one setting against each other."""

from __future__ import annotations

from typing import Annotated

import typer

from nsa_tune._cli import answers
from nsa_tune._cli.console import say, tables_console
from nsa_tune._cli.options import AsJson, Gpu, Heads, KvDtypeOption, Model, share_of
from nsa_tune.backend.types.layouts import layout_of
from nsa_tune.backend.types.profiles import family_of
from nsa_tune.reports.compare import compare as compared
from nsa_tune.reports.compare import pairs_of, side_of
from nsa_tune.reports.compare.document import conclusion, document, grids, title
from nsa_tune.reports.content.select import Wish
from nsa_tune.reports.output.plain import plain
from nsa_tune.reports.output.terminal import print_grids

__all__ = ["compare"]

_REGRESSION = 4


def compare(
    before: Annotated[
        str, typer.Argument(help="Database or text table, FILE@DIGEST of a key, or FILE@run:N.")
    ],
    after: Annotated[str, typer.Argument(help="The other side, told by the first.")],
    gpu: Gpu = None,
    model: Model = None,
    heads: Heads = None,
    kv_dtype: KvDtypeOption = None,
    across_gpus: Annotated[
        bool, typer.Option("--across-gpus", help="Compare tables of different GPUs too.")
    ] = False,
    same_within: Annotated[
        str, typer.Option("--same-within", help="Difference that counts as the same.")
    ] = "3%",
    fail_on: Annotated[
        str | None,
        typer.Option("--fail-on", help="Exit with 4 when something is surely slower by more."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List every cell, the same ones too.")] = (
        False
    ),
    json: AsJson = False,
) -> None:
    """Say what is faster, slower or the same on the second side, and which crossovers moved.

    Takes the tables that both sides have of one model, head count and KV layout.
    """
    tolerance = share_of("--same-within", same_within)
    limit = None if fail_on is None else share_of("--fail-on", fail_on)
    layout = None if kv_dtype is None else str(layout_of(kv_dtype, family_of(model)))
    wish = Wish(gpu, model, heads, layout)
    pairs = pairs_of(side_of(before, wish), side_of(after, wish), across_gpus=across_gpus)
    found = [compared(one, other, same_within=tolerance) for one, other in pairs]
    if json:
        typer.echo(answers.as_text(document(found, limit)))
    else:
        console = tables_console()
        for one in found:
            print_grids(title(one), grids(one, every=every), console)
        typer.echo(plain(conclusion(found, limit)))
    if limit is None:
        return
    regressions = [line for one in found for line in one.regressions(limit)]
    for line in regressions:
        say(line)
    if regressions:
        raise typer.Exit(_REGRESSION)
