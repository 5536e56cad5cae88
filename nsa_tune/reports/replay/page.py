"""A replay as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from nsa_tune.reports.charts.figures import Chart
from nsa_tune.reports.charts.theme import THEMES
from nsa_tune.reports.html.chart_data import plot
from nsa_tune.reports.html.markup import article, figure, heading, html_table, note, packed_text
from nsa_tune.reports.html.page import CREDITS, offline
from nsa_tune.reports.replay.charts import chunks_chart, lost_chart, ways_chart, whole_chart
from nsa_tune.reports.replay.result import Replay
from nsa_tune.reports.replay.tables import facts, tables, warnings

__all__ = ["as_html"]

_VIEW = "crossovers"
"""The view that the page's script shows first; a replay has no other."""


def as_html(found: Replay, javascript: str | None = None) -> str:
    """The page; `javascript` (`charts_javascript`) draws its charts, else there are none."""
    frame = offline(javascript)
    plots: dict[str, Any] = {}
    cards = "".join(_cards(found, plots if frame.has_charts else None))
    data = ""
    if frame.has_charts:
        data = json.dumps({"themes": THEMES, "panels": {}, "plots": plots}, separators=(",", ":"))
    title = f"nsa-tune: {found.traffic.trace} replayed"
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts(found)
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            frame.head,
            "</head>",
            "<body>",
            '<a class="skip" href="#main">Skip to the tables</a>',
            f"<header><h1>{escape(title)}</h1>{''.join(map(note, warnings(found)))}"
            '<form class="filters" hidden></form></header>',
            '<main id="main"><section class="table" aria-labelledby="title">',
            f'<h2 id="title">What choosing by batch is worth</h2><dl class="card">{rows}</dl>',
            cards,
            "</section></main>",
            CREDITS if frame.has_charts else "",
            packed_text("nsa-tune-data", data),
            frame.end,
            "</body>",
            "</html>",
            "",
        ]
    )


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
