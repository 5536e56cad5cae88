"""The chart of prefill rate against chunk size."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_tune.reports.charts.theme import (
    DASHES,
    SCHEMA,
    SHAPES,
    Spec,
    log_axis,
    repeated,
    tips,
)


def chunk_rates(prompts: Sequence[str], whose: Sequence[str]) -> Spec:
    """Million prompt tokens a second through one layer, against chunk size, by prompt length.

    `whose` has two names: the choices of the first (the table) are drawn solid, those of the second
    (the engine's baseline) dashed. Hollow points lie outside the measured batches.

    Data set "chunks": chunk, rate, prompt, who, best (a boolean: the fastest chunk of its line),
    extrapolated, and the texts arms, limit.
    """
    x = log_axis("chunk", "chunk size, tokens", base=2, form="d")
    y = {
        "field": "rate",
        "type": "quantitative",
        "axis": {"title": "million tokens/s through one layer", "tickCount": 6},
        "scale": {"zero": True},
    }
    domain = list(prompts)
    colour = {
        "field": "prompt", "type": "ordinal", "scale": {"domain": domain},
        "legend": {"title": "prompt", "orient": "top", "titleOrient": "left"}, "sort": None,
    }  # fmt: skip
    shapes = {"domain": domain, "range": repeated(SHAPES, prompts)}
    shape = {**colour, "type": "nominal", "scale": shapes}
    dash = {
        "field": "who", "type": "nominal", "scale": {"domain": list(whose), "range": DASHES[:2]},
        "legend": {"title": None, "orient": "top", "symbolType": "stroke"},
    }  # fmt: skip
    hollow = {"condition": {"test": "datum.extrapolated", "value": 0}, "value": 1}
    told = tips({"prompt": "prompt", "who": "chosen by", "chunk": "chunk size", "rate": "million "
                 "tokens a second", "arms": "arms", "limit": "forbidden"})  # fmt: skip
    return {
        "$schema": SCHEMA,
        "data": {"name": "chunks"},
        "width": "container",
        "height": 300,
        "encoding": {"x": x, "y": y, "color": colour},
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"strokeDash": dash}},
            {
                "mark": {"type": "point", "filled": True, "strokeWidth": 2, "opacity": 1},
                "encoding": {
                    "shape": shape,
                    "fillOpacity": hollow,
                    "size": {"condition": {"test": "datum.best", "value": 110}, "value": 45},
                    "tooltip": told,
                },
            },
        ],
    }
