"""The commands `lookup` and `explain`: the plan for one batch, and why it is what it is."""

from __future__ import annotations

import typer

from nsa_tune._cli import json_documents
from nsa_tune._cli.options import AsJson, BatchOptions, DispatcherOptions, grouped
from nsa_tune.reports.formats.plain import plain

__all__ = ["explain", "lookup"]


@grouped
def lookup(batch: BatchOptions, table: DispatcherOptions, json: AsJson = False) -> None:
    """Print the plan for one batch: every decision that an engine would read.

    Without a table for the key, the engine's baseline answers, and stderr says so.
    """
    asked, dispatcher = batch.described(), table.open()
    plan = dispatcher.plan(asked)
    if json:
        typer.echo(json_documents.as_text(json_documents.of_lookup(dispatcher, plan)))
        return
    for name, value in json_documents.decisions(plan).items():
        if value is not None:
            typer.echo(f"{name} = {value}")


@grouped
def explain(batch: BatchOptions, table: DispatcherOptions, json: AsJson = False) -> None:
    """Explain the plan for one batch: estimates, intervals, limits and sources."""
    asked, dispatcher = batch.described(), table.open()
    if json:
        document = json_documents.of_explain(dispatcher, dispatcher.plan(asked))
        typer.echo(json_documents.as_text(document))
        return
    for line in dispatcher.explain(asked).splitlines():
        typer.echo(plain(line))
