"""KV layouts: exact bytes."""

from __future__ import annotations

import pytest

from nsa_tune import UnknownName
from nsa_tune.backend.types.layouts import KVLayout, layout_of


def test_a_bf16_v32_token_takes_1152_bytes() -> None:
    assert KVLayout.BF16.token_bytes(rank=512, rope=64) == 1152


def test_a_packed_v32_token_takes_656_bytes() -> None:
    assert KVLayout.FP8_PACKED.token_bytes(rank=512, rope=64) == 656


def test_a_v4_token_takes_584_bytes() -> None:
    assert KVLayout.V4_PAGED.token_bytes(rank=448, rope=64) == 584


@pytest.mark.parametrize(("page_size", "size"), [(256, 149760), (64, 37440), (2, 1728), (1, 1152)])
def test_a_v4_page_is_padded_to_a_multiple_of_576_bytes(page_size: int, size: int) -> None:
    assert KVLayout.V4_PAGED.page_bytes(448, 64, page_size) == size
    assert size % 576 == 0


def test_kv_dtypes_name_layouts() -> None:
    assert layout_of("fp8") is KVLayout.FP8_PACKED
    assert layout_of("bf16") is KVLayout.BF16
    assert layout_of("fp8", "v4") is KVLayout.V4_PAGED


def test_the_texts_that_tables_are_keyed_by_stay() -> None:
    assert [str(layout) for layout in KVLayout] == ["bf16", "fp8_packed", "v4_paged"]


def test_an_unknown_kv_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="unknown KV dtype 'int4'; use one of: bf16, fp8"):
        layout_of("int4")
    with pytest.raises(UnknownName, match="unknown KV dtype 'bf16'; use one of: fp8"):
        layout_of("bf16", "v4")
