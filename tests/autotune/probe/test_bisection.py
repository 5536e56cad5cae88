"""Bisection: exact whatever is expected, and short when the expectation is right."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.autotune.probe.bisection import find_limit
from nsa_tune.autotune.probe.tries import Outcome, Try


def counted(limit: int, sizes: list[int]) -> Callable[[int], Try]:
    def run(size: int) -> Try:
        sizes.append(size)
        return Try(size, Outcome.OK if size <= limit else Outcome.EXITED)

    return run


@given(
    limit=st.integers(0, 3000),
    start=st.integers(1, 300),
    most=st.integers(300, 2000),
    expected=st.none() | st.integers(1, 2500),
)
def test_the_limit_is_exact_whatever_is_expected(
    limit: int, start: int, most: int, expected: int | None
) -> None:
    sizes: list[int] = []
    found = find_limit(counted(limit, sizes), start, most, expected)

    assert found.limit == min(limit, most)
    assert (found.past is None) == (limit >= most)
    assert found.past is None or found.past.size == found.limit + 1
    assert len(sizes) == len(set(sizes)) <= 2 + 12 + 11
    assert all(1 <= size <= most for size in sizes)


def test_a_right_expectation_takes_two_tries() -> None:
    sizes: list[int] = []
    find_limit(counted(19370, sizes), 1024, 32701, 19370)

    assert sizes == [19370, 19371]
