"""The roofline chart: achieved rates under the measured ceilings."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_tune.reports.charts.theme import (
    SCHEMA,
    Spec,
    choice_colour,
    choice_shape,
    log_axis,
    tips,
)


def roofline(arms: Sequence[str]) -> Spec:
    """TFLOP/s against flops a byte, with the measured copy bandwidth and matrix rate as the roof.

    Data sets: "roof" (x, y, precision, and text on the last point; empty without measured
    ceilings) and "achieved" (x, y, choice: the arm, and the texts batch, moved, share, bound).
    """
    x = log_axis("x", "flops a byte", form="~g")
    y = log_axis("y", "TFLOP/s", ticks=6)
    colour = choice_colour(arms)
    shape = choice_shape(arms)
    told = tips({"choice": "arm", "batch": "batch", "y": "TFLOP/s", "moved": "TB/s",
                 "x": "flops a byte", "share": "of the roof", "bound": "bound by"})  # fmt: skip
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 320,
        "encoding": {"x": x, "y": y},
        "layer": [
            {
                "data": {"name": "roof"},
                "mark": {"type": "line", "strokeWidth": 2, "color": "#808890"},
                "encoding": {"detail": {"field": "precision", "type": "nominal"}},
            },
            {
                "data": {"name": "roof"},
                "transform": [{"filter": "datum.text"}],
                "mark": {"type": "text", "align": "right", "baseline": "bottom", "dy": -4,
                         "fontSize": 11},
                "encoding": {"text": {"field": "text", "type": "nominal"}},
            },
            {
                "data": {"name": "achieved"},
                "mark": {"type": "point", "filled": True, "size": 36, "opacity": 0.7},
                "encoding": {"color": colour, "shape": shape, "tooltip": told},
            },
        ],
    }  # fmt: skip
