"""KV layouts: exact bytes, and what turning one into another moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_tune import UnknownName
from nsa_tune.backend.types.layouts import CONVERSIONS, KVLayout, layout_of


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


def test_every_conversion_is_a_kernel_between_two_layouts() -> None:
    for one in CONVERSIONS:
        module, _, function = one.kernel.partition(".")
        found = __import__(f"nsa_tune.backend.kernels.{module}", fromlist=[function])
        assert callable(getattr(found, function))
        assert one.source is not one.target


def test_a_conversion_costs_what_it_reads_and_writes() -> None:
    by_kernel = {one.kernel: one for one in CONVERSIONS}

    assert by_kernel["packed_fp8.dequantize"].moved_bytes(10, 512, 64) == 10 * (656 + 1152 + 4)
    assert by_kernel["packed_fp8.requantize_raw"].moved_bytes(1, 512, 64) == 576 + 656 + 4
    assert by_kernel["v4_paged.dequantize"].moved_bytes(1, 448, 64) == 584 + 1024 + 4
