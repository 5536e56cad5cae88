"""The command `compare`: what changed between two measurements of the same setting."""

from __future__ import annotations

from typing import Annotated

import typer

from nsa_tune._cli.shared.console import print_document, say, tables_console
from nsa_tune._cli.shared.option_groups import TableOptions, grouped
from nsa_tune._cli.shared.options import AsJson, share_of
from nsa_tune.reports.compare.comparison import compare as compare_tables
from nsa_tune.reports.compare.rendering import (
    comparison_document,
    comparison_tables,
    conclusion,
    title,
)
from nsa_tune.reports.compare.sides import file_of, pairs_of, side_of
from nsa_tune.reports.formats.plain import plain
from nsa_tune.reports.formats.terminal import print_tables

_REGRESSION = 4


@grouped
def compare(
    before: Annotated[
        str, typer.Argument(help="Database or text table, FILE@DIGEST of a key, or FILE@run:N.")
    ],
    after: Annotated[str, typer.Argument(help="The other side, named likewise.")],
    tables: TableOptions,
    across_gpus: Annotated[
        bool, typer.Option("--across-gpus", help="Also compare tables of different GPUs.")
    ] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on", help="Exit with 4 if an arm or a cell is surely slower by more, or broken."
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every cell, also those that are the same.")
    ] = (False),
    json: AsJson = False,
) -> None:
    """Say what is faster, slower or the same on the second side, and where the winner changed.

    Compares tables that have the same model, head count and KV layout on both sides. `nsa-tune db
    list --runs` shows the digests and the numbers of runs.
    """
    limit = None if fail_on is None else share_of("--fail-on", fail_on)
    wanted = tables.filter(file_of(before), file_of(after))
    pairs = pairs_of(side_of(before, wanted), side_of(after, wanted), across_gpus=across_gpus)
    comparisons = [compare_tables(*pair) for pair in pairs]
    if json:
        print_document(comparison_document(comparisons, limit))
    else:
        console = tables_console()
        for comparison in comparisons:
            shown = comparison_tables(comparison, every=every)
            print_tables(title(comparison), shown, console)
        typer.echo(plain(conclusion(comparisons, limit)))
    if limit is None:
        return
    regressions = [line for each in comparisons for line in each.regressions(limit)]
    for line in regressions:
        say(line)
    if regressions:
        raise typer.Exit(_REGRESSION)
