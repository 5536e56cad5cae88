"""Prices: each is the estimate of the arm that a way to choose takes, for all layers."""

from __future__ import annotations

import math
from functools import cache

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.db.reader import shipped
from nsa_tune.db.text_table import read_text
from nsa_tune.engines.sglang.costs.around_mha import around_mha_us
from nsa_tune.engines.sglang.costs.own_copies import longer_us
from nsa_tune.engines.sglang.releases import RELEASES, Release
from nsa_tune.reports.replay import prices as module
from nsa_tune.reports.replay.flags import Flags
from nsa_tune.reports.replay.prices import Price, Pricer, StepPrice, Way, borrowed


@cache
def opened(heads: int = 16, kv_dtype: str = "fp8") -> Dispatcher:
    return Dispatcher.open(gpu="NVIDIA H200", model="deepseek-v3.2", heads=heads, kv_dtype=kv_dtype)


@cache
def pricer(heads: int = 16, kv_dtype: str = "fp8") -> Pricer:
    return Pricer(opened(heads, kv_dtype), RELEASES[-1])


def step(price: Price, point: str) -> StepPrice:
    return next(one for one in price.steps if one.point == point)


def test_a_step_takes_what_its_arm_is_estimated_to_take_in_all_layers() -> None:
    batch = Batch.extend([8192], [2048])
    estimates = opened().policies["prefill"].estimates(batch)

    found = step(pricer().price(batch, graph=True), "prefill")

    assert dict(zip(Way, found.arms, strict=True)) == {
        Way.ENGINE: "mla/flashmla_kv", Way.PLUGIN: "mla/flashmla_sparse",
        Way.TABLE: "mla/flashmla_sparse", Way.BEST: "mla/flashmla_sparse",
    }  # fmt: skip
    for arm, time in zip(found.arms, found.times, strict=True):
        assert time.latency_us == pytest.approx(61 * estimates[arm].latency_us)
    saved = found.times[0].latency_us - found.times[2].latency_us
    assert found.gains_us == {"sparse_prefill": pytest.approx(saved)}


def test_mha_runs_only_outside_of_a_graph() -> None:
    batch = Batch.extend([0] * 4, [2048] * 4)

    graph, eager = (pricer(16, "bf16").price(batch, graph=one) for one in (True, False))

    assert step(graph, "prefill").arms[0] == "mla/flashmla_sparse"
    assert step(eager, "prefill").arms[0] == "mha/fa3"
    assert eager.total_us(Way.ENGINE) < graph.total_us(Way.ENGINE)


def test_mha_costs_what_sglang_runs_around_it() -> None:
    batch = Batch.extend([640], [250])
    estimate = opened().policies["prefill"].estimates(batch)["mha/fa3"]

    found = step(pricer().price(batch, graph=False), "prefill")

    around_us = found.times[0].latency_us / 61 - estimate.latency_us
    assert found.arms[0] == "mha/fa3"
    assert around_us == pytest.approx(around_mha_us(batch, KVLayout.FP8_PACKED))


def test_the_plug_in_turns_mha_off_and_never_on() -> None:
    batch = Batch.extend([1920] * 16, [8] * 16)

    found = step(pricer().price(batch, graph=False), "prefill")

    assert found.arms[0].startswith("mha/")
    assert found.arms[1].startswith("mla/")


def test_the_plug_in_takes_the_kernels_that_it_can_switch_to() -> None:
    found = step(pricer(16, "bf16").price(Batch.extend([8192], [2048]), graph=True), "prefill")

    assert found.arms[0] == "mla/flashmla_sparse"
    assert found.arms[1] == found.arms[2] == "mla/fa3"


@pytest.mark.parametrize(("heads", "kv_dtype"), [(16, "bf16"), (64, "bf16"), (128, "fp8")])
@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
def test_sglang_alone_copies_for_longer(release: Release, heads: int, kv_dtype: str) -> None:
    batch, dispatcher = Batch.extend([8192], [2048]), opened(heads, kv_dtype)
    made = Pricer(dispatcher, release)
    flag = made.flags[True].index(Flags("flashmla_sparse", None))
    price = made.price(batch, graph=True)
    estimate = dispatcher.policies["prefill"].estimates(batch)["mla/flashmla_sparse"]

    others_us = price.total_us(Way.ENGINE) - step(price, "prefill").times[0].latency_us
    alone_us = price.static[flag] - others_us

    longer_by_us = longer_us(batch, dispatcher.setting.layout, heads)
    assert alone_us == pytest.approx(61 * (estimate.latency_us + longer_by_us))
    assert (longer_by_us > 0) == (heads < 64 or kv_dtype == "fp8")


@pytest.mark.parametrize(("release", "longer"), [(RELEASES[0], True), (RELEASES[-1], False)])
def test_only_releases_with_hooks_for_it_copy_faster_with_the_plug_in(
    release: Release, longer: bool
) -> None:
    batch, dispatcher = Batch.extend([30720], [8192]), opened(16, "fp8")
    estimate = dispatcher.policies["prefill"].estimates(batch)["mla/flashmla_sparse"]

    found = step(Pricer(dispatcher, release).price(batch, graph=True), "prefill")

    more_us = longer_us(batch, KVLayout.FP8_PACKED, 16) if longer else 0.0
    assert found.arms[1] == "mla/flashmla_sparse"
    assert found.times[1].latency_us == pytest.approx(61 * (estimate.latency_us + more_us))


