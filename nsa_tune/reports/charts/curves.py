"""Curves: time against one length, with intervals, measured points and crossovers."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_tune.reports.charts.theme import (
    DASHES,
    SCHEMA,
    SHAPES,
    Spec,
    choice_colour,
    log_axis,
    repeated,
    tips,
)

__all__ = ["curves"]

_TIME = (
    "format(datum.us, '.4~r') + ' us (' + format(datum.low, '.4~r') + '-' + "
    "format(datum.high, '.4~r') + ')'"
)


def curves(x_title: str, choices: Sequence[str], *, from_zero: bool = False) -> Spec:
    """Time against one length, with intervals, measured points, crossovers and limits.

    Data sets: "estimates" (x, choice, us, wide: the interval is from us / wide to us * wide),
    "measured" (x, choice, arm, us, low, high, samples, over: the time over the best one's) and
    "edges" (x, low, high, limit, label, text). With `from_zero` x may be 0, which a logarithm
    cannot show.
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
        # Shared, the dashes' missing legend would take that of colour and shape with it.
        "resolve": {"legend": {"strokeDash": "independent"}},
        "encoding": {"x": x},
        "layer": [*_edge_layers(), *_time_layers(x_title, choices)],
    }


def _time_layers(x_title: str, choices: Sequence[str]) -> list[Spec]:
    """The bands, the lines, and the measured points on top."""
    us = log_axis("us", "microseconds", ticks=6)
    colour = choice_colour(choices)
    shape = {**colour, "scale": {"domain": list(choices), "range": repeated(SHAPES, choices)}}
    # A field of its own, or the legend would show dashes around its symbols.
    dashes = {"domain": list(choices), "range": repeated(DASHES, choices)}
    dash = {"field": "dash", "type": "nominal", "scale": dashes, "legend": None}
    told = tips({"choice": "choice", "arm": "arm", "x": x_title, "time": "time",
                 "over": "over the best", "samples": "samples"})  # fmt: skip
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
            "transform": [{"calculate": _TIME, "as": "time"}],
            "mark": {"type": "point", "filled": True, "size": 45, "opacity": 1},
            "encoding": {"y": us, "color": colour, "shape": shape, "tooltip": told},
        },
    ]


def _edge_layers() -> list[Spec]:
    """A band for each crossover's interval, a rule at its value, and the value as text."""
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
