"""Chunk sizes: a prompt's time is that of its chunks' passes, prefix by prefix."""

from __future__ import annotations

import pytest

from nsa_tune import Batch
from nsa_tune.reports.replay.chunks import chunk_times
from nsa_tune.reports.replay.prices import Way
from nsa_tune.reports.replay.rest import RestOfPass
from tests.reports.replay.test_prices import pricer


def test_a_prompt_takes_its_chunks_with_all_before_as_prefix() -> None:
    found = chunk_times(pricer(), 8192)
    one = next(one for one in found if (one.prompt, one.chunk) == (8192, 4096))

    passes = [Batch.extend([0], [4096]), Batch.extend([4096], [4096])]
    prices = [pricer().price(batch, graph=True) for batch in passes]
    assert one.passes == 2
    assert one.engine_s * 1e6 == pytest.approx(sum(p.total_us(Way.ENGINE) for p in prices))
    assert one.table_s * 1e6 == pytest.approx(sum(p.total_us(Way.TABLE) for p in prices))
    assert one.unpriced == ("indexer_prefill", "indexer_topk")


def test_what_a_pass_costs_speaks_for_larger_chunks() -> None:
    rest = RestOfPass("made up", (), {"graph": {"pass": 50.0}, "eager": {"pass": 50.0}}, {}, 0, {})

    found = chunk_times(pricer(), 8192, rest)

    for prompt in {one.prompt for one in found}:
        own = [one for one in found if one.prompt == prompt]
        best = [one.chunk for one in own if one.best]
        assert best == [max(one.chunk for one in own)]
        for one in own:
            assert one.engine_whole_s == pytest.approx(one.engine_s + 0.05 * one.passes)


def test_sizes_stay_within_what_was_measured() -> None:
    most = max(b.q_tokens for b in pricer().dispatcher.policies["prefill"].measured)

    found = chunk_times(pricer(), 8192)

    assert found
    assert all(one.chunk <= min(one.prompt, most) for one in found)
