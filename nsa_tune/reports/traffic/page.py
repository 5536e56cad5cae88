"""A replay as one HTML page: the answer, charts, tables, and at the end what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from nsa_tune.reports.charts.theme import SCHEMA, Chart, Rows, Spec, tips
from nsa_tune.reports.html.cards import Drawn
from nsa_tune.reports.html.chart_data import plot
from nsa_tune.reports.html.frame import offline
from nsa_tune.reports.html.markup import article, figure, heading, html_table, note
from nsa_tune.reports.traffic.replay import Replay, tables

_VIEW = "crossovers"
"""The view that the page's script shows first; a replay has no other."""
_LABEL_PX = 280


def as_html(found: Replay, javascript: str | None = None) -> str:
    """The page; `javascript` (`charts_javascript`) draws its charts, else there are none."""
    frame = offline(javascript)
    drawn = Drawn() if frame.has_charts else None
    title = f"{found.trace} replayed"
    header = (
        f"<header><h1>{escape(title)}</h1><p><strong>{escape(found.headline)}</strong></p>"
        '<form class="filters" hidden></form></header>'
    )
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in found.facts
    )
    section = (
        '<section class="table" aria-labelledby="title">\n'
        '<h2 id="title">What choosing by batch is worth</h2>\n'
        f"{''.join(_cards(found, None if drawn is None else drawn.plots))}\n"
        f'<details><summary>What this rests on</summary><dl class="card">{facts}</dl>'
        f"{''.join(map(note, found.notes))}</details>\n</section>"
    )
    return frame.page(title, header, [section], drawn)


def _cards(found: Replay, plots: dict[str, Any] | None) -> Iterator[str]:
    charts = (
        ("setups", "Seconds of prefills by setup.", _setups_chart(found)),
        ("shapes", "Where the engine's own choices lose most.", _shapes_chart(found)),
    )
    for name, words, chart in charts:
        if plots is not None and chart is not None:
            plots[name] = plot(chart)
            picture = f'<div class="charts" hidden>{figure("plot", words)}</div>'
            yield article(_VIEW, picture, name=name)
    for table in tables(found):
        if table.rows:
            yield article(_VIEW, heading(table) + html_table(table))


def _setups_chart(found: Replay) -> Chart | None:
    rows: Rows = [
        {"setup": one.name, "seconds": round(one.prefill_s, 3), "text": f"{one.prefill_s:.1f} s"}
        for one in found.setups
        if one.prefill_s
    ]
    title = "seconds of prefills" if found.whole else "seconds of prefills' attention"
    return _bars("setups", rows, "setup", title)


def _shapes_chart(found: Replay) -> Chart | None:
    rows: Rows = [
        {"shape": one.example[:34], "seconds": round(one.lost_s, 3),
         "text": f"{one.lost_s:.2f} s of {one.default_s:.2f} s; {one.instead} saves it"}
        for one in found.shapes
    ]  # fmt: skip
    return _bars("shapes", rows, "shape", "seconds lost")


def _bars(data: str, rows: Rows, field: str, title: str) -> Chart | None:
    """A bar of seconds, with its number, for each row; None without rows."""
    if not rows:
        return None
    order: Sequence[str] = list(dict.fromkeys(str(row[field]) for row in rows))
    spec: Spec = {
        "$schema": SCHEMA,
        "data": {"name": data},
        "width": "container",
        "height": 26 * len(order),
        "encoding": {
            "y": {
                "field": field, "type": "nominal", "sort": order,
                "axis": {"title": None, "labelLimit": _LABEL_PX},
            },
            "x": {
                "field": "seconds", "type": "quantitative",
                "axis": {"title": title, "tickCount": 5},
            },
        },
        "layer": [
            {
                "mark": {"type": "bar"},
                "encoding": {"tooltip": tips({field: field, "text": "time"})},
            },
            {
                "mark": {"type": "text", "align": "right", "dx": -4},
                "encoding": {
                    "text": {"field": "seconds", "type": "quantitative", "format": ",.3~g"}
                },
            },
        ],
    }  # fmt: skip
    return Chart(spec, {data: rows})
