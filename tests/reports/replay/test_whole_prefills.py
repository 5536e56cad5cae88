"""Whole prefills: priced by the times and the choice that the plug-in itself goes by."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_tune import Batch, UsageError
from nsa_tune.engines.sglang.pass_mode.mode import PassMode
from nsa_tune.engines.sglang.pass_mode.times.pass_time import PassTime
from nsa_tune.engines.sglang.pass_mode.times.pass_times import PassTimes
from nsa_tune.reports.replay.prices import Way
from nsa_tune.reports.replay.rest import RestOfPass
from nsa_tune.reports.replay.tally import Tally
from nsa_tune.reports.replay.whole_prefills import (
    EAGER,
    ENGINE,
    PLUGIN,
    Basis,
    Took,
    WholePrefills,
    choice_of,
)
from nsa_tune.reports.replay.whole_result import whole_of, whole_tables
from tests.reports.replay.test_prices import pricer
from tests.reports.replay.test_tally import sums

KEY: dict[str, object] = {
    "gpu": "NVIDIA H200", "model": "deepseek-v3.2", "heads": 16, "kv_dtype": "fp8", "layers": 61,
    "sglang": "0.5.17", "draft_tokens": None, "prefill_sizes": [128, 1024, 4096],
    "decode_sizes": [32, 128], "dense_sizes": {"dense_graph": [128, 1024, 4096]},
}  # fmt: skip
SPARSE = "--dsa-prefill-backend flashmla_sparse"
REST = RestOfPass("", (), {"graph": {"q_tokens": 0.01}}, {}, 2048, {})


def made_up(**changes: object) -> PassTimes:
    """Times of an fp8 engine: every pass of up to 1024 tokens, those of 4096 if they are short."""
    found = []
    for size in (128, 1024, 4096):
        for context, selects in ((size // 2, False), (2048, False), (2100, True), (65536, True)):
            if selects and size > 1024:
                continue
            us = 100_000.0 + 50 * size
            found.append(PassTime(PassMode.ENGINE, size, context, us, selects))
            found.append(PassTime(PassMode.TABLE_KERNEL, size, context, 0.8 * us, selects))
        found.append(PassTime(PassMode.DENSE_GRAPH, size, size // 2, 20_000.0 + 20 * size))
    found.append(PassTime(PassMode.EAGER, 4096, 2048, 170_000.0))
    for rows in (32, 128):
        found += [PassTime(PassMode.DECODE_GRAPH, rows, keys, 30_000.0) for keys in (64, 65536)]
    return PassTimes({**KEY, **changes}, found)


def took(batch: Batch, rest: RestOfPass | None = None, **changes: Any) -> dict[str, Took]:
    price = pricer().price(batch, graph=batch.q_tokens <= 8192)
    return WholePrefills(made_up(**changes), pricer(), rest).took(batch, price, graph=True)


def told(one: Took) -> tuple[object, ...]:
    return tuple(one)


def test_each_setup_takes_what_was_measured() -> None:
    prompt, turn = took(Batch.extend([0], [1000])), took(Batch.extend([8192], [100]))

    assert told(prompt[ENGINE]) == ("engine", pytest.approx(151_200), Basis.MEASURED)
    assert told(prompt[PLUGIN]) == ("dense_graph", pytest.approx(40_480), Basis.MEASURED)
    assert told(prompt[SPARSE]) == ("flashmla_sparse", pytest.approx(0.8 * 151_200), Basis.MEASURED)
    assert told(turn[PLUGIN]) == ("decode_graph", pytest.approx(30_000), Basis.MEASURED)
    assert told(turn[EAGER]) == ("eager", 170_000.0, Basis.LAUNCHES)


def test_what_was_not_measured_has_no_price_or_one_by_the_rest() -> None:
    long = Batch.extend([30720], [4096])
    price = pricer().price(long, graph=True)

    assert {one.basis for one in took(long).values()} == {Basis.NONE}
    rested = took(long, REST)

    engine_us = pytest.approx(price.total_us(Way.ENGINE) + 40_960)
    assert told(rested[ENGINE]) == ("engine", engine_us, Basis.REST)
    assert rested[PLUGIN].us == pytest.approx(price.total_us(Way.PLUGIN) + 40_960)
    assert rested[PLUGIN].us < rested[ENGINE].us
    assert rested[PLUGIN].way == "table_kernel"


def test_a_pass_by_the_rest_takes_what_its_whole_graph_takes() -> None:
    """3000 new tokens run in the graph of 4096; attention is for the new ones, as is all of an
    eager pass."""
    batch = Batch.extend([30720], [3000])
    attention_us = pricer().price(batch, graph=True).total_us(Way.ENGINE)

    found = took(batch, REST)

    assert found[ENGINE].us == pytest.approx(attention_us + 40_960)
    assert found[EAGER].us == pytest.approx(max(attention_us + 30_000, 170_000))


def test_an_eager_pass_that_selects_launches_more() -> None:
    times = [
        PassTime(PassMode.ENGINE, 1024, 512, 60_000.0),
        PassTime(PassMode.ENGINE, 1024, 9000, 100_000.0, selects=True),
        PassTime(PassMode.EAGER, 4096, 2048, 170_000.0),
    ]
    batch = Batch.extend([8000], [1000])
    price = pricer().price(batch, graph=True)

    found = WholePrefills(PassTimes(KEY, times), pricer()).took(batch, price, graph=True)

    assert told(found[EAGER]) == ("eager", pytest.approx(210_000), Basis.LAUNCHES)


def test_another_kernel_that_was_not_measured_is_told_by_the_table() -> None:
    batch = Batch.extend([8192], [1000])
    price = pricer().price(batch, graph=True)
    only = [one for one in made_up().times if one.mode is PassMode.ENGINE]

    found = WholePrefills(PassTimes(KEY, only), pricer()).took(batch, price, graph=True)

    saved = price.total_us(Way.ENGINE) - price.total_us(Way.PLUGIN)
    assert found[PLUGIN].basis is Basis.TABLE
    assert found[PLUGIN].us == pytest.approx(found[ENGINE].us - saved)
    assert found[EAGER].basis is Basis.NONE  # no eager pass tells what launches take


@settings(deadline=None, max_examples=40)
@given(
    lens=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 600)), min_size=1, max_size=6),
)
def test_the_plug_in_never_takes_longer_than_the_engine_where_all_is_measured(
    lens: list[tuple[int, int]],
) -> None:
    found = took(Batch.extend([prefix for prefix, _ in lens], [new for _, new in lens]))

    if found[PLUGIN].basis is Basis.MEASURED:
        assert found[PLUGIN].us <= found[ENGINE].us


def test_drafts_give_a_request_several_rows() -> None:
    """Two sequences of 33 new tokens take 36 rows each in requests of 4, which is within 128."""
    batch = Batch.extend([4000, 4000], [33, 33])
    whole = WholePrefills(made_up(draft_tokens=4), pricer())

    assert whole._rows(batch) == 72
    assert whole._rows(batch.sums) is None


def test_graphs_end_where_the_engine_is_told_so() -> None:
    choice = choice_of(made_up(), 2048, 1024)

    assert choice.sizes == (128, 1024)
    assert not choice.dense[PassMode.DENSE_GRAPH].fits(4096, 1)
    for key in ({}, {**made_up().key, "prefill_sizes": [float("inf")]}):
        with pytest.raises(UsageError, match="which graphs the engine had"):
            choice_of(PassTimes(key, []), 2048)


def test_a_tally_adds_up_whole_prefills_by_setup_and_way() -> None:
    batches = [Batch.extend([0], [1000]), Batch.extend([8192], [100]), Batch.extend([9000], [4000])]
    tally = Tally(pricer(), 8192, whole=WholePrefills(made_up(), pricer(), source="a file"))
    for batch in batches:
        tally.add(True, sums(batch), lambda: batch, 3)  # noqa: B023
    tally.done()

    found = whole_of(tally)

    assert found is not None
    engine, plugin, *flags = found.setups
    assert (engine.passes, engine.bases[Basis.NONE]) == (6, 3)
    assert engine.seconds == engine.engine_seconds == pytest.approx(3 * (0.1512 + 0.1064))
    assert plugin.seconds == pytest.approx(3 * (0.04048 + 0.03))
    assert set(plugin.ways) == {"dense_graph", "decode_graph"}
    assert [one.name for one in flags] == [SPARSE, EAGER]  # the engine's own kernel is no change
    assert found.static is flags[0]
    setups, ways = whole_tables(found, {ENGINE: {"mean": 1.0, "p50": 0.5, "p90": 2.0}})
    assert setups.rows[2][0] == f"{SPARSE} (best flag)"
    assert len(ways.rows) == 3


def test_whole_prefills_take_the_place_of_the_rest_where_they_were_measured() -> None:
    short, long = Batch.extend([0], [1000]), Batch.extend([9000], [4000])

    def tallied(*batches: Batch, graph_tokens: int = 8192) -> Tally:
        whole = WholePrefills(made_up(), pricer(), REST)
        tally = Tally(pricer(), graph_tokens, REST, whole=whole)
        for batch in batches:
            tally.add(True, sums(batch), lambda: batch)  # noqa: B023
        tally.done()
        return tally

    assert tallied(short).kinds[True].whole_ms[Way.PLUGIN] == pytest.approx(40.48)
    flags, _ = tallied(short).static(True) or (None, 0.0)
    assert flags is not None
    assert flags.kernel == "flashmla_sparse"
    price = pricer().price(long, graph=True).total_us(Way.PLUGIN) / 1e3
    assert tallied(long).kinds[True].whole_ms[Way.PLUGIN] == pytest.approx(price + 40.96)
    eager = tallied(short, graph_tokens=0).kinds[True].whole_ms
    assert eager[Way.ENGINE] == eager[Way.PLUGIN] == pytest.approx(170)
    assert min(tallied(short, graph_tokens=0).kinds[True].static_ms) == pytest.approx(170)
