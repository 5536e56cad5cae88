"""The commands `lookup` and `explain`: the plan for one batch, and why it is what it is."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_tune._cli.shared.console import print_document, say, tables_console
from nsa_tune._cli.shared.option_groups import BatchOptions, DispatcherOptions, grouped
from nsa_tune._cli.shared.options import AsJson
from nsa_tune.reports.analysis.ceilings import ceilings_of
from nsa_tune.reports.analysis.layer_steps import LayerSteps, layer_steps
from nsa_tune.reports.formats.display_tables import layer_table
from nsa_tune.reports.formats.plain import plain
from nsa_tune.reports.formats.terminal import print_tables

if TYPE_CHECKING:
    from nsa_tune.backend.dispatch.dispatcher import Dispatcher
    from nsa_tune.backend.dispatch.plan import Plan, Reason


@grouped
def lookup(batch: BatchOptions, table: DispatcherOptions, json: AsJson = False) -> None:
    """Print the plan for one batch: every decision that an engine would read.

    stderr says by which table: without one for the key, the engine's baseline answers.
    """
    asked, dispatcher = batch.described(), table.open()
    plan = dispatcher.plan(asked)
    if json:
        print_document(_lookup_document(dispatcher, plan))
        return
    if dispatcher.table is not None:
        say(plain(f"by {dispatcher.source}"))
    for name, value in _decisions(plan).items():
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
        document = _explain_document(dispatcher, plan)
        if layer:
            document["layer"] = asdict(_steps(dispatcher, plan))
        print_document(document)
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


def _decisions(plan: Plan) -> dict[str, str | bool | None]:
    """The fields of `plan` that are decisions, by name."""
    names = [field.name for field in fields(plan) if not field.name.startswith("_")]
    return {name: getattr(plan, name) for name in names if name != "batch"}


def _lookup_document(dispatcher: Dispatcher, plan: Plan) -> dict[str, Any]:
    return {
        "schema": "nsa-tune/lookup/1",
        "batch": str(plan.batch),
        "tuned": dispatcher.table is not None,
        "source": dispatcher.source,
        "layers": dispatcher.setting.sharing,
        "plan": _decisions(plan),
    }


def _explain_document(dispatcher: Dispatcher, plan: Plan) -> dict[str, Any]:
    """The document of `explain`: that of `lookup`, with the reason of every decision."""
    return {
        **_lookup_document(dispatcher, plan),
        "schema": "nsa-tune/explain/2",
        "key": None if dispatcher.table is None else dispatcher.table.key.as_document(),
        "reasons": {name: _reason(reason) for name, reason in plan.reasons.items()},
    }


def _reason(reason: Reason) -> dict[str, Any]:
    return {
        "verdict": str(reason.verdict),
        "source": reason.source,
        "estimates_us": dict(reason.estimates_us),
        "intervals_us": {name: list(ends) for name, ends in reason.intervals_us.items()},
        "guards": dict(reason.guards),
        "text": reason.text,
        "expected_regret": reason.expected_regret,
        "to_win": dict(reason.to_win),
        "rows": [row._asdict() for row in reason.rows],
        "consulted": [guard._asdict() for guard in reason.consulted],
    }
