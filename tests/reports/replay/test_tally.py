"""Tallies: sums of prices, and how far prices that are shared are off."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.sglang.costs.own_copies import longer_us
from nsa_tune.reports.replay import tally as module
from nsa_tune.reports.replay.prices import Way
from nsa_tune.reports.replay.tally import Tally
from tests.reports.replay.test_prices import pricer


def sums(batch: Batch) -> tuple[int, int, int, int, int]:
    return batch.batch_size, batch.q_tokens, batch.kv_tokens, batch.max_kv, batch.pairs


def added(batches: list[Batch], *, graph_tokens: int = 8192, count: int = 1) -> Tally:
    tally = Tally(pricer(), graph_tokens)
    for batch in batches:
        tally.add(batch.mode == "extend", sums(batch), lambda: batch, count)  # noqa: B023
    return tally


def prefills(count: int) -> list[Batch]:
    random = Random(1)
    return [
        Batch.extend([random.randrange(0, 20000)], [random.randrange(1, 8192)])
        for _ in range(count)
    ]


lengths = st.lists(st.tuples(st.integers(0, 40000), st.integers(1, 4000)), min_size=1, max_size=40)


@given(lengths, lengths, st.booleans())
def test_passes_that_are_alike_are_alike_when_they_are_rare(
    one: list[tuple[int, int]], other: list[tuple[int, int]], extend: bool
) -> None:
    tally, found = Tally(pricer(), 8192), []
    for lens in (one, other, [*one[1:], (one[0][0] + 1, one[0][1])]):
        batch = Batch.extend([prefix for prefix, _ in lens], [new for _, new in lens])
        fine = tally._key(extend, sums(batch))
        rare = module._coarse(fine, batch.batch_size)
        # Four times as many cells an octave.
        assert rare[4] == int(4 * math.log2(batch.q_tokens))
        assert rare[5] == int(4 * math.log2(batch.kv_tokens))
        assert rare[6] == (int(4 * math.log2(batch.pairs)) if extend else 0)
        found.append((fine, rare))

    for fine, rare in found:
        for another, as_rare in found:
            assert fine != another or rare == as_rare


def test_what_was_priced_serves_after_the_sums_and_is_not_added_twice() -> None:
    batch = Batch.extend([0], [1000])
    tally = added([batch])
    tally.done()

    def unasked() -> Batch:
        raise AssertionError("a pass like this is priced already")

    price = tally.price(True, sums(batch), unasked)
    tally.done()

    assert price == pricer().price(batch, graph=True)
    assert tally.total(True, Way.ENGINE).latency_us == pytest.approx(price.total_us(Way.ENGINE))


def test_a_sum_is_that_of_the_passes() -> None:
    batches = [Batch.extend([0], [1000]), Batch.extend([4096], [4096])]
    own = [pricer().price(batch, graph=True) for batch in batches]

    tally = added(batches, count=3)
    tally.done()

    for way in Way:
        want = 3 * sum(price.total_us(way) for price in own)
        assert tally.total(True, way).latency_us == pytest.approx(want)
    assert tally.kinds[True].passes == 6
    assert tally.kinds[True].new_tokens == 3 * 5096
    gain = tally.total(True, Way.ENGINE).latency_us - tally.total(True, Way.TABLE).latency_us
    assert tally.kinds[True].gains_us["sparse_prefill"] == pytest.approx(gain)


def test_shared_prices_are_close_and_their_error_is_told() -> None:
    batches = prefills(300)
    tally = added(batches)
    exact = sum(pricer().price(batch, graph=True).total_us(Way.ENGINE) for batch in batches)

    shared = tally.shared_prices()[True]
    tally.done()

    assert tally.total(True, Way.ENGINE).latency_us == pytest.approx(exact, rel=0.02)
    assert shared.passes == 200
    assert shared.median <= shared.p90 < 0.1
    assert abs(shared.total) < 0.02


def test_rare_shapes_share_more_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = prefills(300)
    monkeypatch.setattr(module, "_MOST_FINE", 20)
    monkeypatch.setattr(module, "_MOST_CELLS", 40)
    tally = added(batches)
    tally.done()

    exact = sum(pricer().price(batch, graph=True).total_us(Way.ENGINE) for batch in batches)
    assert tally.kinds[True].passes == 300
    assert tally.total(True, Way.ENGINE).latency_us == pytest.approx(exact, rel=0.1)


def test_the_best_flags_are_the_ones_with_the_least_time() -> None:
    tally = added([Batch.extend([8192], [2048])])
    tally.done()
    found = tally.static(True)

    assert found is not None
    flags, time_us = found
    assert flags.words(extend=True) == ["--dsa-prefill-backend flashmla_sparse"]
    longer_by_us = 61 * longer_us(Batch.extend([8192], [2048]), KVLayout.FP8_PACKED, 16)
    assert time_us == pytest.approx(tally.total(True, Way.TABLE).latency_us + longer_by_us)


def test_the_shapes_that_lose_most_come_first() -> None:
    batches = [Batch.extend([8192], [2048]), Batch.extend([8192], [512]), Batch.decode([4000] * 4)]
    tally = added(batches)
    tally.done()

    lost = tally.most_lost(10)

    assert [one.example for one in lost[:2]] == ["extend:8192+2048", "extend:8192+512"]
    first = lost[0]
    assert first.new_tokens == (2048, 2048)
    assert (first.engine_arms, first.table_arms) == ("mla/flashmla_kv", "mla/flashmla_sparse")
    assert first.lost_us == pytest.approx(first.engine_us - first.table_us)


def test_prefills_beyond_the_graphs_run_eagerly() -> None:
    batch = Batch.extend([0] * 4, [500] * 4)

    graph, eager = added([batch], graph_tokens=2000), added([batch], graph_tokens=1999)

    for one in (graph, eager):
        one.done()
    mha = pricer().price(batch, graph=False).total_us(Way.ENGINE)
    assert eager.total(True, Way.ENGINE).latency_us == pytest.approx(mha)
    assert graph.total(True, Way.ENGINE).latency_us != pytest.approx(mha)
