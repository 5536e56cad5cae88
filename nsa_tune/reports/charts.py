"""Charts as Vega-Lite specs in plain dicts: one pure function a chart.

A spec names its data sets and holds none; `with_rows` puts them in. Colours come from a theme's
`range`, so that one spec serves light and dark pages. A choice has its colour, dash and shape by
its place in the answer, so that no chart depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["THEMES", "Rows", "Spec", "curves", "winner_map", "with_rows"]

Spec = dict[str, Any]
Rows = list[dict[str, Any]]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [1, 3]]
_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
_CELL = 34

# Okabe and Ito's colours, told apart with any colour vision; the dark page's are lighter.
_LIGHT = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"]
_DARK = ["#56a8e0", "#e6a817", "#2fbf94", "#dda0c4", "#f0e442", "#f0784a"]


def _theme(ink: str, faint: str, grid: str, category: list[str]) -> Spec:
    font = "system-ui, sans-serif"
    return {
        "background": "transparent",
        "font": font,
        "view": {"stroke": None},
        "range": {"category": category, "symbol": _SHAPES},
        "axis": {
            "labelColor": ink, "titleColor": ink, "gridColor": grid, "domainColor": faint,
            "tickColor": faint, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": 500,
            "titlePadding": 8,
        },
        "legend": {
            "labelColor": ink, "titleColor": ink, "orient": "top", "title": None,
            "symbolOpacity": 1, "labelFontSize": 12, "symbolSize": 90, "symbolStrokeWidth": 2,
            "labelLimit": 240,
        },
        "text": {"color": ink},
        "rule": {"color": ink},
        "title": {"color": ink, "fontWeight": 600},
    }  # fmt: skip


THEMES: Mapping[str, Spec] = {
    "light": _theme("#1f2430", "#8a92a0", "#e6e8ec", _LIGHT),
    "dark": _theme("#e6e9ef", "#7d8697", "#30363f", _DARK),
}
"""Vega-Lite configs."""


def with_rows(spec: Spec, rows: Mapping[str, Rows]) -> Spec:
    """`spec` with its data sets. Layers of an empty one are left out: they have no extent."""
    layers = [
        layer for layer in spec["layer"] if "data" not in layer or rows[layer["data"]["name"]]
    ]
    return {**spec, "layer": layers, "datasets": dict(rows)}


def _choice(choices: Sequence[str], **legend: Any) -> Spec:
    return {"field": "choice", "type": "nominal", "scale": {"domain": list(choices)}, **legend}


def _tips(fields: Mapping[str, str]) -> list[Spec]:
    return [{"field": field, "type": "nominal", "title": title} for field, title in fields.items()]


def winner_map(x_title: str, y_title: str, choices: Sequence[str]) -> Spec:
    """The fastest choice of each measured batch over two lengths.

    Full colour is a sure winner, pale a tie or unsure, hatched one whose rivals a hard limit
    forbids. The number is the time of the second over that of the first.

    Data set "cells": x, y, choice, kind ("sure", "pale" or "only"), margin, and the texts batch,
    fastest, times, limit.
    """
    return {
        "$schema": _SCHEMA,
        "data": {"name": "cells"},
        "width": {"step": _CELL},
        "height": {"step": 24},
        "encoding": {
            "x": _band("x", x_title, {"labelAngle": 0, "labelOverlap": True}),
            "y": _band("y", y_title, {}, sort="descending"),
            # On every layer, as a number or a hatch lies over its cell.
            "tooltip": _tips(
                {"batch": "batch", "fastest": "answer", "times": "measured", "limit": "forbidden"}
            ),
        },
        "layer": _map_layers(choices),
        "resolve": {"scale": {"color": "independent"}},
    }


def _map_layers(choices: Sequence[str]) -> list[Spec]:
    """The cells, the hatches over some of them, and the numbers over the rest."""
    pale = {"condition": {"test": "datum.kind == 'pale'", "value": 0.35}, "value": 1}
    return [
        {
            "mark": {"type": "rect", "cornerRadius": 2},
            "encoding": {
                "color": _choice(choices, legend={"symbolType": "square"}),
                "opacity": pale,
            },
        },
        {
            "transform": [{"filter": "datum.kind == 'only'"}],
            "mark": {
                "type": "point", "shape": _hatch(), "size": 480, "stroke": "#ffffff",
                "strokeWidth": 1.3, "strokeOpacity": 0.75, "filled": False,
            },
        },
        {
            "transform": [{"filter": "datum.kind != 'only' && datum.margin"}],
            "mark": {"type": "text", "fontSize": 10},
            "encoding": {
                "text": {"field": "margin", "type": "quantitative", "format": ".2f"},
                "color": _ink_on(choices),
            },
        },
    ]  # fmt: skip


def _band(field: str, title: str, axis: Spec, **more: Any) -> Spec:
    axis = {"title": title, "grid": False, "ticks": False, "domain": False, **axis}
    scale = {"paddingInner": 0.06}
    return {"field": field, "type": "ordinal", "axis": axis, "scale": scale, **more}


def _hatch() -> str:
    """Diagonal strokes over a cell, as an SVG path: 3 units wide and 2 high."""
    strokes = []
    for i in range(-4, 5):
        # The stroke through (i / 2, 0) at 45 degrees, cut at the cell's edges.
        left, right = max(i / 2 - 1, -1.5), min(i / 2 + 1, 1.5)
        strokes.append(f"M{left},{i / 2 - left}L{right},{i / 2 - right}")
    return "".join(strokes)


def _ink_on(choices: Sequence[str]) -> Spec:
    """Text colour over a cell: white on the darkest blue, the page's ink on pale cells."""
    first = choices[0] if choices else ""
    return {
        "condition": [
            {"test": "datum.kind == 'pale'", "value": {"expr": "dark ? '#e6e9ef' : '#1f2430'"}},
            {"test": {"field": "choice", "equal": first},
             "value": {"expr": "dark ? '#10131a' : '#ffffff'"}},
        ],
        "value": "#10131a",
    }  # fmt: skip


