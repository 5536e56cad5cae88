"""The fastest choice of batches that no map has a place for, over two sums that all have."""

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

__all__ = ["winner_scatter"]


def winner_scatter(choices: Sequence[str]) -> Spec:
    """One point a batch: its new tokens against the mean of its sequences' kv tokens.

    Full colour is a sure winner, pale a tie or unsure, hollow one whose rivals a limit forbids.

    Data sets "batches" and, of those that leave one choice, "only": x, y, choice, kind ("sure" or
    "pale"), and the texts batch, fastest, times, limit.
    """
    told = tips({"batch": "batch", "fastest": "answer", "times": "times", "limit": "forbidden"})
    colour = choice_colour(choices)
    shape = {**colour, "scale": {"domain": list(choices), "range": repeated(SHAPES, choices)}}
    common = {
        "x": log_axis("x", "new tokens in the batch", base=2, form="d"),
        "y": log_axis("y", "kv tokens a sequence, mean", base=2, form="d", ticks=7),
        "color": colour, "shape": shape, "tooltip": told,
    }  # fmt: skip
    pale = {"condition": {"test": "datum.kind == 'pale'", "value": 0.3}, "value": 0.85}
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 320,
        "layer": [
            _points("batches", {**common, "opacity": pale}, filled=True),
            _points("only", common, filled=False),
        ],
    }


def _points(data: str, encoding: Spec, *, filled: bool) -> Spec:
    return {
        "data": {"name": data},
        "mark": {"type": "point", "filled": filled, "size": 48, "strokeWidth": 1.4},
        "encoding": encoding,
    }
