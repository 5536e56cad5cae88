"""The V4 prefill points: arms agree with the reference, guards hold, and they stay with V4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import Batch, BatchError, UsageError
from nsa_tune.backend.hardware.detect import KNOWN
from nsa_tune.backend.points import POINTS, points_for
from nsa_tune.backend.points.v4_prefill.case import V4PrefillCase
from nsa_tune.backend.points.v4_prefill.features import (
    attended_pairs,
    gathered_tokens,
    most_gathered,
)
from nsa_tune.backend.types.layouts import KVLayout
from nsa_tune.backend.types.point import Setting
from nsa_tune.backend.types.profiles import PROFILES, profile_of
from nsa_tune.backend.types.records import Device

CPU = torch.device("cpu")
TINY = Setting(profile_of("tiny-v4"), 4, KVLayout.V4_PAGED, Device("CPU", "cpu"))
H100 = Setting(
    profile_of("deepseek-v4"), 128, KVLayout.V4_PAGED, KNOWN["NVIDIA H100 80GB HBM3"],
    {"sgl-flash-mla": "1.0.0"},
)  # fmt: skip
RATIOS = (4, 128)
BATCHES = [
    Batch.extend([0], [1]),
    Batch.extend([0], [130]),
    Batch.extend([700, 3, 0], [40, 9, 130]),
    Batch.extend([3000], [5]),
]


def runs() -> Iterator[tuple[int, Batch, str]]:
    for ratio in RATIOS:
        for batch in BATCHES:
            for name in ("torch_sparse", "torch_kv"):
                yield ratio, batch, name


def output(ratio: int, batch: Batch, name: str, case: V4PrefillCase) -> torch.Tensor:
    arm = POINTS[f"v4_prefill_c{ratio}"].arm(name)
    assert arm.allowed(batch, TINY) is None
    return arm.build(case)()


@pytest.mark.parametrize(("ratio", "batch", "name"), list(runs()), ids=str)
def test_every_torch_arm_computes_the_reference(ratio: int, batch: Batch, name: str) -> None:
    case = V4PrefillCase(ratio, batch, TINY, CPU)
    found = output(ratio, batch, name, case)

    assert found.shape == (batch.q_tokens, 4, 96)
    assert case.error_of(found) < case.tolerance


def test_a_query_sees_its_window_and_whole_groups_before_it() -> None:
    case = V4PrefillCase(128, Batch.extend([500], [2]), TINY, CPU)

    assert case.window_lengths.tolist() == [64, 64]
    assert case.extra_lengths.tolist() == [501 // 128, 502 // 128]
    # Window tokens begin 63 before the first query, so that each window is 64 in a row.
    assert case.window_indices[0].tolist() == list(range(64))
    assert case.window_indices[1].tolist() == list(range(1, 65))
    assert case.extra_indices[0, :4].tolist() == [0, 1, 2, -1]


def test_ratio_4_selects_index_topk_compressed_tokens_of_the_whole_context() -> None:
    case = V4PrefillCase(4, Batch.extend([4000], [1]), TINY, CPU)
    chosen = case.extra_indices[0]

    assert chosen.unique().numel() > 240
    assert chosen.min() < 50
    assert 950 < int(chosen.max()) < 1000


def test_compressed_tokens_of_other_sequences_are_never_selected() -> None:
    case = V4PrefillCase(4, Batch.extend([800, 40], [8, 8]), TINY, CPU)
    first, second = case.extra_indices[:8], case.extra_indices[8:]

    assert first.max() < 808 // 4
    assert second[second >= 0].min() >= 808 // 4


def test_the_sink_and_the_compressed_tokens_count() -> None:
    case = V4PrefillCase(4, BATCHES[2], TINY, CPU)
    assert case.error_of(output(4, BATCHES[2], "torch_kv", case)) < case.tolerance
    sink, case.sink = case.sink, case.sink + 3
    assert case.error_of(output(4, BATCHES[2], "torch_kv", case)) > case.tolerance
    case.sink, case.extra_indices = sink, torch.full_like(case.extra_indices, -1)
    assert case.error_of(output(4, BATCHES[2], "torch_kv", case)) > case.tolerance


@pytest.mark.parametrize("row", [0, 39, 40, 48, 178])
def test_a_wrong_row_at_the_edge_of_a_sequence_is_noticed(row: int) -> None:
    case = V4PrefillCase(4, BATCHES[2], TINY, CPU)
    found = output(4, BATCHES[2], "torch_sparse", case)
    found[row] *= 1.05

    assert case.error_of(found) > case.tolerance
    found[row] = torch.nan
    assert case.error_of(found) == inf


def test_a_batch_of_sums_only_cannot_be_measured() -> None:
    sums = Batch.from_totals(mode="extend", q_tokens=4, kv_tokens=8, max_kv=8)
    with pytest.raises(BatchError, match="cannot be measured"):
        V4PrefillCase(4, sums, TINY, CPU)


# --- which models, arms and batches


def names_for(model: str) -> list[str]:
    return [point.name for point in points_for(profile_of(model))]


def test_v4_has_its_own_points_and_v32_none_of_them() -> None:
    assert names_for("deepseek-v4") == ["v4_prefill_c4", "v4_prefill_c128"]
    assert not [name for name in names_for("deepseek-v3.2") if name.startswith("v4")]


def test_the_name_of_the_file_stands_for_both_ratios() -> None:
    found = points_for(profile_of("deepseek-v4"), ["v4_prefill"])
    assert [point.name for point in found] == ["v4_prefill_c4", "v4_prefill_c128"]

    (one,) = points_for(profile_of("deepseek-v4"), ["v4_prefill_c128"])
    assert one.name == "v4_prefill_c128"


def test_a_point_that_does_not_arise_in_the_model_is_refused_with_those_that_do() -> None:
    with pytest.raises(UsageError, match=r"prefill does not arise in deepseek-v4, which has: v4"):
        points_for(profile_of("deepseek-v4"), ["prefill"])
    with pytest.raises(UsageError, match=r"v4_prefill_c4 does not arise in deepseek-v3\.2"):
        points_for(profile_of("deepseek-v3.2"), ["v4_prefill"])


@pytest.mark.parametrize("ratio", RATIOS)
def test_hopper_times_its_kernels_and_a_cpu_times_torch(ratio: int) -> None:
    point = POINTS[f"v4_prefill_c{ratio}"]

    assert [arm.name for arm in point.candidates(H100)] == ["sparse_fwd", "with_kvcache"]
    assert [arm.name for arm in point.candidates(TINY)] == ["torch_sparse", "torch_kv"]
    assert not list(point.candidates(replace(H100, layout=KVLayout.FP8_PACKED)))


def refusal(ratio: int, arm: str, batch: Batch, setting: Setting) -> str | None:
    return POINTS[f"v4_prefill_c{ratio}"].arm(arm).allowed(batch, setting)


SMALL = Batch.extend([1000], [10])


def test_a_model_without_layers_of_the_ratio_is_refused() -> None:
    only = replace(H100, profile=replace(H100.profile, ratios=(4,)))

    assert refusal(4, "sparse_fwd", SMALL, only) is None
    assert refusal(128, "sparse_fwd", SMALL, only) == (
        "deepseek-v4 has no layers of compression ratio 128"
    )
    small_pages = replace(H100, profile=replace(H100.profile, page_size=64))
    assert refusal(128, "with_kvcache", SMALL, small_pages) == (
        "pages of 64 tokens do not hold whole groups of 128"
    )


def test_the_decode_kernel_needs_whole_columns_and_the_prefill_kernel_pads_its_own() -> None:
    odd = replace(H100, profile=replace(H100.profile, window=100))

    assert "topk % 64 == 0, got 100 and 1024" in (refusal(4, "with_kvcache", SMALL, odd) or "")
    assert refusal(4, "sparse_fwd", SMALL, odd) is None


def test_more_than_128_heads_are_refused() -> None:
    for arm in ("sparse_fwd", "with_kvcache"):
        assert "at most 128 heads" in (refusal(4, arm, SMALL, replace(H100, heads=256)) or "")


def test_a_workspace_that_fills_the_device_is_refused_to_the_arm_that_needs_it() -> None:
    long = Batch.extend([2**20 - 10] * 128, [10] * 128)

    assert "workspace" in (refusal(4, "sparse_fwd", long, H100) or "")
    assert refusal(4, "with_kvcache", long, H100) is None


def test_rows_that_overflow_the_index_offsets_are_refused() -> None:
    many = Batch.extend([0], [2**21])

    assert "overflow" in (refusal(4, "sparse_fwd", many, H100) or "")


def test_other_layouts_are_refused() -> None:
    raw = replace(H100, layout=KVLayout.FP8_PACKED)

    assert refusal(4, "with_kvcache", SMALL, raw) == "with_kvcache does not read fp8_packed pools"


# --- work


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(1, 300)), min_size=1, max_size=4),
    st.sampled_from(RATIOS),
)
def test_pairs_and_gathered_tokens_are_counted_exactly(
    lens: list[tuple[int, int]], ratio: int
) -> None:
    batch = Batch.extend([p for p, _ in lens], [n for _, n in lens])
    most = TINY.profile.index_topk if ratio == 4 else max(batch.max_kv // ratio, 1)
    exact = sum(
        min(i, TINY.profile.window) + min(i // ratio, most)
        for prefix, new in lens
        for i in range(prefix + 1, prefix + new + 1)
    )
    window = TINY.profile.window

    assert attended_pairs(batch, TINY.profile, ratio) == exact
    assert most_gathered(batch, window, ratio) >= gathered_tokens(batch, window, ratio)
    assert gathered_tokens(batch, window, ratio) == sum(
        min(prefix + new, new + TINY.profile.window - 1) + (prefix + new) // ratio
        for prefix, new in lens
    )


def test_one_row_more_than_the_decode_kernel_has_parts_is_split() -> None:
    point, parts = POINTS["v4_prefill_c128"], 66  # 132 SMs, two of them for 128 heads
    few, more = (
        point.features(H100).by_name(Batch.extend([4095] * rows, [1] * rows))
        for rows in (parts, parts + 1)
    )
    row = 128 // 64 + 1 + 1  # the window, a block of 32 compressed tokens, and beginning a row

    assert (few["max_split_blocks"], few["splits_rows"]) == (row, 0)
    assert more["splits_rows"] == 1
    assert row < more["max_split_blocks"] < 2 * row


def test_one_row_more_than_the_device_computes_at_once_begins_late() -> None:
    few, more = (
        POINTS["v4_prefill_c128"].features(H100).by_name(Batch.extend([4095] * rows, [1] * rows))
        for rows in (66, 67)
    )
    row = 2 + 1  # 128 + 32 keys in steps of 128, and beginning a row

    assert few["makespan_steps"] == row
    assert more["makespan_steps"] == pytest.approx(1.5 * row, rel=0.02)


@pytest.mark.parametrize("ratio", RATIOS)
def test_compressed_tokens_are_gathered_as_soon_as_a_sequence_has_one(ratio: int) -> None:
    features = POINTS[f"v4_prefill_c{ratio}"].features(H100)
    before, since = (Batch.extend([0, 0], [1, new]) for new in (ratio - 1, ratio))

    assert features.by_name(before)["compresses"] == 0
    assert features.by_name(since)["compresses"] == 1


@pytest.mark.parametrize("ratio", RATIOS)
def test_blocks_are_the_decode_kernels_and_steps_are_those_of_the_copy(ratio: int) -> None:
    point = POINTS[f"v4_prefill_c{ratio}"]
    features = point.features(H100)
    names = features.names
    copy, pools = (
        {names[i] for i in features.columns(point.arm(arm))}
        for arm in ("sparse_fwd", "with_kvcache")
    )

    assert copy | pools == set(names)
    assert copy & pools == {"rows"}
    assert copy >= {"gathered_tokens", "compresses", "makespan_steps"}
    assert pools >= {"max_split_blocks", "splits_rows"}


@pytest.mark.parametrize("ratio", RATIOS)
def test_sums_of_equal_sequences_cost_nearly_what_their_lengths_cost(ratio: int) -> None:
    lengths = Batch.extend([2048] * 4, [256] * 4)
    sums = Batch.from_totals(
        mode="extend", q_tokens=1024, kv_tokens=4 * 2304, max_kv=2304, batch_size=4
    )

    point = POINTS[f"v4_prefill_c{ratio}"]

    assert point.features(H100).by_name(sums) == pytest.approx(
        point.features(H100).by_name(lengths)
    )


@pytest.mark.parametrize("setting", [H100, TINY], ids=["H100", "tiny"])
def test_the_grid_leaves_both_arms_a_choice_and_has_no_batch_twice(setting: Setting) -> None:
    for ratio in RATIOS:
        point = POINTS[f"v4_prefill_c{ratio}"]
        grid = point.grid(setting)
        arms = list(point.candidates(setting))
        assert len({str(batch) for batch in grid}) == len(grid) >= 20
        assert all(arm.allowed(batch, setting) is None for batch in grid for arm in arms)
        assert any(len(set(batch.lens or ())) > 1 for batch in grid)


def test_samples_are_seeded_allowed_and_half_of_them_ragged() -> None:
    point = POINTS["v4_prefill_c4"]
    assert point.sample(H100, Random(3)) == point.sample(H100, Random(3))
    random = Random(3)
    drawn = [point.sample(H100, random) for _ in range(100)]

    assert all(batch.q_tokens <= 16384 for batch in drawn)
    assert all(batch.kv_tokens <= 2**19 for batch in drawn)
    several = [batch for batch in drawn if batch.batch_size > 1]
    assert 20 < sum(len(set(batch.lens or ())) > 1 for batch in several) < 80


def test_every_profile_of_the_family_has_ratios_that_some_point_is_for() -> None:
    for profile in PROFILES.values():
        if profile.family == "v4":
            assert {f"v4_prefill_c{ratio}" for ratio in profile.ratios} <= set(POINTS)
