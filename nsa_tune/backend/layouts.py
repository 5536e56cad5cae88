"""KV cache layouts: how one token's latent lies in a paged pool, byte by byte."""

from __future__ import annotations

from enum import StrEnum

from nsa_tune._errors import UnknownName

__all__ = ["SCALE_TILE", "KVLayout", "layout_of"]

SCALE_TILE = 128
"""Values that share one fp32 scale in the packed fp8 layout."""


class KVLayout(StrEnum):
    """The layout of a paged MLA pool. Members of one pool never mix."""

    BF16 = "bf16"
    """`rank + rope` bf16 values a token: 576 values, 1152 bytes for V3.2."""

    FP8_PACKED = "fp8_packed"
    """FlashMLA's V3.2 layout: `rank` e4m3 values, one fp32 scale for each 128 of them, then
    `rope` bf16 values: 512 + 16 + 128 = 656 bytes a token. value = e4m3 * scale."""

    def token_bytes(self, rank: int, rope: int) -> int:
        """Bytes that one token takes in the pool."""
        if self is KVLayout.BF16:
            return 2 * (rank + rope)
        return rank + 4 * (rank // SCALE_TILE) + 2 * rope


_BY_KV_DTYPE = {"bf16": KVLayout.BF16, "fp8": KVLayout.FP8_PACKED}


def layout_of(kv_dtype: str) -> KVLayout:
    """The layout that the DSA kernels read for `kv_dtype`: ``"bf16"`` or ``"fp8"``.

    Raises:
        UnknownName: for any other name.
    """
    try:
        return _BY_KV_DTYPE[kv_dtype]
    except KeyError:
        raise UnknownName.of("KV dtype", kv_dtype, list(_BY_KV_DTYPE)) from None