def curves(x_title: str, choices: Sequence[str], *, from_zero: bool = False) -> Spec:
    """Time against one length, with intervals, measured points, crossovers and limits.

    Data sets: "estimates" (x, choice, us, wide: the interval is from us / wide to us * wide),
    "measured" (x, choice, us, samples, and the texts arm, time) and "edges" (x, low, high, limit,
    text). With `from_zero` x may be 0, which a logarithm cannot show.
    """
    x = {
        "field": "x",
        "type": "quantitative",
        "scale": {"type": "symlog"} if from_zero else {"type": "log", "base": 2, "nice": False},
        "axis": {"title": x_title, "format": "d", "labelOverlap": "greedy", "tickCount": 8},
    }
    return {
        "$schema": _SCHEMA,
        "width": "container",
        "height": 300,
        # Shared, the dashes' missing legend would take that of colour and shape with it.
        "resolve": {"legend": {"strokeDash": "independent"}},
        "encoding": {"x": x},
        "layer": [*_edge_layers(), *_time_layers(x_title, choices)],
    }


def _time_layers(x_title: str, choices: Sequence[str]) -> list[Spec]:
    """The bands, the lines, and the measured points on top."""
    us = {
        "field": "us",
        "type": "quantitative",
        "scale": {"type": "log", "nice": False},
        "axis": {"title": "microseconds", "format": "~g", "labelOverlap": "greedy",
                 "tickCount": 6},
    }  # fmt: skip
    colour = _choice(choices)
    shape = {**colour, "scale": {"domain": list(choices), "range": _repeated(_SHAPES, choices)}}
    # A field of its own, or the legend would show dashes around its symbols.
    dashes = {"domain": list(choices), "range": _repeated(_DASHES, choices)}
    dash = {"field": "dash", "type": "nominal", "scale": dashes, "legend": None}
    tips = _tips({"choice": "choice", "arm": "arm", "x": x_title, "time": "time",
                  "samples": "samples"})  # fmt: skip
    return [
        {
            "data": {"name": "estimates"},
            "transform": [
                {"calculate": "datum.us / datum.wide", "as": "low"},
                {"calculate": "datum.us * datum.wide", "as": "high"},
            ],
            "mark": {"type": "area", "opacity": 0.18},
            "encoding": {"y": {**us, "field": "low"}, "y2": {"field": "high"}, "color": colour},
        },
        {
            "data": {"name": "estimates"},
            "transform": [{"calculate": "datum.choice", "as": "dash"}],
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {"y": us, "color": colour, "strokeDash": dash},
        },
        {
            "data": {"name": "measured"},
            "mark": {"type": "point", "filled": True, "size": 45, "opacity": 1},
            "encoding": {"y": us, "color": colour, "shape": shape, "tooltip": tips},
        },
    ]


def _repeated(items: Sequence[Any], choices: Sequence[str]) -> list[Any]:
    return [items[i % len(items)] for i in range(len(choices))]


def _edge_layers() -> list[Spec]:
    """A band for each crossover's interval, a rule at its value, and the value as text."""
    data = {"name": "edges"}
    limit = {"condition": {"test": "datum.limit", "value": [2, 4]}, "value": [1, 0]}
    tips = _tips({"text": "crossover", "limit": "limit"})
    return [
        {
            "data": data,
            "mark": {"type": "rect", "opacity": 0.12, "color": "#808890"},
            "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}},
        },
        {
            "data": data,
            "mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.7},
            "encoding": {"strokeDash": limit, "tooltip": tips},
        },
        {
            "data": data,
            "mark": {"type": "text", "y": -4, "align": "center", "baseline": "bottom",
                     "fontSize": 11},
            "encoding": {"text": {"field": "x", "type": "quantitative", "format": "d"}},
        },
    ]  # fmt: skip
