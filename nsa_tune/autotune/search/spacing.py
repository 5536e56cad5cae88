"""Points that are far from each other: an order in which any first part covers all of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import dist, inf

__all__ = ["farthest_first"]

Place = tuple[float, ...]


def farthest_first(places: Sequence[Place], taken: Sequence[Place] = ()) -> list[int]:
    """The indices of `places`, each the farthest from all before it and from `taken`.

    Without `taken` it starts in the middle. Of equally far ones the first comes first.
    """
    if not places:
        return []
    distance = [min((dist(place, other) for other in taken), default=inf) for place in places]
    left = set(range(len(places)))
    order = []
    if not taken:
        middle = tuple(sum(axis) / len(places) for axis in zip(*places, strict=True))
        order.append(min(left, key=lambda i: (dist(places[i], middle), i)))
    else:
        order.append(max(left, key=lambda i: (distance[i], -i)))
    while True:
        newest = order[-1]
        left.discard(newest)
        if not left:
            return order
        for i in left:
            distance[i] = min(distance[i], dist(places[i], places[newest]))
        order.append(max(left, key=lambda i: (distance[i], -i)))
