"""The command `replay`: what choosing by batch is worth on a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.shared.console import print_document, say, tables_console
from nsa_tune._cli.shared.option_groups import grouped
from nsa_tune._cli.shared.options import AsJson, Engine
from nsa_tune._cli.traffic.options import EngineOptions, PricingOptions
from nsa_tune._errors import NsaTuneError, UsageError
from nsa_tune.reports.formats.plain import plain
from nsa_tune.reports.formats.terminal import print_tables
from nsa_tune.reports.traffic.launch import Launch
from nsa_tune.reports.traffic.replay import as_html, tables
from nsa_tune.reports.traffic.replay import replay as replayed


@grouped
def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Requests (Mooncake's JSON lines, Azure's CSV, or JSON lines of your own) or an "
            "engine's decision log (NSA_TUNE_LOG).",
            show_default=False,
        ),
    ] = None,
    named: Annotated[
        Path | None, typer.Option("--trace", help="The same, as advise takes it.")
    ] = None,
    *,
    options: EngineOptions,
    table: PricingOptions,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page to this file too.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Simulate the passes that SGLang would run for a trace, and say what they take.

    Compares the engine's own choices, each flag and the plug-in, and shows how its prefills run.
    """
    path = trace or named
    if path is None or (trace and named):
        raise UsageError("name one trace, as in nsa-tune replay TRACE --gpu H200")
    result = replayed(table.deployment(Engine.SGLANG, options), options.traffic(path))
    left_out = [*Launch.parse("sglang", options.flags).misspelled.values()]
    if html is not None:
        try:
            html.write_text(as_html(replace(result, notes=[*left_out, *result.notes])), "utf-8")
        except OSError as error:
            raise NsaTuneError(f"{html} cannot be written ({error.strerror})") from error
        say(f"wrote {html}")
    if json:
        print_document({**result.document(), "left_out": left_out})
        return
    typer.echo("\n".join(map(plain, (result.headline, *left_out))))
    print_tables("", tables(result), tables_console())
    for text in result.notes:
        say(text)
