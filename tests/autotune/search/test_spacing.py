"""Farthest first: an order in which any first part covers all of the places."""

from __future__ import annotations

from math import dist

from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.autotune.search.spacing import farthest_first

place = st.tuples(st.floats(-10, 10), st.floats(-10, 10))


@given(st.lists(place, max_size=30), st.lists(place, max_size=5))
def test_every_place_comes_once(
    places: list[tuple[float, ...]], taken: list[tuple[float, ...]]
) -> None:
    assert sorted(farthest_first(places, taken)) == list(range(len(places)))


@given(st.lists(place, min_size=2, max_size=30, unique=True))
def test_places_come_closer_and_closer_to_those_before(places: list[tuple[float, ...]]) -> None:
    order = [places[i] for i in farthest_first(places)]
    nearest = [min(dist(one, other) for other in order[:i]) for i, one in enumerate(order) if i]

    assert nearest == sorted(nearest, reverse=True)


def test_what_is_taken_is_kept_away_from() -> None:
    assert farthest_first([(0.0,), (1.0,), (4.0,)], [(0.1,)])[0] == 2


def test_without_anything_taken_it_starts_in_the_middle() -> None:
    assert farthest_first([(0.0,), (2.1,), (4.0,)])[0] == 1
