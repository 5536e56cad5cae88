"""A replay as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from nsa_tune.reports.charts.figures import Chart
from nsa_tune.reports.html.cards import Drawn
from nsa_tune.reports.html.chart_data import plot
from nsa_tune.reports.html.frame import offline
from nsa_tune.reports.html.markup import article, figure, heading, html_table, note
from nsa_tune.reports.replay.charts import chunks_chart, lost_chart, ways_chart, whole_chart
from nsa_tune.reports.replay.result import Replay
from nsa_tune.reports.replay.tables import facts, tables, warnings

_VIEW = "crossovers"
"""The view that the page's script shows first; a replay has no other."""


def as_html(found: Replay, javascript: str | None = None) -> str:
    """The page; `javascript` (`charts_javascript`) draws its charts, else there are none."""
    frame = offline(javascript)
    drawn = Drawn() if frame.has_charts else None
    cards = "".join(_cards(found, None if drawn is None else drawn.plots))
    title = f"nsa-tune: {found.traffic.trace} replayed"
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts(found)
    )
    header = (
        f"<header><h1>{escape(title)}</h1>{''.join(map(note, warnings(found)))}"
        '<form class="filters" hidden></form></header>'
    )
    section = (
        '<section class="table" aria-labelledby="title">\n'
        f'<h2 id="title">What choosing by batch is worth</h2><dl class="card">{rows}</dl>\n'
        f"{cards}\n</section>"
    )
    return frame.page(title, header, [section], drawn)


def _cards(found: Replay, plots: dict[str, Any] | None) -> Iterator[str]:
    """The charts, then the tables."""
    drawn: list[tuple[str, str, Chart | None]] = [
        (
            "whole",
            "Whole prefill passes by setup of the engine, and by the way that they run.",
            whole_chart(found),
        ),
        ("ways", "Attention by who chooses, and by step of a layer.", ways_chart(found)),
        ("lost", "Where the engine loses most, by shape of a pass.", lost_chart(found)),
        (
            "chunks",
            "One prompt by chunk size. Larger marks: the fastest size.",
            chunks_chart(found),
        ),
    ]
    for name, words, chart in drawn:
        if plots is not None and chart is not None:
            plots[name] = plot(chart)
            picture = f'<div class="charts" hidden>{figure("plot", words)}</div>'
            yield article(_VIEW, picture, name=name)
    for table in tables(found):
        yield article(_VIEW, heading(table) + html_table(table))
