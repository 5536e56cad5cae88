"""The commands `lookup` and `explain`: the plan for one batch, and why it is what it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_tune._cli.shared import json_documents
from nsa_tune._cli.shared.console import tables_console
from nsa_tune._cli.shared.option_groups import BatchOptions, DispatcherOptions, grouped
from nsa_tune._cli.shared.options import AsJson
from nsa_tune.reports.analysis.layer_steps import LayerSteps, layer_steps
from nsa_tune.reports.analysis.roofline import ceilings_of
from nsa_tune.reports.formats.display_tables import layer_table
from nsa_tune.reports.formats.plain import plain
from nsa_tune.reports.formats.terminal import print_tables

if TYPE_CHECKING:
    from nsa_tune.backend.dispatch.dispatcher import Dispatcher
    from nsa_tune.backend.dispatch.plan import Plan

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
def explain(
    batch: BatchOptions,
    table: DispatcherOptions,
    layer: Annotated[
        bool,
        typer.Option(
            "--layer",
            help="Show where the attention time goes: each step of a layer with its time and its "
            "physical limit.",
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Explain the plan for one batch: estimates, intervals, limits and sources."""
    asked, dispatcher = batch.described(), table.open()
    plan = dispatcher.plan(asked)
    if json:
        document = json_documents.of_explain(dispatcher, plan)
        if layer:
            document["layer"] = asdict(_steps(dispatcher, plan))
        typer.echo(json_documents.as_text(document))
        return
    if layer:
        shown = layer_table(_steps(dispatcher, plan), dispatcher.baseline.name)
        print_tables(dispatcher.source, [shown], tables_console())
        return
    for line in dispatcher.explain(asked).splitlines():
        typer.echo(plain(line))


def _steps(dispatcher: Dispatcher, plan: Plan) -> LayerSteps:
    """The steps of the plan's batch, with the choices of the plan."""
    measured = () if dispatcher.table is None else dispatcher.table.measurements
    return layer_steps(
        plan.batch, dispatcher.policies, dispatcher.setting, dispatcher.baseline,
        lambda _, question: getattr(plan, question.name, None), ceilings_of(measured),
    )  # fmt: skip
