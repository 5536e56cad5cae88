"""The comparison as one HTML page: charts as pictures, and the tables."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from benchmarks.engine.comparison import KINDS, Contest, Engine, contest_of
from nsa_tune._errors import ExtraMissing
from nsa_tune.reports.charts.pictures import as_svg
from nsa_tune.reports.charts.theme import SCHEMA, Spec, tips
from nsa_tune.reports.formats.display_tables import DisplayTable
from nsa_tune.reports.html.markup import article, asset, heading, html_table, note

__all__ = ["as_page", "ratio_chart", "time_chart"]

_WIDTH = 400
_SCALE = {"type": "log", "nice": False, "zero": False, "padding": 12}
_ROW = 22
"""Pixels for each row of a chart."""


def as_page(engines: Sequence[Engine], tables: Sequence[DisplayTable]) -> str:
    """The page, without scripts; its pictures are in it."""
    try:
        charts = list(_charts(engines))
    except ExtraMissing as error:
        charts = [note(str(error))]
    cards = [article("table", heading(table) + html_table(table)) for table in tables]
    title = "nsa-tune in SGLang"
    body = [f"<h1>{title}</h1>", *(article("chart", one) for one in charts), *cards]
    return "\n".join([
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>{asset('page.css')}img {{ max-width: 100%; }}</style>",
        "</head>",
        "<body>",
        "<main>",
        *body,
        "</main>",
        "</body>",
        "</html>",
        "",
    ])  # fmt: skip


def _charts(engines: Sequence[Engine]) -> Iterator[str]:
    """For each kind of test the times, and beside them the ratios."""
    for engine in engines:
        for kind in KINDS:
            contest = contest_of([engine], kind, engine)
            if contest.lines:
                title = f"{kind.title} ({engine.label})"
                pair = _figure(title, time_chart(contest))
                pair += _figure("The same over the default's", ratio_chart(contest))
                yield f'<div class="charts two">{pair}</div>'


def time_chart(contest: Contest) -> Spec:
    """Each batch's time in each configuration."""
    rows = [
        {"batch": line.name, "choice": one.configuration, "time": one.value, "ran": one.ran}
        for line in contest.lines
        for one in line.options
    ]
    x = {"field": "time", "type": "quantitative", "scale": _SCALE,
         "axis": {"title": contest.kind.unit, "format": ".3~g", "tickCount": 5}}  # fmt: skip
    point = {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 0.8},
             "encoding": _encoding(contest, x)}  # fmt: skip
    return _spec(contest, rows, [point])


def ratio_chart(contest: Contest) -> Spec:
    """Each configuration's time over the default's, with its 95 % interval."""
    rows = []
    for line in contest.lines:
        for one in line.options:
            ratio = None if one is line.default else one.over(line.default)
            if ratio is not None:
                low, high = ratio["interval"] or (ratio["median"], ratio["median"])
                rows.append({"batch": line.name, "choice": one.configuration, "ran": one.ran,
                             "ratio": ratio["median"], "low": low, "high": high})  # fmt: skip
    x = {"field": "ratio", "type": "quantitative", "scale": _SCALE,
         "axis": {"title": "over the default", "format": ".3~g", "tickCount": 5}}  # fmt: skip
    encoding = _encoding(contest, x)
    whole = {"mark": {"type": "rule", "strokeDash": [4, 3]}, "encoding": {"x": {"datum": 1}}}
    ends = {"x": {**x, "field": "low"}, "x2": {"field": "high"}}
    bar = {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": {**encoding, **ends}}
    point = {"mark": {"type": "point", "filled": True, "size": 70}, "encoding": encoding}
    return _spec(contest, rows, [whole, bar, point])


def _encoding(contest: Contest, x: Spec) -> Spec:
    choices = _choices(contest)
    legend = {"field": "choice", "type": "nominal", "scale": {"domain": choices}}
    return {
        "y": {"field": "batch", "type": "nominal", "sort": [line.name for line in contest.lines],
              "axis": {"title": None, "labelLimit": 240, "grid": True}},
        "x": x, "color": legend, "shape": legend,
        "tooltip": tips({"batch": "batch", "choice": "configuration", "ran": "ran"}),
    }  # fmt: skip


def _choices(contest: Contest) -> list[str]:
    """The configurations, the default first, then the plug-in."""
    found = [line.default.configuration for line in contest.lines[:1]]
    found += [line.plugin.configuration for line in contest.lines[:1]]
    every = (one.configuration for line in contest.lines for one in line.options)
    return list(dict.fromkeys([*found, *every]))


def _spec(contest: Contest, rows: list[dict[str, Any]], layers: list[Spec]) -> Spec:
    return {
        "$schema": SCHEMA, "width": _WIDTH, "height": _ROW * len(contest.lines) + 40,
        "data": {"values": rows}, "layer": layers,
    }  # fmt: skip


def _figure(title: str, spec: Spec) -> str:
    light, dark = (_data(as_svg(spec, theme)) for theme in ("light", "dark"))
    return (
        f"<figure><h3>{escape(title)}</h3><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(title)}: the table below has the figures"></picture>'
        f"</figure>"
    )


def _data(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
