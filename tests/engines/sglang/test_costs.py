"""What SGLang pays beside the measured kernels, once a pass and in a layer."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.engines.sglang.costs import (
    PASS_US,
    SEQUENCE_US,
    cost_us,
    longer_us,
    mha_projection_us,
    padding_us,
    read_back_us,
    with_pass_overhead,
    without_unsupported,
)

KV, SPARSE = "mla/flashmla_kv", "mla/flashmla_sparse"
FP8, BF16 = KVLayout.FP8_PACKED, KVLayout.BF16


@pytest.fixture(scope="module")
def plain() -> Dispatcher:
    """The package's own table."""
    return Dispatcher.open(
        gpu="NVIDIA H100 80GB HBM3", model="deepseek-v3.2", heads=128, kv_dtype="fp8"
    )


def test_without_a_prefix_only_the_wait_counts() -> None:
    assert cost_us(Batch.extend([0] * 8, [64] * 8)) == PASS_US
    assert cost_us(Batch.extend([0, 9], [64, 64])) == PASS_US + 2 * SEQUENCE_US


@pytest.mark.parametrize("layers", [1, 4, 16, 61])
def test_the_kernel_is_taken_where_all_layers_gain_more_than_that(
    plain: Dispatcher, layers: int
) -> None:
    dear = with_pass_overhead(plain, layers)
    taken = given_up = 0
    for batch in plain.policies["prefill"].measured:
        times = plain.policies["prefill"].survey(batch).latencies
        kv, sparse = times.get(KV), times.get(SPARSE)
        if kv is None or sparse is None:
            continue
        before, after = plain.plan(batch).sparse_prefill, dear.plan(batch).sparse_prefill
        gain = layers * (kv - sparse) / cost_us(batch)
        # Near the break-even the surfaces' errors decide.
        if gain > 1.5 and kv > 1.1 * sparse:
            assert after == "flashmla_sparse"
            taken += 1
        elif gain < 0.5:
            assert after == "flashmla_kv"
            given_up += before == "flashmla_sparse"
    assert taken > 10
    assert given_up > 0


def test_a_slower_read_back_costs_each_layer_more_with_each_token(plain: Dispatcher) -> None:
    own, slower = (with_pass_overhead(plain, 61, swapped_read_back=own) for own in (True, False))
    behind, alone = Batch.extend([60000], [300]), Batch.extend([0], [4000])

    def sparse_us(dispatcher: Dispatcher, batch: Batch) -> float:
        found = dispatcher.policies["prefill"].survey(batch).latencies[SPARSE]
        assert found is not None
        return found

    more_us = sparse_us(slower, behind) - sparse_us(own, behind)
    assert more_us == pytest.approx(read_back_us(behind, FP8), rel=0.2)
    assert sparse_us(slower, alone) == pytest.approx(sparse_us(own, alone), rel=0.02)
    assert slower.plan(behind).sparse_prefill == "flashmla_kv"
    assert own.plan(behind).sparse_prefill == "flashmla_sparse"


def test_other_answers_stay(plain: Dispatcher) -> None:
    dear = with_pass_overhead(plain, 61)
    random = Random(1)
    for _ in range(50):
        batch = Batch.decode([random.randrange(1, 9000)])
        assert dear.plan(batch).indexer_layout == plain.plan(batch).indexer_layout
    assert dear.source == plain.source


def test_a_forced_arm_stays_forced(monkeypatch: pytest.MonkeyPatch, plain: Dispatcher) -> None:
    monkeypatch.setenv("NSA_TUNE_FORCE", "prefill=mla/flashmla_kv")
    forced = Dispatcher.open(
        gpu="NVIDIA H100 80GB HBM3", model="deepseek-v3.2", heads=128, kv_dtype="fp8"
    )
    batch = Batch.extend([9000], [4096]).sums

    assert with_pass_overhead(plain, 61).chooser("sparse_prefill")(batch) == "flashmla_sparse"
    assert with_pass_overhead(forced, 61).chooser("sparse_prefill")(batch) == "flashmla_kv"


def with_ideal(plain: Dispatcher, arm: str, like: str) -> Dispatcher:
    """`plain` with an arm that takes 1 us wherever `like` was measured."""
    table = plain.table
    assert table is not None
    point = plain.policies["prefill"].point
    ideal = [
        replace(row, arm=arm, latency_us=1.0, low_us=1.0, high_us=1.0)
        for row in table.measurements
        if row.arm == like and row.latency_us is not None
        and point.arm(arm).allowed(Batch.parse(row.batch), plain.setting) is None
    ]  # fmt: skip
    rows = (*table.measurements, *ideal)
    policies = {**plain.policies, "prefill": Policy.fit(point, plain.setting, rows)}
    return Dispatcher(
        plain.setting, policies.values(), source="with more",
        table=replace(table, measurements=rows),
    )  # fmt: skip


def test_an_arm_that_sglang_has_no_call_for_is_not_compared(plain: Dispatcher) -> None:
    """Were it the fastest everywhere, the plug-in would have nothing to switch to."""
    told = with_ideal(plain, "mla/flashmla_kv_mixed", KV)

    batch = Batch.extend([8192], [64])
    assert told.plan(batch).sparse_prefill == "flashmla_kv_mixed"
    dear, other = with_pass_overhead(told, 61), with_pass_overhead(plain, 61)
    assert dear.plan(batch).sparse_prefill == other.plan(batch).sparse_prefill


def test_two_calls_and_a_merge_are_not_sglangs(plain: Dispatcher) -> None:
    told = with_ideal(plain, "mha/fa3_merged", "mha/fa3")
    batch = Batch.extend([1024], [64])

    assert (plain.plan(batch).prefill_path, told.plan(batch).prefill_path) == ("mla", "mha")
    for own in (without_unsupported(told), with_pass_overhead(told, 61)):
        assert own.plan(batch).prefill_path == "mla"


def test_a_table_of_sglangs_arms_alone_is_taken_as_it_is(plain: Dispatcher) -> None:
    assert without_unsupported(plain) is plain


def test_sglangs_copies_take_longer_where_there_are_any() -> None:
    alone, behind = Batch.extend([0], [1000]), Batch.extend([9000], [1000])

    assert longer_us(alone, BF16, 64) == longer_us(behind, BF16, 128) == 0
    assert longer_us(alone, BF16, 16) == longer_us(alone, FP8, 16) > 20
    assert longer_us(behind, FP8, 128) == pytest.approx(25)
    assert padding_us(alone, 32) > padding_us(alone, 16)


def test_projecting_grows_with_the_keys_that_are_projected() -> None:
    few, many = (mha_projection_us(Batch.extend([0], [new]), FP8) for new in (100, 2000))

    assert 4 < few < many < 6


def test_a_prefix_is_copied_once_more_over_an_fp8_pool() -> None:
    batch, alone = Batch.extend([1024], [976]), Batch.extend([0], [2000])

    assert mha_projection_us(batch, FP8) > mha_projection_us(alone, FP8) + 2
    assert mha_projection_us(batch, BF16) == mha_projection_us(alone, BF16)
