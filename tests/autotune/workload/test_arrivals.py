"""Arrivals: what is cached of each request, and reading them more than once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from errno import ENOSPC
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune._errors import NsaTuneError
from nsa_tune.autotune.workload import arrivals as module
from nsa_tune.autotune.workload.arrivals import Arrival, KeptArrivals, arrivals
from nsa_tune.autotune.workload.requests import TraceRequest
from tests.autotune.workload.strategies import requests


def cached(found: list[TraceRequest], cache_tokens: int = 2**20) -> list[int]:
    return [one.cached_tokens for one in arrivals(found, cache_tokens)]


def many(count: int) -> Iterator[Arrival]:
    return (Arrival(i / 7, 100 + i, 1 + i % 3, i % 100) for i in range(count))


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


@pytest.mark.parametrize("count", [0, 1, 256, 257, 3000])
def test_all_arrivals_come_each_time_and_are_read_once(count: int) -> None:
    coming = many(count)
    with KeptArrivals(coming) as kept:
        first, second = list(kept), list(kept)

    assert first == second == list(many(count))
    assert all(type(one) is Arrival for one in second)
    assert next(coming, None) is None
    assert kept.counted.requests == count
    assert kept.counted.prompt_tokens == sum(one.input_tokens for one in first)
    assert kept.counted.output_tokens == sum(one.output_tokens for one in first)


def test_one_that_stops_early_keeps_nothing_from_the_next() -> None:
    with KeptArrivals(many(1000)) as kept:
        assert list(islice(kept, 300)) == list(many(300))
        assert list(kept) == list(many(1000))


def test_two_may_read_at_once() -> None:
    with KeptArrivals(many(1000)) as kept:
        for one, other in zip(kept, kept, strict=True):
            assert one == other


def test_a_long_trace_is_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_IN_MEMORY", 1000)
    with KeptArrivals(many(1000)) as kept:
        assert list(kept) == list(kept) == list(many(1000))
        assert kept._kept._rolled  # type: ignore[attr-defined]


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr("pickle.dump", full)
    with KeptArrivals(many(1)) as kept, pytest.raises(NsaTuneError, match=r"No space .* TMPDIR"):
        list(kept)


_LIMITED = """
import resource, signal, sys
from nsa_tune._errors import NsaTuneError
from nsa_tune.autotune.workload import arrivals as module

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
module._MOST_IN_MEMORY = 1000
try:
    with module.KeptArrivals(module.Arrival(float(i), 9, 9, 0) for i in range(2000)) as kept:
        print(len(list(kept)), len(list(kept)))
except NsaTuneError as error:
    print(error)
"""


@pytest.mark.parametrize("most_bytes", [2000, 10_000, 20_000, 30_000])
def test_a_disk_that_fills_up_is_told_wherever_it_ends(most_bytes: int) -> None:
    command = [sys.executable, "-c", _LIMITED, str(most_bytes)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "TMPDIR" in said


def test_a_disk_with_room_is_enough() -> None:
    command = [sys.executable, "-c", _LIMITED, "1000000"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert said == "2000 2000\n"