def test_an_answer_alone_gains_what_a_flag_gains() -> None:
    batch, made = Batch.extend([8192], [2048]), pricer(16, "bf16")
    price = made.price(batch, graph=True)

    gain_us = step(price, "prefill").gains_us["sparse_prefill"]

    flag = made.flags[True].index(Flags("fa3", None))
    assert gain_us == pytest.approx(price.static[0] - price.static[flag])


def test_no_way_beats_the_best_arm() -> None:
    batches = [Batch.extend([0], [n]) for n in (1, 100, 3000)] + [Batch.decode([5000] * 8)]
    for batch in batches:
        price = pricer().price(batch, graph=True)
        best = price.total_us(Way.BEST)
        assert all(price.total_us(way) >= best for way in Way)
        assert min(price.static) >= best - 1e-6


def test_the_first_flags_are_the_engines_own() -> None:
    for batch in (Batch.extend([0], [3000]), Batch.decode([5000] * 8)):
        price = pricer().price(batch, graph=False)
        assert price.static[0] == pytest.approx(price.total_us(Way.ENGINE))


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("most", [1, 256, 257, 2048, 9000])
def test_flags_that_come_to_the_same_share_a_time(kv_dtype: str, most: int) -> None:
    """Each by itself: the time of the arms that remain under it."""
    batch, made = Batch.extend([0, 0], [most, 1]), pricer(16, kv_dtype)
    point = opened(16, kv_dtype).policies["prefill"].point
    price = made.price(batch, graph=False)
    engine = made._engine(point, batch)
    times_with = made._timed(opened(16, kv_dtype).policies["prefill"], batch)
    assert times_with is not None
    timed = made._alone(times_with, batch)

    static = made._static(point, engine, batch, timed)

    for flags, found in zip(made.flags[True], static, strict=True):
        chosen = flags.applied(engine, batch)
        times = [
            one.latency_us for arm, one in timed.items() if module._remains(point, chosen, arm)
        ]
        assert found == min(times, default=math.inf)
    others = price.static[0] - static[0]
    assert price.static == pytest.approx([one + others for one in static])


def test_flags_change_what_they_name() -> None:
    batch = Batch.extend([1000], [500])
    flags = pricer().flags[True]
    price = pricer().price(batch, graph=False)
    estimates = opened().policies["prefill"].estimates(batch)

    mla = price.static[flags.index(Flags("flashmla_sparse", 0))]

    alone_us = longer_us(batch, KVLayout.FP8_PACKED, 16)
    assert mla == pytest.approx(61 * (estimates["mla/flashmla_sparse"].latency_us + alone_us))
    assert price.static[flags.index(Flags("flashmla_sparse", None))] == pytest.approx(
        price.total_us(Way.ENGINE)  # it takes MHA
    )


def test_a_step_without_times_is_named() -> None:
    price = pricer().price(Batch.extend([8192], [2048]), graph=True)

    assert "indexer_topk" in price.unpriced
    assert "indexer_metadata" not in {one.point for one in price.steps}


def test_nothing_is_selected_in_short_prefills_even_in_a_graph() -> None:
    price = pricer().price(Batch.extend([0], [512]), graph=True)

    assert [one.point for one in price.steps] == ["prefill"]
    assert price.unpriced == ()


def test_metadata_is_computed_once_a_pass() -> None:
    batch = Batch.decode([5000] * 8)
    estimates = opened().policies["indexer_metadata"].estimates(batch)

    found = step(pricer().price(batch, graph=False), "indexer_metadata")

    assert found.times[0].latency_us == pytest.approx(estimates["deep_gemm"].latency_us)


def test_of_tables_with_equally_many_times_that_of_most_heads_lends() -> None:
    stems = [f"h200_deepseek-v3.2_h{heads}_fp8" for heads in (8, 128, 32)]
    tables = [read_text(path) for stem in stems for path in shipped() if path.stem == stem]
    lent = borrowed(opened(), tables)

    # The selection's times are in two of them, and are lent by none.
    assert {name: table.key.heads for name, (_, table) in lent.items()} == {"indexer_prefill": 128}


def test_the_indexers_times_come_from_another_table_of_the_gpu() -> None:
    name = "h200_deepseek-v3.2_h128_fp8"
    table = read_text(next(path for path in shipped() if path.stem == name))
    lent = borrowed(opened(), [table])
    assert set(lent) == {"indexer_prefill"}
    batch = Batch.extend([8192], [2048])

    policies = {point: policy for point, (policy, _) in lent.items()}
    price = Pricer(opened(), RELEASES[-1], policies).price(batch, graph=True)

    found = step(price, "indexer_prefill")
    own = policies["indexer_prefill"].estimates(batch)["ragged"].latency_us
    assert found.times[0].latency_us == pytest.approx(61 * own)
    # The dispatcher has no times for it, and goes on as the engine does.
    assert found.arms[2] == found.arms[0] == "ragged"
