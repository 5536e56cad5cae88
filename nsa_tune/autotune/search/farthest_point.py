"""Farthest-point sampling: an order of places whose first few, however many, cover all of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import dist, inf

Place = tuple[float, ...]


def farthest_point_order(places: Sequence[Place], taken: Sequence[Place] = ()) -> list[int]:
    """The indices of `places`, each one the farthest from all before it and from `taken`.

    Without `taken` the first one is the nearest to the mean of all. Of places that are equally far
    the one with the lower index comes first.
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
