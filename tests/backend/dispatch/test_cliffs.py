"""A cliff is a cost: plans go past it where that is still the fastest, and never past death."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from nsa_tune import Batch, Dispatcher
from nsa_tune.backend.costmodel.policy import Policy
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import profile_of
from nsa_tune.backend.types.records import Measurement, Status

PREFILL = POINTS["prefill"]
SETTING = Setting(
    profile_of("deepseek-v3.2"), 128, KVLayout.FP8_PACKED, KNOWN["NVIDIA H100 80GB HBM3"],
    {"sgl-flash-mla": "1.0.0"}, layers=1,
)  # fmt: skip
US_PER_ROW = {"mla/flashmla_sparse": 2.0, "mla/flashmla_kv": 1.8}


def rows(*counts: int, extra_us: float = 0.0) -> list[Measurement]:
    """Both kernels on one sequence of `counts` new tokens behind a prefix."""
    made = []
    for count in counts:
        for arm, per_row in US_PER_ROW.items():
            us = per_row * count + (extra_us if arm.endswith("kv") else 0.0)
            word = str(Batch.extend([8192], [count]))
            made.append(Measurement("prefill", word, arm, Status.OK, us, us * 0.999, us * 1.001))
    return made


def dispatcher(
    limits: Mapping[str, int] | None = None,
    more: list[Measurement] | None = None,
    layers: int = 1,
) -> Dispatcher:
    setting = replace(SETTING, limits=limits or {}, layers=layers)
    table = rows(*(2**k for k in range(6, 15))) + (more or [])
    return Dispatcher(setting, [Policy.fit(PREFILL, setting, table)], source="made up")


def chosen(by: Dispatcher, count: int) -> str | None:
    return by.plan(Batch.extend([8192], [count])).sparse_prefill


def test_behind_the_cliff_the_slow_schedule_is_reckoned_with() -> None:
    by = dispatcher()

    assert chosen(by, 19370) == "flashmla_kv"
    assert chosen(by, 19371) == "flashmla_sparse"
    reason = by.plan(Batch.extend([8192], [19371])).reasons["sparse_prefill"]
    # 318 ns more for each row.
    assert reason.estimates_us["flashmla_kv"] == pytest.approx((1.8 + 0.318) * 19371, rel=0.02)
    assert not reason.guards.get("flashmla_kv")


def test_layers_of_a_pass_share_the_slow_schedule() -> None:
    by = dispatcher(layers=61)
    batch = Batch.extend([8192], [19371])

    # 5 ns more for each row, where 200 are to be had.
    assert chosen(by, 19371) == "flashmla_kv"
    reason = by.plan(batch).reasons["sparse_prefill"]
    assert reason.estimates_us["flashmla_kv"] == pytest.approx((1.8 + 0.318 / 61) * 19371, rel=0.01)
    # Two layers save too little to pay for it, three do.
    dear = {"flashmla_schedule_ns_per_row": 500}
    assert chosen(dispatcher(dear, layers=2), 19371) == "flashmla_sparse"
    assert chosen(dispatcher(dear, layers=3), 19371) == "flashmla_kv"
    # Without a number of its own it is the model's.
    assert chosen(dispatcher(dear, layers=0), 19371) == "flashmla_kv"


def test_a_probed_price_decides_whether_to_go_past() -> None:
    assert chosen(dispatcher({"flashmla_schedule_ns_per_row": 20}), 25000) == "flashmla_kv"
    assert chosen(dispatcher({"flashmla_schedule_ns_per_row": 900}), 25000) == "flashmla_sparse"


def test_a_probed_cliff_that_comes_earlier_counts() -> None:
    by = dispatcher({"flashmla_schedule_rows": 9000})

    assert chosen(by, 9000) == "flashmla_kv"
    assert chosen(by, 9001) == "flashmla_sparse"


def test_where_the_kernel_dies_no_price_is_good_enough() -> None:
    by = dispatcher({"flashmla_decode_rows": 20000, "flashmla_schedule_ns_per_row": 0})

    assert chosen(by, 20000) == "flashmla_kv"
    assert chosen(by, 20001) == "flashmla_sparse"
    reason = by.plan(Batch.extend([8192], [20001])).reasons["sparse_prefill"]
    assert "pass 20000" in reason.guards["flashmla_kv"]


def test_what_was_measured_behind_the_cliff_does_not_bend_the_surface_before_it() -> None:
    beyond = rows(20480, 24576, extra_us=9000.0)
    plain, bent = dispatcher(), dispatcher(more=beyond)
    batch = Batch.extend([8192], [12000])

    for by in (plain, bent):
        estimate = by.policies["prefill"].estimates(batch)["mla/flashmla_kv"]
        assert estimate.latency_us == pytest.approx(1.8 * 12000, rel=0.01)
