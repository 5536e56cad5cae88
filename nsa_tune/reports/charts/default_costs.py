"""The chart of what the engine's baseline costs on each batch."""

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

_LEAST = 1.25
"""The least upper end of the cost axis."""


def default_costs(x_title: str, choices: Sequence[str], worst: float) -> Spec:
    """The baseline's time over the best choice's, against the batch's size; `worst` is the highest.

    Data sets: "costs" (x, cost, choice: the best one, and the texts batch, default, taken, best)
    and "mean" (cost, text).
    """
    legend = {"title": "best", "titleOrient": "left"}
    colour, shape = choice_colour(choices, legend=legend), choice_shape(choices, legend=legend)
    told = tips({"batch": "batch", "default": "default", "taken": "takes", "choice": "best",
                 "best": "takes, the best", "cost": "cost"})  # fmt: skip
    y = log_axis("cost", "default over best", ticks=6)
    # Leave room above the worst, and keep an axis where no batch costs anything.
    y["scale"]["domain"] = [1, round(max(1.06 * worst, _LEAST), 3)]
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 260,
        "encoding": {"y": y},
        "layer": [
            {
                "data": {"name": "costs"},
                "mark": {"type": "point", "filled": True, "size": 40, "opacity": 0.7},
                "encoding": {
                    "x": log_axis("x", x_title, base=2, form="d"),
                    "color": colour,
                    "shape": shape,
                    "tooltip": told,
                },
            },
            {
                "data": {"name": "mean"},
                "mark": {"type": "rule", "strokeDash": [6, 3], "opacity": 0.8},
            },
            {
                "data": {"name": "mean"},
                "mark": {"type": "text", "align": "left", "baseline": "middle", "dx": 5,
                         "x": "width", "fontSize": 11},
                "encoding": {"text": {"field": "text", "type": "nominal"}},
            },
        ],
    }  # fmt: skip
