"""Farthest-point sampling: the first few places cover all of them."""

from __future__ import annotations

from math import dist

from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.autotune.search.farthest_point import farthest_point_order

place = st.tuples(st.floats(-10, 10), st.floats(-10, 10))


@given(st.lists(place, max_size=30), st.lists(place, max_size=5))
def test_every_place_comes_once(
    places: list[tuple[float, ...]], taken: list[tuple[float, ...]]
) -> None:
    assert sorted(farthest_point_order(places, taken)) == list(range(len(places)))


@given(st.lists(place, min_size=2, max_size=30, unique=True))
def test_each_place_is_at_most_as_far_from_those_before_as_the_one_before_it(
    places: list[tuple[float, ...]],
) -> None:
    order = [places[i] for i in farthest_point_order(places)]
    nearest = [min(dist(one, other) for other in order[:i]) for i, one in enumerate(order) if i]

    assert nearest == sorted(nearest, reverse=True)


def test_places_far_from_those_taken_come_first() -> None:
    assert farthest_point_order([(0.0,), (1.0,), (4.0,)], [(0.1,)])[0] == 2


def test_without_anything_taken_it_starts_in_the_middle() -> None:
    assert farthest_point_order([(0.0,), (2.1,), (4.0,)])[0] == 1
