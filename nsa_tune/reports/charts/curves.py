"""The curves: time against one length, with intervals, measured points and crossovers."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_tune.reports.charts.theme import (
    DASHES,
    SCHEMA,
    Spec,
    choice_colour,
    choice_shape,
    repeated,
    tips,
)

_TIME = (
    "format(datum.us, '.4~r') + ' us (' + format(datum.low, '.4~r') + '-' + "
    "format(datum.high, '.4~r') + ')'"
)
_WIDEST = 10
"""Times its middle that an interval is drawn, so that one that says nothing sets no axis."""


def curves(x_title: str, choices: Sequence[str], *, from_zero: bool = False) -> Spec:
    """Time against one length, with intervals, measured points, crossovers and limits.

    Data sets: "estimates" (x, choice, us, wide: the interval is from us / wide to us * wide),
    "measured" (x, choice, arm, us, low, high, samples, over: the time over the best one's) and
    "edges" (x, low, high, limit, label, text). `from_zero` is for data with x = 0, which a
    logarithmic axis cannot show.
    """
    x = {
        "field": "x",
        "type": "quantitative",
        "scale": {"type": "symlog"} if from_zero else {"type": "log", "base": 2, "nice": False},
        "axis": {
            "title": x_title,
            "format": "d",
            "labelOverlap": "greedy",
            "labelSeparation": 6,
            "tickCount": 8,
        },
    }
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 300,
        # If shared, hiding the legend of dashes would hide that of colour and shape too.
        "resolve": {"legend": {"strokeDash": "independent"}},
        "encoding": {"x": x},
        "layer": [*_edge_layers(), *_time_layers(x_title, choices)],
    }


def _time_layers(x_title: str, choices: Sequence[str]) -> list[Spec]:
    """Interval bands, lines, and the measured points on top."""
    us = {
        "field": "us",
        "type": "quantitative",
        "scale": {"type": "log", "base": 10, "nice": False},
        "axis": {
            "title": "microseconds", "format": "~g", "labelOverlap": "greedy",
            "labelSeparation": 6, "tickCount": 6,
        },
    }  # fmt: skip
    colour = choice_colour(choices)
    shape = choice_shape(choices)
    # Dashes use a field of their own: on "choice" the legend would draw its symbols dashed.
    dashes = {"domain": list(choices), "range": repeated(DASHES, choices)}
    dash = {"field": "dash", "type": "nominal", "scale": dashes, "legend": None}
    told = tips({"choice": "choice", "arm": "arm", "x": x_title, "time": "time",
                 "over": "over the best", "samples": "samples"})  # fmt: skip
    return [
        {
            "data": {"name": "estimates"},
            "transform": [
                {"calculate": f"min(datum.wide, {_WIDEST})", "as": "drawn"},
                {"calculate": "datum.us / datum.drawn", "as": "low"},
                {"calculate": "datum.us * datum.drawn", "as": "high"},
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
            "transform": [{"calculate": _TIME, "as": "time"}],
            "mark": {"type": "point", "filled": True, "size": 45, "opacity": 1},
            "encoding": {"y": us, "color": colour, "shape": shape, "tooltip": told},
        },
    ]


def _edge_layers() -> list[Spec]:
    """For each crossover a band over its interval, a vertical line at its value, and the value."""
    data = {"name": "edges"}
    limit = {"condition": {"test": "datum.limit", "value": [2, 4]}, "value": [1, 0]}
    told = tips({"text": "crossover", "limit": "limit"})
    return [
        {
            "data": data,
            "mark": {"type": "rect", "opacity": 0.12, "color": "#808890"},
            "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}},
        },
        {
            "data": data,
            "mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.7},
            "encoding": {"strokeDash": limit, "tooltip": told},
        },
        {
            "data": data,
            "mark": {"type": "text", "y": -4, "align": "center", "baseline": "bottom",
                     "fontSize": 11},
            "encoding": {"text": {"field": "label", "type": "nominal"}},
        },
    ]  # fmt: skip
