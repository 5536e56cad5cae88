"""The k-d tree finds what a look at every place finds."""

from __future__ import annotations

from math import dist

from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.backend.costmodel.neighbours import Neighbours

_NUMBER = st.integers(-3, 3).map(float) | st.floats(-40, 40)
_PLACES = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.tuples(*[_NUMBER] * width), min_size=1, max_size=120)
)


@given(_PLACES, st.data())
def test_the_nearest_are_those_of_a_look_at_all(
    places: list[tuple[float, ...]], data: st.DataObject
) -> None:
    where = data.draw(st.tuples(*[_NUMBER] * len(places[0])))
    count, besides = data.draw(st.integers(1, 9)), data.draw(st.integers(-1, len(places) - 1))
    ranked = sorted((dist(where, one), i) for i, one in enumerate(places) if i != besides)

    assert Neighbours(places).nearest(where, count, besides) == ranked[:count]


@given(_PLACES, st.data())
def test_those_within_reach_are_those_of_a_look_at_all(
    places: list[tuple[float, ...]], data: st.DataObject
) -> None:
    where = data.draw(st.tuples(*[_NUMBER] * len(places[0])))
    reach = data.draw(st.floats(0, 20))

    found = Neighbours(places).within(where, reach)

    assert found == [i for i, one in enumerate(places) if dist(where, one) <= reach]


def test_places_that_are_all_the_same_end() -> None:
    assert Neighbours([(1.0, 2.0)] * 500).nearest((0.0, 0.0), 2)[0][1] == 0
