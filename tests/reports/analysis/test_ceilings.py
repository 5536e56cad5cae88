"""The work of an arm, and the ceilings that were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import PROFILES
from nsa_tune.backend.types.records import Status
from nsa_tune.reports.analysis.ceilings import ceilings_of, share_text
from nsa_tune.reports.analysis.work import Work, work_of
from tests.reports.synthetic import CEILINGS, H100

SETTING = Setting(PROFILES["deepseek-v3.2"], 128, KVLayout.FP8_PACKED, H100)


def _work(arm: str, batch: Batch, setting: Setting = SETTING) -> Work:
    work = work_of("prefill", arm, batch, setting)
    assert work is not None
    return work


def test_dense_flops_are_those_of_the_projection_and_of_causal_attention() -> None:
    work = _work("mha/fa3", Batch.extend([0], [2]))

    # 2 tokens expanded to 128 heads of 256 values; 3 pairs of 192 + 128 products a head.
    assert work.flops == 2 * 2 * 512 * 128 * 256 + 2 * 3 * 128 * 320


def test_sparse_flops_stop_growing_at_topk() -> None:
    below, above, far = (_work("mla/any", Batch.extend([p], [1])) for p in (2046, 2047, 100_000))

    assert below.flops < above.flops == far.flops


def test_a_ragged_batch_attends_like_its_sequences_one_by_one() -> None:
    both = _work("mla/any", Batch.extend([0, 4000], [4096, 64]))
    apart = [_work("mla/any", Batch.extend([p], [n])) for p, n in ((0, 4096), (4000, 64))]

    assert both.flops == sum(one.flops for one in apart)


def test_without_a_prefix_the_pool_is_not_read() -> None:
    cold, warm = (_work("mha/fa3", Batch.extend([p], [64 - p])) for p in (0, 1))
    bf16 = replace(SETTING, layout=KVLayout.BF16)

    assert cold.moved == _work("mha/fa3", Batch.extend([0], [64]), bf16).moved
    assert warm.moved != _work("mha/fa3", Batch.extend([1], [63]), bf16).moved


@pytest.mark.parametrize(("ratio", "compressed"), [(4, 1024), (128, 64)])
def test_a_v4_query_attends_to_its_window_and_its_compressed_tokens(
    ratio: int, compressed: int
) -> None:
    setting = Setting(PROFILES["deepseek-v4"], 128, KVLayout.V4_PAGED, H100)
    point = f"v4_prefill_c{ratio}"
    work = work_of(point, "sparse_fwd", Batch.extend([8191], [1]), setting)

    assert work is not None
    # 128 heads, keys and values of 512.
    assert work.flops == 2 * (128 + compressed) * 128 * (512 + 512)
    heads, read = 128 * (512 + 512) * 2, (128 + compressed) * 584
    assert heads + read < work.moved <= heads + read + (128 + 1024) * 4


def test_a_share_that_rounds_to_nothing_is_said_to_be_little() -> None:
    assert [share_text(s) for s in (None, 0.0, 0.004, 0.01, 0.876)] == [
        "-", "under 1%", "under 1%", "1%", "88%",
    ]  # fmt: skip


def test_an_unknown_way_has_no_work() -> None:
    assert work_of("prefill", "sideways/any", Batch.extend([0], [2]), SETTING) is None
    assert work_of("elsewhere", "mha/fa3", Batch.extend([0], [2]), SETTING) is None


def test_the_best_measurement_of_each_kind_is_a_ceiling() -> None:
    ceilings = ceilings_of(CEILINGS)

    assert ceilings is not None
    assert ceilings.bytes_per_s == pytest.approx(3e12)
    assert ceilings.flops_per_s == pytest.approx({"bf16": 600e12, "fp8": 1200e12})


@pytest.mark.parametrize("left_out", ["copy", "matmul"])
def test_half_a_roof_is_none(left_out: str) -> None:
    rows = [row for row in CEILINGS if not row.arm.startswith(left_out)]

    assert ceilings_of(rows) is None


def test_rows_that_failed_or_say_nothing_are_no_ceiling() -> None:
    failed = [replace(row, status=Status.FAILED, latency_us=None) for row in CEILINGS]
    strange = [replace(row, batch="copy:many") for row in CEILINGS]

    assert ceilings_of(failed) is None
    assert ceilings_of(strange) is None
