"""What vLLM pays for MHA over a prefix: as measured, or else by assumption."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.types.records import Measurement, Status
from nsa_tune.engines.vllm.priced import merge_us, priced

MERGED = "mha/fa3_merged"
WARM, COLD = Batch.extend([512], [64]), Batch.extend([0], [64])


@pytest.fixture(scope="module")
def plain() -> Dispatcher:
    """A shipped table without times of `mha/fa3_merged`, which is MHA in two calls."""
    return Dispatcher.open(
        gpu="NVIDIA H200", model="deepseek-v3.2", heads=8, kv_dtype="fp8", layers=61
    )


def _with(plain: Dispatcher, *rows: Measurement) -> Dispatcher:
    assert plain.table is not None
    table = replace(plain.table, measurements=(*plain.table.measurements, *rows))
    return Dispatcher(plain.setting, plain.policies.values(), source="with more", table=table)


def _us(dispatcher: Dispatcher, batch: Batch, arm: str = "mha/fa3") -> float:
    (row,) = (
        row
        for row in dispatcher.policies["prefill"].rows
        if (row.batch, row.arm) == (str(batch), arm)
    )
    assert row.latency_us is not None
    return row.latency_us


def test_two_calls_cost_more_by_assumption_where_they_were_not_measured(plain: Dispatcher) -> None:
    paid = priced(plain, 61, 2**17)

    assert _us(paid, WARM) == _us(plain, WARM) + merge_us(WARM, paid.setting)
    assert merge_us(COLD, paid.setting) == 0
    assert _us(paid, COLD) == _us(plain, COLD)


def test_two_calls_that_failed_say_nothing(plain: Dispatcher) -> None:
    failed = Measurement("prefill", str(WARM), MERGED, Status.FAILED, reason="no such kernel")
    paid = priced(_with(plain, failed), 61, 2**17)

    assert _us(paid, WARM) == _us(plain, WARM) + merge_us(WARM, paid.setting)


def test_where_two_calls_were_measured_mha_costs_that(plain: Dispatcher) -> None:
    assert plain.table is not None
    merged = [
        replace(row, arm=MERGED, latency_us=1.3 * row.latency_us, low_us=None, high_us=None)
        for row in plain.table.measurements
        if row.arm == "mha/fa3" and row.latency_us and Batch.parse(row.batch).prefix_tokens
    ]
    paid = priced(_with(plain, *merged), 61, 2**17)

    assert _us(paid, WARM, MERGED) == 1.3 * _us(plain, WARM)
    assert _us(paid, COLD) == _us(plain, COLD)
    warm = {row.arm for row in paid.policies["prefill"].rows if row.batch == str(WARM)}
    assert {arm for arm in warm if arm.startswith("mha/")} == {MERGED}
    dense = {a: us for a, us in paid.policies["prefill"].survey(WARM).latencies.items() if us}
    assert {arm for arm in dense if arm.startswith("mha/")} == {MERGED}
    before = plain.policies["prefill"].survey(WARM).latencies["mha/fa3"]
    assert before is not None and dense[MERGED] == pytest.approx(1.3 * before, rel=0.05)


BY_DECODE_KERNEL = frozenset({"flashmla_kv", "flashmla_kv_mixed"})
RUN = [
    (128, "8192+2048", "sparse", "sparse"), (128, "30720+8192", "sparse", "sparse"),
    (128, "0+8192", "sparse", "sparse"), (128, "30720+512", "sparse", "sparse"),
    (128, "0+200x4", "decode", "mha"), (128, "1920+64x4", "decode", "decode"),
    (128, "8192+128", "decode", "decode"), (128, "30720+64", "decode", "decode"),
    (128, "0+1024x4", "mha", "mha"),
    (16, "8192+2048", "decode", "sparse"), (16, "30720+8192", "decode", "sparse"),
    (16, "0+8192", "decode", "sparse"), (16, "30720+512", "decode", "decode"),
    (16, "0+200x4", "mha", "mha"), (16, "1920+64x4", "decode", "mha"),
    (16, "8192+128", "decode", "decode"), (16, "30720+64", "decode", "decode"),
    (16, "0+1024x4", "mha", "mha"),
]  # fmt: skip
"""docs/vllm.md's runs: heads, lengths, vLLM's own way, and the way by the table of that day."""


@pytest.mark.parametrize(("heads", "lengths", "own", "way"), RUN)
def test_the_shipped_tables_take_the_ways_that_an_engine_was_measured_in(
    heads: int, lengths: str, own: str, way: str
) -> None:
    dispatcher = Dispatcher.open(
        gpu="NVIDIA H200", model="deepseek-v3.2", heads=heads, kv_dtype="fp8", layers=61
    )
    plan = priced(dispatcher, 61, 2**17, leaving=own == "decode").plan(
        Batch.parse(f"extend:{lengths}")
    )

    by_decode_kernel = plan.sparse_prefill in BY_DECODE_KERNEL
    assert way == ("mha" if plan.prefill_path == "mha" else
                   "decode" if by_decode_kernel else "sparse")  # fmt: skip
