"""Bytes of a token in each KV layout, and the names of the layouts."""

from __future__ import annotations

import pytest

from nsa_tune import UnknownName
from nsa_tune.backend.layouts import KVLayout, layout_of


def test_a_packed_v32_token_takes_656_bytes() -> None:
    assert KVLayout.FP8_PACKED.token_bytes(rank=512, rope=64) == 656


def test_a_bf16_v32_token_takes_1152_bytes() -> None:
    assert KVLayout.BF16.token_bytes(rank=512, rope=64) == 1152


def test_kv_dtypes_name_layouts() -> None:
    assert layout_of("fp8") is KVLayout.FP8_PACKED
    assert layout_of("bf16") is KVLayout.BF16


def test_an_unknown_kv_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="unknown KV dtype 'int4'; use one of: bf16, fp8"):
        layout_of("int4")
