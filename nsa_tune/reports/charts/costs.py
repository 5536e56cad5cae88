"""What the engine's rule costs, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_tune.reports.charts.theme import (
    SCHEMA,
    SHAPES,
    Spec,
    choice_colour,
    log_axis,
    repeated,
    tips,
)

__all__ = ["default_costs"]

_LEAST = 1.25
"""Where the axis of costs ends at least."""


def default_costs(x_title: str, choices: Sequence[str], worst: float) -> Spec:
    """The rule's time over the best choice's against the size of the batch; 1 costs nothing and
    `worst` is the most.

    Data sets: "costs" (x, cost, choice: the best one, and the texts batch, default, taken, best)
    and "mean" (cost, text).
    """
    colour = choice_colour(choices, legend={"title": "best", "titleOrient": "left"})
    shape = {**colour, "scale": {"domain": list(choices), "range": repeated(SHAPES, choices)}}
    told = tips({"batch": "batch", "default": "default", "taken": "takes", "choice": "best",
                 "best": "takes, the best", "cost": "cost"})  # fmt: skip
    y = log_axis("cost", "default over best", ticks=6)
    # A little over the worst; and a default that is the best everywhere has an axis too.
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
