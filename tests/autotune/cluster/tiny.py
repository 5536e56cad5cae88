"""Every decision point of the tiny profile, with a few batches of its grid."""

from __future__ import annotations

from dataclasses import replace

from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.point import Point, Setting

__all__ = ["TINY"]

_BATCHES = 4


def _thinned(point: Point) -> Point:
    def grid(setting: Setting) -> list[Batch]:
        allowed = [
            batch
            for batch in point.grid(setting)
            if sum(arm.allowed(batch, setting) is None for arm in point.candidates(setting)) > 1
        ]
        return allowed[:: -(-len(allowed) // _BATCHES)]

    return replace(point, grid=grid)


TINY = {name: _thinned(POINTS[name]) for name in ("prefill", "decode", "indexer_layout")}
