"""KV layouts: exact bytes, who reads which, and that nothing is accepted without a conversion."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import UnknownName, UsageError
from nsa_tune.backend.points import POINTS
from nsa_tune.backend.types import layouts
from nsa_tune.backend.types.layouts import (
    CONVERSIONS,
    READS,
    KVLayout,
    Role,
    layout_of,
    layouts_of,
    pair,
)

NAMES = st.sampled_from(sorted(READS))
DTYPES = st.sampled_from(["bf16", "fp8"])


def test_a_plan_knows_what_each_sparse_kernel_reads() -> None:
    """An engine is told to transform indices and to convert by `READS` alone."""
    arms = [arm.name for point in POINTS.values() for arm in point.arms]
    sparse = {name.removeprefix("mla/") for name in arms if name.startswith("mla/")}
    sparse |= {arm.name for arm in POINTS["decode"].arms}

    missing = sparse - READS.keys()
    assert not missing, (
        f"READS in nsa_tune/backend/types/layouts.py does not say what {missing} read"
    )


def places(layout: KVLayout, rank: int) -> list[tuple[str, str, int, int]]:
    return [(s.name, s.dtype, s.offset, s.size) for s in layout.spans(rank, 64)]


def test_a_bf16_v32_token_takes_1152_bytes() -> None:
    assert KVLayout.BF16.token_bytes(rank=512, rope=64) == 1152
    assert places(KVLayout.BF16, 512) == [
        ("latent", "bf16", 0, 1024), ("rope", "bf16", 1024, 128),
    ]  # fmt: skip


def test_a_packed_v32_token_takes_656_bytes() -> None:
    assert KVLayout.FP8_PACKED.token_bytes(rank=512, rope=64) == 656
    assert places(KVLayout.FP8_PACKED, 512) == [
        ("latent", "e4m3", 0, 512), ("scales", "fp32", 512, 16), ("rope", "bf16", 528, 128),
    ]  # fmt: skip


def test_a_raw_v32_token_takes_576_bytes() -> None:
    assert KVLayout.FP8_RAW.token_bytes(rank=512, rope=64) == 576


def test_a_v4_token_takes_584_bytes_its_scales_apart_from_its_row() -> None:
    assert KVLayout.V4_PAGED.token_bytes(rank=448, rope=64) == 584
    assert places(KVLayout.V4_PAGED, 448) == [
        ("latent", "e4m3", 0, 448), ("rope", "bf16", 448, 128), ("scales", "ue8m0", 0, 8),
    ]  # fmt: skip


@pytest.mark.parametrize(("page_size", "size"), [(256, 149760), (64, 37440), (2, 1728), (1, 1152)])
def test_a_v4_page_is_padded_to_a_multiple_of_576_bytes(page_size: int, size: int) -> None:
    assert KVLayout.V4_PAGED.page_bytes(448, 64, page_size) == size
    assert size % 576 == 0


@given(st.sampled_from(KVLayout), st.integers(1, 8), st.integers(1, 4), st.integers(1, 512))
def test_the_fields_of_a_token_lie_side_by_side_and_pages_hold_all_of_them(
    layout: KVLayout, tiles: int, ropes: int, page_size: int
) -> None:
    rank, rope = 128 * tiles, 16 * ropes
    end = 0
    for span in layout.spans(rank, rope):
        apart = layout is KVLayout.V4_PAGED and span.name == "scales"
        assert span.offset == (0 if apart else end)
        end += span.size
    assert layout.token_bytes(rank, rope) == end
    assert layout.page_bytes(rank, rope, page_size) >= page_size * end


def test_kv_dtypes_name_layouts() -> None:
    assert layout_of("fp8") is KVLayout.FP8_PACKED
    assert layout_of("bf16") is KVLayout.BF16
    assert layout_of("fp8", "v4") is KVLayout.V4_PAGED


def test_the_texts_that_tables_are_keyed_by_stay() -> None:
    assert [str(layout) for layout in KVLayout] == ["bf16", "fp8_packed", "fp8_raw", "v4_paged"]


def test_an_unknown_kv_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="unknown KV dtype 'int4'; use one of: bf16, fp8"):
        layout_of("int4")
    with pytest.raises(UnknownName, match="unknown KV dtype 'bf16'; use one of: fp8"):
        layout_of("bf16", "v4")
    with pytest.raises(UnknownName, match="unknown KV dtype 'int4'"):
        pair("fa3", "fa3", "int4")


def test_every_conversion_is_a_kernel_between_two_layouts() -> None:
    for one in CONVERSIONS:
        module, _, function = one.kernel.partition(".")
        found = __import__(f"nsa_tune.backend.kernels.{module}", fromlist=[function])
        assert callable(getattr(found, function))
        assert one.source is not one.target
        for name in one.readers - {"sparse_fwd"}:
            assert one.target in READS[name], "the kernel reads what the conversion writes"


def test_a_conversion_costs_what_it_reads_and_writes() -> None:
    by_kernel = {one.kernel: one for one in CONVERSIONS}

    assert by_kernel["packed_fp8.dequantize"].moved_bytes(10, 512, 64) == 10 * (656 + 1152 + 4)
    assert by_kernel["packed_fp8.requantize_raw"].moved_bytes(1, 512, 64) == 576 + 656 + 4
    assert by_kernel["v4_paged.dequantize"].moved_bytes(1, 448, 64) == 584 + 1024 + 4


# --- prefill and decode over one pool


def test_flashmla_prefill_over_a_trtllm_pool_goes_by_repacking_it() -> None:
    found = pair("flashmla_kv", "trtllm", "fp8")

    assert found.pool is KVLayout.FP8_RAW
    assert found.decode is None
    assert found.prefill is not None
    assert found.prefill.kernel == "packed_fp8.requantize_raw"


def test_trtllm_prefill_does_not_go_with_flashmla_decode() -> None:
    with pytest.raises(UsageError) as refusal:
        pair("trtllm", "flashmla_kv", "fp8")

    assert str(refusal.value) == (
        "prefill by trtllm reads bf16 or fp8_raw and decode by flashmla_kv reads fp8_packed, "
        "and no conversion lets them share a pool of fp8"
    )


def test_a_packed_pool_is_read_back_for_a_prefill_kernel_that_reads_bf16() -> None:
    found = pair("flashmla_sparse", "flashmla_kv", "fp8")

    assert (found.pool, found.decode) == (KVLayout.FP8_PACKED, None)
    assert found.prefill is not None
    assert found.prefill.kernel == "packed_fp8.dequantize"
    assert pair("flashmla_sparse", "fa3", "bf16") == layouts.Pairing(KVLayout.BF16, None, None)


def test_v4_kernels_share_a_pool_of_their_own_and_with_no_others() -> None:
    assert pair("sparse_fwd", "with_kvcache", "fp8").pool is KVLayout.V4_PAGED
    with pytest.raises(UsageError, match=r"flashmla_kv reads .* by with_kvcache reads v4_paged"):
        pair("flashmla_kv", "with_kvcache", "fp8")


def test_an_unknown_implementation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="unknown implementation 'magic'; use one of: flashmla"):
        pair("magic", "fa3", "bf16")


def reaches(name: str, pool: KVLayout, role: Role, by: layouts.Conversion | None) -> bool:
    if by is None:
        return pool in READS[name]
    known = any(by == one for one in CONVERSIONS)
    return known and by.source is pool and name in by.readers and role in by.roles


@given(NAMES, NAMES, DTYPES)
def test_no_combination_is_accepted_without_a_conversion_and_none_refused_with_one(
    prefill: str, decode: str, kv_dtype: str
) -> None:
    ways = [None, *CONVERSIONS]
    possible = any(
        reaches(prefill, pool, Role.PREFILL, first) and reaches(decode, pool, Role.DECODE, second)
        for pool, first, second in product(layouts_of(kv_dtype), ways, ways)
    )
    try:
        found = pair(prefill, decode, kv_dtype)
    except UsageError as refusal:
        assert not possible
        assert prefill in str(refusal)
        assert decode in str(refusal)
    else:
        assert found.pool in layouts_of(kv_dtype)
        assert reaches(prefill, found.pool, Role.PREFILL, found.prefill)
        assert reaches(decode, found.pool, Role.DECODE, found.decode)
