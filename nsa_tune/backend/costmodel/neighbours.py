"""The nearest of many places, found without a look at each: a k-d tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappush, heapreplace
from math import dist, inf
from typing import NamedTuple, TypeAlias

_LEAF = 24
"""Places that are cheaper looked at one by one than divided further."""


class _Split(NamedTuple):
    """Places on either side of a value of one coordinate; those at the value may be on both."""

    axis: int
    value: float
    left: _Tree
    right: _Tree


_Tree: TypeAlias = "_Split | tuple[int, ...]"
"""A leaf has the numbers of its places."""


class Neighbours:
    """Finds which of `places` are near; all have the same number of coordinates."""

    def __init__(self, places: Sequence[tuple[float, ...]]) -> None:
        self._places = places
        self._root = self._divided(list(range(len(places))))

    def _divided(self, numbers: list[int]) -> _Tree:
        if len(numbers) <= _LEAF:
            return tuple(numbers)
        places = self._places
        columns = list(zip(*(places[i] for i in numbers), strict=True))
        widths = [max(column) - min(column) for column in columns]
        axis = max(range(len(widths)), key=widths.__getitem__)
        # Places that are all the same cannot be divided. Half of them is, whatever their values.
        numbers.sort(key=lambda i: places[i][axis])
        middle = len(numbers) // 2
        value = places[numbers[middle]][axis]
        return _Split(axis, value, self._divided(numbers[:middle]), self._divided(numbers[middle:]))

    def nearest(
        self, where: tuple[float, ...], count: int, besides: int = -1
    ) -> list[tuple[float, int]]:
        """(distance, number) of the `count` nearest, the nearest first; of equally near ones the
        lower numbers. The place number `besides` is left out."""
        # The farthest of the best first: a heap of negated pairs.
        best: list[tuple[float, int]] = []
        for leaf in self._leaves(where, best, count):
            for i in leaf:
                if i == besides:
                    continue
                place = (-dist(where, self._places[i]), -i)
                if len(best) < count:
                    heappush(best, place)
                elif place > best[0]:
                    heapreplace(best, place)
        return sorted((-distance, -i) for distance, i in best)

    def _leaves(
        self, where: tuple[float, ...], best: Sequence[tuple[float, int]], count: int
    ) -> Iterator[tuple[int, ...]]:
        """Leaves that may hold one of the nearest, nearer ones first; `best` shrinks meanwhile."""
        stack: list[tuple[float, _Tree]] = [(0.0, self._root)]
        while stack:
            off, tree = stack.pop()
            if len(best) == count and off > -best[0][0]:
                continue
            while isinstance(tree, _Split):
                beyond = where[tree.axis] - tree.value
                near, far = (tree.left, tree.right) if beyond < 0 else (tree.right, tree.left)
                stack.append((max(off, abs(beyond)), far))
                tree = near
            yield tree

    def within(self, where: tuple[float, ...], reach: float) -> list[int]:
        """The numbers of the places that are at most `reach` away, in order."""
        near: list[int] = []
        everything = [(-reach, 1)] if reach < inf else []
        for leaf in self._leaves(where, everything, 1):
            near += [i for i in leaf if dist(where, self._places[i]) <= reach]
        return sorted(near)
