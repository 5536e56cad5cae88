"""The fastest choice of batches that are on no winner map, such as those of unequal sequences."""

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


def winner_scatter(choices: Sequence[str]) -> Spec:
    """One point for each batch: its new tokens, and the mean kv tokens of its sequences.

    Full colour: a sure winner. Pale: a tie or unsure. Hollow: limits forbid every other choice.

    Data sets "batches", and "only" for those with one allowed choice: x, y, choice, kind ("sure" or
    "pale"), and the texts batch, fastest, times, limit.
    """
    told = tips({"batch": "batch", "fastest": "answer", "times": "times", "limit": "forbidden"})
    colour = choice_colour(choices)
    shape = choice_shape(choices)
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
