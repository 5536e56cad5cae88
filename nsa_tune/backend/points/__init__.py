"""The decision points, a folder each. Everything else is generic over this registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nsa_tune._errors import UnknownName, UsageError
from nsa_tune.backend.points.decode import DECODE
from nsa_tune.backend.points.dense_decode import DENSE_DECODE
from nsa_tune.backend.points.dense_prefill import DENSE_PREFILL
from nsa_tune.backend.points.indexer_layout import INDEXER_LAYOUT
from nsa_tune.backend.points.indexer_metadata import INDEXER_METADATA
from nsa_tune.backend.points.indexer_prefill import INDEXER_PREFILL
from nsa_tune.backend.points.indexer_topk import INDEXER_TOPK
from nsa_tune.backend.points.prefill import PREFILL
from nsa_tune.backend.points.v4_prefill import V4_PREFILL
from nsa_tune.backend.types.point import Point
from nsa_tune.backend.types.profiles import PROFILES, ModelProfile

__all__ = ["LOSSY", "POINTS", "lossy_named", "named", "points_for"]

POINTS: dict[str, Point] = {
    point.name: point
    for point in (
        PREFILL,
        DECODE,
        INDEXER_LAYOUT,
        INDEXER_METADATA,
        INDEXER_PREFILL,
        INDEXER_TOPK,
        DENSE_PREFILL,
        DENSE_DECODE,
        *V4_PREFILL,
    )
}


LOSSY: dict[str, str] = {
    arm.choice: arm.loss for point in POINTS.values() for arm in point.arms if arm.loss
}
"""The arms that run only where the user asked for them, and what they do to the numbers."""


def lossy_named(names: Iterable[str]) -> frozenset[str]:
    """Names of lossy arms.

    Raises:
        UnknownName: for one that is no lossy arm's.
    """
    lossy = frozenset(names)
    for name in lossy - LOSSY.keys():
        raise UnknownName.of("lossy arm", name, list(LOSSY))
    return lossy


def named(name: str, points: Mapping[str, Point]) -> list[Point]:
    """Those of `points` that are called `name`, or grouped under it.

    Raises:
        UnknownName: when there is none.
    """
    if grouped := [point for point in points.values() if point.group == name]:
        return grouped
    if name not in points:
        raise UnknownName.of("decision point", name, list(points))
    return [points[name]]


def points_for(
    profile: ModelProfile, names: Sequence[str] = (), points: Mapping[str, Point] | None = None
) -> list[Point]:
    """Those of `points` (None: of the registry) that arise in a model: all of them, or the ones
    called `names` or grouped under one.

    Raises:
        UnknownName: for a name that neither a point nor a group has.
        UsageError: for a point that does not arise in the model.
    """
    registry = POINTS if points is None else points
    arising = [point for point in registry.values() if profile.family in point.families]
    if not names:
        return arising
    chosen: list[Point] = []
    for name in names:
        chosen += named(name, registry)
    for point in chosen:
        if point not in arising:
            models = [name for name, model in PROFILES.items() if model.family in point.families]
            raise UsageError(
                f"decision point {point.name} does not arise in {profile.name}, which has: "
                f"{', '.join(other.name for other in arising)}; it arises in: {', '.join(models)}"
            )
    return chosen
