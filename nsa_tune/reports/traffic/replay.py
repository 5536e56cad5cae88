"""A replay: what one trace takes under each setup of an engine.

Its tables are for the terminal and for an HTML page, which begins with the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from math import inf
from typing import Any

from nsa_tune.reports.formats.display_tables import DisplayTable
from nsa_tune.reports.html.frame import offline
from nsa_tune.reports.html.markup import article, heading, html_table, note, said
from nsa_tune.reports.traffic.advice import measured_runs, notes_on, prices_decode, standing_in
from nsa_tune.reports.traffic.answer import does_not_fit
from nsa_tune.reports.traffic.attention import DEFAULT, PLUGIN
from nsa_tune.reports.traffic.deployment import Deployment, Traffic
from nsa_tune.reports.traffic.pass_prices import PassPrice
from nsa_tune.reports.traffic.served import Setups, seconds_of

_VIEW = "crossovers"  # the view that the page's script shows first; a replay has no other
Row = dict[str, Any]  # a row of a table, by column; None where a cell says nothing


@dataclass(frozen=True, slots=True)
class Replay:
    """Everything that a replay found; seconds are of attention alone unless `whole_passes`."""

    headline: str
    trace: str
    requests: int
    passes: dict[str, int]
    """"prefill" and "decode"."""
    whole_passes: bool
    setups: list[Row]  # the default, each flag, the plug-in, over the same passes
    ways: list[Row]  # prefills with the plug-in, by the way that they run
    facts: dict[str, str]
    notes: list[str]

    def document(self) -> dict[str, Any]:
        return {"schema": "nsa-tune/replay/3", **asdict(self)}


def replay(deployment: Deployment, traffic: Traffic) -> Replay:
    """Replay `traffic`; UsageError when it cannot be read."""
    requests = deployment.count(traffic)
    counted = [shape for shape in deployment.prices.shapes.values() if shape.count]
    best, _ = deployment.best_flag(extend=True)
    simulated = requests and deployment.model is not None and deployment.fits
    served_too = {DEFAULT, PLUGIN, best} if simulated else set()
    foreign = standing_in(deployment)
    names = [name for name in deployment.passes.setups if not (foreign and name == PLUGIN)]
    setups = [_setup(deployment, requests, name, name in served_too) for name in names]
    extends = [shape for shape in counted if shape.batch.mode == "extend"]
    prefills = sum(shape.count for shape in extends)
    passes = {"prefill": prefills, "decode": sum(shape.count for shape in counted) - prefills}
    scheduler = deployment.scheduler
    facts = {
        "engine": f"{deployment.where}, {deployment.release}", "priced by": deployment.source,
        "chunk": f"{scheduler.chunk_tokens} tokens",
        "requests at once": f"up to {scheduler.max_running}",
        "KV pool": f"{scheduler.pool_tokens} tokens",
    }  # fmt: skip
    whole = deployment.model is not None
    runs = [f"intervals of times to first token: {measured_runs(deployment)}"] if simulated else []
    notes = [*runs, *notes_on(deployment, traffic)]
    headline = _headline(setups, best, whole, foreign)
    if deployment.memory is not None and not deployment.fits:
        headline = f"{does_not_fit(deployment.memory, deployment.launch)} {headline}"
    return Replay(
        headline, traffic.name, len(requests), passes, whole, setups,
        [] if foreign else _ways(extends), facts, notes,
    )  # fmt: skip


def _headline(setups: list[Row], best: str, whole: bool, foreign: str) -> str:
    """What the plug-in and the best flag are worth, in a sentence."""
    saved = {row["setup"]: row["prefill saved"] for row in setups}
    if saved[DEFAULT] is None:
        return "The trace has no prefills that are priced."
    parts = "prefills take" if whole else "the attention of prefills takes"
    text = foreign and f"{foreign} "
    if PLUGIN in saved:
        text = f"With the plug-in {parts} {saved[PLUGIN]:.1%} less time than by default; "
    if best == DEFAULT:
        return f"{text}no flag saves any."
    return f"{text}with the best flag, {best}, {parts} {saved[best]:.1%} less time."


def _setup(deployment: Deployment, requests: Sequence[Any], name: str, simulated: bool) -> Row:
    row: Row = {"setup": name}
    for kind, extend in (("prefill", True), ("decode", False)):
        default_s = seconds_of(deployment.prices, DEFAULT, extend=extend)
        about = name in (DEFAULT, PLUGIN, *deployment.flags(extend=extend))
        about = about and (extend or prices_decode(deployment))
        seconds = seconds_of(deployment.prices, name, extend=extend) if about else inf
        row[f"{kind} s"] = seconds if seconds < inf else None
        row[f"{kind} saved"] = 1 - seconds / default_s if default_s > 0 and seconds < inf else None
    decode = PLUGIN if name == PLUGIN else DEFAULT
    result = deployment.serve(requests, Setups(name, decode)) if simulated else None
    for quantile in ("mean", "p50", "p90"):
        row[f"TTFT {quantile} s"] = result and result.ttft_s[quantile]
    row["TPOT mean s"] = result and result.tpot_s["mean"]
    return row


def _ways(extends: list[PassPrice]) -> list[Row]:
    rows: dict[str, Row] = {}
    for shape in extends:
        empty = {"way": shape.way, "passes": 0, "plug-in s": 0.0, "by default s": 0.0}
        row = rows.setdefault(shape.way, empty)
        row["passes"] += shape.count
        for column, setup in (("plug-in s", PLUGIN), ("by default s", DEFAULT)):
            row[column] += shape.count * shape.us[setup] / 1e6
    return sorted(rows.values(), key=lambda row: -row["plug-in s"])


def tables(replayed: Replay) -> Iterator[DisplayTable]:
    what = "Passes" if replayed.whole_passes else "Attention of passes"
    yield _table(f"{what} by setup", replayed.setups)
    if replayed.ways:
        yield _table("Prefills with the plug-in, by the way that they run", replayed.ways)
    facts = [{"fact": name, "value": value} for name, value in replayed.facts.items()]
    yield _table("What this rests on", facts)


def _table(title: str, rows: list[Row]) -> DisplayTable:
    columns = tuple(rows[0]) if rows else ()
    numeric = {i for i, name in enumerate(columns) if name.endswith((" s", "saved", "passes"))}
    cells = tuple(tuple(_cell(name, row[name]) for name in columns) for row in rows)
    return DisplayTable(title, columns, cells, frozenset(numeric))


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and column.endswith("saved"):
        return f"{value:.1%}"
    return f"{value:.{'0f' if value > 99 else '3g'}}" if isinstance(value, float) else str(value)


def as_html(replayed: Replay) -> str:
    """The page, which needs nothing but itself."""
    title = f"{replayed.trace} replayed"
    header = f'<header><h1>{escape(title)}</h1><form class="filters" hidden></form></header>'
    saved = {row["setup"]: row["prefill saved"] for row in replayed.setups}.get(PLUGIN)
    number = "" if saved is None else f"{saved:.0%}"
    sentence = re.sub(r"(--[\w-]+ \w+)", r"`\1`", replayed.headline)
    answer = article(_VIEW, said(number, "less prefill time", sentence), kind="answer")
    cards = (article(_VIEW, heading(table) + html_table(table)) for table in tables(replayed))
    section = (
        '<section class="table" aria-labelledby="title">\n'
        f'<h2 id="title">{escape(replayed.facts["engine"])}</h2>\n{answer}{"".join(cards)}\n'
        f"{''.join(map(note, replayed.notes))}\n</section>"
    )
    return offline(None).page(title, header, [section], None)
