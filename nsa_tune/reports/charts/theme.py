"""What all charts share: colours for light and dark pages, marks, scales, tooltips.

Colours come from the theme, so one spec serves light and dark pages. A choice has its own colour,
dash and shape, by its position among the choices, so no chart depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Spec = dict[str, Any]
Rows = list[dict[str, Any]]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [1, 3]]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]

# The palette of Okabe and Ito, safe for colour-blind readers; lighter on dark pages.
_LIGHT = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"]
_DARK = ["#56a8e0", "#e6a817", "#2fbf94", "#dda0c4", "#f0e442", "#f0784a"]


def _theme(ink: str, faint: str, grid: str, category: list[str]) -> Spec:
    return {
        "background": "transparent",
        "font": "system-ui, sans-serif",
        "view": {"stroke": None},
        "range": {"category": category, "symbol": SHAPES},
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
        "title": {
            "color": ink, "fontWeight": 600, "anchor": "start", "subtitleColor": ink,
            "subtitlePadding": 6,
        },
    }  # fmt: skip


THEMES: Mapping[str, Spec] = {
    "light": _theme("#1f2430", "#8a92a0", "#e6e8ec", _LIGHT),
    "dark": _theme("#e6e9ef", "#7d8697", "#30363f", _DARK),
}
"""Vega-Lite configs."""


def picture_theme(name: str) -> Spec:
    """The theme for a picture file: with fonts of equal width everywhere."""
    font = "Arial, Helvetica, Liberation Sans, sans-serif"
    return {**THEMES[name], "font": font, "padding": 16, "aria": False}


def with_rows(spec: Spec, rows: Mapping[str, Rows]) -> Spec:
    """`spec` with its data sets. Layers with an empty one are dropped: Vega cannot scale them."""
    layers = [
        layer for layer in spec["layer"] if "data" not in layer or rows[layer["data"]["name"]]
    ]
    return {**spec, "layer": layers, "datasets": dict(rows)}


def choice_shape(choices: Sequence[str]) -> Spec:
    """The mark of each choice, by its position; in the same legend as its colour."""
    scale = {"domain": list(choices), "range": repeated(SHAPES, choices)}
    return {**choice_colour(choices), "scale": scale}


def choice_colour(choices: Sequence[str], **legend: Any) -> Spec:
    """The colour of each choice, by its position."""
    return {"field": "choice", "type": "nominal", "scale": {"domain": list(choices)}, **legend}


def tips(fields: Mapping[str, str]) -> list[Spec]:
    """A tooltip of texts, from field names and their titles."""
    return [{"field": field, "type": "nominal", "title": title} for field, title in fields.items()]


def repeated(items: Sequence[Any], choices: Sequence[str]) -> list[Any]:
    """One of `items` for each choice, starting over when they run out."""
    return [items[i % len(items)] for i in range(len(choices))]
