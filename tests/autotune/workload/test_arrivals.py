"""Arrivals: what is cached of each request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsa_tune.autotune.workload.arrivals import arrivals
from nsa_tune.autotune.workload.requests import TraceRequest
from tests.autotune.workload.strategies import requests


def cached(found: list[TraceRequest], cache_tokens: int = 2**20) -> list[int]:
    return [one.cached_tokens for one in arrivals(found, cache_tokens)]


@given(requests, st.integers(0, 4096))
def test_nothing_else_changes_and_the_last_token_is_never_cached(
    found: list[TraceRequest], cache_tokens: int
) -> None:
    given = list(arrivals(found, cache_tokens))

    assert [one[:3] for one in given] == [one[:3] for one in found]
    assert all(0 <= one.cached_tokens < one.input_tokens for one in given)


@given(requests)
def test_without_a_cache_nothing_is_cached(found: list[TraceRequest]) -> None:
    assert set(cached(found, 511)) <= {0}


def test_the_leading_blocks_of_earlier_requests_are_cached() -> None:
    found = [
        TraceRequest(0.0, 1600, 1, (1, 2, 3)),
        TraceRequest(1.0, 1600, 1, (1, 2, 4)),
        TraceRequest(2.0, 1600, 1, (2, 1, 3)),
        TraceRequest(3.0, 1600, 1, (9, 1, 2)),
    ]

    assert cached(found) == [0, 1024, 1536, 0]


def test_a_block_that_was_used_since_stays_longer() -> None:
    found = [TraceRequest(0.0, 600, 1, (block,)) for block in (1, 2, 1, 3, 1, 2)]

    assert cached(found, 2 * 512) == [0, 0, 512, 0, 512, 0]
