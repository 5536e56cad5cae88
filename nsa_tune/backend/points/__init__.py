"""The decision points, one file each. Everything else is generic over this registry."""

from __future__ import annotations

from nsa_tune._errors import UnknownName
from nsa_tune.backend.point import Point
from nsa_tune.backend.points.decode import DECODE
from nsa_tune.backend.points.indexer_layout import INDEXER_LAYOUT
from nsa_tune.backend.points.indexer_metadata import INDEXER_METADATA
from nsa_tune.backend.points.prefill import PREFILL

__all__ = ["POINTS", "point_of"]

POINTS: dict[str, Point] = {
    point.name: point for point in (PREFILL, DECODE, INDEXER_LAYOUT, INDEXER_METADATA)
}


def point_of(name: str) -> Point:
    """The decision point called `name`.

    Raises:
        UnknownName: when there is none.
    """
    try:
        return POINTS[name]
    except KeyError:
        raise UnknownName.of("decision point", name, list(POINTS)) from None
