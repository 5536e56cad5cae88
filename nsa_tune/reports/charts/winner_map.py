"""The winner map: the fastest choice of each measured batch over two lengths."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_tune.reports.charts.theme import SCHEMA, Spec, choice_colour, tips

_WIDTHS, _HEIGHTS = (27, 48), (24, 36)
"""Least and most pixels of a column and of a row."""
_WHOLE_WIDTH, _WHOLE_HEIGHT = 400, 240
"""Pixels of a map whose columns and rows are within these bounds."""
_INNER = 0.94
"""Share of its step that a cell fills."""
_HATCH = "M-1,-0.5L-0.5,-1M-1,0L0,-1M-1,0.5L0.5,-1M-1,1L1,-1M-0.5,1L1,-0.5M0,1L1,0M0.5,1L1,0.5"
"""Diagonal strokes over a square, as an SVG path from -1 to 1."""
_THREE_DIGITS = (
    "format(datum.margin, datum.margin < 9.995 ? '.2f' : datum.margin < 99.95 ? '.1f' : '.0f')"
)


def winner_map(x_title: str, y_title: str, choices: Sequence[str], columns: int, rows: int) -> Spec:
    """The fastest choice of each measured batch, over up to `columns` and `rows` values of two
    lengths.

    Full colour: a sure winner. Pale: a tie or unsure. Hatched: limits forbid every other choice.
    The number is the second fastest choice's time over the fastest one's.

    Parameters: "hatched", the side of a hatch in pixels, and "numbers", whether they fit. A page
    changes both, and the step of the columns, to what fits.

    Data set "cells": x, y, choice, kind ("sure", "pale" or "only"), margin, and the texts batch,
    fastest, limit.
    """
    width = _step(_WHOLE_WIDTH, columns, _WIDTHS)
    height = _step(_WHOLE_HEIGHT, rows, _HEIGHTS)
    return {
        "$schema": SCHEMA,
        "params": [
            {"name": "hatched", "value": _INNER * min(width, height)},
            {"name": "numbers", "value": True},
        ],
        "data": {"name": "cells"},
        "width": {"step": width},
        "height": {"step": height},
        "encoding": {
            "x": _band("x", x_title, {"labelAngle": 0, "labelOverlap": True, "labelSeparation": 6}),
            "y": _band("y", y_title, {}, sort="descending"),
            # Shared by all layers, because numbers and hatches lie over the cells.
            "tooltip": tips({"batch": "batch", "fastest": "answer", "limit": "forbidden"}),
        },
        "layer": _layers(choices),
        "resolve": {"scale": {"color": "independent"}},
    }


def _step(whole: int, count: int, bounds: tuple[int, int]) -> int:
    """Pixels of one of `count` columns or rows, within `bounds`."""
    return min(max(whole // max(count, 1), bounds[0]), bounds[1])


def _layers(choices: Sequence[str]) -> list[Spec]:
    """The cells, the hatches over some of them, and the numbers over the rest."""
    pale = {"condition": {"test": "datum.kind == 'pale'", "value": 0.35}, "value": 1}
    return [
        {
            "mark": {"type": "rect", "cornerRadius": 2},
            "encoding": {
                "color": choice_colour(choices, legend={"symbolType": "square"}),
                "opacity": pale,
            },
        },
        {
            "transform": [{"filter": "datum.kind == 'only'"}],
            "mark": {
                "type": "point", "shape": _HATCH, "size": {"expr": "hatched * hatched"},
                "stroke": "#ffffff",
                "strokeWidth": 1.3, "strokeOpacity": 0.75, "filled": False,
            },
        },
        {
            "transform": [
                {"filter": "numbers && datum.kind != 'only' && datum.margin"},
                {"calculate": _THREE_DIGITS, "as": "shown"},
            ],
            "mark": {"type": "text", "fontSize": 10},
            "encoding": {
                "text": {"field": "shown", "type": "nominal"},
                "color": _ink_on(choices),
            },
        },
    ]  # fmt: skip


def _band(field: str, title: str, axis: Spec, **more: object) -> Spec:
    axis = {"title": title, "grid": False, "ticks": False, "domain": False, **axis}
    scale = {"paddingInner": round(1 - _INNER, 2)}
    return {"field": field, "type": "ordinal", "axis": axis, "scale": scale, **more}


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
