"""The command `replay`: what choosing by batch is worth on a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from nsa_tune._cli.shared.console import print_document, say, tables_console
from nsa_tune._cli.shared.option_groups import DispatcherOptions, grouped
from nsa_tune._cli.shared.options import AsJson
from nsa_tune._cli.traffic.options import TrafficOptions, release_named
from nsa_tune._cli.traffic.prices import kv_dtype_of, pricer_for, refused, whole_prefills
from nsa_tune._cli.traffic.replaying import opened, replay_decisions, replay_requests
from nsa_tune._errors import ExtraMissing, NsaTuneError, UsageError
from nsa_tune.autotune.workload.arrivals import Counted, KeptArrivals
from nsa_tune.autotune.workload.weighted_batches import is_decision_log
from nsa_tune.engines.sglang.releases import Release
from nsa_tune.reports.formats.terminal import print_tables
from nsa_tune.reports.html.vega_bundle import bundling
from nsa_tune.reports.replay.chunks import chunk_times
from nsa_tune.reports.replay.page import as_html
from nsa_tune.reports.replay.prices import Pricer, Way
from nsa_tune.reports.replay.rest import RestOfPass
from nsa_tune.reports.replay.result import Replay, Served, Table, Traffic, kinds_of
from nsa_tune.reports.replay.tables import facts, tables, warnings
from nsa_tune.reports.replay.tally import Tally
from nsa_tune.reports.replay.whole_prefills import ENGINE, PLUGIN, WholePrefills
from nsa_tune.reports.replay.whole_result import whole_of

_LOST = 10


@grouped
def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            help="Requests (Mooncake's JSON lines, Azure's CSV, or JSON lines of your own) or an "
            "engine's decision log (NSA_TUNE_LOG).",
            show_default=False,
        ),
    ],
    traffic: TrafficOptions,
    table: DispatcherOptions,
    version: Annotated[
        str | None,
        typer.Option("--engine-version", help="Release of SGLang. Default: the newest known."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with charts to this file too.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Simulate the passes that an engine would run for a trace, and estimate their times.

    Says how long attention takes by the engine's defaults, its best static flags, the plug-in,
    the whole table and the best arm of each step.
    """
    release = release_named(version)
    pricer, lent = pricer_for(table.open(), release, table.database)
    found = _replayed(trace, traffic, release, pricer, lent)
    if html is not None:
        _write_page(found, html)
    if json:
        print_document(found.document())
        return
    console = tables_console()
    for name, value in facts(found):
        console.print(f"  {name:<22}{value}", markup=False, highlight=False)
    print_tables("", tables(found), console)
    for text in warnings(found):
        say(text)


def _replayed(
    trace: Path, options: TrafficOptions, release: Release, pricer: Pricer, lent: dict[str, str]
) -> Replay:
    graph_tokens = options.graphs(release)
    rest = options.model(kv_dtype_of(pricer.setting))
    whole = _whole(options, pricer, rest)
    tally = Tally(pricer, graph_tokens, whole=whole)
    decisions = is_decision_log(trace)
    if decisions:
        replay_decisions(trace, tally)
        tally.done()
        counted, served = Counted(), []
    else:
        with opened(trace, options) as requests:
            served = _served(requests, options, tally, rest)
            counted = requests.counted
    setting = pricer.setting
    return Replay(
        Traffic(
            trace.name,
            "decisions" if decisions else "requests",
            counted.requests,
            counted.prompt_tokens,
            counted.output_tokens,
            {} if decisions else options.settings(),
        ),
        Table(
            setting.device.name, setting.profile.name, setting.heads, str(setting.layout),
            setting.sharing, pricer.dispatcher.source, lent,
        ),
        pricer.dispatcher.baseline.name,
        graph_tokens,
        kinds_of(tally),
        tuple(tally.most_lost(_LOST)),
        tuple(served),
        rest,
        chunk_times(
            pricer, graph_tokens if options.graph_tokens is not None else release.graph_tokens, rest
        ),
        whole_of(tally),
    )  # fmt: skip


def _whole(
    options: TrafficOptions, pricer: Pricer, rest: RestOfPass | None
) -> WholePrefills | None:
    """What prices whole prefills, if pass times of this engine are there."""
    why = ""
    if options.dp > 1:
        why = "with --dp ranks wait for each other"
    elif options.graph_tokens == 0:
        why = "without prefill graphs (--graph-tokens 0) the plug-in has no other ways"
    if why:
        if options.pass_times:
            raise UsageError(f"--pass-times has no effect here: {why}")
        return None
    given = options.pass_times or ()
    found = whole_prefills(
        given, pricer, rest, next_n=options.next_n, graph_tokens=options.graph_tokens
    )
    if given and found is None:
        raise refused(given, pricer, options.next_n)
    return found


def _served(
    trace: KeptArrivals, options: TrafficOptions, tally: Tally, rest: RestOfPass | None
) -> list[Served]:
    """Add the traffic to `tally`, and say how it is served: by way, the trace simulated again, as
    shorter passes let later requests start sooner. Nothing where passes have no time."""
    own = None if tally.whole is None else ENGINE
    timed = replay_requests(trace, options, tally, Way.ENGINE, rest, own)
    tally.done()
    if own is None and rest is None:
        return []
    others = (
        replay_requests(trace, options, tally, way, rest, setup, adds=False).served
        for way, setup in _others(tally)
    )
    return [timed.served, *others]


def _others(tally: Tally) -> Iterator[tuple[Way, str | None]]:
    """What is simulated besides the engine by itself, as (way, setup): the plug-in, and the best
    flag if there is one; without times of whole passes the plug-in and the table."""
    passes = whole_of(tally)
    if passes is None:
        yield from ((way, None) for way in (Way.PLUGIN, Way.TABLE))
        return
    yield Way.PLUGIN, PLUGIN
    if passes.static is not None:
        yield Way.ENGINE, passes.static.name


def _write_page(found: Replay, path: Path) -> None:
    with bundling() as javascript:
        try:
            text = as_html(found, javascript())
        except ExtraMissing as missing:
            say(str(missing))
            text = as_html(found)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NsaTuneError(f"{path} cannot be written ({error.strerror})") from error
    say(f"wrote {path}")
